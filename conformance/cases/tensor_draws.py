"""Strategies of tensor collectives: they draw cases that a backend claims."""

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

#: The largest world of a property of tensor collectives: the smallest whose reduction tree has three
#: full levels. The property of COLL-SIZES runs every size up to it.
MOST = 8

#: Layouts that an output can have, and layouts that an input can have.
WRITABLE = tuple(name for name in LAYOUTS if name != "expanded")
READABLE = tuple(LAYOUTS)

Members = tuple[tuple[int, ...], bool]  #: ranks in a group's order; whether it is the default one


def worlds(smp_world: SmpWorld, least: int = 1) -> st.SearchStrategy[int]:
    """Draw a world size from ``least`` to MOST, or skip a session with fewer than ``least`` ranks."""
    needs(smp_world, least)
    return _many(least, min(MOST, smp_world.ranks))


def _many(least: int, most: int) -> st.SearchStrategy[int]:
    """Draw a number of ranks; 3, 4 and 5 are twice as likely as the others.

    One or two ranks show little of an order or a root, and more than five take long.
    """
    numbers = range(least, most + 1)
    return st.sampled_from([*numbers, *(number for number in numbers if 2 < number < 6)])


def op_of(operation: str) -> str:
    """The reduce op of a case by default: SUM if the operation reduces, else empty."""
    return "SUM" if COLLECTIVES[operation].reduces else ""


def claimed(smp_world: SmpWorld, among: Iterable[str] = COLLECTIVES) -> list[str]:
    """The collectives that the backend claims for at least one dtype; without any, end the property."""
    claims, among = smp_world.capabilities, list(among)
    found = [
        name
        for name in among
        if COLLECTIVES[name].capability in claims and dtypes_or_none(claims, op_of(name), name)
    ]
    return found or not_supported(f"the backend claims none of {', '.join(among)}")


def rooted(smp_world: SmpWorld, data: st.DataObject, ranks: int) -> Iterator[tuple[Case, str]]:
    """Yield a case of every claimed collective with a root, and the keyword that names the root."""
    for operation in claimed(smp_world, [name for name, each in COLLECTIVES.items() if each.root]):
        root = data.draw(st.integers(0, ranks - 1), f"root of {operation}")
        case = Case(operation, tuple(range(ranks)), shape=(2,), op=op_of(operation), root=root)
        yield case, case.collective.root


def dtypes(claims: Capabilities, op: str = "", operation: str = "") -> list[torch.dtype]:
    """The dtypes that the backend moves, or reduces by ``op``; without any, end the property.

    ``operation`` is a name of COLLECTIVES whose dtypes are asked for; if empty, every claimed dtype counts.

    The torch.distributed.ReduceOp docs do not support MAX, MIN and PRODUCT of complex tensors.
    """
    return dtypes_or_none(claims, op, operation) or not_supported(
        f"the backend claims no dtype for {op or operation or 'any collective'}"
    )


def dtypes_or_none(claims: Capabilities, op: str, operation: str) -> list[torch.dtype]:
    """The dtypes as in ``dtypes``, or an empty list, for properties that try several operations."""
    names = claims.moves(COLLECTIVES[operation].capability) if operation else claims.dtypes
    if op:
        names &= claims.reductions.get(op, frozenset())
    found = [dtype for dtype in ALL if str(dtype).removeprefix("torch.") in names]
    if op in ("MIN", "MAX", "PRODUCT"):
        found = [dtype for dtype in found if not dtype.is_complex]
    return found


def kept(claims: Capabilities, ops: Iterable[str]) -> list[str]:
    """Those of these reduce ops for which the backend claims a dtype; without any, end the property."""
    ops = list(ops)
    found = [op for op in ops if claims.reductions.get(op)]
    return found or not_supported(f"the backend claims none of {', '.join(ops)}")


def spread(case: Case, among: Sequence[torch.dtype]) -> list[Case]:
    """Repeat the case in each of these dtypes."""
    return [dataclasses.replace(case, dtype=dtype) for dtype in among]


def alternated(cases: Sequence[Case], first: bool) -> list[Case]:
    """Make every second case asynchronous; ``first`` says whether the first case is."""
    return [
        dataclasses.replace(case, asynchronous=(at % 2 == 0) == first)
        for at, case in enumerate(cases)
    ]


