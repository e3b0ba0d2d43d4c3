"""Bugs of clipping under sharded data parallelism: elements left out of the norm or counted twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from conformance.mutants.defences import unseen_drift
from conformance.mutants.protocol import Bugs, Patch
from conformance.mutants.sharded_gradients import Result, Sums, windows
from smp_core.torch.precision import masters
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.reducer import GradientReducer
from smp_core.torch.sharding import sharded_model
from smp_core.torch.sharding.sharded_model import ShardedModel

BUGS = Bugs("clipping of sharded gradients")


def coefficient(patch: Patch, number: Callable[[float, float], float]) -> None:
    """Make clipping multiply gradients by ``number(most, norm)``."""
    clip = ShardedModel.clip

    def changed(self: ShardedModel, targets: Sequence[nn.Parameter], scale: float = 1.0) -> None:
        clip(self, targets, scale)
        masters.multiply(targets, number(self._clipping, self.norm) / scale)

    patch.setattr(sharded_model, "multiply", lambda targets, factor: None)
    patch.setattr(ShardedModel, "clip", changed)


@BUGS.enter("SHARD-CLIP-ONE-PROCESS")
def nothing_is_clipped(patch: Patch) -> None:
    """gradients are never scaled down"""
    coefficient(patch, lambda most, norm: 1.0)


@BUGS.enter("SHARD-CLIP-ONE-PROCESS")
def small_gradients_are_scaled_up(patch: Patch) -> None:
    """gradients are scaled to the norm that is asked for, also where theirs is smaller"""
    coefficient(patch, lambda most, norm: min(most / (norm + 1e-6), 1e6))


@BUGS.enter("SHARD-CLIP-ONE-PROCESS")
def nothing_is_added_to_the_norm(patch: Patch) -> None:
    """gradients are divided by the norm alone, without 1e-6"""
    coefficient(patch, lambda most, norm: min(1.0, most / norm) if norm else 1.0)


@BUGS.enter("SHARD-CLIP-ONE-PROCESS", origin="B107")
def norm_of_the_first_rank(patch: Patch) -> None:
    """all clip by the norm of what the first rank of the shard group owns"""
    values = Collectives.all_gather_values
    patch.setattr(Collectives, "all_gather_values", lambda self, own: values(self, own)[:1])


@BUGS.enter("SHARD-CLIP-ONE-PROCESS", origin="B104")
def tied_count_twice(patch: Patch) -> None:
    """a parameter that modules share counts in the norm once for each of them"""
    own = ShardedModel._own

    def repeated(self: ShardedModel, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        named = self._module.named_parameters(remove_duplicate=False)
        times = sum(each is parameter for _, each in named)
        return own(self, parameter, gradient).repeat(times)

    patch.setattr(ShardedModel, "_own", repeated)


@BUGS.enter("SHARD-CLIP-EQUAL")
def norm_before_the_second_hop(patch: Patch) -> None:
    """the norm is that of a shard group's own sums, before those of the others are added"""
    unseen_drift(patch)
    seen: dict[int, Tensor] = {}

    def noted(self: GradientReducer, sums: Sums, result: Result) -> None:
        seen.update((id(each), total) for each, total in sums.items())

    windows(patch, noted)
    patch.setattr(ShardedModel, "_own", lambda self, parameter, gradient: seen[id(parameter)])


@BUGS.enter("SHARD-REPLAYED")
def norm_in_bfloat16(patch: Patch) -> None:
    """squares are summed in bfloat16, as where the model computes in it"""
    patch.setattr(sharded_model, "_square", lambda gradient: gradient.bfloat16().square().sum())
