"""Changes of layout between the ranks of a TP group, forward and backward.

An activation of a TP group has one of these layouts. B is a rank's batch, G the batch of the group, C the channels (the
last axis), t the degree.

==========  ====================  ============================================================================
layout      shape on a rank       contents
==========  ====================  ============================================================================
local       ``(B, ..., C)``       the samples of this rank, whole
full        ``(G, ..., C)``       the samples of all ranks, whole, the same on all ranks
sliced      ``(G, ..., C / t)``   the samples of all ranks, the channels of this rank
partial     ``(G, ..., C)``       summands: the activation is their sum over the ranks
==========  ====================  ============================================================================

Without ``prescaled_batch`` each rank brings samples of its own, and G = t B: the samples of tp rank 0 come first.
With ``prescaled_batch`` all ranks bring the same batch, G = B, and local is full (API 4.4).

Each function is differentiable; its backward is another one of them. Sums over ranks are folded along the tree of
``smp_core.reduction`` in the order of tp ranks, 16-bit values in float32 with one rounding, so the bits are the same on
every backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import FunctionCtx

from smp_core import reduction
from smp_core.errors import ArgumentError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.execution import activity as activities
from smp_core.torch.reduction.collectives import Collectives, Pending
from smp_core.torch.reduction.traffic import Traffic
from smp_core.torch.session import TrainingSession

Tensor = torch.Tensor


class TensorGroup:
    """The TP group, as one rank sees it.

    All ranks of the world make one at the same point, as ``Collectives`` are. While a rank traces the model, for the
    partition, it is alone: it gets its own values in place of those of others, which have the same shapes.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Flat: the configuration's plan is that of sharded state, and not of activations (API 3.3).
        self._collectives = Collectives(runtime, GroupKind.TP, GroupKind.TP, plan="flat")
        self.size, self.rank = self._collectives.size, self._collectives.rank
        self.prescaled = runtime.config.prescaled_batch
        self._digest = 0

    def note(self, module: int) -> None:
        """Note that the distributed module of this number is called. Calls outside of steps are not compared."""
        if activities.current() is not None and not self._alone:
            self._mix(module + 1)

    def take_digest(self) -> int:
        """A checksum of the distributed modules that were called in this step, and of the microbatches of exchanges, in
        order; the next step's begins anew. Ranks of a TP group whose checksums differ have exchanged activations of
        different modules or microbatches.
        """
        digest, self._digest = self._digest, 0
        return digest

    def _mix(self, number: int) -> None:
        self._digest = (self._digest * 1_000_003 + number) % 2**61

    @property
    def traffic(self) -> Traffic:
        """The bytes that this rank has sent for distributed modules."""
        return self._collectives.traffic

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Exchange rows: row i of ``rows`` goes to tp rank i, and row i of the result came from tp rank i."""
        return rows if self._alone else self._wait(lambda: self._collectives.all_to_all(rows))

    def all_gather(self, value: Tensor) -> Tensor:
        """The values of all tp ranks, stacked in their order."""
        if self._alone:
            return torch.stack([value] * self.size)
        flat = self._wait(lambda: self._collectives.all_gather(value.reshape(-1)))
        return flat.view(self.size, *value.shape)

    def sum_rows(self, rows: Tensor) -> Tensor:
        """The sum over the ranks of the row that each has for this rank."""
        return _sum(self.all_to_all(rows))

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum of the values of all tp ranks, the same bits on each."""
        if self._alone:
            return value.clone()
        flat = self._wait(lambda: self._collectives.all_reduce(value.reshape(-1)))
        return flat.view(value.shape)

    def all_gather_values(self, value: float) -> list[float]:
        """The values of all tp ranks, in their order, exactly."""
        return [each for (each,) in self._collectives.all_gather_values([value])]

    @property
    def _alone(self) -> bool:
        session: TrainingSession | None = self._runtime.training
        return session is not None and session.tracing

    def _wait(self, begin: Callable[[], Pending[Tensor]]) -> Tensor:
        """Carry out an operation in the rank's own thread, because no other thread communicates."""
        activity = activities.current()
        if activity is None:
            return begin().result()
        self._mix(activity.microbatch + 1)
        results: list[Tensor] = []
        activity.step_aside(lambda: results.append(begin().result()))
        return results[0]


def _sum(values: Tensor) -> Tensor:
    """The sum over the first axis along the tree, 16-bit values in float32."""
    return reduction.reduce_tensors(list(values), "SUM")


# ---- Raw changes of layout -----------------------------------------------------------------------


def _slice_channels(group: TensorGroup, x: Tensor) -> Tensor:
    if group.prescaled:
        return _slices(group, x)[group.rank].contiguous()
    # (B, ..., C) -> (t, B, ..., C / t) -> (t B, ..., C / t)
    rows = torch.stack(_slices(group, x))
    return group.all_to_all(rows).flatten(0, 1)


def _merge_channels(group: TensorGroup, x: Tensor) -> Tensor:
    own = group.prescaled
    rows = group.all_gather(x.contiguous()) if own else group.all_to_all(_batches(group, x))
    return torch.cat(list(rows), dim=-1)


def _sum_batch(group: TensorGroup, x: Tensor) -> Tensor:
    if group.prescaled:
        return group.all_reduce(x.contiguous())
    return group.sum_rows(_batches(group, x))


