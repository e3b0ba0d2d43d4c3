"""One call of a tensor collective as data: the members' inputs, their layouts, and the expected outputs.

A :class:`Case` prints and pickles; :func:`play` runs cases on every rank and compares there. Expected
outputs are computed from the recipes of all members' inputs (tensor_oracle.py): a collective that moves
tensors picks some of them, and a collective that reduces is computed number by number.

Words. The *piece* from i to j is the tensor that member i has for member j. In a broadcast or a gather
member i has the same piece for every j. A member's number is its position in the group.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from conformance.cases.tensor_oracle import (
    MANY,
    Recipe,
    Signs,
    alike,
    difference,
    exact_bound,
    kept,
    reduced,
)
from conformance.requirements.registry import Capability
from pytest_smp.strategies import TensorSpec, same
from pytest_smp.strategies.numbers import NUMBERS, signed
from pytest_smp.strategies.recipes import GUARD_BYTE, LAYOUTS

Tensor = torch.Tensor
Shape = tuple[int, ...]

# ---- The collectives -----------------------------------------------------------------------------


class TensorCollective(NamedTuple):
    """How a function of torch.distributed takes the members' pieces.

    Attributes:
        capability: the claim of a backend that has the function.
        given: the form of a member's input: one tensor for all members ("one"), a list with a tensor
            for each member ("list"), or these tensors joined along the first dimension ("joined").
        taken: the form of a member's output: its input ("same"), one tensor ("one"), a list with a
            tensor from each member ("list"), or these tensors joined ("joined").
        root: the keyword that names the root; empty for a function without a root.
        reduces: whether the output is a reduction over the members.
        call: calls the function with lists of inputs and outputs, and with keywords.
    """

    capability: Capability
    given: Literal["one", "list", "joined"]
    taken: Literal["same", "one", "list", "joined"]
    root: Literal["", "src", "dst"]
    reduces: bool
    call: Callable[[list[Tensor], list[Tensor], dict[str, Any]], Any]


# Each lambda looks its function up at the call, because a mutant may have replaced the function.
COLLECTIVES: Mapping[str, TensorCollective] = {
    "broadcast": TensorCollective(
        Capability.BROADCAST,
        "one",
        "same",
        "src",
        False,
        lambda given, taken, how: dist.broadcast(given[0], **how),
    ),
    "all_reduce": TensorCollective(
        Capability.ALL_REDUCE,
        "one",
        "same",
        "",
        True,
        lambda given, taken, how: dist.all_reduce(given[0], **how),
    ),
    "reduce": TensorCollective(
        Capability.REDUCE,
        "one",
        "same",
        "dst",
        True,
        lambda given, taken, how: dist.reduce(given[0], **how),
    ),
    "all_gather": TensorCollective(
        Capability.ALL_GATHER,
        "one",
        "list",
        "",
        False,
        lambda given, taken, how: dist.all_gather(taken, given[0], **how),
    ),
    "all_gather_single": TensorCollective(
        Capability.ALL_GATHER_SINGLE,
        "one",
        "joined",
        "",
        False,
        lambda given, taken, how: dist.all_gather_single(taken[0], given[0], **how),
    ),
    "gather": TensorCollective(
        Capability.GATHER,
        "one",
        "list",
        "dst",
        False,
        lambda given, taken, how: dist.gather(given[0], taken or None, **how),
    ),
    "scatter": TensorCollective(
        Capability.SCATTER,
        "list",
        "one",
        "src",
        False,
        lambda given, taken, how: dist.scatter(taken[0], given or None, **how),
    ),
    "reduce_scatter": TensorCollective(
        Capability.REDUCE_SCATTER,
        "list",
        "one",
        "",
        True,
        lambda given, taken, how: dist.reduce_scatter(taken[0], given, **how),
    ),
    "reduce_scatter_single": TensorCollective(
        Capability.REDUCE_SCATTER_SINGLE,
        "joined",
        "one",
        "",
        True,
        lambda given, taken, how: dist.reduce_scatter_single(taken[0], given[0], **how),
    ),
    "all_to_all": TensorCollective(
        Capability.ALL_TO_ALL,
        "list",
        "list",
        "",
        False,
        lambda given, taken, how: dist.all_to_all(taken, given, **how),
    ),
    "all_to_all_single": TensorCollective(
        Capability.ALL_TO_ALL_SINGLE,
        "joined",
        "joined",
        "",
        False,
        lambda given, taken, how: dist.all_to_all_single(taken[0], given[0], **how),
    ),
}


class Buffer(NamedTuple):
    """A tensor of a rank, and its recipe."""

    spec: TensorSpec
    tensor: Tensor

    def damaged(self) -> tuple[int, ...]:
        """The indices in the storage at which a guard was overwritten."""
        there = storage(self.tensor)
        if self.spec.layout == "contiguous":  # slices save a mask as large as the tensor
            start = self.spec.offset * self.spec.dtype.itemsize
            end = start + self.spec.numel * self.spec.dtype.itemsize
            intact = (there[:start] == GUARD_BYTE).all() and (there[end:] == GUARD_BYTE).all()
        else:
            intact = (there[_guards(self.spec)] == GUARD_BYTE).all()
        return () if intact else self.spec.damaged_guards(self.tensor)


# ---- The case ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """One call of a collective, on every member of a group.

    Attributes:
        operation: a name of :data:`COLLECTIVES`.
        ranks: the world ranks of the group, in the group's order.
        dtype: the dtype of all tensors.
        shape: the shape of every piece.
        rows: None, or the first side of every piece, in place of the first side of ``shape``:
            ``rows[i][j]`` from i to j, or ``rows[i][0]`` where a member has one tensor for all.
        default: whether the call is on the default group and passes no group.
        sort: whether ``new_group`` gets the ranks in reverse and has to sort them.
        op: the name of a ReduceOp; empty for a call that passes none.
        root: the position of the root.
        root_as: whether the call names the root by its rank in the world, by its rank in the group, or
            not at all.
        stacked: whether joined pieces are stacked; otherwise they are concatenated.
        given: layouts of inputs: tensor j of member i has layout ``i + j``, modulo their number.
        taken: layouts of outputs, chosen like those of inputs; the receivers of a broadcast use them too.
        offset: elements in front of every tensor in its storage.
        chunks: whether the tensors of a list are views of one tensor.
        in_place: whether a member's piece of the output is its input, or its input a piece of the output.
        unchanged: whether inputs, guards included, are compared with their bytes before the call.
        asynchronous: whether the call is asynchronous and then waited for.
        special: whether the values are those of :func:`specials`.
        conjugated: whether the complex inputs are lazy conjugates.
        signs: the signs of the inputs of a reduction: alternating, all negative, all positive, or mixed
            (pseudorandom, with some zeros).
        wide: whether the values of a reduction span the whole range of the dtype; otherwise the result
            is exact in any order.
        bits: whether a bool in the result of a reduction must be the byte 0 or 1.
        number: the number of this call among ``of`` calls, no two of which have the same values.
        of: the number of calls with different values.
    """

    operation: str
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    shape: Shape = ()
    rows: tuple[tuple[int, ...], ...] | None = None
    default: bool = True
    sort: bool = False
    op: str = ""
    root: int = 0
    root_as: Literal["world", "group", "nothing"] = "world"
    stacked: bool = False
    given: tuple[str, ...] = ("contiguous",)
    taken: tuple[str, ...] = ("contiguous",)
    offset: int = 0
    chunks: bool = False
    in_place: bool = False
    unchanged: bool = False
    asynchronous: bool = False
    special: bool = False
    conjugated: bool = False
    signs: Signs = "alternating"
    wide: bool = False
    bits: bool = False
    number: int = 0
    of: int = 1

    def __repr__(self) -> str:
        said = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return f"Case({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis's own printing shows every field, defaults included

    @property
    def collective(self) -> TensorCollective:
        """The collective that ``operation`` names."""
        return COLLECTIVES[self.operation]

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def piece(self, source: int, target: int) -> Shape:
        """The shape of the piece from one member to another."""
        if self.rows is None:
            return self.shape
        sides = self.rows[source]
        return (sides[target if len(sides) > 1 else 0], *self.shape[1:])

    def pieces_of(self, me: int) -> tuple[list[Shape], list[Shape]]:
        """The shapes of the pieces from a member to each member, and of the pieces from each to it."""
        return (
            [self.piece(me, each) for each in range(self.size)],
            [self.piece(each, me) for each in range(self.size)],
        )

    def gets(self, me: int) -> bool:
        """Return whether a member has an output."""
        return self.collective.root != "dst" or me == self.root

    def joined(self, pieces: Sequence[Shape]) -> Shape:
        """The shape of the tensor that joins pieces of these shapes."""
        if self.stacked:
            return (len(pieces), *pieces[0])
        return (sum(piece[0] for piece in pieces), *pieces[0][1:])

    def parts(self, whole: Tensor, pieces: Sequence[Shape]) -> list[Tensor]:
        """Views of the pieces in a tensor that joins them."""
        if self.stacked:
            return list(whole.unbind())
        return list(torch.split(whole, [piece[0] for piece in pieces]))

    def listed(
        self, side: Literal["given", "taken"], tensors: list[Tensor], pieces: Sequence[Shape]
    ) -> list[Tensor]:
        """The tensors that the call gets: these, or with ``chunks`` the views of the only one."""
        if self.chunks and tensors and getattr(self.collective, side) == "list":
            return self.parts(tensors[0], pieces)
        return tensors

    def blanks(self, me: int, shapes: Sequence[Shape]) -> list[Buffer]:
        """Make a member's output tensors of these shapes, with nothing written to them."""
        specs = [self.spec(self.taken, me + at, shape) for at, shape in enumerate(shapes)]
        return [Buffer(spec, _blank(spec)) for spec in specs]

    def spec(self, layouts: Sequence[str], index: int, shape: Shape) -> TensorSpec:
        """The recipe of a tensor; contiguous if the shape has too few dimensions for the layout."""
        layout = layouts[index % len(layouts)]
        if LAYOUTS[layout].min_dims > len(shape):
            layout = "contiguous"
        return TensorSpec(shape, self.dtype, layout, self.offset)

    def inputs(self, source: int) -> tuple[list[TensorSpec], int]:
        """The recipes of a member's input tensors, and the number of input tensors in all calls."""
        pieces = [self.piece(source, target) for target in range(self.size)]
        kind = "joined" if self.chunks else self.collective.given
        match self.collective.given, kind:
            case "one", _:
                shapes = [self.piece(source, 0)]
            case _, "joined":
                shapes = [self.joined(pieces)]
            case _:
                shapes = pieces
        sources = self.of * self.size * len(shapes)
        most = max(map(math.prod, shapes))
        bound = None
        if self.op in ("MIN", "MAX") and not signed(
            self.dtype
        ):  # values from both ends of the range
            bound = NUMBERS[self.dtype].largest_bound if source % 2 else None
        elif self.collective.reduces and not self.wide:
            bound = exact_bound(self.op or "SUM", self.dtype, self.size, most * sources)
        specs = [self.spec(self.given, source + at, shape) for at, shape in enumerate(shapes)]
        return [dataclasses.replace(spec, bound=bound) for spec in specs], sources

    @property
    def factor(self) -> int:
        """A common divisor of all values: the size for an average over no power of two, otherwise 1."""
        return self.size if self.op == "AVG" and self.size & (self.size - 1) else 1

    def makes(self, source: int) -> list[tuple[Recipe, int, int]]:
        """The recipes of a member's inputs, each with the arguments of ``TensorSpec.make``.

        The arguments make signs change from element to element and from tensor to tensor.
        """
        specs, sources = self.inputs(source)
        first = (self.number * self.size + source) * len(specs)
        if not signed(self.dtype):
            return [(self.recipe(spec), first + at, sources) for at, spec in enumerate(specs)]
        made = []
        for at, spec in enumerate(specs, first):
            per_sign = spec.distinct // 2
            made.append((self.recipe(spec), at + at % 2 * per_sign, sources + 3 * per_sign))
        return made

    def recipe(self, spec: TensorSpec) -> Recipe:
        """The recipe of an input, with the changes to its values that this case asks for."""
        return Recipe(spec, self.factor, self.special, self.signs)

    def values(self, source: int) -> list[Tensor]:
        """The pieces from a member to each member. The tensors are cached; callers must only read them."""
        tensors = [kept(*each) for each in self.makes(source)]
        if self.conjugated:
            tensors = [torch.conj_physical(tensor) for tensor in tensors]
        if self.collective.given == "one":
            return tensors * self.size
        if len(tensors) == self.size and not self.chunks and self.collective.given == "list":
            return tensors
        return self.parts(tensors[0], [self.piece(source, each) for each in range(self.size)])

    def expected(self, target: int) -> list[Tensor]:
        """The expected outputs of a member: a tensor from each member, or one; callers must only read them."""
        if self.collective.given == "one":
            target = 0  # all members get the same, so the cache holds it once
        return _expected(self, target)

    def wanted(self, target: int) -> list[Tensor]:
        """Compute the expected outputs of a member, without the cache of :meth:`expected`."""
        sources = [self.root] if self.collective.root == "src" else range(self.size)
        pieces = [self.values(source)[target] for source in sources]
        return [reduced(pieces, self.op or "SUM")] if self.collective.reduces else pieces


