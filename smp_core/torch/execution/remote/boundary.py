"""A module call that one rank asks another one for: both sides, forward and backward.

The caller gets its outputs from an autograd node whose backward pass asks the owner for the gradients of the inputs.
The owner gets its inputs from a node that keeps the gradients that reach it. Neither node adds or copies: strides
travel along, so no sum is made where an unpartitioned model makes none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from smp_core.torch.exceptions import OutsideStepError
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import modes
from smp_core.torch.execution.activity import Activity
from smp_core.torch.execution.failures import module_text
from smp_core.torch.execution.remote.messages import Backward, Forward
from smp_core.torch.execution.remote.packets import OutgoingPayload, ReceivedPayload, freeze
from smp_core.torch.execution.uses import CallKey

Tensor = torch.Tensor


# The caller's side.


def call_remote(
    activity: Activity,
    owner: int,
    key: CallKey,
    hooked: bool,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Have ``owner`` run a module, and return its outputs. Raises PayloadError if an argument cannot be
    sent.
    """
    grad = torch.is_grad_enabled()
    payload = freeze((args, kwargs), f"{module_text(key.path)}: an argument", grad)
    step, activity.called_remote = activity.step, True
    message = Forward(
        activity.microbatch,
        step.rank,
        step.next_call(),
        key,
        hooked,
        modes.current(),
        step.seed,
        step.ended_since_last_request(owner),
        step.sites[key.path].training(),
    )
    received = activity.ask(owner, message, payload)
    wanted = received.differentiable()
    if not wanted:
        return received.thaw()
    inputs = [t for t, requires in zip(payload.tensors, payload.requires, strict=True) if requires]
    outputs = [received.tensors[index] for index in wanted]
    call = _RemoteCall(owner, message, outputs)
    tied: Any = _RemoteOutputs.apply(call, _anchor(), *inputs)  # type: ignore[no-untyped-call]
    tensors = list(received.tensors)
    for index, tensor in zip(wanted, tied, strict=True):
        tensors[index] = tensor
    return received.thaw(tensors)


def _anchor() -> Tensor:
    """An input by which a node's outputs require a gradient, even if no input of the call does."""
    return torch.empty(0, requires_grad=True)


class _RemoteCall:
    """The request and the outputs of a remote call, for its node on the caller."""

    __slots__ = ("message", "outputs", "owner")

    def __init__(self, owner: int, message: Forward, outputs: list[Tensor]) -> None:
        self.owner, self.message, self.outputs = owner, message, outputs


class _RemoteOutputs(torch.autograd.Function):
    """The caller's node: its backward pass asks the owner for the backward pass of the call."""

    @staticmethod
    def forward(ctx: Any, call: _RemoteCall, anchor: Tensor, *inputs: Tensor) -> object:
        ctx.owner, ctx.message, ctx.count = call.owner, call.message, len(inputs)
        ctx.set_materialize_grads(False)
        outputs, call.outputs = tuple(call.outputs), []
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> object:
        activity = activities.current()
        message = ctx.message
        if activity is None:
            raise OutsideStepError(
                f"backward through {module_text(message.key.path)}, which another pp rank "
                "owns, was called outside of a step. Call model.backward(loss) in the function that "
                "smp.step decorates"
            )
        if all(grad is None for grad in grads):
            return (None,) * (2 + ctx.count)
        step = activity.step
        request = Backward(
            activity.microbatch,
            step.rank,
            step.next_call(),
            message.call,
            step.ended_since_last_request(ctx.owner),
        )
        received = activity.ask(ctx.owner, request, freeze(list(grads), "gradients", False))
        return (None, None, *received.thaw())


# The owner's side.


class ServedCall:
    """A module call that this rank has run for another rank, kept until its backward pass.

    Attributes:
        path: of the module.
        microbatch: its index.
        called_remote: the call has called modules of other ranks, and so will its backward pass.
        count: how many inputs require a gradient.
        outputs: those that require a gradient.
        outstanding: the indices of the outputs that no backward pass has come from.
        grads: the gradients of the inputs that the backward pass in progress has brought.
    """

    __slots__ = (
        "called_remote",
        "count",
        "grads",
        "microbatch",
        "outputs",
        "outstanding",
        "path",
    )

    def __init__(self, path: str) -> None:
        self.path = path
        self.microbatch = -1
        self.called_remote = False
        self.count = 0
        self.outputs: list[Tensor] = []
        self.outstanding: set[int] = set()
        self.grads: Sequence[Tensor | None] | None = None

    def close(self) -> None:
        """Drop the graph, whose node refers to the record: a cycle."""
        self.outputs = []


class _ReceivedInputs(torch.autograd.Function):
    """The owner's node: its backward pass keeps the gradients of the inputs in the record."""

    @staticmethod
    def forward(ctx: Any, record: ServedCall, anchor: Tensor, received: list[Tensor]) -> object:
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> object:
        ctx.record.grads = grads
        return None, None, None


def run_forward(
    message: Forward,
    received: ReceivedPayload,
    run: Callable[[tuple[object, ...], dict[str, object]], object],
) -> tuple[OutgoingPayload, ServedCall | None]:
    """Run a module for another rank by ``run(args, kwargs)``.

    Returns the outputs, and the record for their backward pass if an output requires a gradient.
    """
    record = ServedCall(message.key.path)
    with modes.entered(message.modes):
        wanted = received.differentiable()
        tensors = list(received.tensors)
        if wanted:
            inputs = [tensors[index] for index in wanted]
            tied: Any = _ReceivedInputs.apply(record, _anchor(), inputs)  # type: ignore[no-untyped-call]
            for index, tensor in zip(wanted, tied, strict=True):
                tensors[index] = tensor
            record.count = len(wanted)
        args, kwargs = received.thaw(tensors)
        value = run(args, kwargs)
        payload = freeze(value, f"{module_text(message.key.path)}: an output", message.modes.grad)
    record.outputs = [
        t for t, requires in zip(payload.tensors, payload.requires, strict=True) if requires
    ]
    record.outstanding = set(range(len(record.outputs)))
    return payload, record if record.outputs else None


def run_backward(record: ServedCall, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Run the backward pass of a call that this rank has run.

    Returns the gradients of the inputs; None for an input that the outputs do not depend on, as autograd does.
    """
    if not record.outputs:
        raise RuntimeError(
            "model.backward came a second time to a call of a module on another rank, whose graph has been "
            "freed: retain_graph is not supported (docs/spec/api.md#1.7). Add the losses, and call it once"
        )
    given = [index for index, grad in enumerate(grads) if grad is not None]
    record.grads = None
    torch.autograd.backward(
        [record.outputs[index] for index in given], [grads[index] for index in given]
    )
    reached = record.grads
    inputs: list[Tensor | None] = [None] * record.count if reached is None else list(reached)
    record.grads = None
    record.outstanding.difference_update(given)
    return inputs
