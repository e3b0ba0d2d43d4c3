"""Bugs of the tensor collectives of a process group: layouts, dtypes, roots, orders.

Most stand around the functions of torch.distributed, which every backend is called by; those of the
order and the numbers of a reduction, in the fold.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from conformance.mutants.blocks import PerRun
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core import reduction
from smp_core.backends.fabrics.checked_group import CheckedGroup
from smp_core.backends.fabrics.memory import Flight, copy, poison
from smp_core.backends.fabrics.sim import collectives
from smp_core.errors import ArgumentError, VerdictError

BUGS = Bugs("collectives and layout")

Tensor = torch.Tensor

# ---- What bugs are made of -----------------------------------------------------------------------

#: By name of a function: the places of its inputs and of its outputs among the positional arguments,
#: as ``call`` of conformance.cases.tensors.COLLECTIVES passes them.
ARGUMENTS = {
    "broadcast": ((0,), (0,)),
    "all_reduce": ((0,), (0,)),
    "reduce": ((0,), (0,)),
    "all_gather": ((1,), (0,)),
    "all_gather_single": ((1,), (0,)),
    "gather": ((0,), (1,)),
    "scatter": ((1,), (0,)),
    "reduce_scatter": ((1,), (0,)),
    "reduce_scatter_single": ((1,), (0,)),
    "all_to_all": ((1,), (0,)),
    "all_to_all_single": ((1,), (0,)),
}


def around(patch: Patch, names: str | Sequence[str], wrapper: Callable[..., Any]) -> None:
    """Replace functions of torch.distributed by one that gets the original and its arguments."""
    for name in [names] if isinstance(names, str) else names:
        patch.setattr(dist, name, functools.partial(wrapper, getattr(dist, name)))


def everywhere(patch: Patch, wrapper: Callable[..., Any]) -> None:
    """``around`` every function; the wrapper gets its name first."""
    for name in ARGUMENTS:
        around(patch, name, functools.partial(wrapper, name))


def each(change: Callable[[Tensor], Tensor], argument: Any) -> Any:
    """Change a tensor, or all of a list; None stays."""
    if isinstance(argument, list):
        return [change(tensor) for tensor in argument]
    return argument if argument is None else change(argument)


def tensors_at(arguments: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
    """The tensors at these places, lists opened."""
    found = [arguments[place] for place in places]
    return [
        tensor
        for one in found
        if one is not None
        for tensor in (one if isinstance(one, list) else [one])
    ]


def seen_as(
    patch: Patch, name: str, change: Callable[[Tensor], Tensor], inputs: bool, outputs: bool
) -> None:
    """The function gets other views of the same memory."""
    reads, writes = ARGUMENTS[name]
    places = {*(reads if inputs else ()), *(writes if outputs else ())}

    def call(original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        changed = [
            each(change, argument) if place in places else argument
            for place, argument in enumerate(arguments)
        ]
        return original(*changed, **how)

    around(patch, name, call)


def as_if_dense(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element on, read or written as if the rest followed densely."""
    if tensor.is_contiguous():
        return tensor
    start, count = tensor.storage_offset(), tensor.numel()
    there = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize - start
    if there >= count:
        return tensor.as_strided((count,), (1,), start).view(tensor.shape)
    beyond = torch.zeros(count - there, dtype=torch.float32).to(tensor.dtype)
    return torch.cat([tensor.as_strided((there,), (1,), start), beyond]).view(tensor.shape)


def from_the_start(tensor: Tensor) -> Tensor:
    """A tensor's memory, its place in the storage forgotten."""
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def members(group: Any) -> int:
    """The size of a group; None is the default one."""
    return dist.get_world_size(group)


def turned(parts: Sequence[Any]) -> list[Any]:
    """The last first."""
    return [*parts[-1:], *parts[:-1]]


