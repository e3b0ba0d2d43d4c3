"""What the properties of tensor collectives draw: cases within what a backend claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import torch

from conformance.cases.draws import needs
from conformance.cases.tensors import COLLECTIVES, Case, Shape
from conformance.requirements.registry import Capability
from conformance.session.verdicts import not_supported
from pytest_smp.proxies import SmpWorld
from pytest_smp.ranks.capabilities import Capabilities
from pytest_smp.strategies.numbers import ALL
from pytest_smp.strategies.recipes import LAYOUTS

#: A property of tensor collectives draws worlds of up to so many ranks: the smallest with a fold of
#: three full levels. COLL-SIZES takes every size of them.
MOST = 8

#: Layouts that a call can write to, and those that it can only read.
WRITABLE = tuple(name for name in LAYOUTS if name != "expanded")
READABLE = tuple(LAYOUTS)

Members = tuple[tuple[int, ...], bool]  #: ranks in a group's order; whether it is the default one


def worlds(smp_world: SmpWorld, least: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ranks; skips the test where the session has fewer than ``least``."""
    needs(smp_world, least)
    return _many(least, min(MOST, smp_world.ranks))


def _many(least: int, most: int) -> st.SearchStrategy[int]:
    """Numbers of ranks. One or two show little of an order or a root, and more than five take long;
    those between come twice.
    """
    numbers = range(least, most + 1)
    return st.sampled_from([*numbers, *(number for number in numbers if 2 < number < 6)])


def op_of(operation: str) -> str:
    """SUM for what reduces."""
    return "SUM" if COLLECTIVES[operation].reduces else ""


def claimed(smp_world: SmpWorld, among: Iterable[str] = COLLECTIVES) -> list[str]:
    """The collectives that the backend claims, and a dtype of; ends the property where there is none."""
    claims, among = smp_world.capabilities, list(among)
    found = [
        name
        for name in among
        if COLLECTIVES[name].capability in claims and dtypes_or_none(claims, op_of(name), name)
    ]
    return found or not_supported(f"the backend claims none of {', '.join(among)}")


def rooted(smp_world: SmpWorld, data: st.DataObject, ranks: int) -> Iterator[tuple[Case, str]]:
    """A case of every claimed collective with a root, and the keyword of its root."""
    for operation in claimed(smp_world, [name for name, each in COLLECTIVES.items() if each.root]):
        root = data.draw(st.integers(0, ranks - 1), f"root of {operation}")
        case = Case(operation, tuple(range(ranks)), shape=(2,), op=op_of(operation), root=root)
        yield case, case.collective.root


def dtypes(claims: Capabilities, op: str = "", operation: str = "") -> list[torch.dtype]:
    """The dtypes that the backend moves, or reduces by ``op``; ends the property where there is none.

    ``operation``: a name of COLLECTIVES, of which they must be; any dtype that is claimed, if empty.

    torch.distributed.ReduceOp docs: MAX, MIN and PRODUCT are not supported for complex tensors.
    """
    return dtypes_or_none(claims, op, operation) or not_supported(
        f"the backend claims no dtype for {op or operation or 'any collective'}"
    )


def dtypes_or_none(claims: Capabilities, op: str, operation: str) -> list[torch.dtype]:
    """As ``dtypes``, for properties that go through several operations; empty where there is none."""
    names = claims.moves(COLLECTIVES[operation].capability) if operation else claims.dtypes
    if op:
        names &= claims.reductions.get(op, frozenset())
    found = [dtype for dtype in ALL if str(dtype).removeprefix("torch.") in names]
    if op in ("MIN", "MAX", "PRODUCT"):
        found = [dtype for dtype in found if not dtype.is_complex]
    return found


def kept(claims: Capabilities, ops: Iterable[str]) -> list[str]:
    """Those of these reduce ops for which the backend claims a dtype; ends the property without."""
    ops = list(ops)
    found = [op for op in ops if claims.reductions.get(op)]
    return found or not_supported(f"the backend claims none of {', '.join(ops)}")


def spread(case: Case, among: Sequence[torch.dtype]) -> list[Case]:
    """The case in each of these dtypes."""
    return [dataclasses.replace(case, dtype=dtype) for dtype in among]


def alternated(cases: Sequence[Case], first: bool) -> list[Case]:
    """Every second case is asynchronous; ``first``: whether the first one is."""
    return [
        dataclasses.replace(case, asynchronous=(at % 2 == 0) == first)
        for at, case in enumerate(cases)
    ]