def _expected(case: Case, target: int) -> list[Tensor]:
    large = math.prod(case.shape) >= MANY
    return (_expected_large if large else _expected_small)(case, target)


@functools.lru_cache(maxsize=1024)
def _expected_small(case: Case, target: int) -> list[Tensor]:
    return case.wanted(target)


@functools.lru_cache(maxsize=3)
def _expected_large(case: Case, target: int) -> list[Tensor]:
    return case.wanted(target)


def _blank(spec: TensorSpec) -> Tensor:
    """Make a new tensor to write to; a small one is a copy of a cached tensor, which is faster."""
    return spec.blank() if spec.numel >= MANY else _copy(_blank_kept(spec))


@functools.lru_cache(maxsize=4096)
def _blank_kept(spec: TensorSpec) -> Tensor:
    return spec.blank()


@functools.lru_cache(maxsize=4096)
def _guards(spec: TensorSpec) -> Tensor:
    """A mask of the bytes of a recipe's storage that belong to guards."""
    tensor = spec.blank()
    once = tensor[:1] if spec.layout == "expanded" else tensor
    once.copy_(torch.zeros(once.shape).to(spec.dtype))
    return storage(tensor) == GUARD_BYTE


def storage(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, guards included, as a 1-D uint8 view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor with its storage: strides, offset and guards stay the same."""
    copied = storage(tensor).clone().view(tensor.dtype)
    return copied.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# ---- On the ranks --------------------------------------------------------------------------------


def play(*cases: Case) -> None:
    """Run cases one after the other, and compare this rank's outputs.

    Every rank must call this function; a rank takes part in the cases of its groups. Raises
    AssertionError.
    """
    me = dist.get_rank()
    wanted = dict.fromkeys((case.ranks, case.sort) for case in cases if not case.default)
    groups = {ranks: new_group(ranks, sort) for ranks, sort in wanted}
    for case in cases:
        if me in case.ranks:
            take_part(case, None if case.default else groups[case.ranks])
    for ranks, group in groups.items():
        if me in ranks:
            dist.destroy_process_group(group)


def new_group(ranks: Sequence[int], sort: bool = False) -> Any:
    """Make a group of these ranks in this order, or sorted if ``sort``; every rank of the world calls."""
    if sort:
        return dist.new_group(list(reversed(ranks)))  # sorted unless told otherwise
    if list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks))
    return dist.new_group(list(ranks), sort_ranks=False)


class CallTensors(NamedTuple):
    """This rank's tensors for a case: the arguments of the call, and the buffers to compare afterwards.

    Attributes:
        inputs: buffers of the input tensors; a broadcast or a reduction may write to them.
        outputs: buffers that the call writes to.
        given: the input tensors, as the call gets them.
        taken: the output tensors, as the call gets them.
        before: the bytes of the inputs before the call, if the case compares them.
    """

    inputs: list[Buffer]
    outputs: list[Buffer]
    given: list[Tensor]
    taken: list[Tensor]
    before: list[Tensor]


def prepare(case: Case, me: int) -> CallTensors:
    """Make the tensors of the member at a position."""
    collective = case.collective
    outward, inward = case.pieces_of(me)
    inputs: list[Buffer] = []
    if collective.root != "src" or me == case.root:
        inputs = [Buffer(made[0].spec, _copy(kept(*made))) for made in case.makes(me)]
    given = case.listed("given", [each.tensor for each in inputs], outward)
    if case.conjugated:
        given = [each.conj() for each in given]
    outputs: list[Buffer] = []
    if collective.taken == "same":  # the receiver of a broadcast has no input and needs a buffer
        outputs = inputs or case.blanks(me, [case.piece(case.root, me)])
        taken = given = [each.tensor for each in outputs]
    else:
        if case.gets(me):
            whole = collective.taken == "joined" or (collective.taken == "list" and case.chunks)
            single = [case.piece(case.root, me)] if collective.taken == "one" else inward
            outputs = case.blanks(me, [case.joined(inward)] if whole else single)
        taken = case.listed("taken", [each.tensor for each in outputs], inward)
    if case.in_place and collective.taken == "one":
        slots = case.parts(given[0], outward) if collective.given == "joined" else given
        inputs, outputs, taken = [], inputs, [slots[me]]
    elif case.in_place:
        slots = case.parts(taken[0], inward) if collective.taken == "joined" else taken
        inputs, given = [], [slots[me].copy_(given[0])]
    before = [storage(each.tensor).clone() for each in inputs if case.unchanged]
    return CallTensors(inputs, outputs, given, taken, before)


def inspect(case: Case, me: int, part: CallTensors, where: str) -> None:
    """Compare the outputs of the member at a position.

    Raises AssertionError, with a message that begins with ``where``.
    """
    collective, taken = case.collective, part.taken
    if case.gets(me):
        _, inward = case.pieces_of(me)
        got = case.parts(taken[0], inward) if collective.taken == "joined" else taken
        for at, (each, want) in enumerate(zip(got, case.expected(me), strict=True)):
            of = f" {at} of {len(got)}" if len(got) > 1 else ""
            right = alike if collective.reduces and not case.bits else same
            assert right(each, want), f"{where}: output{of} {difference(each, want)}"
    for buffer in part.inputs + part.outputs:
        damaged = buffer.damaged()
        assert not damaged, f"{where}: wrote outside of {buffer.spec}: at {damaged} of its storage"
    if case.unchanged and (collective.taken != "same" or collective.root == "src"):
        for at, (buffer, old) in enumerate(zip(part.inputs, part.before, strict=True)):
            assert torch.equal(storage(buffer.tensor), old), f"{where}: input {at} has changed"


def place(case: Case, me: int) -> str:
    """Describe rank, call, group and dtype for messages."""
    op = f" {case.op}" if case.op else ""
    root = f" root {case.root}" if case.collective.root else ""
    group = "the default group" if case.default else f"the group {list(case.ranks)}"
    return (
        f"rank {case.ranks[me]} (position {me} of {group}): "
        f"{case.operation}{op}{root} of {case.dtype}"
    )


def take_part(case: Case, group: Any = None) -> None:
    """Make this rank's tensors, call the collective, and compare. Raises AssertionError."""
    me = case.ranks.index(dist.get_rank())
    part, where = prepare(case, me), place(case, me)
    how = keywords(case, me, group)
    if case.asynchronous:
        work = case.collective.call(part.given, part.taken, how | {"async_op": True})
        assert work is not None, f"{where}: async_op=True gave no work"
        work.wait()
    else:
        case.collective.call(part.given, part.taken, how)
    inspect(case, me, part, where)


def keywords(case: Case, me: int, group: Any) -> dict[str, Any]:
    how: dict[str, Any] = {} if case.default else {"group": group}
    if case.op:
        how["op"] = getattr(dist.ReduceOp, case.op)
    if case.collective.root and case.root_as == "world":
        how[case.collective.root] = case.ranks[case.root]
    elif case.collective.root and case.root_as == "group":
        how[f"group_{case.collective.root}"] = case.root
    if case.operation == "all_to_all_single" and case.rows is not None:
        how["input_split_sizes"] = list(case.rows[me])
        how["output_split_sizes"] = [case.rows[each][me] for each in range(case.size)]
    return how
