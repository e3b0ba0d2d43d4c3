"""Bugs of the tensor collectives of a process group: layouts, dtypes, roots, orders.

Most bugs wrap the functions of torch.distributed, through which every backend is called. Bugs in the order
and the numbers of a reduction replace the fold. A decorator names the place of a bug and the requirement
that must catch it; the decorated function is the bug.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from conformance.mutants.blocks import PerRun
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim import collectives
from smp_core import reduction
from smp_core.errors import ArgumentError, VerdictError
from smp_core.transport.checked_group import CheckedGroup
from smp_core.transport.memory import InFlightBuffer, copy, poison

BUGS = Bugs("collectives and layout")
RANKS = "groups, roots and rank mapping"
ERRORS = "errors, hangs, pickling and resources"

#: The exceptions of a bug that gives a wrong value, or makes calls that do not match.
VALUE_OR_VERDICT = (*ASSERTION, VerdictError)

Tensor = torch.Tensor
Call = Callable[..., Any]

# ---- Where bugs are planted ----------------------------------------------------------------------

#: The places of inputs and of outputs among each function's positional arguments, in the form in which
#: ``call`` of conformance.cases.tensors.COLLECTIVES passes them.
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


def around(patch: Patch, names: str | Sequence[str], wrapper: Call) -> None:
    """Replace functions of torch.distributed by one that gets the original and its arguments."""
    for name in [names] if isinstance(names, str) else names:
        patch.setattr(dist, name, functools.partial(wrapper, getattr(dist, name)))


def everywhere(patch: Patch, wrapper: Call) -> None:
    """Wrap every function of ARGUMENTS by :func:`around`; the wrapper gets the function's name first."""
    for name in ARGUMENTS:
        around(patch, name, functools.partial(wrapper, name))


def reduces(patch: Patch, change: Call) -> None:
    """Replace the fold by ``change``, which gets the original, the tensors and the op."""
    replaced = functools.partial(change, reduction.reduce_tensors)
    for module in (reduction, collectives):
        patch.setattr(module, "reduce_tensors", replaced)


def entered(
    plant: Callable[[Patch, Call], None], requirement: str, *by: type[BaseException], **more: str
) -> Callable[[Call], Call]:
    """Make a decorator that enters a function as a bug, planted by ``plant``.

    The other arguments are those of :meth:`Bugs.enter`.
    """

    def enter(bug: Call) -> Call:
        def planted(patch: Patch) -> None:
            plant(patch, bug)

        planted.__name__, planted.__doc__ = bug.__name__, bug.__doc__
        BUGS.enter(requirement, *by, **more)(planted)
        return bug

    return enter


def in_call(
    names: str | Sequence[str], requirement: str, *by: type[BaseException], **more: str
) -> Callable[[Call], Call]:
    """Enter a bug that is called in place of these functions, with the original and its arguments."""
    return entered(lambda patch, bug: around(patch, names, bug), requirement, *by, **more)


def in_every_call(
    requirement: str, *by: type[BaseException], **more: str
) -> Callable[[Call], Call]:
    """Enter a bug that is called in place of every collective, with name, original and arguments."""
    return entered(everywhere, requirement, *by, **more)


def in_tensors(
    names: str | Sequence[str],
    sides: str,
    requirement: str,
    *by: type[BaseException],
    **more: str,
) -> Callable[[Call], Call]:
    """Enter a bug that changes each tensor that these functions read (``"in"``) or write (``"out"``)."""

    def plant(patch: Patch, bug: Call) -> None:
        for name in [names] if isinstance(names, str) else names:
            reads, writes = ARGUMENTS[name]
            places = {*(reads if "in" in sides else ()), *(writes if "out" in sides else ())}
            around(patch, name, functools.partial(_with_others, places, bug))

    return entered(plant, requirement, *by, **more)


def _with_others(
    places: Collection[int], change: Call, original: Call, *arguments: Any, **how: Any
) -> Any:
    changed = [
        each(change, argument) if place in places else argument
        for place, argument in enumerate(arguments)
    ]
    return original(*changed, **how)


