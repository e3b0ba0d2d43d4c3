"""What the properties draw beside :mod:`pytest_smp.strategies`, and what their bodies share."""

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

#: Properties draw worlds of up to so many ranks: the smallest with three dimensions of two.
MOST_RANKS = 8

#: For properties on ranks, on top of the profile that the user chose: an example takes as long as the
#: backend takes; one failure tells enough; explaining what a failure depends on tries it again up to
#: hundreds of times, and what is drawn in the body it cannot explain.
on_ranks = settings(
    deadline=None,
    report_multiple_bugs=False,
    phases=[phase for phase in settings().phases if phase is not Phase.explain],
)


def share(part: float) -> settings:
    """``on_ranks`` with this part of the examples of the profile that the user chose, and at least
    those that every property gets (:mod:`conformance.session.amounts`).
    """
    return settings(on_ranks, max_examples=amounts.share(part, on_ranks.max_examples))


comm_groups = st.sampled_from(smp.CommGroup)


def sizes(smp_world: SmpWorld, least: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ranks that the session has; skips the test where it has fewer than ``least``."""
    needs(smp_world, least)
    return strategies.world_sizes(min_size=least, max_size=min(MOST_RANKS, smp_world.ranks))


def divisors(number: int) -> list[int]:
    """Its divisors, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def dimensions(size: int, pipeline: int, tensor: int) -> int:
    """In how many dimensions a world has more than one rank."""
    return sum(degree > 1 for degree in (pipeline, tensor, size // (pipeline * tensor)))


#: Size, pipeline and tensor degree; by size, so that few ranks are tried first when a failure is made
#: smaller. Worlds with several dimensions are few, and tell the most: they stand here more than once.
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
    """Worlds of as many ranks, with any degrees and placement; skips as ``sizes`` does."""
    needs(smp_world, least)
    return _worlds(least, min(MOST_RANKS, smp_world.ranks))


def needs(smp_world: SmpWorld, ranks: int) -> None:
    """Skip the test where the session has fewer ranks."""
    if smp_world.ranks < ranks:
        pytest.skip(f"this {launch.shortage(ranks, smp_world.ranks)}")


def pairs(ranks: int) -> st.SearchStrategy[tuple[int, int]]:
    """Two different ranks of a world."""
    return st.permutations(range(ranks)).map(lambda order: (order[0], order[1]))


#: Where a buffer, a page, a packet or a chunk of a large transfer may end.
CHUNKS = (2**12, 2**14, 2**16, 2**20)


def around(chunk: int) -> st.SearchStrategy[int]:
    """Exact multiples of a chunk, and one more and one less than those."""
    times = st.integers(1, 3 if chunk < 2**16 else 1)
    return st.builds(lambda times, more: times * chunk + more, times, st.sampled_from([0, 1, -1]))


@st.composite
def some(draw: st.DrawFn, ranks: Sequence[int]) -> list[int]:
    """Any number of these ranks, evenly drawn, in any order."""
    return draw(st.permutations(ranks))[: draw(st.integers(0, len(ranks)))]


def be_late(ranks: Sequence[int]) -> None:
    """Pass a message around the late ranks, so that all of them come later than the rest.

    Called on every one of ``ranks``.
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


#: Objects that no pickler takes, by name: they are made on the rank that sends them.
UNPICKLABLE = ("lock", "generator", "memoryview")


def unpicklable(name: str) -> object:
    """The object of this name."""
    match name:
        case "lock":
            return threading.Lock()
        case "generator":
            return (each for each in "")
    return memoryview(b"")


class Unreadable(Exception):
    """Pickles, and cannot be unpickled: an exception remembers what it gave to Exception, only."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first)
