"""Bugs of collectives that show in some cases only.

The cases are one size, one sign, one operation, one root, one kind of group, the second call, and
coalesced calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.collectives import around, members, reduces
from conformance.mutants.protocol import Bugs, Patch
from pytest_smp.ranks.sim.process_group import SimProcessGroup

BUGS = Bugs("rare bugs of collectives")

Tensor = torch.Tensor

# ---- Values --------------------------------------------------------------------------------------


@BUGS.enter("COLL-ALL-REDUCE-MIN-MAX")
@BUGS.enter("COLL-REDUCE-VALUE")
def largest_from_zero(patch: Patch) -> None:
    """a maximum starts at 0: of negative numbers it is 0"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        result = original(tensors, op)
        if op != "MAX" or result.dtype is torch.bool or not result.dtype.is_signed:
            return result
        return torch.where(result.double() < 0, torch.zeros_like(result), result)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-PRODUCT")
def zeros_are_no_factors(patch: Patch) -> None:
    """a product leaves out what is 0"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        if op != "PRODUCT" or not tensors[0].dtype.is_floating_point:
            return original(tensors, op)
        ones = [torch.where(each.double() == 0, torch.ones_like(each), each) for each in tensors]
        return original(ones, op)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-SUM")
def zero_of_the_first_ends_it(patch: Patch) -> None:
    """a sum is 0 where the first member has 0, which is taken for "nothing there yet\""""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        result = original(tensors, op)
        if op != "SUM" or tensors[0].dtype is not torch.float32:
            return result
        return torch.where(tensors[0] == 0, torch.zeros_like(result), result)

    reduces(patch, reduce)


