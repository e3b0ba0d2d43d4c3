"""Bugs of gradients under sharded data parallelism: layout, sums, divisors, accumulation."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.mutants.defences import unseen_drift
from conformance.mutants.protocol import Bugs, Patch
from smp_core import topology
from smp_core.topology import GroupKind
from smp_core.torch import session as sessions
from smp_core.torch.execution.agreement import Agreement
from smp_core.torch.reduction import buckets, collectives
from smp_core.torch.reduction.bucket_reducer import BucketReducer
from smp_core.torch.reduction.buckets import Bucket
from smp_core.torch.reduction.collectives import Collectives, divided
from smp_core.torch.reduction.layout import bins
from smp_core.torch.reduction.reducer import GradientReducer

BUGS = Bugs("sharded gradients")

Sums = Mapping[nn.Parameter, Tensor]
Result = dict[nn.Parameter, Tensor]


def _model() -> Any:
    """The model of this rank."""
    return sessions.current("the mutant").model


class _Done:
    """An operation that has completed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def result(self) -> Tensor:
        return self._tensor


def passes(
    patch: Patch,
    before: Callable[[GradientReducer], object] = lambda self: None,
    after: Callable[[GradientReducer, Result], object] = lambda self, sums: None,
) -> None:
    """Call ``before(gradients)`` before every pass, and ``after(gradients, sums)`` after every good pass.

    ``sums`` are the accumulated sums from before the pass.
    """
    end_step = GradientReducer.end_step

    def changed(self: GradientReducer, *args: Any, **how: Any) -> Any:
        before(self)
        sums = dict(self._pending)
        agreed = end_step(self, *args, **how)
        if agreed is None:
            after(self, sums)
        return agreed

    patch.setattr(GradientReducer, "end_step", changed)


def windows(patch: Patch, change: Callable[[GradientReducer, Sums, Result], object]) -> None:
    """Call ``change(gradients, sums, result)`` on the result of each window.

    ``sums`` are the divided sums over the shard group alone.
    """
    original = GradientReducer._all_reduced

    def changed(self: GradientReducer, step: BucketReducer, agreed: Agreement) -> Result:
        divisor = self._divisor(self._unit)
        sums = {each: divided(total, divisor) for each, total in self._pending.items()}
        result = original(self, step, agreed)
        change(self, sums, result)
        return result

    patch.setattr(GradientReducer, "_all_reduced", changed)


def divided_by(patch: Patch, number: Callable[[Any, int, int], int]) -> None:
    """Make the reducer divide by ``number(gradients, divisor, degree)``."""
    divisor = GradientReducer._divisor
    patch.setattr(
        GradientReducer,
        "_divisor",
        lambda self, count, split=False: number(
            self, divisor(self, count, split), self._collectives.size
        ),
    )


# ---- Accumulation --------------------------------------------------------------------------------


@BUGS.enter("SHARD-ACCUMULATION", origin="B071")
def summed_over_blocks_in_every_pass(patch: Patch) -> None:
    """gradients are summed over the shard groups in every pass, what came earlier again and again"""

    def again(self: GradientReducer, sums: Result) -> None:
        for each, total in self._pending.items():
            self._pending[each] = self._collectives.all_reduce(total).result()

    passes(patch, after=again)


@BUGS.enter("SHARD-ALLREDUCE-BOUNDARY", origin="B071")
def averaged_over_blocks_in_every_pass(patch: Patch) -> None:
    """gradients are averaged over the shard groups in every pass, which leaves their values right"""

    def again(self: GradientReducer, sums: Result) -> None:
        for each, total in self._pending.items():
            summed = self._collectives.all_reduce(total).result()
            self._pending[each] = summed / self._collectives.replicas

    passes(patch, after=again)


@BUGS.enter("SHARD-ACCUMULATION", origin="https://github.com/ServiceNow/Fast-LLM/issues/550")
def single_block_does_not_accumulate(patch: Patch) -> None:
    """where there is one shard group, only the last pass counts"""

    def forgetting(self: GradientReducer) -> None:
        if self._collectives.replicas == 1:
            self._pending = {}

    passes(patch, forgetting)


@BUGS.enter("SHARD-ACCUMULATION", origin="https://github.com/NVIDIA/Megatron-LM/issues/6660")
def single_block_doubles(patch: Patch) -> None:
    """where there is one shard group, what was accumulated doubles in each pass"""

    def doubling(self: GradientReducer) -> None:
        if self._collectives.replicas == 1:
            self._pending = {each: total * 2 for each, total in self._pending.items()}

    passes(patch, doubling)


@BUGS.enter("SHARD-ACCUMULATION", origin="B119")
def sums_outlive_their_window(patch: Patch) -> None:
    """sums of one window are accumulated in the next, too"""

    def kept(self: GradientReducer, sums: Result) -> None:
        if not self._passes:
            self._pending = sums

    passes(patch, after=kept)


@BUGS.enter("SHARD-ACCUMULATION", origin="B073")
def first_sharded_window_is_short(patch: Patch) -> None:
    """the first window ends one pass early"""
    init = GradientReducer.__init__

    def short(self: GradientReducer, *args: Any) -> None:
        init(self, *args)
        self._passes = min(1, self._options.backward_passes_per_step - 1)

    patch.setattr(GradientReducer, "__init__", short)


