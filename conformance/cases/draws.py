"""Strategies of the suite beside :mod:`pytest_smp.strategies`, and helpers of the properties' bodies."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings

import smp_core.torch as smp
from conformance.session import amounts
from pytest_smp import launch, strategies
from pytest_smp.proxies import SmpWorld
from smp_core.topology import Topology

#: The largest world that properties draw: the smallest one with three dimensions of two ranks each.
MOST_RANKS = amounts.MOST_RANKS

#: Settings of properties on ranks, on top of the user's profile. No deadline: the backend decides how
#: long an example takes. One bug is reported: a second one rarely tells more. No explain phase: its
#: up to several hundred runs take long, and draws inside the body stay unexplained.
on_ranks = settings(
    deadline=None,
    report_multiple_bugs=False,
    phases=[phase for phase in settings().phases if phase is not Phase.explain],
)


def share(part: float) -> settings:
    """``on_ranks`` with a part of the examples of the user's profile.

    The result has at least the examples that every property gets (:mod:`conformance.session.amounts`).
    """
    return settings(on_ranks, max_examples=amounts.share(part, on_ranks.max_examples))


comm_groups = st.sampled_from(smp.CommGroup)


def sizes(smp_world: SmpWorld, least: int = 1) -> st.SearchStrategy[int]:
    """Draw a world size from ``least`` to the session's ranks, or skip a session with fewer ranks."""
    needs(smp_world, least)
    return strategies.world_sizes(min_size=least, max_size=min(MOST_RANKS, smp_world.ranks))


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def dimensions(size: int, pipeline: int, tensor: int) -> int:
    """The number of dimensions in which a world has more than one rank."""
    return sum(degree > 1 for degree in (pipeline, tensor, size // (pipeline * tensor)))


#: Size, pipeline and tensor degree. Shapes ascend by size, so that shrinking tries few ranks first.
#: Shapes with several dimensions are few and find the most bugs, so they are listed several times.
_SHAPES: list[tuple[int, int, int]] = [
    (size, pipeline, tensor)
    for size in range(1, MOST_RANKS + 1)
    for pipeline in divisors(size)
    for tensor in divisors(size // pipeline)
    for _ in range({3: 16, 2: 2}.get(dimensions(size, pipeline, tensor), 1))
]


@st.composite
def _worlds(draw: st.DrawFn, least: int, most: int) -> Topology:
    size, pipeline, tensor = draw(st.sampled_from([s for s in _SHAPES if least <= s[0] <= most]))
    return Topology(size, pipeline, tensor, placement=draw(strategies.placements()))


def worlds(smp_world: SmpWorld, least: int = 1) -> st.SearchStrategy[Topology]:
    """Draw a world of at least ``least`` ranks, with any degrees and placement; skip as ``sizes`` does."""
    needs(smp_world, least)
    return _worlds(least, min(MOST_RANKS, smp_world.ranks))


def needs(smp_world: SmpWorld, ranks: int) -> None:
    """Skip the test if the session has fewer ranks than ``ranks``."""
    if smp_world.ranks < ranks:
        pytest.skip(f"this {launch.shortage(ranks, smp_world.ranks)}")


def pairs(ranks: int) -> st.SearchStrategy[tuple[int, int]]:
    """Draw two different ranks of a world."""
    return st.permutations(range(ranks)).map(lambda order: (order[0], order[1]))


#: Bytes at which a buffer, a page, a packet or a chunk of a large transfer may end.
CHUNKS = (2**12, 2**14, 2**16, 2**20)


def around(chunk: int) -> st.SearchStrategy[int]:
    """Draw a multiple of a chunk, or a number that is one larger or one smaller."""
    times = st.integers(1, 3 if chunk < 2**16 else 1)
    return st.builds(lambda times, more: times * chunk + more, times, st.sampled_from([0, 1, -1]))


@st.composite
def some(draw: st.DrawFn, ranks: Sequence[int]) -> list[int]:
    """Draw some of these ranks in any order; each number of ranks is equally likely."""
    return draw(st.permutations(ranks))[: draw(st.integers(0, len(ranks)))]


def be_late(ranks: Sequence[int]) -> None:
    """Delay these ranks: pass a message around a ring of them, so that they arrive after the others.

    Every one of ``ranks`` must call this function.
    """
    at = ranks.index(smp.rank())
    before, after = ranks[at - 1], ranks[(at + 1) % len(ranks)]
    if len(ranks) == 1:
        return
    if at > 0:
        smp.recv_from(before, smp.RankType.WORLD_RANK)
    smp.send("late", after, smp.RankType.WORLD_RANK)
    if at == 0:
        smp.recv_from(before, smp.RankType.WORLD_RANK)


#: Names of objects that no pickler takes. The sending rank makes the object: a name can be drawn and sent.
UNPICKLABLE = ("lock", "generator", "memoryview")


def unpicklable(name: str) -> object:
    """Make the object that a name of UNPICKLABLE stands for."""
    match name:
        case "lock":
            return threading.Lock()
        case "generator":
            return (each for each in "")
    return memoryview(b"")


class Unreadable(Exception):
    """An exception that pickles and cannot be unpickled.

    ``Exception.__reduce__`` repeats the call with the arguments given to ``Exception``: one of two.
    """

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first)
