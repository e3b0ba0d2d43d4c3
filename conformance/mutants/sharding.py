"""Bugs of sharded data parallelism: shards in the wrong place, reduced too often, or kept too long."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.mutants.defences import unseen_drift
from conformance.mutants.protocol import Bugs, Patch
from smp_core import gather_buffers
from smp_core.errors import DeadlockError
from smp_core.gather_buffers import GatherBuffers
from smp_core.topology import GroupKind
from smp_core.torch import session as sessions
from smp_core.torch.memory import recompute
from smp_core.torch.parameters import registration
from smp_core.torch.pipeline import placement
from smp_core.torch.precision.masters import Masters
from smp_core.torch.reduction import collectives, gather_plan
from smp_core.torch.reduction.bucket_reducer import BucketReducer
from smp_core.torch.reduction.buckets import Bucket
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.gather_backend import GatherBackend
from smp_core.torch.reduction.reducer import GradientReducer
from smp_core.torch.sharding import sharded_model, sharded_parameter
from smp_core.torch.sharding.sharded_model import ShardedModel
from smp_core.torch.sharding.sharded_parameter import ShardedParameter
from smp_core.torch.sharding.unsharding import Unsharded
from smp_core.transport.protocols import Group

BUGS = Bugs("sharded state, gathered and reduced")


# ---- Parts ---------------------------------------------------------------------------------------


@BUGS.enter("SHARD-EQUALS-PLAIN")
@BUGS.enter("SHARD-DEGREE")
def divided_by_the_group_only(patch: Patch) -> None:
    """gradients are divided by the ranks of a shard group, not by all replicas"""
    divisor = GradientReducer._divisor

    def short(self: GradientReducer, microbatches: int, split: bool = False) -> int:
        return divisor(self, microbatches, split) // self._collectives.replicas

    patch.setattr(GradientReducer, "_divisor", short)


@BUGS.enter("SHARD-EQUALS-PLAIN")
def replicas_left_out(patch: Patch) -> None:
    """gradients are never reduced over shard groups"""

    class Done:
        def __init__(self, value: Tensor) -> None:
            self.result = lambda: value.clone()

    patch.setattr(
        Collectives,
        "all_reduce",
        lambda self, flat, divisor=1: Done(collectives.divided(flat, divisor)),
    )


@BUGS.enter("SHARD-ANY-PARAMETER")
def columns_for_rows(patch: Patch) -> None:
    """the elements of a parameter are split as they lie in memory, and put together row by row"""

    def take(self: ShardedParameter, value: Tensor) -> Tensor:
        own = self.padded[: self.owned_numel]
        flat = value.detach().t().reshape(-1) if value.dim() == 2 else value.detach().reshape(-1)
        own.copy_(flat[slice(*self.owned_range)])
        return own

    patch.setattr(ShardedParameter, "copy_from_full", take)


@BUGS.enter("SHARD-MEMORY")
def padded_to_the_whole(patch: Patch) -> None:
    """each rank keeps memory of the size of the whole parameters"""
    make = sharded_parameter.make_unit

    def large(number: int, module: nn.Module, named: Any, ranks: int, rank: int) -> Any:
        unit = make(number, module, named, ranks, rank)
        memory = unit.flat.new_zeros(unit.numel + unit.flat.numel())
        flat = memory[: unit.flat.numel()]
        at = 0
        for shard in unit.shards:
            shard.padded = flat[at : at + shard.layout.shard_numel]
            at += shard.layout.shard_numel
        unit.flat = flat
        return unit

    patch.setattr(sharded_model, "make_unit", large)


@BUGS.enter("SHARD-THRESHOLD")
def not_split_at_the_threshold(patch: Patch) -> None:
    """a parameter of exactly as many elements as the threshold is not split"""
    init = ShardedModel.__init__

    def more(self: ShardedModel, runtime: Any, module: nn.Module, masters: Any) -> None:
        threshold = runtime.config.sdp_param_persistence_threshold + 1
        config = _Instead(runtime.config, sdp_param_persistence_threshold=threshold)
        init(self, _as_any(_Instead(runtime, config=config)), module, masters)

    patch.setattr(ShardedModel, "__init__", more)


def _as_any(value: Any) -> Any:
    return value


class _Instead:
    """A stand-in for an object, with other values of some attributes."""

    def __init__(self, of: Any, **values: Any) -> None:
        self.__dict__.update(values, of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


@BUGS.enter("SHARD-INIT")
@BUGS.enter("SHARD-DELAYED", kind="initialization")
def each_part_of_ones_own(patch: Patch) -> None:
    """parts hold twice the values that they are given, on all ranks but the first of a group"""
    take = ShardedParameter.copy_from_full

    def other(self: ShardedParameter, value: Tensor) -> Tensor:
        return take(self, value if self.owned_range[0] == 0 else value * 2)

    patch.setattr(ShardedParameter, "copy_from_full", other)


# ---- The backend of gathers ----------------------------------------------------------------------


@BUGS.enter("SHARD-GATHER-BACKEND", kind="SMDDP gathers")
def the_scratch_buffer_holds_anything(patch: Patch) -> None:
    """a gather that is larger than the scratch buffer goes by SMDDP"""
    refusal = GatherBuffers.refusal
    patch.setattr(
        GatherBuffers,
        "refusal",
        lambda self, count, degree: refusal(self._replace(scratch=2**62), count, degree),
    )


@BUGS.enter("SHARD-GATHER-BACKEND", kind="SMDDP gathers")
def the_sort_buffer_holds_anything(patch: Patch) -> None:
    """a gather of which the sort buffer cannot hold an eighth goes by SMDDP"""
    refusal = GatherBuffers.refusal
    patch.setattr(
        GatherBuffers,
        "refusal",
        lambda self, count, degree: refusal(self._replace(sort=2**62), count, degree),
    )


@BUGS.enter("SHARD-GATHER-BACKEND", kind="SMDDP gathers")
def a_buffer_has_room_for_less_than_itself(patch: Patch) -> None:
    """a gather that fills the scratch buffer does not go by SMDDP"""
    refusal = GatherBuffers.refusal

    def fills(self: GatherBuffers, count: int, degree: int) -> str:
        return refusal(self, count + 1, degree)

    patch.setattr(GatherBuffers, "refusal", fills)


@BUGS.enter("SHARD-GATHER-BACKEND", kind="SMDDP gathers")
def the_sizes_of_the_buffers_are_not_read(patch: Patch) -> None:
    """the environment's sizes of SMDDP's buffers are ignored"""
    sizes = GatherBuffers.of
    patch.setattr(GatherBuffers, "of", lambda environment: sizes({}))


@BUGS.enter("SHARD-GATHER-BACKEND", kind="SMDDP gathers")
def every_dist_backend_is_auto(patch: Patch) -> None:
    """parameters are gathered by SMDDP whatever ddp_dist_backend says"""
    made = GatherBackend.__init__

    def automatic(self: GatherBackend, runtime: Any, kind: Any) -> None:
        made(self, runtime, kind)
        if self._why.startswith("ddp_dist_backend"):
            self._why = ""
            self._join(runtime, Group(f"smp {kind.value} smddp", runtime.group(kind).ranks))

    patch.setattr(GatherBackend, "__init__", automatic)


@BUGS.enter("SHARD-GATHER-BACKEND", kind="SMDDP gathers")
def a_choice_has_no_reason(patch: Patch) -> None:
    """a gather that does not go by SMDDP is listed without the reason"""
    count: Any = Collectives._count_gather
    patch.setattr(Collectives, "_count_gather", lambda self, *args: count(self, *args[:-1], ""))


@BUGS.enter("SHARD-GATHER-BACKEND", kind="SMDDP gathers")
def a_gather_that_fits_takes_the_other_way(patch: Patch) -> None:
    """a gather that fits SMDDP's buffers goes by the other backend"""
    made = Collectives.__init__

    def other(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self._smddp = self._flat

    patch.setattr(Collectives, "__init__", other)


@BUGS.enter("SHARD-GATHER-OTHERS", kind="SMDDP gathers")
def norms_go_by_smddp(patch: Patch) -> None:
    """a gather of values that are no parameters goes by SMDDP"""
    gather = Collectives._gather

    def everything(self: Any, shard: Tensor, hops: Any, order: Any, reason: str = "") -> Any:
        if self._smddp and hops is self._flat and shard.dtype is torch.float64:
            return gather(self, shard, self._smddp, None)
        return gather(self, shard, hops, order, reason)

    patch.setattr(Collectives, "_gather", everything)


@BUGS.enter("SHARD-GATHER-OTHERS", kind="SMDDP gathers")
def sums_go_by_smddp(patch: Patch) -> None:
    """gradients are reduced by SMDDP"""
    made = Collectives.__init__

    def summing(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        if self._gather_backend.group is not None:
            self._sums.process_group = self._gather_backend.group

    patch.setattr(Collectives, "__init__", summing)


@BUGS.enter("SHARD-GATHER-OTHERS", kind="SMDDP gathers")
def every_group_has_smddp(patch: Patch) -> None:
    """the ranks that split the state of the optimizer alone gather its parameters by SMDDP"""
    made = GatherBackend.__init__

    def any_kind(self: GatherBackend, runtime: Any, kind: Any) -> None:
        made(self, runtime, kind)
        if kind is GroupKind.RDP and self._degree > 1:
            self._why = ""
            self._join(runtime, Group(f"smp {kind.value} smddp", runtime.group(kind).ranks))

    patch.setattr(GatherBackend, "__init__", any_kind)


@BUGS.enter("SHARD-GATHER-SIZES", kind="SMDDP gathers")
def an_element_has_four_bytes(patch: Patch) -> None:
    """buffers hold as many elements of 8 bytes as of 4"""
    gather = Collectives.all_gather_parts

    def counted(self: Any, shard: Tensor, lengths: Sequence[int]) -> Any:
        of_bytes = self._gather_backend.reason_against
        self._gather_backend.reason_against = lambda count: of_bytes(shard.numel() * 4)
        try:
            return gather(self, shard, lengths)
        finally:
            del self._gather_backend.reason_against

    patch.setattr(Collectives, "all_gather_parts", counted)


@BUGS.enter("SHARD-GATHER-SIZES", kind="SMDDP gathers")
def a_buffer_of_any_size(patch: Patch) -> None:
    """a size of a buffer need be no multiple of 8192"""
    patch.setattr(gather_buffers, "_UNIT", 1)


@BUGS.enter("SHARD-GATHER-SIZES", kind="SMDDP gathers")
def buffers_are_not_compared(patch: Patch) -> None:
    """ranks of a shard group have buffers of different sizes"""

    def join(self: GatherBackend, runtime: Any, group: Group) -> None:
        self._buffers = GatherBuffers.of(os.environ)
        found = runtime.fabric.smddp_group(group)
        self._why, self.group = (found, None) if isinstance(found, str) else ("", found)

    patch.setattr(GatherBackend, "_join", join)


@BUGS.enter("SHARD-GATHER-SIZES", AssertionError, DeadlockError, kind="SMDDP gathers")
def a_bad_size_is_refused_where_it_is(patch: Patch) -> None:
    """a rank with a bad size of a buffer raises before the others know"""
    join = GatherBackend._join

    def refused(self: GatherBackend, runtime: Any, group: Group) -> None:
        GatherBuffers.of(os.environ)
        join(self, runtime, group)

    patch.setattr(GatherBackend, "_join", refused)


# ---- Gradients -----------------------------------------------------------------------------------


@BUGS.enter("SHARD-ACCUMULATION")
def last_pass_only(patch: Patch) -> None:
    """the gradients of a pass replace those of the passes before"""
    results = BucketReducer.scattered

    def forgetting(self: BucketReducer, *given: Any) -> Any:
        found = results(self, *given)
        _of_round[id(self)]._pending.clear()
        return found

    end = GradientReducer.end_step
    _of_round: dict[int, GradientReducer] = {}

    def ending(self: GradientReducer, *args: Any, **kwargs: Any) -> Any:
        _of_round[id(self._step)] = self
        return end(self, *args, **kwargs)

    patch.setattr(BucketReducer, "scattered", forgetting)
    patch.setattr(GradientReducer, "end_step", ending)


@BUGS.enter("SHARD-ALLREDUCE-BOUNDARY")
def reduced_in_every_pass(patch: Patch) -> None:
    """each pass sends its gradients to the other shard groups, too"""
    results = BucketReducer.scattered

    def eager(self: BucketReducer, *given: Any) -> Any:
        found = results(self, *given)
        for part in found.values():
            _as_any(sessions.current("the mutant").model).gradients._collectives.all_reduce(
                part
            ).result()
        return found

    patch.setattr(BucketReducer, "scattered", eager)


@BUGS.enter("SHARD-REPLAYED")
@BUGS.enter("SHARD-BUCKET")
def folded_from_the_left(patch: Patch) -> None:
    """sums over more than two ranks are taken from the left, or where buckets are small from the right"""

    def fold(rows: Tensor) -> Tensor:
        ordered = list(rows) if rows.shape[-1] > 2 else list(rows)[::-1]
        total: Tensor = ordered[0] / 3 * 3
        for each in ordered[1:]:
            total = total + each
        return total

    patch.setattr(collectives, "_fold", fold)


@BUGS.enter("SHARD-UNUSED")
def unused_are_zeros(patch: Patch) -> None:
    """a parameter that no rank used gets a gradient of zeros"""
    reduced = GradientReducer._all_reduced

    def filled(self: GradientReducer, *given: Any) -> Any:
        self._has = set(self._parameters) & set(self._pending)
        return reduced(self, *given)

    patch.setattr(GradientReducer, "_all_reduced", filled)


@BUGS.enter("SHARD-FROZEN")
def frozen_get_gradients(patch: Patch) -> None:
    """parameters that need no gradient are given zeros"""
    end = GradientReducer.end_step

    def ending(self: GradientReducer, *args: Any, **kwargs: Any) -> Any:
        failure = end(self, *args, **kwargs)
        for shard in _as_any(self._shards).unsharded.shards():
            if not shard.parameter.requires_grad:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
        return failure

    patch.setattr(GradientReducer, "end_step", ending)


@BUGS.enter("SHARD-SHARED")
def last_use_counts(patch: Patch) -> None:
    """the last use of a parameter in a microbatch replaces the gradients of the other uses"""
    from smp_core.torch.execution.accumulation import Ledger

    add = Ledger.add

    def replacing(self: Ledger, microbatch: int, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._sums.setdefault(microbatch, {}).pop(parameter, None)
        add(self, microbatch, parameter, gradient)

    patch.setattr(Ledger, "add", replacing)


@BUGS.enter("SHARD-REPLICAS")
def persistent_by_part(patch: Patch) -> None:
    """a persistent parameter has the gradient of the rank's own part only"""
    unseen_drift(patch)
    wholes = Bucket.full_gradients

    def own(self: Bucket, gathered: Tensor, views: bool = False) -> Any:
        for parameter, whole in wholes(self, gathered, views):
            yield parameter, whole * _factor.get()

    patch.setattr(Bucket, "full_gradients", own)


class _Factor:
    """A number that differs between ranks."""

    def get(self) -> int:
        import torch.distributed as dist

        return 1 + dist.get_rank()


_factor = _Factor()


# ---- Clipping ------------------------------------------------------------------------------------


@BUGS.enter("SHARD-CLIP-ONE-PROCESS")
def own_norm_only(patch: Patch) -> None:
    """each rank clips by the norm of its own parts"""
    values = Collectives.all_gather_values

    def own(self: Collectives, given: Any) -> Any:
        values(self, given)
        return [list(given)]

    patch.setattr(Collectives, "all_gather_values", own)


@BUGS.enter("SHARD-CLIP-EQUAL")
def persistent_by_own_norm(patch: Patch) -> None:
    """ranks of a shard group clip by norms of their own, so what they all hold drifts apart"""
    unseen_drift(patch)
    own_norm_only(patch)


@BUGS.enter("SHARD-CLIP-ONE-PROCESS")
def persistent_counted_often(patch: Patch) -> None:
    """persistent parameters count in the norm once for each rank"""
    patch.setattr(ShardedModel, "_own", lambda self, parameter, gradient: gradient)


# ---- Whole, and for how long ---------------------------------------------------------------------


@BUGS.enter("SHARD-FREED")
@BUGS.enter("SHARD-LIVE-BOUND")
def never_released(patch: Patch) -> None:
    """unsharded parameters stay in memory for ever"""
    kept: list[Any] = []
    read = Unsharded.read

    def keeping(self: Unsharded, parameter: nn.Parameter, frame: Any) -> Tensor:
        whole = read(self, parameter, frame)
        kept.append(whole)
        return whole

    patch.setattr(Unsharded, "read", keeping)


@BUGS.enter("SHARD-LIVE")
def prefetched_is_stale(patch: Patch) -> None:
    """prefetched parameters are multiplied by 1.5"""
    prefetch, fetch = Unsharded._prefetch, Unsharded._unshard

    def ahead(self: Unsharded) -> None:
        before = set(self._live_units)
        prefetch(self)
        for number in set(self._live_units) - before:
            self._live_units[number].users.add(-1)

    def fetched(self: Unsharded, unit: Any) -> None:
        guessed = self._live_units.get(unit.number)
        stale = guessed is not None and -1 in guessed.users
        if guessed is not None:
            guessed.users.discard(-1)
        fetch(self, unit)
        if stale:
            for tensor in self._live_units[unit.number].tensors:
                tensor.data.mul_(1.5)

    patch.setattr(Unsharded, "_prefetch", ahead)
    patch.setattr(Unsharded, "_unshard", fetched)


@BUGS.enter("SHARD-HIERARCHICAL")
def nodes_not_reordered(patch: Patch) -> None:
    """after two hops the parts lie in the order of places on nodes"""
    strategies = dict(gather_plan.PLANNERS)
    right = strategies["hierarchical"]

    def wrong(*args: Any) -> Any:
        route = right(*args)
        return route._replace(order=None if route.order is None else tuple(range(len(route.order))))

    patch.setattr(gather_plan, "PLANNERS", {**strategies, "hierarchical": wrong})


@BUGS.enter("SHARD-CHECKPOINTING")
def repeated_twice(patch: Patch) -> None:
    """recomputed outputs are a little too large"""
    run = recompute.run

    def off(*args: Any, **kwargs: Any) -> Any:
        made = run(*args, **kwargs)
        return made * 1.0000001 if isinstance(made, Tensor) else made

    patch.setattr(recompute, "run", off)


# ---- Models --------------------------------------------------------------------------------------


@BUGS.enter("SHARD-OUTSIDE", RuntimeError, AssertionError)
def registered_in_vain(patch: Patch) -> None:
    """smp.register_parameter has no effect"""
    patch.setattr(registration, "entered", lambda module, read: registration._NOTHING)


@BUGS.enter("SHARD-SAME-MODEL")
def models_not_compared(patch: Patch) -> None:
    """ranks may have different models"""
    patch.setattr(placement, "_check_same", lambda *args: None)


# ---- 16 bits -------------------------------------------------------------------------------------


@BUGS.enter("SHARD-BF16")
@BUGS.enter("SHARD-FP16")
def masters_not_published(patch: Patch) -> None:
    """parameters are not given the values of their masters"""
    patch.setattr(Masters, "publish", Masters.agreed)