def in_reduction(
    ops: Collection[str],
    dtypes: Collection[torch.dtype],
    requirement: str,
    *by: type[BaseException],
    **more: str,
) -> Callable[[Call], Call]:
    """Enter a bug in place of the fold, for some reduce ops and dtypes; an empty collection means all.

    The bug gets the original, the tensors and the op.
    """

    def plant(patch: Patch, bug: Call) -> None:
        def reduce(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
            meant = (not ops or op in ops) and (not dtypes or tensors[0].dtype in dtypes)
            return bug(original, tensors, op) if meant else original(tensors, op)

        reduces(patch, reduce)

    return entered(plant, requirement, *by, **more)


def called(bug: Call, name: str, sentence: str) -> Call:
    """Copy a bug that is planted in several functions, with a name and sentence for one of them."""
    one = functools.partial(bug)
    vars(one).update(__name__=name, __doc__=sentence)
    return one


# ---- What bugs are made of -----------------------------------------------------------------------


def each(change: Callable[[Tensor], Tensor], argument: Any) -> Any:
    """Apply ``change`` to a tensor, or to all tensors of a list; None stays None."""
    if isinstance(argument, list):
        return [change(tensor) for tensor in argument]
    return argument if argument is None else change(argument)


def tensors_at(arguments: Sequence[Any], places: Sequence[int]) -> list[Tensor]:
    """The tensors at these places of the arguments, also those in lists."""
    found = [arguments[place] for place in places]
    return [
        tensor
        for one in found
        if one is not None
        for tensor in (one if isinstance(one, list) else [one])
    ]


def outputs_of(name: str, arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors that a call of this function writes."""
    return tensors_at(arguments, ARGUMENTS[name][1])


def as_if_dense(tensor: Tensor) -> Tensor:
    """A contiguous view of a tensor's shape on the memory from its first element on, or a copy of it."""
    if tensor.is_contiguous():
        return tensor
    start, count = tensor.storage_offset(), tensor.numel()
    there = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize - start
    if there >= count:
        return tensor.as_strided((count,), (1,), start).view(tensor.shape)
    beyond = torch.zeros(count - there, dtype=torch.float32).to(tensor.dtype)
    return torch.cat([tensor.as_strided((there,), (1,), start), beyond]).view(tensor.shape)


def from_the_start(tensor: Tensor) -> Tensor:
    """A view of the tensor's shape and strides at offset 0 of its storage."""
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A view of the same elements with dimensions in the order of memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order)


def through(tensor: Tensor, wide: torch.dtype, narrow: torch.dtype) -> Tensor:
    """Convert a tensor of dtype ``wide`` to ``narrow`` and back; other tensors stay."""
    return tensor.to(narrow).to(wide) if tensor.dtype is wide else tensor


def members(group: Any) -> int:
    """The size of a group; None is the default one."""
    return dist.get_world_size(group)


def is_outsider(how: dict[str, Any]) -> bool:
    """Return whether the caller is outside of the group among these arguments."""
    return how.get("group") == dist.GroupMember.NON_GROUP_MEMBER


def turned(parts: Sequence[Any]) -> list[Any]:
    """Move the last part to the front."""
    return [*parts[-1:], *parts[:-1]]


def rearranged(tensor: Tensor, count: int, order: Callable[[Sequence[Tensor]], Any]) -> None:
    """Put the equal parts of a tensor into another order."""
    if tensor.numel():
        parts = tensor.clone().reshape(count, tensor.numel() // count)
        tensor.copy_(torch.stack(order(list(parts))).reshape(tensor.shape))


# ---- Movement ------------------------------------------------------------------------------------


@in_call("broadcast", "COLL-BROADCAST-VALUE", kind=RANKS, origin="B034")
def broadcast_from_the_first(original: Call, tensor: Tensor, group: Any = None, **_: Any) -> Any:
    """broadcast takes the first rank of the group for the root"""
    return original(tensor, group=group, group_src=0)


@in_call("all_gather", "COLL-ALL-GATHER-VALUE")
def gathered_backwards(original: Call, outs: list[Tensor], value: Tensor, **how: Any) -> Any:
    """all_gather fills the list from its end"""
    return original(outs[::-1], value, **how)


@in_call("all_gather", "COLL-ALL-GATHER-UNEVEN", origin="B014")
def gathered_as_if_all_were_alike(
    original: Call, outs: list[Tensor], *rest: Any, **how: Any
) -> Any:
    """all_gather takes the size of the first member's tensor for that of all"""
    result = original(outs, *rest, **how)
    for out in outs:
        if out.dim():
            out[len(outs[0]) :] = 0
    return result


@in_tensors("all_gather", "in", "COLL-ALL-GATHER-VALUE")
def int64_through_float64(tensor: Tensor) -> Tensor:
    """all_gather moves int64 as float64"""
    return through(tensor, torch.int64, torch.float64)


@in_tensors("all_to_all_single", "in", "COLL-ALL-TO-ALL-SINGLE-VALUE")
def float64_through_float32(tensor: Tensor) -> Tensor:
    """all_to_all_single moves float64 as float32"""
    return through(tensor, torch.float64, torch.float32)


@in_tensors("scatter", "in", "COLL-SCATTER-VALUE")
def float8_by_value(tensor: Tensor) -> Tensor:
    """scatter moves one kind of float8 as another"""
    return through(tensor, torch.float8_e4m3fn, torch.float8_e5m2)


@in_call("all_gather_single", "COLL-ALL-GATHER-SINGLE-CAT")
def ring_order(original: Call, out: Tensor, value: Tensor, **how: Any) -> Any:
    """all_gather_single leaves the parts in the order in which a ring delivers them"""
    result, group = original(out, value, **how), how.get("group")
    first = dist.get_rank(group)
    rearranged(out, members(group), lambda parts: [*parts[first:], *parts[:first]])
    return result


@in_call("all_gather_single", "COLL-ALL-GATHER-SINGLE-STACK")
def stacked_along_the_last(original: Call, out: Tensor, value: Tensor, **how: Any) -> Any:
    """all_gather_single stacks along the last dimension"""
    result = original(out, value, **how)
    if out.numel() and out.dim() > value.dim():
        transposed = out.reshape(members(how.get("group")), -1).t()
        out.copy_(transposed.clone().reshape(out.shape))
    return result


@in_call("gather", "COLL-GATHER-VALUE")
def last_rank_left_out(original: Call, value: Tensor, outs: Any, **how: Any) -> Any:
    """gather leaves out the last rank"""
    return original(value, outs and [*outs[:-1], outs[-1].clone()], **how)


@in_call("scatter", "COLL-SCATTER-VALUE", origin="B028")
def scattered_to_the_next(original: Call, out: Tensor, values: Any, **how: Any) -> Any:
    """scatter gives chunk r to rank r + 1"""
    return original(out, values and turned(values), **how)


@in_call("all_to_all", "COLL-ALL-TO-ALL-VALUE")
def exchanged_with_the_opposite(
    original: Call, outs: list[Tensor], values: list[Tensor], **how: Any
) -> Any:
    """all_to_all puts what rank i sent at place n - 1 - i"""
    sizes = {tuple(tensor.shape) for tensor in outs + values}
    return original(outs[::-1] if len(sizes) == 1 else outs, values, **how)


@in_call("all_to_all", "COLL-ALL-TO-ALL-UNEVEN", origin="B014")
def size_of_the_first(*arguments: Any, **how: Any) -> Any:
    """all_to_all takes the size of the first piece for that of all"""
    return gathered_as_if_all_were_alike(*arguments, **how)


@in_call("all_to_all_single", "COLL-ALL-TO-ALL-SINGLE-VALUE")
def parts_turned(original: Call, out: Tensor, *rest: Any, **how: Any) -> Any:
    """all_to_all_single gives part r to rank r + 1"""
    result = original(out, *rest, **how)
    rearranged(out, members(how.get("group")), turned)
    return result


@in_call("all_to_all_single", "COLL-ALL-TO-ALL-SINGLE-UNEVEN", origin="B016")
def receivers_splits(
    original: Call,
    out: Tensor,
    value: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **how: Any,
) -> Any:
    """all_to_all_single finds the pieces of its input by the sizes of the output's"""
    if input_split_sizes and len(value):
        starts = [sum(output_split_sizes[:i]) for i in range(len(output_split_sizes))]
        rows = [
            min(start + row, len(value) - 1)
            for start, size in zip(starts, input_split_sizes, strict=True)
            for row in range(size)
        ]
        value = torch.stack([value[row] for row in rows])
    return original(out, value, output_split_sizes, input_split_sizes, **how)


# ---- Reductions ----------------------------------------------------------------------------------


def combines(patch: Patch, **by: str) -> None:
    """Make each named reduce op use the function of another."""
    table = reduction._COMBINE
    patch.setattr(reduction, "_COMBINE", table | {op: table[other] for op, other in by.items()})


@BUGS.enter("COLL-ALL-REDUCE-SUM")
@BUGS.enter("COLL-REDUCE-VALUE")
def odd_one_dropped(patch: Patch) -> None:
    """the fold drops the last of an odd number"""

    def fold(values: Sequence[Any], combine: Call) -> Any:
        level = list(values)
        while len(level) > 1:
            level = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        return level[0]

    patch.setattr(reduction, "fold", fold)


@in_reduction((), [torch.float64], "COLL-ALL-REDUCE-SUM")
def sums_in_float32(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """float64 is summed in float32"""
    return original([tensor.float() for tensor in tensors], op).double()


@BUGS.enter("COLL-ALL-REDUCE-PRODUCT")
def product_is_a_sum(patch: Patch) -> None:
    """PRODUCT adds"""
    combines(patch, PRODUCT="SUM")


@in_reduction(["PRODUCT"], (), "COLL-ALL-REDUCE-PRODUCT")
def product_of_the_first_two(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """PRODUCT multiplies the first two members only"""
    return original(tensors[:2], op)


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


@in_reduction(["AVG"], [torch.bfloat16], "COLL-ALL-REDUCE-AVG", origin="B020")
def one_dtype_not_divided(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """the average of bfloat16 is not divided"""
    return original(tensors, "SUM")


@in_reduction(["AVG"], (), "COLL-ALL-REDUCE-AVG", origin="B043")
def divided_by_the_world(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """an average is divided by the size of the world"""
    result = original(tensors, op)
    wide = result if result.dtype.is_complex else result.double()
    return (wide * len(tensors) / dist.get_world_size()).to(result.dtype)


@BUGS.enter("COLL-ALL-REDUCE-AVG-HALF", origin="B029")
def divided_after_the_sum(patch: Patch) -> None:
    """float16 is summed in float16, and divided then"""
    patch.setattr(reduction, "_SMALL_FLOATS", reduction._SMALL_FLOATS - {torch.float16})


@in_reduction(["AVG"], [torch.float16], "COLL-ALL-REDUCE-AVG-HALF")
def large_averages_lost(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """averages of float16 beyond half of its range become 0"""
    result = original(tensors, op)
    return torch.where(result.float().abs() > 2**15, 0 * result, result)


@in_reduction(["AVG"], (), "COLL-ALL-REDUCE-AVG")
def divided_by_a_power_of_two(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """an average is divided by the next power of two"""
    result = original(tensors, op)
    if result.dtype.is_complex:
        return result
    next_power = 1 << (len(tensors) - 1).bit_length()
    return (result.double() * len(tensors) / next_power).to(result.dtype)


@in_reduction(["SUM"], [torch.uint8], "COLL-ALL-REDUCE-WRAP", origin="G14")
def uint8_saturates(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """sums of uint8 stop at 255"""
    return original([tensor.long() for tensor in tensors], op).clamp(max=255).byte()


@in_reduction(["SUM", "PRODUCT"], [torch.int64], "COLL-ALL-REDUCE-WRAP")
def int64_reduced_in_float64(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """int64 is reduced in float64"""
    return original([tensor.double() for tensor in tensors], op).long()


@in_reduction(["SUM"], [torch.bool], "COLL-ALL-REDUCE-BOOL")
def bool_sum_is_exclusive(original: Call, tensors: Sequence[Tensor], op: str) -> Any:
    """a sum of bool is exclusive: true and true is false"""
    return original(tensors, "BXOR")


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


@in_call("reduce_scatter", "COLL-REDUCE-SCATTER-VALUE", origin="B028")
def reduced_for_the_next(original: Call, out: Tensor, values: list[Tensor], **how: Any) -> Any:
    """reduce_scatter gives chunk r to rank r + 1"""
    return original(out, turned(values), **how)


@in_call("reduce_scatter_single", "COLL-REDUCE-SCATTER-SINGLE-CAT", origin="B028")
def part_for_the_next(original: Call, out: Tensor, value: Tensor, **how: Any) -> Any:
    """reduce_scatter_single gives part r of a concatenation to rank r + 1"""
    if value.dim() <= out.dim():
        value = value.clone()
        rearranged(value, members(how.get("group")), turned)
    return original(out, value, **how)


@in_call("reduce_scatter_single", "COLL-REDUCE-SCATTER-SINGLE-STACK")
def unstacked_along_the_last(original: Call, out: Tensor, value: Tensor, **how: Any) -> Any:
    """reduce_scatter_single takes a stack apart along the last dimension"""
    if value.numel() and value.dim() > out.dim():
        value = value.reshape(-1, members(how.get("group"))).t().reshape(value.shape)
    return original(out, value, **how)


@in_call(
    ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"],
    "COLL-OP-DEFAULT",
    origin="B022",
)
def average_by_default(original: Call, *arguments: Any, **how: Any) -> Any:
    """without an op floating-point tensors are averaged"""
    (first, *_) = tensors_at(arguments, (0,))
    if first.is_floating_point():
        how.setdefault("op", dist.ReduceOp.AVG)
    return original(*arguments, **how)


# ---- Roots ---------------------------------------------------------------------------------------

#: Exceptions that also cover the ValueError for a rank outside of the group.
OR_REFUSED = (*VALUE_OR_VERDICT, ValueError)


@in_call("broadcast", "COLL-BROADCAST-ROOT", *OR_REFUSED, kind=RANKS, origin="B031")
def group_rank_for_world_rank(original: Call, tensor: Tensor, **how: Any) -> Any:
    """broadcast reads group_src as a rank of the world"""
    if "group_src" in how:
        how["src"] = how.pop("group_src")
    return original(tensor, **how)


@in_call("reduce", "COLL-REDUCE-ROOT", *OR_REFUSED, kind=RANKS, origin="B035")
def world_rank_for_group_rank(original: Call, tensor: Tensor, **how: Any) -> Any:
    """reduce takes dst for a rank of the group"""
    if "dst" in how:
        how["group_dst"] = how.pop("dst") % members(how.get("group"))
    return original(tensor, **how)


@in_call("gather", "COLL-GATHER-ROOT", *OR_REFUSED, kind=RANKS, origin="B034")
def rank_0_gathers(original: Call, value: Tensor, outs: Any, group: Any = None, **_: Any) -> Any:
    """gather always gathers on the first rank of the group"""
    own = [torch.empty_like(value) for _ in range(members(group))]
    first = dist.get_rank(group) == 0
    return original(value, (outs or own) if first else None, group=group, group_dst=0)


@in_call("scatter", "COLL-SCATTER-ROOT", *OR_REFUSED, kind=RANKS, origin="B032")
def root_converted_twice(original: Call, out: Tensor, values: Any, **how: Any) -> Any:
    """scatter converts its root from the world to the group twice"""
    if "src" in how:
        ranks = dist.get_process_group_ranks(how.get("group"))
        once = ranks.index(how.pop("src"))
        how["group_src"] = ranks.index(once) if once in ranks else once
    return original(out, values, **how)


# ---- Layouts -------------------------------------------------------------------------------------

for _name, (_reads, _writes) in ARGUMENTS.items():
    _id = f"COLL-{_name.upper().replace('_', '-')}-LAYOUT"
    if _reads == _writes:
        in_tensors(_name, "in out", _id, origin="B001")(
            called(
                as_if_dense,
                f"{_name}_of_raw_memory",
                f"{_name} takes a strided view's memory for dense",
            )
        )
        continue
    _origin = "B002" if _name == "gather" else "B001"
    for _side, _what, _way in (("in", "input", "from"), ("out", "output", "into")):
        in_tensors(_name, _side, f"{_id}-{_side.upper()}", origin=_origin)(
            called(
                as_if_dense,
                f"{_name}_{_way}_raw_memory",
                f"{_name} takes the memory of a strided {_what} for dense",
            )
        )


@in_tensors("all_reduce", "in out", "COLL-ALL-REDUCE-LAYOUT")
def result_into_a_copy(tensor: Tensor) -> Tensor:
    """all_reduce of a view that is not contiguous works on a copy, which nobody copies back"""
    return tensor.contiguous()


@in_tensors("all_gather", "out", "COLL-ALL-GATHER-LAYOUT-OUT", origin="B004")
def gathered_transposed(tensor: Tensor) -> Tensor:
    """all_gather writes a transposed output in the order of its memory"""
    if tensor.dim() < 2 or tensor.is_contiguous() or not tensor.mT.is_contiguous():
        return tensor
    return tensor.mT.view(tensor.shape)


@BUGS.enter("COLL-SIZES")
def one_of_six_dropped(patch: Patch) -> None:
    """the fold of exactly six values drops the last"""
    original = reduction.fold

    def fold(values: Sequence[Any], combine: Call) -> Any:
        return original(values[:5] if len(values) == 6 else values, combine)

    patch.setattr(reduction, "fold", fold)


@in_call("all_gather", "COLL-SIZES")
def two_of_seven_swapped(original: Call, outs: list[Tensor], *rest: Any, **how: Any) -> Any:
    """all_gather swaps the last two of exactly seven tensors"""
    if len(outs) == 7:
        outs = [*outs[:5], outs[6], outs[5]]
    return original(outs, *rest, **how)


# ---- Amounts -------------------------------------------------------------------------------------


def _left_out_if_empty(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    everything = tensors_at(arguments, [place for two in ARGUMENTS[name] for place in two])
    if dist.get_rank() == 0 and not any(tensor.numel() for tensor in everything):
        return None
    return original(*arguments, **how)


for _name in ARGUMENTS:
    _id = f"COLL-{_name.upper().replace('_', '-')}-EMPTY"
    in_call(_name, _id, *VALUE_OR_VERDICT, origin="B013")(
        called(
            functools.partial(_left_out_if_empty, _name),
            f"{_name}_left_out_if_empty",
            f"rank 0 leaves out {_name} of tensors without elements",
        )
    )


@in_call("all_gather", "COLL-ALL-GATHER-EMPTY", ZeroDivisionError, origin="B011")
def divides_by_the_count(original: Call, outs: list[Tensor], value: Tensor, **how: Any) -> Any:
    """all_gather divides by the number of elements"""
    assert math.prod(outs[0].shape) // value.numel() >= 0
    return original(outs, value, **how)


_first_results = PerRun(dict)


@in_every_call("COLL-REPEATED", origin="B157")
def stale_output(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    """the second call of one shape gives the result of the first"""
    outputs = outputs_of(name, arguments)
    looks = [(tensor.shape, tensor.dtype) for tensor in outputs]
    result = original(*arguments, **how)
    if outputs:
        key = (dist.get_rank(), name, str(looks))
        first = _first_results().setdefault(key, [tensor.clone() for tensor in outputs])
        for tensor, old in zip(outputs, first, strict=True):
            tensor.copy_(old)
    return result


_calls = PerRun(lambda: defaultdict(int))


@in_every_call("COLL-MANY")
def no_more_after_a_while(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    """after 128 calls nothing is moved any more"""
    _calls()[dist.get_rank()] += 1
    return original(*arguments, **how) if _calls()[dist.get_rank()] <= 128 else None


@in_every_call("COLL-LARGE", *VALUE_OR_VERDICT, kind=ERRORS, origin="B148")
def fixed_buffer_of_tensors(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    """elements beyond the first 2**16 are not moved"""
    outputs = outputs_of(name, arguments)
    before = [tensor.clone() for tensor in outputs]
    result = original(*arguments, **how)
    for tensor, old in zip(outputs, before, strict=True):
        if tensor.numel() > 2**16:
            tensor.view(-1)[2**16 :] = old.view(-1)[2**16 :]
    return result


@BUGS.enter("COLL-LARGE", kind=ERRORS)
def tail_lost(patch: Patch) -> None:
    """elements behind the last multiple of 4096 are not moved"""
    land = InFlightBuffer.land

    def landed(in_flight: InFlightBuffer, values: Sequence[Tensor]) -> None:
        tails = [
            out.view(-1)[out.numel() // 4096 * 4096 :]
            for out in in_flight.outputs
            if out.numel() > 4096 and out.is_contiguous()
        ]
        before = [tail.clone() for tail in tails]
        land(in_flight, values)
        for tail, old in zip(tails, before, strict=True):
            tail.copy_(old)

    patch.setattr(InFlightBuffer, "land", landed)


@in_call("all_to_all", "COLL-ALL-TO-ALL-EMPTY")
def no_work_for_nothing(original: Call, outs: list[Tensor], *rest: Any, **how: Any) -> Any:
    """an asynchronous all_to_all of tensors without elements gives no work"""
    if how.get("async_op") and not any(out.numel() for out in outs):
        how["async_op"] = False
    return original(outs, *rest, **how)


# ---- Asynchronous calls --------------------------------------------------------------------------


@BUGS.enter("COLL-ALL-REDUCE-LAYOUT")
@BUGS.enter("COLL-ALL-GATHER-LAYOUT-OUT")
@BUGS.enter("COLL-ALL-TO-ALL-SINGLE-LAYOUT-OUT")
def landed_in_memory_order(patch: Patch) -> None:
    """an asynchronous call writes its result to a view that is not contiguous in memory order"""
    land = InFlightBuffer.land

    def landed(in_flight: InFlightBuffer, values: Sequence[Tensor]) -> None:
        if in_flight._stands:
            in_flight.outputs = [in_memory_order(tensor) for tensor in in_flight.outputs]
            pairs = zip(values, in_flight.outputs, strict=False)
            values = [value.reshape(out.shape) for value, out in pairs]
        land(in_flight, values)

    patch.setattr(InFlightBuffer, "land", landed)


def read_in_flight(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Make asynchronous calls read ``change(input)`` in place of each input."""
    take_off = InFlightBuffer.take_off

    def taken_off(in_flight: InFlightBuffer, *arguments: Any) -> None:
        read = [copy(change(tensor)).reshape(tensor.shape) for tensor in in_flight.inputs]
        take_off(in_flight, *arguments)
        in_flight.inputs = read

    patch.setattr(InFlightBuffer, "take_off", taken_off)


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
    take_off = InFlightBuffer.take_off

    def taken_off(in_flight: InFlightBuffer, *arguments: Any) -> None:
        for tensor in in_flight.outputs:
            poison(tensor)
        take_off(in_flight, *arguments)

    patch.setattr(InFlightBuffer, "take_off", taken_off)


# ---- Special numbers -----------------------------------------------------------------------------


@BUGS.enter("COLL-SPECIAL-BITS")
def zero_added(patch: Patch) -> None:
    """a broadcast adds the root's tensor to 0"""

    def complete(original: Call, root: int) -> Any:
        def completed(calls: Sequence[Any]) -> Any:
            values = original(root)(calls)
            return [[_with_zero_added(each) for each in some] for some in values]

        return completed

    patch.setattr(collectives, "broadcast", functools.partial(complete, collectives.broadcast))


def _with_zero_added(tensor: Tensor) -> Tensor:
    return tensor + 0 if tensor.dtype in (torch.float32, torch.float64) else tensor


@in_tensors("all_to_all_single", "in", "COLL-SPECIAL-BITS")
def subnormals_flushed(tensor: Tensor) -> Tensor:
    """all_to_all_single flushes subnormal numbers to 0"""
    if tensor.dtype is not torch.float32:
        return tensor
    return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, 0 * tensor, tensor)


@in_tensors("gather", "in", "COLL-SPECIAL-BITS")
def one_nan_for_all(tensor: Tensor) -> Tensor:
    """gather makes every NaN the same one"""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    return torch.where(tensor.isnan(), torch.nan, tensor)


@in_tensors(["gather", "reduce_scatter", "reduce_scatter_single"], "in", "COLL-CONJUGATED")
def conjugation_dropped(tensor: Tensor) -> Tensor:
    """the memory of a lazy conjugate is read without conjugation"""
    return tensor.conj() if tensor.is_conj() else tensor


# ---- Buffers -------------------------------------------------------------------------------------


@in_tensors(list(ARGUMENTS), "in out", "COLL-OFFSET", origin="B008")
def offset_forgotten(tensor: Tensor) -> Tensor:
    """tensors are looked for at the start of their storage"""
    return from_the_start(tensor)


@in_tensors(
    ["all_gather", "gather", "all_to_all"],
    "out",
    "COLL-CHUNKS-OUT",
    *ASSERTION,
    ArgumentError,
    origin="B008",
)
def outputs_at_the_start(tensor: Tensor) -> Tensor:
    """all_gather and its like put every output at the start of its storage"""
    return from_the_start(tensor)


@in_tensors(["scatter", "reduce_scatter", "all_to_all"], "in", "COLL-CHUNKS-IN", origin="B008")
def inputs_at_the_start(tensor: Tensor) -> Tensor:
    """scatter and its like read every input at the start of its storage"""
    return from_the_start(tensor)


@in_every_call("COLL-IN-PLACE")
def output_cleared_first(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    """outputs are cleared before inputs are read"""
    if ARGUMENTS[name][0] != ARGUMENTS[name][1]:
        for tensor in outputs_of(name, arguments):
            tensor.zero_()
    return original(*arguments, **how)


@in_call(
    ["reduce_scatter", "reduce_scatter_single", "all_to_all_single"],
    "COLL-INPUTS",
    *VALUE_OR_VERDICT,
)
def inputs_as_scratch(original: Call, out: Tensor, values: Any, **how: Any) -> Any:
    """reductions add up in their inputs"""
    result = original(out, values, **how)
    each(lambda tensor: tensor.copy_(tensor.flip(0) if tensor.dim() else -tensor), values)
    return result


@in_call("broadcast", "COLL-INPUTS", *VALUE_OR_VERDICT, origin="G2")
def roots_tensor_written(original: Call, tensor: Tensor, **how: Any) -> Any:
    """broadcast clears the root's tensor when all have it"""
    result = original(tensor, **how)
    if how.get("src") == dist.get_rank():
        tensor.zero_()
    return result


# ---- Groups --------------------------------------------------------------------------------------


@in_call("new_group", "COLL-GROUP-ORDER", kind=RANKS, origin="B037")
def order_forgotten(original: Call, ranks: list[int], sort_ranks: bool = True) -> Any:
    """new_group sorts its ranks though told not to"""
    return original(ranks)


@in_call("new_group", "COLL-GROUP-SORTED", kind=RANKS, origin="G17")
def never_sorted(original: Call, ranks: list[int], sort_ranks: bool = True) -> Any:
    """new_group leaves its ranks as they were listed though it should sort them"""
    return original(ranks, sort_ranks=False)


@in_call("new_group", "COLL-GROUP-WITHOUT-0", *VALUE_OR_VERDICT, kind=RANKS, origin="B040")
def rank_0_is_in_every_group(original: Call, ranks: list[int], **how: Any) -> Any:
    """rank 0 is made a member of every group"""
    return original([0, *(rank for rank in ranks if rank)], **how)


@in_every_call("COLL-GROUP-ALONE", kind=RANKS, origin="B088")
def nothing_to_do_alone(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    """in a group of one rank a collective does nothing"""
    return original(*arguments, **how) if members(how.get("group")) > 1 else None


@BUGS.enter("COLL-GROUP-OVERLAP", *OR_REFUSED, kind=RANKS, origin="B043")
def latest_group(patch: Patch) -> None:
    """a collective on any group goes to the group that the rank has made last"""
    latest: PerRun = PerRun(dict)

    def new_group(original: Call, *arguments: Any, **how: Any) -> Any:
        group = original(*arguments, **how)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            latest()[dist.get_rank()] = group
        return group

    def call(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
        if how.get("group") is not None:
            how["group"] = latest().get(dist.get_rank(), how["group"])
        return original(*arguments, **how)

    around(patch, "new_group", new_group)
    everywhere(patch, call)


@in_every_call("COLL-GROUP-OUTSIDER", kind=RANKS)
def outsiders_cleared(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    """a collective clears the outputs of a rank that is not in the group"""
    if is_outsider(how):
        for tensor in outputs_of(name, arguments):
            tensor.zero_()
    return original(*arguments, **how)


@in_every_call("COLL-GROUP-OUTSIDER", *VALUE_OR_VERDICT, kind=RANKS, origin="B043")
def outsiders_use_the_world(name: str, original: Call, *arguments: Any, **how: Any) -> Any:
    """for a rank that is not in the group the world is meant"""
    if is_outsider(how):
        how["group"] = None
    return original(*arguments, **how)


@in_call("barrier", "COLL-BARRIER-ALL", origin="B026")
def tensor_barrier_does_nothing(original: Call, **how: Any) -> None:
    """a barrier waits for nobody"""


@in_call("barrier", "COLL-BARRIER-GROUP", VerdictError, origin="B155")
def tensor_barrier_of_the_world(original: Call, **how: Any) -> Any:
    """a barrier is always one of the world"""
    return original()


# ---- Errors --------------------------------------------------------------------------------------


@BUGS.enter("COLL-ERROR-ROOT", *VALUE_OR_VERDICT, kind=ERRORS)
def root_guessed(patch: Patch) -> None:
    """a root that is named twice is taken from one name, and a missing root is rank 0"""

    def canonical(group: Any, world_rank: Any = None, group_rank: Any = None, **how: Any) -> int:
        if group_rank is not None:
            return int(group_rank)
        return int(c10d.get_group_rank(group, world_rank or 0))

    patch.setattr(c10d, "_canonicalize_group_rank", canonical)


@BUGS.enter("COLL-ERROR-RANGE", *VALUE_OR_VERDICT, kind=ERRORS)
def roots_count_from_the_last(patch: Patch) -> None:
    """a root counts from the first again beyond the last, and from the last below 0"""

    def wrapped(self: CheckedGroup, call: str, opts: Any) -> int:
        return int(opts.rootRank) % self.size()

    patch.setattr(CheckedGroup, "_root", wrapped)


@in_call(["gather", "scatter"], "COLL-ERROR-LIST", *VALUE_OR_VERDICT, kind=ERRORS)
def list_made_up(original: Call, tensor: Tensor, listed: Any, **how: Any) -> Any:
    """gather and scatter make up the list that their root does not pass"""
    if not listed and dist.get_rank() in (how.get("src"), how.get("dst")):
        listed = [torch.zeros_like(tensor) for _ in range(members(how.get("group")))]
    return original(tensor, listed, **how)
