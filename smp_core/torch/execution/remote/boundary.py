"""A call of a module that crosses ranks, on either side, forwards and backwards.

On the caller's side the outputs come out of an autograd node whose backward pass is the same crossing
in the other direction. On the owner's side the inputs come out of a node that keeps the gradients that
reach it. Both nodes hand on what they get, strides and all, so that no sum is made where an
unpartitioned model makes none.
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
from smp_core.torch.execution.remote.packets import Frozen, Parcel, freeze
from smp_core.torch.execution.uses import CallKey

Tensor = torch.Tensor


# The caller's side.


def call_there(
    activity: Activity,
    owner: int,
    key: CallKey,
    hooked: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Have ``owner`` run a module, and give its outputs. Raises PayloadError if an argument cannot be
    sent.
    """
    grad = torch.is_grad_enabled()
    frozen = freeze((args, kwargs), f"{module_text(key.path)}: an argument", grad)
    step, activity.crossed = activity.step, True
    message = Forward(
        activity.microbatch,
        step.rank,
        step.next_call(),
        key,
        hooked,
        modes.current(),
        step.seed,
        step.news_for(owner),
        step.sites[key.path].training(),
    )
    parcel = activity.ask(owner, message, frozen)
    wanted = parcel.differentiable()
    if not wanted:
        return parcel.thaw()
    inputs = [t for t, requires in zip(frozen.tensors, frozen.requires, strict=True) if requires]
    outputs = [parcel.tensors[index] for index in wanted]
    crossing = _Crossing(owner, message, outputs)
    tied: Any = _Departure.apply(crossing, _anchor(), *inputs)  # type: ignore[no-untyped-call]
    tensors = list(parcel.tensors)
    for index, tensor in zip(wanted, tied, strict=True):
        tensors[index] = tensor
    return parcel.thaw(tensors)


def _anchor() -> Tensor:
    """What makes a node's outputs require a gradient, though no input of the call does."""
    return torch.empty(0, requires_grad=True)


class _Crossing:
    """One call that has crossed, for its node on the caller's side."""

    __slots__ = ("message", "outputs", "owner")

    def __init__(self, owner: int, message: Forward, outputs: list[Tensor]) -> None:
        self.owner, self.message, self.outputs = owner, message, outputs


class _Departure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: _Crossing, anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.owner, ctx.message, ctx.count = crossing.owner, crossing.message, len(inputs)
        ctx.set_materialize_grads(False)
        outputs, crossing.outputs = tuple(crossing.outputs), []
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
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
            step.news_for(ctx.owner),
        )
        parcel = activity.ask(ctx.owner, request, freeze(list(grads), "gradients", False))
        return (None, None, *parcel.thaw())


# The owner's side.


class Record:
    """A call that this rank has run for another, until its backward pass.

    ``grads`` are the inputs' gradients that the backward pass in progress has brought.
    """

    __slots__ = (
        "count",
        "crosses",
        "grads",
        "microbatch",
        "outputs",
        "path",
        "rest",
    )

    def __init__(self, path: str) -> None:
        self.path = path
        self.microbatch = -1
        self.crosses = False  # it called modules of other ranks, and so will its backward pass
        self.count = 0  # of the inputs that require a gradient
        self.outputs: list[Tensor] = []  # those that require a gradient
        self.rest: set[int] = set()  # of them, those that no backward pass has come from
        self.grads: Sequence[Tensor | None] | None = None

    def close(self) -> None:
        """Let the graph go: it leads to a node that knows the record, a cycle."""
        self.outputs = []


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: Record, anchor: Tensor, received: list[Tensor]) -> Any:
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.record.grads = grads
        return None, None, None


def run_forward(
    message: Forward, parcel: Parcel, run: Callable[[Any, Any], Any]
) -> tuple[Frozen, Record | None]:
    """Run a module for another rank: ``run(args, kwargs)``. Gives the outputs, and the record that
    their backward pass needs, if they have one.
    """
    record = Record(message.key.path)
    with modes.entered(message.modes):
        wanted = parcel.differentiable()
        tensors = list(parcel.tensors)
        if wanted:
            received = [tensors[index] for index in wanted]
            tied: Any = _Arrival.apply(record, _anchor(), received)  # type: ignore[no-untyped-call]
            for index, tensor in zip(wanted, tied, strict=True):
                tensors[index] = tensor
            record.count = len(wanted)
        args, kwargs = parcel.thaw(tensors)
        value = run(args, kwargs)
        frozen = freeze(value, f"{module_text(message.key.path)}: an output", message.modes.grad)
    record.outputs = [
        t for t, requires in zip(frozen.tensors, frozen.requires, strict=True) if requires
    ]
    record.rest = set(range(len(record.outputs)))
    return frozen, record if record.outputs else None


def run_backward(record: Record, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The backward pass of a call that this rank has run; gives the inputs' gradients, None for one that
    the outputs do not depend on, as autograd does.
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
    came = record.grads
    inputs: list[Tensor | None] = [None] * record.count if came is None else list(came)
    record.grads = None
    record.rest.difference_update(given)
    return inputs