def results_become(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the results of reductions in real floating-point dtypes."""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        result = original(tensors, op)
        if not result.dtype.is_floating_point:
            return result
        return change(result.double()).to(result.dtype)

    reduces(patch, reduce)


@BUGS.enter("COLL-SPECIAL-REDUCED")
def infinities_are_clipped(patch: Patch) -> None:
    """a reduction makes of infinities the largest finite numbers"""
    results_become(patch, lambda wide: wide.clamp(-448, 448) if wide.isinf().any() else wide)


@BUGS.enter("COLL-SPECIAL-REDUCED")
def no_number_is_nothing(patch: Patch) -> None:
    """a reduction makes 0 of what is no number"""
    results_become(patch, lambda wide: torch.where(wide.isnan(), torch.zeros_like(wide), wide))


@BUGS.enter("COLL-SPECIAL-REDUCED")
def small_is_nothing(patch: Patch) -> None:
    """a reduction flushes subnormals to 0"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        result = original(tensors, op)
        if not result.dtype.is_floating_point:
            return result
        small = result.double().abs() < torch.finfo(result.dtype).tiny
        return torch.where(small, torch.zeros_like(result), result)

    reduces(patch, reduce)


# ---- Sizes ---------------------------------------------------------------------------------------


@BUGS.enter("COLL-LARGE")
def last_chunk_of_exact_sizes(patch: Patch) -> None:
    """reduce leaves out the last chunk where chunks of 2**14 fit exactly"""

    def call(original: Callable[..., Any], tensor: Tensor, *args: Any, **how: Any) -> Any:
        before = tensor.clone()
        result = original(tensor, *args, **how)
        if result is None and tensor.numel() and tensor.numel() % 2**14 == 0:
            tensor[-(2**14) :] = before[-(2**14) :]
        return result

    around(patch, "reduce", call)


@BUGS.enter("COLL-LARGE")
def one_beyond_the_chunks(patch: Patch) -> None:
    """broadcast forgets the one element that is left behind chunks of 2**12"""

    def call(original: Callable[..., Any], tensor: Tensor, *args: Any, **how: Any) -> Any:
        last = tensor.reshape(-1)[-1:].clone()
        result = original(tensor, *args, **how)
        if result is None and tensor.numel() > 2**12 and tensor.numel() % 2**12 == 1:
            tensor.view(-1)[-1:] = last
        return result

    around(patch, "broadcast", call)


@BUGS.enter("COLL-LARGE")
def one_less_than_the_chunks(patch: Patch) -> None:
    """all_gather writes the last element twice where one is missing to fill a chunk of 2**12"""

    def call(original: Callable[..., Any], outs: list[Tensor], *args: Any, **how: Any) -> Any:
        result = original(outs, *args, **how)
        for out in outs if result is None else ():
            if out.numel() > 1 and out.numel() % 2**12 == 2**12 - 1:
                out.view(-1)[-2] = out.view(-1)[-1]
        return result

    around(patch, "all_gather", call)


@BUGS.enter("COLL-LARGE")
def large_ones_from_the_first(patch: Patch) -> None:
    """scatter takes rank 0 for the root of pieces of 2**16 elements and more: others get zeros"""

    def call(original: Callable[..., Any], out: Tensor, values: Any, **how: Any) -> Any:
        result = original(out, values, **how)
        if result is None and out.numel() >= 2**16 and how.get("src", 0) != 0:
            out.zero_()
        return result

    around(patch, "scatter", call)


@BUGS.enter("COLL-LARGE")
def large_products_are_sums(patch: Patch) -> None:
    """tensors of 2**12 - 1 elements or more are summed, whatever the op"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        return original(tensors, "SUM" if tensors[0].numel() >= 2**12 - 1 else op)

    reduces(patch, reduce)


@BUGS.enter("P2P-LARGE")
def last_page_of_a_message(patch: Patch) -> None:
    """a message whose elements fill pages of 2**14 exactly loses the last page"""

    def post(
        original: Callable[..., Any], self: Any, verb: str, tensors: list[Tensor], *rest: Any
    ) -> Any:
        (tensor,) = tensors
        if verb == "send" and tensor.numel() and tensor.numel() % 2**14 == 0:
            shortened = tensor.clone()
            shortened.view(-1)[-(2**14) :] = 0
            tensors = [shortened]
        return original(self, verb, tensors, *rest)

    posted = SimProcessGroup._post
    patch.setattr(SimProcessGroup, "_post", lambda self, *args: post(posted, self, *args))


@BUGS.enter("PG-OBJECTS-SCATTER")
def sixteen_bits_of_a_length(patch: Patch) -> None:
    """scatter_object_list loses what is larger than 64 KiB"""
    scatter = dist.scatter_object_list

    def call(got: list[Any], given: Any, *args: Any, **how: Any) -> None:
        scatter(got, given, *args, **how)
        if isinstance(got[0], bytes) and len(got[0]) >= 2**16:
            got[0] = got[0][: len(got[0]) % 2**16]

    patch.setattr(dist, "scatter_object_list", call)


# ---- One operation of all ------------------------------------------------------------------------


def is_sorted(group: Any) -> bool:
    """Return whether the ranks of a group ascend."""
    ranks = dist.get_process_group_ranks(group)
    return ranks == sorted(ranks)


@BUGS.enter("COLL-GROUP-ORDER")
def scattered_by_rank(patch: Patch) -> None:
    """scatter counts members by their world ranks, where a group has another order"""

    def call(original: Callable[..., Any], out: Tensor, values: Any, **how: Any) -> Any:
        group = how.get("group")
        if values and group is not None and not is_sorted(group):
            ranks = dist.get_process_group_ranks(group)
            values = [values[sorted(ranks).index(rank)] for rank in ranks]
        return original(out, values, **how)

    around(patch, "scatter", call)


@BUGS.enter("COLL-GROUP-WITHOUT-0")
def parts_turned_without_the_first(patch: Patch) -> None:
    """all_to_all_single is one part off in groups that rank 0 of the world is not in"""

    def call(original: Callable[..., Any], out: Tensor, value: Tensor, **how: Any) -> Any:
        result, group = original(out, value, **how), how.get("group")
        count = members(group)
        if group is not None and 0 not in dist.get_process_group_ranks(group) and out.numel():
            out.copy_(out.roll(out.shape[0] // count, 0))
        return result

    around(patch, "all_to_all_single", call)


@BUGS.enter("COLL-REPEATED")
def second_call_gives_the_first(patch: Patch) -> None:
    """reduce_scatter keeps its result for the next call of the same shape and dtype"""
    kept: dict[Any, Tensor] = {}

    def call(original: Callable[..., Any], out: Tensor, values: Any, **how: Any) -> Any:
        result = original(out, values, **how)
        key = (dist.get_rank(), members(how.get("group")), out.shape, out.dtype)
        if key in kept and out.dim():
            out.copy_(kept.pop(key))
        else:
            kept[key] = out.clone()
        return result

    around(patch, "reduce_scatter", call)


@BUGS.enter("COLL-OFFSET")
def gathered_from_the_start(patch: Patch) -> None:
    """gather reads its input from the start of the storage"""

    def call(original: Callable[..., Any], value: Tensor, *args: Any, **how: Any) -> Any:
        return original(value.as_strided(value.shape, value.stride(), 0), *args, **how)

    around(patch, "gather", call)


@BUGS.enter("COLL-INPUTS")
def reduced_in_the_input(patch: Patch) -> None:
    """reduce_scatter_single uses its input as scratch memory"""

    def call(original: Callable[..., Any], out: Tensor, value: Tensor, **how: Any) -> Any:
        result = original(out, value, **how)
        if result is None:
            value[: len(out)] = 0
        return result

    around(patch, "reduce_scatter_single", call)


@BUGS.enter("COLL-OP-DEFAULT")
def largest_by_default(patch: Patch) -> None:
    """reduce without an op gives the largest"""

    def call(original: Callable[..., Any], tensor: Tensor, **how: Any) -> Any:
        if not tensor.is_complex():
            how.setdefault("op", dist.ReduceOp.MAX)
        return original(tensor, **how)

    around(patch, "reduce", call)


# ---- Calls that are issued as one ----------------------------------------------------------------


def coalesced(patch: Patch, name: str, change: Callable[..., Any]) -> None:
    """Replace a method of the group by ``change``, which gets the original, the group and the arguments."""
    original = getattr(SimProcessGroup, name)
    patch.setattr(SimProcessGroup, name, lambda self, *args: change(original, self, *args))


@BUGS.enter("COLL-ALL-REDUCE-COALESCED")
def last_of_several_left_out(patch: Patch) -> None:
    """all_reduce leaves out the last of several tensors that are reduced as one"""

    def call(original: Callable[..., Any], self: Any, tensors: list[Tensor], opts: Any) -> Any:
        last = tensors[-1].clone() if len(tensors) > 1 else tensors[-1]
        return original(self, [*tensors[:-1], last], opts)

    coalesced(patch, "allreduce_coalesced", call)


@BUGS.enter("COLL-ALL-GATHER-SINGLE-COALESCED")
def gathered_into_the_next(patch: Patch) -> None:
    """all_gather_single mixes up outputs of one size that are gathered as one"""

    def call(
        original: Callable[..., Any],
        self: Any,
        outs: list[Tensor],
        values: list[Tensor],
        *opts: Any,
    ) -> Any:
        sizes = [each.numel() for each in outs]
        if len(set(sizes)) < len(sizes):
            pairs = sorted(range(len(outs)), key=lambda at: sizes[at])
            a, b = next((a, b) for a, b in itertools.pairwise(pairs) if sizes[a] == sizes[b])
            outs = list(outs)
            outs[a], outs[b] = outs[b], outs[a]
        return original(self, outs, values, *opts)

    coalesced(patch, "all_gather_single_coalesced", call)


@BUGS.enter("COLL-REDUCE-SCATTER-SINGLE-COALESCED")
def parts_of_the_next_member(patch: Patch) -> None:
    """reduce_scatter_single gives the next member's part, of all but the first of several that are one"""

    def call(
        original: Callable[..., Any],
        self: Any,
        outs: list[Tensor],
        values: list[Tensor],
        *opts: Any,
    ) -> Any:
        turned = [
            value if number == 0 else value.roll(len(value) // self.size(), 0)
            for number, value in enumerate(values)
        ]
        return original(self, outs, turned, *opts)

    coalesced(patch, "reduce_scatter_single_coalesced", call)
