"""One call of a tensor collective as a value: who brings what, laid out how, and what comes of it.

A :class:`Case` prints and pickles; :func:`play` carries cases out on every rank and compares there.
What is expected is computed from the recipes of all members' tensors (tensor_oracle.py): what is moved by picking,
what is reduced number by number.

Words. The *piece* from i to j is the tensor that member i has for member j (of a broadcast or a
gather it is the same for every j). Members are counted by their position in the group.
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
        capability: what a backend claims that has it.
        given: a member's input is one tensor for all ("one"), a list with a tensor for each member
            ("list"), or these joined along the first dimension ("joined").
        taken: a member's output is its input ("same"), one tensor, a list with a tensor from each
            member, or these joined.
        root: the keyword of its root; empty if it has none.
        reduces: whether what a member gets is reduced over the members.
        call: gets inputs, outputs and keywords.
    """

    capability: Capability
    given: Literal["one", "list", "joined"]
    taken: Literal["same", "one", "list", "joined"]
    root: Literal["", "src", "dst"]
    reduces: bool
    call: Callable[[list[Tensor], list[Tensor], dict[str, Any]], Any]


# The functions are looked up when they are called: a planted bug may stand in their place.
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
        """Where guards were written: indices of elements of the storage."""
        there = storage(self.tensor)
        if self.spec.layout == "contiguous":  # no mask as large as the tensor
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
        ranks: the group: world ranks, in its order.
        dtype: of all tensors.
        shape: of every piece.
        rows: None, or the first side of every piece in place of the shape's: ``rows[i][j]`` from i
            to j, or ``rows[i][0]`` where a member has one tensor for all.
        default: whether the call is on the default group, and names none.
        sort: whether torch has to sort the ranks of the group, which it gets in reverse.
        op: of a reduction: the name of a ReduceOp; empty for a call that names none.
        root: the root's position.
        root_as: how the root is named: by its rank in the world, in the group, or not at all.
        stacked: whether joined pieces are stacked; else they are concatenated.
        given: layouts of inputs: member i's j-th tensor takes number ``i + j``, counted round.
        taken: layouts of outputs, taken the same way; also of a broadcast's receivers.
        offset: elements in front of every tensor in its storage.
        chunks: whether the tensors of a list are views of one tensor.
        in_place: whether a member's part of the output is its input, or the other way round.
        unchanged: whether inputs are compared with what they were, guards included.
        asynchronous: whether the call is issued, and then waited for.
        special: whether values are those of :func:`specials`.
        conjugated: whether inputs, complex ones, are lazy conjugates.
        signs: of the inputs of a reduction: they alternate, are all those of negative or of positive
            numbers, or are "mixed": none can be foretold, and some numbers are 0.
        wide: whether values of a reduction come from the whole range of the dtype; else its result
            is exact in any order.
        bits: whether a bool that comes of a reduction must be the byte 0 or 1.
        number: which of ``of`` calls this is: no two of them bring the same values.
        of: see ``number``.
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
        printer.text(repr(self))  # Hypothesis would print every field

    @property
    def collective(self) -> TensorCollective:
        """How the operation takes its tensors."""
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
        """The shapes of the pieces that a member has for the others, and of those for it."""
        return (
            [self.piece(me, each) for each in range(self.size)],
            [self.piece(each, me) for each in range(self.size)],
        )

    def gets(self, me: int) -> bool:
        """Whether a member has an output."""
        return self.collective.root != "dst" or me == self.root

    def joined(self, pieces: Sequence[Shape]) -> Shape:
        """The shape of the tensor that joins pieces of these shapes."""
        if self.stacked:
            return (len(pieces), *pieces[0])
        return (sum(piece[0] for piece in pieces), *pieces[0][1:])

    def parts(self, whole: Tensor, pieces: Sequence[Shape]) -> list[Tensor]:
        """Views of the pieces that a tensor joins."""
        if self.stacked:
            return list(whole.unbind())
        return list(torch.split(whole, [piece[0] for piece in pieces]))

    def listed(
        self, side: Literal["given", "taken"], tensors: list[Tensor], pieces: Sequence[Shape]
    ) -> list[Tensor]:
        """What is passed to the call: these tensors, or the chunks of the one that there is."""
        if self.chunks and tensors and getattr(self.collective, side) == "list":
            return self.parts(tensors[0], pieces)
        return tensors

    def blanks(self, me: int, shapes: Sequence[Shape]) -> list[Buffer]:
        """A member's output tensors, not written yet."""
        specs = [self.spec(self.taken, me + at, shape) for at, shape in enumerate(shapes)]
        return [Buffer(spec, _blank(spec)) for spec in specs]

    def spec(self, layouts: Sequence[str], index: int, shape: Shape) -> TensorSpec:
        """The recipe of a tensor. A layout that needs more dimensions gives way to a plain one."""
        layout = layouts[index % len(layouts)]
        if LAYOUTS[layout].min_dims > len(shape):
            layout = "contiguous"
        return TensorSpec(shape, self.dtype, layout, self.offset)

    def inputs(self, source: int) -> tuple[list[TensorSpec], int]:
        """The recipes of a member's input tensors, and how many tensors there are in all calls."""
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
        if self.op in ("MIN", "MAX") and not signed(self.dtype):  # from both ends
            bound = NUMBERS[self.dtype].largest_bound if source % 2 else None
        elif self.collective.reduces and not self.wide:
            bound = exact_bound(self.op or "SUM", self.dtype, self.size, most * sources)
        specs = [self.spec(self.given, source + at, shape) for at, shape in enumerate(shapes)]
        return [dataclasses.replace(spec, bound=bound) for spec in specs], sources

    @property
    def factor(self) -> int:
        """What all values are multiples of: of an average that no power of two divides, the size."""
        return self.size if self.op == "AVG" and self.size & (self.size - 1) else 1

    def makes(self, source: int) -> list[tuple[Recipe, int, int]]:
        """As ``inputs``, each with the arguments of ``TensorSpec.make``.

        They are chosen so that signs change from element to element and from tensor to tensor.
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
        """The recipe of an input, and what becomes of its values."""
        return Recipe(spec, self.factor, self.special, self.signs)

    def values(self, source: int) -> list[Tensor]:
        """The pieces that a member has for each. Only to be read: they are kept."""
        tensors = [kept(*each) for each in self.makes(source)]
        if self.conjugated:
            tensors = [torch.conj_physical(tensor) for tensor in tensors]
        if self.collective.given == "one":
            return tensors * self.size
        if len(tensors) == self.size and not self.chunks and self.collective.given == "list":
            return tensors
        return self.parts(tensors[0], [self.piece(source, each) for each in range(self.size)])

    def expected(self, target: int) -> list[Tensor]:
        """What a member must get: a tensor from each member, or one. Only to be read."""
        if self.collective.given == "one":
            target = 0  # the same for all
        return _expected(self, target)

    def wanted(self, target: int) -> list[Tensor]:
        """As ``expected``, worked out anew."""
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
    """A tensor of its own, to write to."""
    return spec.blank() if spec.numel >= MANY else _copy(_blank_kept(spec))


@functools.lru_cache(maxsize=4096)
def _blank_kept(spec: TensorSpec) -> Tensor:
    return spec.blank()


@functools.lru_cache(maxsize=4096)
def _guards(spec: TensorSpec) -> Tensor:
    """Which bytes of the storage are guards'."""
    tensor = spec.blank()
    once = tensor[:1] if spec.layout == "expanded" else tensor
    once.copy_(torch.zeros(once.shape).to(spec.dtype))
    return storage(tensor) == GUARD_BYTE