@BUGS.enter("SHARD-ACCUMULATION", origin="B068")
def sharded_passes_are_averaged(patch: Patch) -> None:
    """accumulated gradients are divided by the number of passes"""
    divided_by(patch, lambda self, by, degree: by * self._options.backward_passes_per_step)


@BUGS.enter("SHARD-UNUSED", origin="B065")
def absent_in_the_last_pass_is_dropped(patch: Patch) -> None:
    """gradients of earlier passes are dropped for a parameter that the last pass does not use"""
    passes(patch, lambda self: self._has.clear())


# ---- Two hops ------------------------------------------------------------------------------------


@BUGS.enter("SHARD-REPLICAS", origin="B088")
def no_second_hop(patch: Patch) -> None:
    """gradients are not summed over the shard groups"""
    unseen_drift(patch)
    patch.setattr(
        Collectives,
        "all_reduce",
        lambda self, flat, divisor=1: _Done(divided(flat.clone(), divisor)),
    )


@BUGS.enter("SHARD-ACCUMULATION", origin="B083")
def second_window_stays_in_its_block(patch: Patch) -> None:
    """from the second window on gradients are not summed over the shard groups"""
    all_reduce = Collectives.all_reduce

    def once(self: Collectives, flat: Tensor, divisor: int = 1) -> Any:
        first = not _model().gradients.reductions
        return all_reduce(self, flat, divisor) if first else _Done(divided(flat.clone(), divisor))

    patch.setattr(Collectives, "all_reduce", once)