def some(dtypes: Sequence[torch.dtype], most: int = 4) -> st.SearchStrategy[list[torch.dtype]]:
    """At most so many of these dtypes, far apart; each comes as often as any other."""
    step = -(-len(dtypes) // most)
    return st.integers(0, step - 1).map(lambda first: list(dtypes[first::step]))


def sides(least_dims: int = 0, most_dims: int = 3, most: int = 5) -> st.SearchStrategy[Shape]:
    """Shapes without a side of 0."""
    return st.lists(st.integers(1, most), min_size=least_dims, max_size=most_dims).map(tuple)


def empty(least_dims: int = 1) -> st.SearchStrategy[Shape]:
    """Shapes with a side of 0."""
    return (
        sides(least_dims, 3, 3)
        .filter(bool)
        .flatmap(
            lambda shape: st.integers(0, len(shape) - 1).map(
                lambda at: (*shape[:at], 0, *shape[at + 1 :])
            )
        )
    )


@st.composite
def cases(
    draw: st.DrawFn,
    /,
    world: int,
    claims: Capabilities,
    operation: str,
    *,
    group: str = "any",
    members: Members | None = None,
    shape: st.SearchStrategy[Shape] | None = None,
    uneven: bool = False,
    given: Sequence[str] = ("contiguous",),
    taken: Sequence[str] = ("contiguous",),
    **fixed: Any,
) -> Case:
    """Cases of a collective. Shrinks towards one call of few ranks on the default group.

    Args:
        world: the number of ranks that run.
        claims: what the backend claims; groups are made only if it claims them.
        operation: a name of COLLECTIVES.
        group: "default", "any" (the default one, or some ranks, ascending), "unsorted" (ranks in
            any other order), "alone" (one rank), "without 0".
        members: the group itself, if it was drawn before.
        shape: of a piece; if not given any without a side of 0.
        uneven: whether the first sides of pieces differ, 0 among them.
        given: layouts to draw inputs' from.
        taken: layouts to draw outputs' from.
        fixed: further fields of the case.
    """
    collective = COLLECTIVES[operation]
    joins = "joined" in (collective.given, collective.taken)
    # Only what is about stacks draws them: a backend may know concatenations alone.
    stacked = fixed.get("stacked", False)
    cut = (joins and not stacked) or uneven or fixed.get("chunks", False)
    named = min(
        (LAYOUTS[name].min_dims for name in {*given, *taken} if name != "contiguous"), default=0
    )
    drawn = draw(sides(max(int(cut), named)) if shape is None else shape)

    ranks, default = members or draw(groups(world, claims, group))
    rows = None
    if uneven:
        many = 1 if collective.given == "one" else len(ranks)
        row = st.lists(st.integers(0, 4), min_size=many, max_size=many).map(tuple)
        rows = tuple(draw(row) for _ in ranks)
    return Case(
        operation=operation,
        ranks=ranks,
        default=default,
        shape=drawn,
        rows=rows,
        root=draw(st.integers(0, len(ranks) - 1)) if collective.root else 0,
        given=draw(_layouts(given, drawn)),
        taken=draw(_layouts(taken, drawn)),
        **fixed,
    )


@st.composite
def every(
    draw: st.DrawFn,
    /,
    world: int,
    smp_world: SmpWorld,
    among: Iterable[str] = COLLECTIVES,
    *,
    group: str = "any",
    members: Members | None = None,
    most: int = 1,
    **how: Any,
) -> list[Case]:
    """A case of each of these collectives that the backend claims, all on one group.

    Nothing is left to the draw that way: whatever the number of examples, each is called in each.

    Args:
        world: the number of ranks that run.
        smp_world: the backend.
        among: names of COLLECTIVES.
        group: as for :func:`cases`.
        members: as for :func:`cases`.
        most: the number of dtypes of each, at most.
        how: further arguments of :func:`cases`, and fields.
    """
    claims = smp_world.capabilities
    members = members or draw(groups(world, claims, group))
    found = []
    for name in claimed(smp_world, among):
        op = how.get("op", op_of(name))
        case = draw(cases(world, claims, name, members=members, **{**how, "op": op}))
        found += spread(case, draw(some(dtypes(claims, op_of(name), name), most)))
    return found


def _layouts(names: Sequence[str], shape: Shape) -> st.SearchStrategy[tuple[str, ...]]:
    """Two, so that neighbours differ, of those that suit the shape."""
    fitting = [name for name in names if LAYOUTS[name].min_dims <= len(shape)]
    if len(fitting) < 2:
        return st.just(tuple(fitting) or ("contiguous",))
    return st.lists(st.sampled_from(fitting), min_size=1, max_size=2).map(tuple)


def groups(world: int, claims: Capabilities, kind: str) -> st.SearchStrategy[Members]:
    """Groups of a kind that :func:`cases` knows; the default one, if the backend makes no others."""
    return _groups(world, kind if Capability.GROUPS in claims else "default")


@st.composite
def _groups(draw: st.DrawFn, world: int, kind: str) -> Members:
    everyone = tuple(range(world))
    if kind == "default" or (kind == "any" and draw(st.booleans())):
        return everyone, True
    if kind == "alone":
        return (draw(st.sampled_from(everyone)),), False
    among = everyone[1:] if kind == "without 0" else everyone
    least = 2 if kind == "unsorted" else 1
    size = draw(_many(least, len(among)))
    ranks = tuple(draw(st.permutations(among))[:size])
    if kind != "unsorted":
        return tuple(sorted(ranks)), False
    return (tuple(reversed(ranks)) if list(ranks) == sorted(ranks) else ranks), False
