"""Worlds: their sizes, degrees, placements, topologies, and groups of their ranks."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_bool, check_int
from smp_core.topology import PLACEMENTS, Topology


def world_sizes(*, min_size: int = 1, max_size: int = 8) -> SearchStrategy[int]:
    """Draw numbers of ranks from ``min_size`` to ``max_size``, both included, small ones more often.

    Shrinks towards ``min_size``.

    Raises:
        InvalidArgument: the arguments are no ints with ``1 <= min_size <= max_size``.
    """
    check_int("min_size", min_size, at_least=1)
    check_int("max_size", max_size, at_least=min_size, why="min_size")
    # Half of the draws are small, so that a world of one rank comes often however large the others.
    return st.integers(min_size, min(max_size, min_size + 3)) | st.integers(min_size, max_size)


def placements() -> SearchStrategy[str]:
    """Draw values of ``placement_strategy``: ``"cluster"``, ``"spread"`` and the six permutations.

    Shrinks towards ``"cluster"``. Source: API 4.2.
    """
    return st.sampled_from(tuple(PLACEMENTS))


def degrees(size: int) -> SearchStrategy[int]:
    """Draw parallel degrees that ``size`` ranks can have: divisors of ``size``, 1 most often.

    Shrinks towards 1.

    Raises:
        InvalidArgument: ``size`` is no int of at least 1.
    """
    check_int("size", size, at_least=1)
    # 1 a second time: with it many paths of the code under test are left out.
    return st.sampled_from((1, *divisors(size)))


def divisors(number: int) -> list[int]:
    """The divisors of ``number``, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def topologies(
    *, min_size: int = 1, max_size: int = 8, sharding: bool = False
) -> SearchStrategy[Topology]:
    """Draw topologies of ``min_size`` to ``max_size`` ranks, degree 1 often in each dimension.

    Shrinks towards few ranks, degrees of 1 and ``"cluster"``.

    Args:
        sharding: whether sharded data parallelism occurs. Where it does, the pipeline's degree is
            1, because no configuration allows both (API 3.5).

    Raises:
        InvalidArgument: the arguments are no ints with ``1 <= min_size <= max_size``, or
            ``sharding`` is no bool.
    """
    check_bool("sharding", sharding)
    return _topologies(world_sizes(min_size=min_size, max_size=max_size), sharding)


@st.composite
def _topologies(draw: DrawFn, sizes: SearchStrategy[int], sharding: bool) -> Topology:
    size = draw(sizes)
    pipeline, tensor, sharded = draw(joint_degrees(size, sharding=sharding))
    return Topology(size, pipeline, tensor, sharded, draw(placements()))


@st.composite
def joint_degrees(draw: DrawFn, size: int, *, sharding: bool = True) -> tuple[int, int, int]:
    """Degrees of the pipeline, of tensors and of sharding that fit ``size`` ranks together."""
    # Sharding first, because it is rare where the others leave little room.
    if sharding and draw(st.booleans()):
        sharded = draw(st.sampled_from(divisors(size)))
        return 1, draw(degrees(size // sharded)), sharded
    pipeline = draw(degrees(size))
    return pipeline, draw(degrees(size // pipeline)), 1


def groups(
    size: int, *, min_size: int = 1, max_size: int | None = None
) -> SearchStrategy[tuple[int, ...]]:
    """Draw groups of a world of ``size`` ranks: tuples of distinct world ranks, in any order.

    Unsorted ones, ones without rank 0 and ones of a single rank come often. Shrinks towards few,
    small, ascending ranks, so ``(0,)`` comes first.

    Args:
        size: ranks in the world.
        min_size: fewest ranks in a group.
        max_size: most ranks in a group; None is ``size``.

    Raises:
        InvalidArgument: the arguments are no ints with ``1 <= min_size <= max_size <= size``.
    """
    check_int("size", size, at_least=1)
    check_int("min_size", min_size, at_least=1, at_most=size, why="size")
    most = size if max_size is None else max_size
    check_int("max_size", most, at_least=min_size, at_most=size, why="min_size to size")
    return _groups(size, min_size, most)


@st.composite
def _groups(draw: DrawFn, size: int, min_size: int, max_size: int) -> tuple[int, ...]:
    # The length first, and evenly: a list's own length seldom reaches its maximum.
    length = draw(st.integers(min_size, max_size))
    ranks = st.sampled_from(range(size))
    return tuple(draw(st.lists(ranks, unique=True, min_size=length, max_size=length)))