def rearranged(tensor: Tensor, count: int, order: Callable[[Sequence[Tensor]], Any]) -> None:
    """Put the equal parts of a tensor into another order."""
    parts = tensor.clone().reshape(count, tensor.numel() // count)
    tensor.copy_(torch.stack(order(list(parts))).reshape(tensor.shape))


def named(plant: Callable[[Patch], None], name: str, sentence: str) -> Callable[[Patch], None]:
    """A bug that is planted in several functions, named for one of them."""
    plant.__name__, plant.__doc__ = name, sentence
    return plant


# ---- Movement ------------------------------------------------------------------------------------


@BUGS.enter("COLL-BROADCAST-VALUE", kind="groups, roots and rank mapping", origin="B034")
def broadcast_from_the_first(patch: Patch) -> None:
    """broadcast takes the first rank of the group for the root"""

    def call(original: Callable[..., Any], tensor: Tensor, group: Any = None, **how: Any) -> Any:
        return original(tensor, group=group, group_src=0)

    around(patch, "broadcast", call)


@BUGS.enter("COLL-ALL-GATHER-VALUE")
def gathered_backwards(patch: Patch) -> None:
    """all_gather fills the list from its end"""
    around(patch, "all_gather", lambda call, outs, value, **how: call(outs[::-1], value, **how))


@BUGS.enter("COLL-ALL-GATHER-UNEVEN", origin="B014")
def gathered_as_if_all_were_alike(patch: Patch) -> None:
    """all_gather takes the size of the first member's tensor for that of all"""

    def call(original: Callable[..., Any], outs: list[Tensor], value: Tensor, **how: Any) -> Any:
        result = original(outs, value, **how)
        for out in outs:
            if out.dim():
                out[len(outs[0]) :] = 0
        return result

    around(patch, "all_gather", call)


def through(patch: Patch, name: str, narrow: torch.dtype, wide: torch.dtype) -> None:
    """Inputs of a dtype make a detour through another."""
    seen_as(patch, name, lambda t: t.to(narrow).to(wide) if t.dtype is wide else t, True, False)


@BUGS.enter("COLL-ALL-GATHER-VALUE")
def int64_through_float64(patch: Patch) -> None:
    """all_gather moves int64 as float64"""
    through(patch, "all_gather", torch.float64, torch.int64)


@BUGS.enter("COLL-ALL-TO-ALL-SINGLE-VALUE")
def float64_through_float32(patch: Patch) -> None:
    """all_to_all_single moves float64 as float32"""
    through(patch, "all_to_all_single", torch.float32, torch.float64)


@BUGS.enter("COLL-SCATTER-VALUE")
def float8_by_value(patch: Patch) -> None:
    """scatter moves one kind of float8 as another"""
    through(patch, "scatter", torch.float8_e5m2, torch.float8_e4m3fn)


def arranged_after(
    patch: Patch, name: str, order: Callable[[Sequence[Tensor]], Any], stacked: bool | None = None
) -> None:
    """Put the parts of the output into another order, of stacks or concatenations only if said so."""

    def call(
        original: Callable[..., Any], out: Tensor, value: Tensor, *rest: Any, **how: Any
    ) -> Any:
        result = original(out, value, *rest, **how)
        if out.numel() and stacked in (None, out.dim() > value.dim()):
            rearranged(out, members(how.get("group")), order)
        return result

    around(patch, name, call)


@BUGS.enter("COLL-ALL-GATHER-SINGLE-CAT")
def ring_order(patch: Patch) -> None:
    """all_gather_single leaves the parts in the order in which a ring delivers them"""

    def call(original: Callable[..., Any], out: Tensor, value: Tensor, **how: Any) -> Any:
        result, group = original(out, value, **how), how.get("group")
        if out.numel():
            first = dist.get_rank(group)
            rearranged(out, members(group), lambda parts: [*parts[first:], *parts[:first]])
        return result

    around(patch, "all_gather_single", call)


@BUGS.enter("COLL-ALL-GATHER-SINGLE-STACK")
def stacked_along_the_last(patch: Patch) -> None:
    """all_gather_single stacks along the last dimension"""
    arranged_after(
        patch,
        "all_gather_single",
        lambda parts: list(torch.stack(list(parts)).t().reshape(len(parts), -1)),
        stacked=True,
    )


@BUGS.enter("COLL-GATHER-VALUE")
def last_rank_left_out(patch: Patch) -> None:
    """gather leaves out the last rank"""

    def call(original: Callable[..., Any], value: Tensor, outs: Any, **how: Any) -> Any:
        kept = outs and [*outs[:-1], outs[-1].clone()]
        return original(value, kept, **how)

    around(patch, "gather", call)


@BUGS.enter("COLL-SCATTER-VALUE", origin="B028")
def scattered_to_the_next(patch: Patch) -> None:
    """scatter gives chunk r to rank r + 1"""
    around(
        patch,
        "scatter",
        lambda call, out, values, **how: call(out, values and turned(values), **how),
    )


@BUGS.enter("COLL-ALL-TO-ALL-VALUE")
def exchanged_with_the_opposite(patch: Patch) -> None:
    """all_to_all puts what rank i sent at place n - 1 - i"""

    def call(
        original: Callable[..., Any], outs: list[Tensor], values: list[Tensor], **how: Any
    ) -> Any:
        sizes = {tuple(tensor.shape) for tensor in outs + values}
        return original(outs[::-1] if len(sizes) == 1 else outs, values, **how)

    around(patch, "all_to_all", call)


@BUGS.enter("COLL-ALL-TO-ALL-UNEVEN", origin="B014")
def size_of_the_first(patch: Patch) -> None:
    """all_to_all takes the size of the first piece for that of all"""

    def call(original: Callable[..., Any], outs: list[Tensor], *rest: Any, **how: Any) -> Any:
        result = original(outs, *rest, **how)
        for out in outs:
            if out.dim():
                out[len(outs[0]) :] = 0
        return result

    around(patch, "all_to_all", call)


@BUGS.enter("COLL-ALL-TO-ALL-SINGLE-VALUE")
def parts_turned(patch: Patch) -> None:
    """all_to_all_single gives part r to rank r + 1"""
    arranged_after(patch, "all_to_all_single", turned)


@BUGS.enter("COLL-ALL-TO-ALL-SINGLE-UNEVEN", origin="B016")
def receivers_splits(patch: Patch) -> None:
    """all_to_all_single finds the pieces of its input by the sizes of the output's"""

    def call(
        original: Callable[..., Any],
        out: Tensor,
        value: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **how: Any,
    ) -> Any:
        if input_split_sizes and len(value):
            starts = [sum(output_split_sizes[:i]) for i in range(len(output_split_sizes))]
            rows = [
                min(start + row, len(value) - 1)
                for start, size in zip(starts, input_split_sizes, strict=True)
                for row in range(size)
            ]
            value = torch.stack([value[row] for row in rows])
        return original(out, value, output_split_sizes, input_split_sizes, **how)

    around(patch, "all_to_all_single", call)


# ---- Reductions ----------------------------------------------------------------------------------


def combines(patch: Patch, **by: str) -> None:
    """Reduce ops use the function of others."""
    table = reduction._COMBINE
    patch.setattr(reduction, "_COMBINE", table | {op: table[other] for op, other in by.items()})


def reduces(patch: Patch, change: Callable[..., Tensor]) -> None:
    """``change`` gets the original reduction, the tensors and the op."""
    replaced = functools.partial(change, reduction.reduce_tensors)
    for module in (reduction, collectives):
        patch.setattr(module, "reduce_tensors", replaced)


@BUGS.enter("COLL-ALL-REDUCE-SUM")
@BUGS.enter("COLL-REDUCE-VALUE")
def odd_one_dropped(patch: Patch) -> None:
    """the fold drops the last of an odd number"""

    def fold(values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
        level = list(values)
        while len(level) > 1:
            level = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        return level[0]

    patch.setattr(reduction, "fold", fold)


@BUGS.enter("COLL-ALL-REDUCE-SUM")
def sums_in_float32(patch: Patch) -> None:
    """float64 is summed in float32"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        if tensors[0].dtype is torch.float64:
            return original([tensor.float() for tensor in tensors], op).double()
        return original(tensors, op)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-PRODUCT")
def product_is_a_sum(patch: Patch) -> None:
    """PRODUCT adds"""
    combines(patch, PRODUCT="SUM")


@BUGS.enter("COLL-ALL-REDUCE-PRODUCT")
def product_of_the_first_two(patch: Patch) -> None:
    """PRODUCT multiplies the first two members only"""
    reduces(
        patch, lambda original, tensors, op: original(tensors[: 2 if op == "PRODUCT" else None], op)
    )


@BUGS.enter("COLL-ALL-REDUCE-MIN-MAX")
def least_and_largest_swapped(patch: Patch) -> None:
    """MIN and MAX are swapped"""
    combines(patch, MIN="MAX", MAX="MIN")


@BUGS.enter("COLL-ALL-REDUCE-MIN-MAX")
def uint64_compared_as_int64(patch: Patch) -> None:
    """MIN and MAX compare uint64 as int64"""
    patch.setattr(reduction, "_INT64_MIN", 0)


@BUGS.enter("COLL-ALL-REDUCE-BITS")
def exclusive_or_is_or(patch: Patch) -> None:
    """BXOR is BOR"""
    combines(patch, BXOR="BOR")


@BUGS.enter("COLL-ALL-REDUCE-AVG", origin="B020")
def one_dtype_not_divided(patch: Patch) -> None:
    """the average of bfloat16 is not divided"""
    reduces(
        patch,
        lambda original, tensors, op: original(
            tensors, "SUM" if op == "AVG" and tensors[0].dtype is torch.bfloat16 else op
        ),
    )


@BUGS.enter("COLL-ALL-REDUCE-AVG", origin="B043")
def divided_by_the_world(patch: Patch) -> None:
    """an average is divided by the size of the world"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        result = original(tensors, op)
        if op != "AVG":
            return result
        wide = result if result.dtype.is_complex else result.double()
        return (wide * len(tensors) / dist.get_world_size()).to(result.dtype)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-AVG-HALF", origin="B029")
def divided_after_the_sum(patch: Patch) -> None:
    """float16 is summed in float16, and divided then"""
    patch.setattr(reduction, "_SMALL_FLOATS", reduction._SMALL_FLOATS - {torch.float16})


@BUGS.enter("COLL-ALL-REDUCE-AVG-HALF")
def large_averages_lost(patch: Patch) -> None:
    """averages of float16 beyond half of its range become 0"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        result = original(tensors, op)
        if op != "AVG" or result.dtype is not torch.float16:
            return result
        return torch.where(result.float().abs() > 2**15, 0 * result, result)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-AVG")
def divided_by_a_power_of_two(patch: Patch) -> None:
    """an average is divided by the next power of two"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        result = original(tensors, op)
        if op != "AVG" or result.dtype.is_complex:
            return result
        next_power = 1 << (len(tensors) - 1).bit_length()
        return (result.double() * len(tensors) / next_power).to(result.dtype)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-WRAP", origin="G14")
def uint8_saturates(patch: Patch) -> None:
    """sums of uint8 stop at 255"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        if tensors[0].dtype is torch.uint8 and op == "SUM":
            return original([tensor.long() for tensor in tensors], op).clamp(max=255).byte()
        return original(tensors, op)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-WRAP")
def int64_reduced_in_float64(patch: Patch) -> None:
    """int64 is reduced in float64"""

    def reduce(original: Callable[..., Tensor], tensors: Sequence[Tensor], op: str) -> Tensor:
        if tensors[0].dtype is torch.int64 and op in ("SUM", "PRODUCT"):
            return original([tensor.double() for tensor in tensors], op).long()
        return original(tensors, op)

    reduces(patch, reduce)


@BUGS.enter("COLL-ALL-REDUCE-BOOL")
def bool_sum_is_exclusive(patch: Patch) -> None:
    """a sum of bool is exclusive: true and true is false"""
    reduces(
        patch,
        lambda original, tensors, op: original(
            tensors, "BXOR" if op == "SUM" and tensors[0].dtype is torch.bool else op
        ),
    )


@BUGS.enter("COLL-ALL-REDUCE-IDENTICAL")
def everybody_begins_with_themselves(patch: Patch) -> None:
    """each member folds in an order of its own, beginning with its own tensor"""

    def all_reduce(op: str) -> Any:
        def complete(calls: Sequence[Any]) -> Any:
            columns = list(zip(*(call.data for call in calls), strict=True))
            return [
                [reduction.reduce_tensors([*column[i:], *column[:i]], op) for column in columns]
                for i in range(len(calls))
            ]

        return complete

    patch.setattr(collectives, "all_reduce", all_reduce)


@BUGS.enter("COLL-REDUCE-VALUE", origin="B023")
def roots_own_left_out(patch: Patch) -> None:
    """reduce leaves out the root's own tensor"""

    def reduce(op: str, root: int) -> Any:
        def complete(calls: Sequence[Any]) -> Any:
            others = [call for at, call in enumerate(calls) if at != root] or calls
            columns = zip(*(call.data for call in others), strict=True)
            results = [reduction.reduce_tensors(column, op) for column in columns]
            return [results if at == root else [] for at in range(len(calls))]

        return complete

    patch.setattr(collectives, "reduce", reduce)


@BUGS.enter("COLL-REDUCE-SCATTER-VALUE", origin="B028")
def reduced_for_the_next(patch: Patch) -> None:
    """reduce_scatter gives chunk r to rank r + 1"""
    around(
        patch,
        "reduce_scatter",
        lambda call, out, values, **how: call(out, turned(values), **how),
    )


def arranged_before(patch: Patch, order: Callable[[Sequence[Tensor]], Any], stacked: bool) -> None:
    """reduce_scatter_single gets the parts of its input in another order."""

    def call(original: Callable[..., Any], out: Tensor, value: Tensor, **how: Any) -> Any:
        if value.numel() and stacked == (value.dim() > out.dim()):
            value = value.clone()
            rearranged(value, members(how.get("group")), order)
        return original(out, value, **how)

    around(patch, "reduce_scatter_single", call)


@BUGS.enter("COLL-REDUCE-SCATTER-SINGLE-CAT", origin="B028")
def part_for_the_next(patch: Patch) -> None:
    """reduce_scatter_single gives part r of a concatenation to rank r + 1"""
    arranged_before(patch, turned, stacked=False)


@BUGS.enter("COLL-REDUCE-SCATTER-SINGLE-STACK")
def unstacked_along_the_last(patch: Patch) -> None:
    """reduce_scatter_single takes a stack apart along the last dimension"""
    arranged_before(
        patch,
        lambda parts: list(torch.stack(list(parts)).reshape(-1, len(parts)).t()),
        stacked=True,
    )


@BUGS.enter("COLL-OP-DEFAULT", origin="B022")
def average_by_default(patch: Patch) -> None:
    """without an op floating-point tensors are averaged"""

    def call(original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        (first, *_) = tensors_at(arguments, (0,))
        if first.is_floating_point():
            how.setdefault("op", dist.ReduceOp.AVG)
        return original(*arguments, **how)

    around(patch, ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"], call)


# ---- Roots ---------------------------------------------------------------------------------------


@BUGS.enter(
    "COLL-BROADCAST-ROOT",
    *ASSERTION,
    ValueError,
    VerdictError,
    kind="groups, roots and rank mapping",
    origin="B031",
)
def group_rank_for_world_rank(patch: Patch) -> None:
    """broadcast reads group_src as a rank of the world"""

    def call(original: Callable[..., Any], tensor: Tensor, **how: Any) -> Any:
        if "group_src" in how:
            how["src"] = how.pop("group_src")
        return original(tensor, **how)

    around(patch, "broadcast", call)


@BUGS.enter(
    "COLL-REDUCE-ROOT",
    *ASSERTION,
    ValueError,
    VerdictError,
    kind="groups, roots and rank mapping",
    origin="B035",
)
def world_rank_for_group_rank(patch: Patch) -> None:
    """reduce takes dst for a rank of the group"""

    def call(original: Callable[..., Any], tensor: Tensor, **how: Any) -> Any:
        if "dst" in how:
            how["group_dst"] = how.pop("dst") % members(how.get("group"))
        return original(tensor, **how)

    around(patch, "reduce", call)


@BUGS.enter(
    "COLL-GATHER-ROOT",
    *ASSERTION,
    ValueError,
    VerdictError,
    kind="groups, roots and rank mapping",
    origin="B034",
)
def rank_0_gathers(patch: Patch) -> None:
    """gather always gathers on the first rank of the group"""

    def call(
        original: Callable[..., Any], value: Tensor, outs: Any, group: Any = None, **_: Any
    ) -> Any:
        own = [torch.empty_like(value) for _ in range(members(group))]
        first = dist.get_rank(group) == 0
        return original(value, (outs or own) if first else None, group=group, group_dst=0)

    around(patch, "gather", call)


@BUGS.enter(
    "COLL-SCATTER-ROOT",
    *ASSERTION,
    ValueError,
    VerdictError,
    kind="groups, roots and rank mapping",
    origin="B032",
)
def root_converted_twice(patch: Patch) -> None:
    """scatter converts its root from the world to the group twice"""

    def call(original: Callable[..., Any], out: Tensor, values: Any, **how: Any) -> Any:
        if "src" in how:
            ranks = dist.get_process_group_ranks(how.get("group"))
            once = ranks.index(how.pop("src"))
            how["group_src"] = ranks.index(once) if once in ranks else once
        return original(out, values, **how)

    around(patch, "scatter", call)


# ---- Layouts -------------------------------------------------------------------------------------


def _raw(name: str, inputs: bool, outputs: bool) -> Callable[[Patch], None]:
    return lambda patch: seen_as(patch, name, as_if_dense, inputs, outputs)


for _name, (_reads, _writes) in ARGUMENTS.items():
    _id = _name.upper().replace("_", "-")
    if _reads == _writes:
        BUGS.enter(f"COLL-{_id}-LAYOUT", origin="B001")(
            named(
                _raw(_name, True, True),
                f"{_name}_of_raw_memory",
                f"{_name} takes a strided view's memory for dense",
            )
        )
        continue
    for _side, _inputs in (("IN", True), ("OUT", False)):
        _what = "input" if _inputs else "output"
        BUGS.enter(
            f"COLL-{_id}-LAYOUT-{_side}",
            origin="B002" if _name == "gather" else "B001",
        )(
            named(
                _raw(_name, _inputs, not _inputs),
                f"{_name}_{'from' if _inputs else 'into'}_raw_memory",
                f"{_name} takes the memory of a strided {_what} for dense",
            )
        )


@BUGS.enter("COLL-ALL-REDUCE-LAYOUT")
def result_into_a_copy(patch: Patch) -> None:
    """all_reduce of a view that is not contiguous works on a copy, which nobody copies back"""
    seen_as(patch, "all_reduce", lambda tensor: tensor.contiguous(), True, True)


@BUGS.enter("COLL-ALL-GATHER-LAYOUT-OUT", origin="B004")
def gathered_transposed(patch: Patch) -> None:
    """all_gather writes a transposed output in the order of its memory"""

    def in_memory_order(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.is_contiguous() or not tensor.mT.is_contiguous():
            return tensor
        return tensor.mT.view(tensor.shape)

    seen_as(patch, "all_gather", in_memory_order, False, True)


@BUGS.enter("COLL-SIZES")
def one_of_six_dropped(patch: Patch) -> None:
    """the fold of exactly six values drops the last"""
    original = reduction.fold

    def fold(values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
        return original(values[:5] if len(values) == 6 else values, combine)

    patch.setattr(reduction, "fold", fold)


@BUGS.enter("COLL-SIZES")
def two_of_seven_swapped(patch: Patch) -> None:
    """all_gather swaps the last two of exactly seven tensors"""

    def call(original: Callable[..., Any], outs: list[Tensor], *rest: Any, **how: Any) -> Any:
        if len(outs) == 7:
            outs = [*outs[:5], outs[6], outs[5]]
        return original(outs, *rest, **how)

    around(patch, "all_gather", call)


# ---- Amounts -------------------------------------------------------------------------------------


def _skips(name: str) -> Callable[[Patch], None]:
    def call(original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        everything = tensors_at(arguments, [place for two in ARGUMENTS[name] for place in two])
        if dist.get_rank() == 0 and not any(tensor.numel() for tensor in everything):
            return None
        return original(*arguments, **how)

    return lambda patch: around(patch, name, call)


for _name in ARGUMENTS:
    BUGS.enter(
        f"COLL-{_name.upper().replace('_', '-')}-EMPTY",
        *ASSERTION,
        VerdictError,
        origin="B013",
    )(
        named(
            _skips(_name),
            f"{_name}_left_out_if_empty",
            f"rank 0 leaves out {_name} of tensors without elements",
        )
    )


@BUGS.enter("COLL-ALL-GATHER-EMPTY", ZeroDivisionError, origin="B011")
def divides_by_the_count(patch: Patch) -> None:
    """all_gather divides by the number of elements"""

    def call(original: Callable[..., Any], outs: list[Tensor], value: Tensor, **how: Any) -> Any:
        assert math.prod(outs[0].shape) // value.numel() >= 0
        return original(outs, value, **how)

    around(patch, "all_gather", call)


@BUGS.enter("COLL-REPEATED", origin="B157")
def stale_output(patch: Patch) -> None:
    """the second call of one shape gives the result of the first"""
    memory = PerRun(dict)

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        outputs = tensors_at(arguments, ARGUMENTS[name][1])
        looks = [(tensor.shape, tensor.dtype) for tensor in outputs]
        result = original(*arguments, **how)
        if outputs:
            key = (dist.get_rank(), name, str(looks))
            first = memory().setdefault(key, [tensor.clone() for tensor in outputs])
            for tensor, old in zip(outputs, first, strict=True):
                tensor.copy_(old)
        return result

    everywhere(patch, call)


@BUGS.enter("COLL-MANY")
def no_more_after_a_while(patch: Patch) -> None:
    """after 128 calls nothing is moved any more"""
    counts: PerRun = PerRun(lambda: defaultdict(int))

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        counts()[dist.get_rank()] += 1
        return original(*arguments, **how) if counts()[dist.get_rank()] <= 128 else None

    everywhere(patch, call)


@BUGS.enter(
    "COLL-LARGE",
    *ASSERTION,
    VerdictError,
    kind="errors, hangs, pickling and resources",
    origin="B148",
)
def fixed_buffer_of_tensors(patch: Patch) -> None:
    """elements beyond the first 2**16 are not moved"""

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        outputs = tensors_at(arguments, ARGUMENTS[name][1])
        before = [tensor.clone() for tensor in outputs]
        result = original(*arguments, **how)
        for tensor, old in zip(outputs, before, strict=True):
            if tensor.numel() > 2**16:
                tensor.view(-1)[2**16 :] = old.view(-1)[2**16 :]
        return result

    everywhere(patch, call)


@BUGS.enter("COLL-LARGE", kind="errors, hangs, pickling and resources")
def tail_lost(patch: Patch) -> None:
    """elements behind the last multiple of 4096 are not moved"""
    land = Flight.land

    def landed(flight: Flight, values: Sequence[Tensor]) -> None:
        tails = [
            out.view(-1)[out.numel() // 4096 * 4096 :]
            for out in flight.outputs
            if out.numel() > 4096 and out.is_contiguous()
        ]
        before = [tail.clone() for tail in tails]
        land(flight, values)
        for tail, old in zip(tails, before, strict=True):
            tail.copy_(old)

    patch.setattr(Flight, "land", landed)


@BUGS.enter("COLL-ALL-TO-ALL-EMPTY")
def no_work_for_nothing(patch: Patch) -> None:
    """an asynchronous all_to_all of tensors without elements gives no work"""

    def call(original: Callable[..., Any], outs: list[Tensor], *rest: Any, **how: Any) -> Any:
        if how.get("async_op") and not any(out.numel() for out in outs):
            return original(outs, *rest, **how | {"async_op": False})
        return original(outs, *rest, **how)

    around(patch, "all_to_all", call)


# ---- Asynchronous calls --------------------------------------------------------------------------


def in_memory_order(tensor: Tensor) -> Tensor:
    """The view of the same elements that has them as they lie."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order)


@BUGS.enter("COLL-ALL-REDUCE-LAYOUT")
@BUGS.enter("COLL-ALL-GATHER-LAYOUT-OUT")
@BUGS.enter("COLL-ALL-TO-ALL-SINGLE-LAYOUT-OUT")
def landed_in_memory_order(patch: Patch) -> None:
    """what an asynchronous call gets is written to a view that is not contiguous in memory order"""
    land = Flight.land

    def landed(flight: Flight, values: Sequence[Tensor]) -> None:
        if flight._stands:
            flight.outputs = [in_memory_order(tensor) for tensor in flight.outputs]
            pairs = zip(values, flight.outputs, strict=False)
            values = [value.reshape(out.shape) for value, out in pairs]
        land(flight, values)

    patch.setattr(Flight, "land", landed)


def read_in_flight(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """An asynchronous call reads other views of its inputs."""
    take_off = Flight.take_off

    def taken_off(flight: Flight, *arguments: Any) -> None:
        read = [copy(change(tensor)).reshape(tensor.shape) for tensor in flight.inputs]
        take_off(flight, *arguments)
        flight.inputs = read

    patch.setattr(Flight, "take_off", taken_off)


@BUGS.enter("COLL-BROADCAST-LAYOUT")
@BUGS.enter("COLL-SCATTER-LAYOUT-IN")
@BUGS.enter("COLL-REDUCE-SCATTER-SINGLE-LAYOUT-IN")
def taken_off_in_memory_order(patch: Patch) -> None:
    """an asynchronous call reads a view that is not contiguous in memory order"""
    read_in_flight(patch, in_memory_order)


@BUGS.enter("COLL-OFFSET")
def taken_off_without_offset(patch: Patch) -> None:
    """an asynchronous call reads its inputs from the start of their storage"""
    read_in_flight(patch, from_the_start)


@BUGS.enter("COLL-IN-PLACE")
def poisoned_before_the_copy(patch: Patch) -> None:
    """an asynchronous call gives up its outputs before it has copied its inputs"""
    take_off = Flight.take_off

    def taken_off(flight: Flight, *arguments: Any) -> None:
        for tensor in flight.outputs:
            poison(tensor)
        take_off(flight, *arguments)

    patch.setattr(Flight, "take_off", taken_off)


# ---- Special numbers -----------------------------------------------------------------------------


@BUGS.enter("COLL-SPECIAL-BITS")
def zero_added(patch: Patch) -> None:
    """what a broadcast gives is added to 0"""

    def complete(original: Callable[..., Any], root: int) -> Any:
        def completed(calls: Sequence[Any]) -> Any:
            values = original(root)(calls)
            return [[_with_zero_added(each) for each in some] for some in values]

        return completed

    patch.setattr(collectives, "broadcast", functools.partial(complete, collectives.broadcast))


def _with_zero_added(tensor: Tensor) -> Tensor:
    return tensor + 0 if tensor.dtype in (torch.float32, torch.float64) else tensor


@BUGS.enter("COLL-SPECIAL-BITS")
def subnormals_flushed(patch: Patch) -> None:
    """all_to_all_single flushes subnormal numbers to 0"""

    def flushed(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0 * tensor, tensor)

    seen_as(patch, "all_to_all_single", flushed, True, False)


@BUGS.enter("COLL-SPECIAL-BITS")
def one_nan_for_all(patch: Patch) -> None:
    """gather makes every NaN the same one"""

    def made_one(tensor: Tensor) -> Tensor:
        if tensor.dtype not in (torch.float32, torch.float64):
            return tensor
        return torch.where(tensor.isnan(), torch.nan, tensor)

    seen_as(patch, "gather", made_one, True, False)


@BUGS.enter("COLL-CONJUGATED")
def conjugation_dropped(patch: Patch) -> None:
    """of a lazy conjugate, the memory is read"""
    for name in ("gather", "reduce_scatter", "reduce_scatter_single"):
        seen_as(patch, name, lambda t: t.conj() if t.is_conj() else t, True, False)


# ---- Buffers -------------------------------------------------------------------------------------


@BUGS.enter("COLL-OFFSET", origin="B008")
def offset_forgotten(patch: Patch) -> None:
    """tensors are looked for at the start of their storage"""
    for name in ARGUMENTS:
        seen_as(patch, name, from_the_start, True, True)


@BUGS.enter("COLL-CHUNKS-OUT", *ASSERTION, ArgumentError, origin="B008")
def outputs_at_the_start(patch: Patch) -> None:
    """all_gather and its like put every output at the start of its storage"""
    for name in ("all_gather", "gather", "all_to_all"):
        seen_as(patch, name, from_the_start, False, True)


@BUGS.enter("COLL-CHUNKS-IN", origin="B008")
def inputs_at_the_start(patch: Patch) -> None:
    """scatter and its like read every input at the start of its storage"""
    for name in ("scatter", "reduce_scatter", "all_to_all"):
        seen_as(patch, name, from_the_start, True, False)


@BUGS.enter("COLL-IN-PLACE")
def output_cleared_first(patch: Patch) -> None:
    """outputs are cleared before inputs are read"""

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        if ARGUMENTS[name][0] != ARGUMENTS[name][1]:
            for tensor in tensors_at(arguments, ARGUMENTS[name][1]):
                tensor.zero_()
        return original(*arguments, **how)

    everywhere(patch, call)


@BUGS.enter("COLL-INPUTS", *ASSERTION, VerdictError)
def inputs_as_scratch(patch: Patch) -> None:
    """reductions add up in their inputs"""

    def call(original: Callable[..., Any], out: Tensor, values: Any, **how: Any) -> Any:
        result = original(out, values, **how)
        each(lambda tensor: tensor.copy_(tensor.flip(0) if tensor.dim() else -tensor), values)
        return result

    around(patch, ["reduce_scatter", "reduce_scatter_single", "all_to_all_single"], call)


@BUGS.enter("COLL-INPUTS", *ASSERTION, VerdictError, origin="G2")
def roots_tensor_written(patch: Patch) -> None:
    """broadcast clears the root's tensor when all have it"""

    def call(original: Callable[..., Any], tensor: Tensor, **how: Any) -> Any:
        result = original(tensor, **how)
        if how.get("src") == dist.get_rank():
            tensor.zero_()
        return result

    around(patch, "broadcast", call)


# ---- Groups --------------------------------------------------------------------------------------


@BUGS.enter("COLL-GROUP-ORDER", kind="groups, roots and rank mapping", origin="B037")
def order_forgotten(patch: Patch) -> None:
    """new_group sorts its ranks though told not to"""
    around(patch, "new_group", lambda new, ranks, sort_ranks=True: new(ranks))


@BUGS.enter("COLL-GROUP-SORTED", kind="groups, roots and rank mapping", origin="G17")
def never_sorted(patch: Patch) -> None:
    """new_group leaves its ranks as they were listed though it should sort them"""
    around(patch, "new_group", lambda new, ranks, sort_ranks=True: new(ranks, sort_ranks=False))


@BUGS.enter(
    "COLL-GROUP-WITHOUT-0",
    *ASSERTION,
    VerdictError,
    kind="groups, roots and rank mapping",
    origin="B040",
)
def rank_0_is_in_every_group(patch: Patch) -> None:
    """rank 0 is made a member of every group"""
    around(
        patch,
        "new_group",
        lambda new, ranks, **how: new([0, *(rank for rank in ranks if rank)], **how),
    )


@BUGS.enter("COLL-GROUP-ALONE", kind="groups, roots and rank mapping", origin="B088")
def nothing_to_do_alone(patch: Patch) -> None:
    """in a group of one rank a collective does nothing"""

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        return original(*arguments, **how) if members(how.get("group")) > 1 else None

    everywhere(patch, call)


@BUGS.enter(
    "COLL-GROUP-OVERLAP",
    *ASSERTION,
    ValueError,
    VerdictError,
    kind="groups, roots and rank mapping",
    origin="B043",
)
def latest_group(patch: Patch) -> None:
    """a collective on any group goes to the group that the rank has made last"""
    latest: PerRun = PerRun(dict)

    def new_group(original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        group = original(*arguments, **how)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            latest()[dist.get_rank()] = group
        return group

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        if how.get("group") is not None:
            how["group"] = latest().get(dist.get_rank(), how["group"])
        return original(*arguments, **how)

    around(patch, "new_group", new_group)
    everywhere(patch, call)


@BUGS.enter("COLL-GROUP-OUTSIDER", kind="groups, roots and rank mapping")
def outsiders_cleared(patch: Patch) -> None:
    """a collective clears the outputs of a rank that is not in the group"""

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        if how.get("group") == dist.GroupMember.NON_GROUP_MEMBER:
            for tensor in tensors_at(arguments, ARGUMENTS[name][1]):
                tensor.zero_()
        return original(*arguments, **how)

    everywhere(patch, call)


@BUGS.enter(
    "COLL-GROUP-OUTSIDER",
    *ASSERTION,
    VerdictError,
    kind="groups, roots and rank mapping",
    origin="B043",
)
def outsiders_use_the_world(patch: Patch) -> None:
    """for a rank that is not in the group the world is meant"""

    def call(name: str, original: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        if how.get("group") == dist.GroupMember.NON_GROUP_MEMBER:
            how["group"] = None
        return original(*arguments, **how)

    everywhere(patch, call)


@BUGS.enter("COLL-BARRIER-ALL", origin="B026")
def tensor_barrier_does_nothing(patch: Patch) -> None:
    """a barrier waits for nobody"""
    around(patch, "barrier", lambda call, **how: None)


@BUGS.enter("COLL-BARRIER-GROUP", VerdictError, origin="B155")
def tensor_barrier_of_the_world(patch: Patch) -> None:
    """a barrier is always one of the world"""
    around(patch, "barrier", lambda call, **how: call())


# ---- Errors --------------------------------------------------------------------------------------


@BUGS.enter(
    "COLL-ERROR-ROOT", *ASSERTION, VerdictError, kind="errors, hangs, pickling and resources"
)
def root_guessed(patch: Patch) -> None:
    """of two names of a root one is taken, and without any rank 0"""

    def canonical(group: Any, world_rank: Any = None, group_rank: Any = None, **how: Any) -> int:
        if group_rank is not None:
            return int(group_rank)
        return int(c10d.get_group_rank(group, world_rank or 0))

    patch.setattr(c10d, "_canonicalize_group_rank", canonical)


@BUGS.enter(
    "COLL-ERROR-RANGE", *ASSERTION, VerdictError, kind="errors, hangs, pickling and resources"
)
def roots_count_from_the_last(patch: Patch) -> None:
    """a root counts from the first again beyond the last, and from the last below 0"""

    def wrapped(self: CheckedGroup, call: str, opts: Any) -> int:
        return int(opts.rootRank) % self.size()

    patch.setattr(CheckedGroup, "_root", wrapped)


@BUGS.enter(
    "COLL-ERROR-LIST", *ASSERTION, VerdictError, kind="errors, hangs, pickling and resources"
)
def list_made_up(patch: Patch) -> None:
    """gather and scatter make up the list that their root does not pass"""

    def call(original: Callable[..., Any], tensor: Tensor, listed: Any, **how: Any) -> Any:
        if not listed and dist.get_rank() in (how.get("src"), how.get("dst")):
            listed = [torch.zeros_like(tensor) for _ in range(members(how.get("group")))]
        return original(tensor, listed, **how)

    around(patch, ["gather", "scatter"], call)