def some(dtypes: Sequence[torch.dtype], most: int = 4) -> st.SearchStrategy[list[torch.dtype]]:
    """Draw at most ``most`` of these dtypes, far apart in the list; all are equally likely."""
    step = -(-len(dtypes) // most)
    # One of the lists, which Hypothesis prints: of a mapped lambda it prints the source.
    return st.sampled_from([list(dtypes[first::step]) for first in range(step)])


def sides(least_dims: int = 0, most_dims: int = 3, most: int = 5) -> st.SearchStrategy[Shape]:
    """Draw a shape without a side of 0."""
    return st.lists(st.integers(1, most), min_size=least_dims, max_size=most_dims).map(tuple)


def empty(least_dims: int = 1) -> st.SearchStrategy[Shape]:
    """Draw a shape with one side of 0."""
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
    """Draw a case of a collective. Examples shrink towards few ranks on the default group.

    Args:
        draw: Hypothesis's.
        world: the number of ranks that run.
        claims: the backend's claims; without GROUPS the case is on the default group.
        operation: a name of COLLECTIVES.
        group: "default", "any" (the default group, or some ranks in ascending order), "unsorted"
            (ranks in any other order), "alone" (one rank), or "without 0" (ranks but rank 0, ascending).
        members: the group itself, if it was drawn before.
        shape: the strategy of a piece's shape; by default any shape without a side of 0.
        uneven: whether the first sides of pieces differ, 0 among them. The group has two ranks at least, if the world
            has: one example may be all that a session draws.
        given: the layouts that inputs may have.
        taken: the layouts that outputs may have.
        fixed: further fields of the case.
    """
    collective = COLLECTIVES[operation]
    joins = "joined" in (collective.given, collective.taken)
    # Only a property of stacked pieces asks for them: a backend may support concatenations alone.
    stacked = fixed.get("stacked", False)
    cut = (joins and not stacked) or uneven or fixed.get("chunks", False)
    named = min(
        (LAYOUTS[name].min_dims for name in {*given, *taken} if name != "contiguous"), default=0
    )
    drawn = draw(sides(max(int(cut), named)) if shape is None else shape)

    ranks, default = members or draw(groups(world, claims, group, least=2 if uneven else 1))
    rows = None
    if uneven:
        rows = draw(_uneven_rows(len(ranks), 1 if collective.given == "one" else len(ranks)))
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
    """Draw a case of each of these collectives that the backend claims, all on one group.

    Every example calls every collective, so a small number of examples leaves none of them out.

    Args:
        draw: Hypothesis's.
        world: the number of ranks that run.
        smp_world: the backend.
        among: names of COLLECTIVES.
        group: the kind of group, as for :func:`cases`.
        members: the group itself, as for :func:`cases`.
        most: the largest number of dtypes of each collective.
        how: further arguments of :func:`cases`, fields of the case among them.
    """
    claims = smp_world.capabilities
    members = members or draw(groups(world, claims, group))
    found = []
    for name in claimed(smp_world, among):
        op = how.get("op", op_of(name))
        case = draw(cases(world, claims, name, members=members, **{**how, "op": op}))
        found += spread(case, draw(some(dtypes(claims, op_of(name), name), most)))
    return found


def _uneven_rows(senders: int, many: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Draw the first sides of the ``many`` pieces of each sender: not all alike, unless there is one piece."""
    row = st.lists(st.integers(0, 4), min_size=many, max_size=many).map(tuple)
    rows = st.lists(row, min_size=senders, max_size=senders).map(tuple)
    if senders * many == 1:
        return rows
    return rows.filter(lambda rows: len({side for row in rows for side in row}) > 1)


def _layouts(names: Sequence[str], shape: Shape) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw one or two of the layouts that suit the shape; with two, neighbouring tensors can differ."""
    fitting = [name for name in names if LAYOUTS[name].min_dims <= len(shape)]
    if len(fitting) < 2:
        return st.just(tuple(fitting) or ("contiguous",))
    return st.lists(st.sampled_from(fitting), min_size=1, max_size=2).map(tuple)


def groups(
    world: int, claims: Capabilities, kind: str, least: int = 1
) -> st.SearchStrategy[Members]:
    """Draw a group of a kind that :func:`cases` knows; without the claim GROUPS, the default group.

    A group of ranks in ascending order has ``least`` of them, if there are as many.
    """
    return _groups(world, kind if Capability.GROUPS in claims else "default", least)


@st.composite
def _groups(draw: st.DrawFn, world: int, kind: str, least: int) -> Members:
    everyone = tuple(range(world))
    if kind == "default" or (kind == "any" and draw(st.booleans())):
        return everyone, True
    if kind == "alone":
        return (draw(st.sampled_from(everyone)),), False
    among = everyone[1:] if kind == "without 0" else everyone
    least = 2 if kind == "unsorted" else min(least, len(among))
    size = draw(_many(least, len(among)))
    ranks = tuple(draw(st.permutations(among))[:size])
    if kind != "unsorted":
        return tuple(sorted(ranks)), False
    return (tuple(reversed(ranks)) if list(ranks) == sorted(ranks) else ranks), False