def storage(tensor: Tensor) -> Tensor:
    """Every byte that a tensor lies between, guards included: uint8, 1-D; no copy."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _copy(tensor: Tensor) -> Tensor:
    """A tensor that lies in a storage of its own as this one lies in its."""
    copied = storage(tensor).clone().view(tensor.dtype)
    return copied.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# ---- On the ranks --------------------------------------------------------------------------------


def play(*cases: Case) -> None:
    """Carry cases out, one after the other, and compare what this rank got.

    Called on every rank; a rank takes part in the cases of its groups. Raises AssertionError.
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
    """A group of these ranks in this order; called on every rank of the world."""
    if sort:
        return dist.new_group(list(reversed(ranks)))  # sorted unless told otherwise
    if list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks))
    return dist.new_group(list(ranks), sort_ranks=False)


class CallTensors(NamedTuple):
    """This rank's tensors for a case: what is passed to the call, and what is looked at afterwards.

    Attributes:
        inputs: buffers that are only read, but where a call writes to its input.
        outputs: buffers that are written.
        given: the input tensors, as they are passed to the call.
        taken: the output tensors, as they are passed to the call.
        before: the bytes of the inputs, where they are compared.
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
    if collective.taken == "same":  # the receiver of a broadcast has a buffer, too
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
    """Compare what the member at a position got. Raises AssertionError, which begins with ``where``."""
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
    """Rank, call, group and dtype, for messages."""
    op = f" {case.op}" if case.op else ""
    root = f" root {case.root}" if case.collective.root else ""
    group = "the default group" if case.default else f"the group {list(case.ranks)}"
    return (
        f"rank {case.ranks[me]} (position {me} of {group}): "
        f"{case.operation}{op}{root} of {case.dtype}"
    )


def take_part(case: Case, group: Any = None) -> None:
    """Make this rank's tensors, call, and compare. Raises AssertionError."""
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