@BUGS.enter("SHARD-EQUALS-PLAIN", origin="B079")
def divided_by_the_blocks_only(patch: Patch) -> None:
    """gradients are divided by the number of shard groups, not by all replicas"""
    divided_by(patch, lambda self, by, degree: by // degree)


@BUGS.enter("SHARD-EQUALS-PLAIN", origin="B070")
def divided_by_the_degree_twice(patch: Patch) -> None:
    """gradients are divided by the sharding degree twice"""
    divided_by(patch, lambda self, by, degree: by * degree)


@BUGS.enter("SHARD-EQUALS-PLAIN", origin="B028")
def parts_of_the_neighbour(patch: Patch) -> None:
    """each rank gets the sum for the rank before it"""
    scatter = Collectives.reduce_scatter

    def rolled(self: Collectives, columns: Sequence[Tensor]) -> Any:
        return scatter(self, [each.roll(1, 0) for each in columns])

    patch.setattr(Collectives, "reduce_scatter", rolled)


def groups_by(patch: Patch, kind: GroupKind, key: Callable[[int, int, int], int]) -> None:
    """Put the ranks of an RDP group into groups of a kind by ``key(rdp_rank, degree, blocks)``."""
    lay_out = topology._lay_out

    @functools.lru_cache(maxsize=16)
    def changed(given: Any) -> Any:
        made = lay_out(given)
        rdp = made.partitions[GroupKind.RDP]
        keys = [
            (*group, key(place, given.sharding, len(group) // given.sharding))
            for group, place in zip(rdp.group_of, rdp.position_of, strict=True)
        ]
        return made._replace(partitions={**made.partitions, kind: topology._partition(keys)})

    patch.setattr(topology, "_lay_out", changed)


@BUGS.enter("SHARD-DEGREE", origin="B097")
def neighbours_are_replicas(patch: Patch) -> None:
    """gradients are summed over ranks next to each other, which hold different parts"""
    unseen_drift(patch)
    groups_by(patch, GroupKind.REPLICATION, lambda rank, degree, blocks: rank // blocks)


@BUGS.enter("SHARD-REPLICAS")
def groups_are_strided(patch: Patch) -> None:
    """a shard group has one rank of each block, and is no block"""
    groups_by(patch, GroupKind.REPLICATION, lambda rank, degree, blocks: rank // blocks)
    groups_by(patch, GroupKind.SHARDING, lambda rank, degree, blocks: rank % blocks)


@BUGS.enter("SHARD-REPLAYED", origin="B029")
def divided_before_the_sum(patch: Patch) -> None:
    """gradients are divided by the degree before they are summed, by the rest afterwards"""
    scatter = Collectives.reduce_scatter

    def divided(self: Collectives, columns: Sequence[Tensor]) -> Any:
        return scatter(self, [each / self.size for each in columns])

    patch.setattr(Collectives, "reduce_scatter", divided)
    divided_by(patch, lambda self, by, degree: by // degree)


@BUGS.enter("SHARD-REPLAYED")
def ranks_one_after_the_other(patch: Patch) -> None:
    """ranks are summed up from the left, not along the tree"""
    patch.setattr(collectives, "_fold", lambda rows: functools.reduce(torch.add, list(rows)))


@BUGS.enter("SHARD-REPLAYED")
def ranks_are_folded_backwards(patch: Patch) -> None:
    """ranks are summed up along the tree from the last to the first"""
    fold = collectives._fold
    patch.setattr(collectives, "_fold", lambda rows: fold(rows.flip(0)))


# ---- Buckets and kinds of parameters -------------------------------------------------------------


@BUGS.enter("SHARD-BUCKET")
def what_did_not_fit_is_dropped(patch: Patch) -> None:
    """a parameter that does not fit into the bucket is left out"""

    def lossy(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
        first, *rest = bins(sizes, most)
        yield first
        yield from (bin_[1:] for bin_ in rest if bin_[1:])

    patch.setattr(buckets, "bins", lossy)


@BUGS.enter("SHARD-BUCKET", origin="B020")
def bucket_of_one_is_not_divided(patch: Patch) -> None:
    """a bucket of one parameter is summed and not averaged"""
    parts = Bucket.shards

    def special(self: Bucket, row: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for each, part in parts(self, row):
            yield each, part * self.ranks if len(self.parameters) == 1 else part

    patch.setattr(Bucket, "shards", special)


@BUGS.enter("SHARD-UNUSED", origin="B118")
def old_memory_counts(patch: Patch) -> None:
    """where a rank has no gradient, its part of the bucket is whatever was there"""
    rows = Bucket.rows

    def stale(self: Bucket, totals: Sums) -> Tensor:
        there = {
            each: totals.get(each, torch.ones(layout.numel, dtype=self.dtype))
            for each, layout in zip(self.parameters, self.layouts, strict=True)
        }
        return rows(self, there)

    patch.setattr(Bucket, "rows", stale)


@BUGS.enter("SHARD-UNUSED", origin="B025")
def used_on_one_rank_is_lost(patch: Patch) -> None:
    """a parameter that one rank did not use gets no gradient"""

    def everywhere(self: Agreement) -> bytes:
        given = [each.present for each in self.reports if each.present]
        return bytes(map(min, zip(*given, strict=True))) if given else b""

    patch.setattr(Agreement, "present", property(everywhere))


@BUGS.enter("SHARD-FROZEN", origin="B122")
def frozen_are_reduced(patch: Patch) -> None:
    """parameters that need no gradient are reduced with the others, so the optimizer changes them"""
    patch.setattr(GradientReducer, "_planned", lambda self: list(self._parameters))
    patch.setattr(BucketReducer, "present", property(lambda self: self.planned))


@BUGS.enter("SHARD-SHARED", origin="B089")
def shared_is_reduced_for_each_owner(patch: Patch) -> None:
    """a parameter that modules share is reduced once for each of them"""

    def again(self: GradientReducer, sums: Sums, result: Result) -> None:
        named = _model().module.named_parameters(remove_duplicate=False)
        owners = Counter(id(parameter) for _, parameter in named)
        for each in result:
            result[each] = result[each] * owners[id(each)]

    windows(patch, again)


@BUGS.enter("SHARD-ANY-PARAMETER", origin="B116")
def partly_padded_gets_nothing(patch: Patch) -> None:
    """a part that is filled up with padding gets a gradient of zeros"""

    def lost(self: GradientReducer, sums: Sums, result: Result) -> None:
        for each in result:
            shard: Any = self._shards.shard(each)
            if shard is not None and shard.owned_numel < shard.layout.shard_numel:
                result[each] = torch.zeros_like(result[each])

    windows(patch, lost)


@BUGS.enter("SHARD-ANY-PARAMETER", origin="B013")
def without_elements_no_gradient(patch: Patch) -> None:
    """a rank that owns no element of a parameter gets no gradient for it"""

    def skipped(self: GradientReducer, sums: Sums, result: Result) -> None:
        for each in [each for each, gradient in result.items() if not gradient.numel()]:
            del result[each]

    windows(patch, skipped)


@BUGS.enter("SHARD-ANY-PARAMETER")
def scalars_are_not_trained(patch: Patch) -> None:
    """a parameter without dimensions gets no gradient"""

    def skipped(self: GradientReducer, sums: Sums, result: Result) -> None:
        for each in list(result):
            shard: Any = self._shards.shard(each)
            if not (each.shape if shard is None else shard.shape):
                del result[each]

    windows(patch, skipped)


@BUGS.enter("SHARD-REPLICAS")
def persistent_stay_in_their_block(patch: Patch) -> None:
    """gradients of parameters that are not split are not summed over the shard groups"""
    unseen_drift(patch)

    def local(self: GradientReducer, sums: Sums, result: Result) -> None:
        for each in sums:
            if self._shards.shard(each) is None:
                bucket = Bucket([each], [self._layout(each)], sums[each].dtype)
                gathered = self._collectives.all_gather(sums[each]).result()
                result.update(bucket.full_gradients(gathered * self._collectives.replicas))

    windows(patch, local)


@BUGS.enter("SHARD-MEMORY")
def gradients_stay_whole(patch: Patch) -> None:
    """a rank's gradient is a view of the whole one"""

    def views(self: GradientReducer, sums: Sums, result: Result) -> None:
        for each, gradient in result.items():
            shard: Any = self._shards.shard(each)
            if shard is not None:
                result[each] = shard.owned_slice(gradient.new_zeros(shard.numel)).copy_(gradient)

    windows(patch, views)