def _gather_batch(group: TensorGroup, x: Tensor) -> Tensor:
    return x if group.prescaled else group.all_gather(x.contiguous()).flatten(0, 1)


def _gather_channels(group: TensorGroup, x: Tensor) -> Tensor:
    return torch.cat(list(group.all_gather(x.contiguous())), dim=-1)


def _sum_channels(group: TensorGroup, x: Tensor) -> Tensor:
    return group.sum_rows(torch.stack(_slices(group, x)))


def _sum_ranks(group: TensorGroup, x: Tensor) -> Tensor:
    return group.all_reduce(x.contiguous())


def _slices(group: TensorGroup, x: Tensor) -> tuple[Tensor, ...]:
    """The slice of each rank, of channels that the degree divides (``check_divisible``)."""
    return x.chunk(group.size, dim=-1)


def _batches(group: TensorGroup, x: Tensor) -> Tensor:
    """(t B, ...) as (t, B, ...): the samples of each rank."""
    return x.contiguous().view(group.size, x.shape[0] // group.size, *x.shape[1:])


_Change = Callable[[TensorGroup, Tensor], Tensor]


class _Context(FunctionCtx):
    """The context of one change."""

    group: TensorGroup
    there: _Change
    back: _Change


class _Changed(torch.autograd.Function):
    """One change of layout, and another one for its gradient."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, group: TensorGroup, there: _Change, back: _Change
    ) -> Tensor:
        ctx.group, ctx.there, ctx.back = group, there, back
        changed = there(group, x)
        return changed.view_as(changed) if changed is x else changed

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # The change back is one that autograd sees, for a gradient of the gradient.
        return _changed(gradient, ctx.group, ctx.back, ctx.there), None, None, None


def _changed(x: Tensor, group: TensorGroup, there: _Change, back: _Change) -> Tensor:
    if group.size == 1:
        return x
    result: Tensor = _Changed.apply(x, group, there, back)  # type: ignore[no-untyped-call]
    return result


# ---- What modules call ---------------------------------------------------------------------------

#: The name in errors of a module that gives none.
_ANY = "tensor parallelism"


def check_channels(module: str, x: Tensor, channels: int, name: str) -> None:
    """Check, before the first exchange, that an input has the channels that a module is made for.

    Ranks may wait for an activation of one that raises later. ``name`` is the module's name for the number. Raises
    ArgumentError for another number, and for an input without a batch.
    """
    if x.dim() < 2:
        raise ArgumentError(
            f"{module}: the input is {list(x.shape)}, and ranks exchange batches: it must be (B, ..., {name})"
        )
    if x.shape[-1] != channels:
        raise ArgumentError(
            f"{module}: the input is {list(x.shape)}: its last axis has {x.shape[-1]} channels, and {name} is "
            f"{channels}"
        )


def check_divisible(module: str, x: Tensor, group: TensorGroup) -> None:
    """Check that the channels of a module's activation can be split. Raises ArgumentError."""
    # torch's chunk gives fewer slices, of different sizes, where they cannot.
    if x.shape[-1] % group.size:
        raise ArgumentError(
            f"{module}: an activation is {list(x.shape)}, and {x.shape[-1]} channels cannot be split over "
            f"{group.size} tp ranks"
        )


def slice_channels(x: Tensor, group: TensorGroup, module: str = _ANY) -> Tensor:
    """Local to sliced: an all-to-all, or, with ``prescaled_batch``, this rank's slice.

    Raises ArgumentError for channels that cannot be split; ``module`` is the name in the error.
    """
    check_divisible(module, x, group)
    return _changed(x, group, _slice_channels, _merge_channels)


def merge_channels(x: Tensor, group: TensorGroup) -> Tensor:
    """Sliced to local: an all-to-all, or, with ``prescaled_batch``, an all-gather."""
    return _changed(x, group, _merge_channels, _slice_channels)


def sum_batch(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial to local: a reduce-scatter, or, with ``prescaled_batch``, an all-reduce."""
    return _changed(x, group, _sum_batch, _gather_batch)


def gather_batch(x: Tensor, group: TensorGroup) -> Tensor:
    """Local to full: an all-gather, or, with ``prescaled_batch``, nothing. Gradients of full are partial."""
    return _changed(x, group, _gather_batch, _sum_batch)


def gather_channels(x: Tensor, group: TensorGroup) -> Tensor:
    """Sliced to full: an all-gather. Gradients of full are partial."""
    return _changed(x, group, _gather_channels, _sum_channels)


def sum_channels(x: Tensor, group: TensorGroup, module: str = _ANY) -> Tensor:
    """Partial to sliced: a reduce-scatter. Raises as ``slice_channels`` does."""
    check_divisible(module, x, group)
    return _changed(x, group, _sum_channels, _gather_channels)


def sum_ranks(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial to full: an all-reduce. Gradients of full are partial."""
    return _changed(x, group, _sum_ranks, _sum_ranks)


def gather_ids(ids: Tensor, group: TensorGroup) -> Tensor:
    """Local to full, of values without gradients: ids of an embedding, a mask."""
    return ids if group.size == 1 else _gather_batch(group, ids)
