"""Drawing programs: every choice is a number below another, and 0 is the simplest.

So Hypothesis shrinks a program by its numbers, and a seeded generator draws the same programs
faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.ranks.capabilities import EVERYTHING, Capabilities, Capability
from pytest_smp.strategies.arguments import check_int
from pytest_smp.strategies.communication.coverage import (
    Cell,
    claimed,
    claimed_dtypes,
    claimed_layouts,
    kind_of,
    reduce_ops,
)
from pytest_smp.strategies.communication.operations import OPERATIONS, PAYLOADS
from pytest_smp.strategies.communication.program import Program
from pytest_smp.strategies.communication.steps import PLAIN, Lie, Shape, Step
from pytest_smp.strategies.recipes import LAYOUTS
from smp_core.topology import GroupKind, Topology

T = TypeVar("T")

#: A number from 0 to one less than the argument.
Choose = Callable[[int], int]

MOST_RANKS = 8  # the model's bounds of exactness go so far
_LAGS = (0, 1, 2, 99)  # 99: at the end


def pick(choose: Choose, options: Sequence[T]) -> T:
    """One of the options; the first is the simplest."""
    return options[choose(len(options))]


@dataclass(frozen=True)
class ProgramWorld:
    """The world that steps are drawn for: ranks, and the groups that they may use, each with its name."""

    ranks: int
    groups: Mapping[str, tuple[int, ...]]
    degrees: tuple[int, int]
    api_groups: tuple[tuple[str, tuple[int, ...]], ...]
    capabilities: Capabilities

    @functools.cached_property
    def tensor_groups(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The default group, whose name is empty, and those that the program makes."""
        return (("", tuple(range(self.ranks))), *self.groups.items())

    def groups_for(self, operation: str) -> Sequence[tuple[str, tuple[int, ...]]]:
        """The groups on which an operation can be called."""
        entry = OPERATIONS[operation]
        groups = self.api_groups if entry.capability is Capability.OBJECTS else self.tensor_groups
        return [group for group in groups if entry.alone or len(group[1]) > 1]

    @functools.cached_property
    def operations(self) -> tuple[str, ...]:
        """The operations that can be called."""
        return tuple(name for name in claimed(self.capabilities) if self.groups_for(name))


# ---- Worlds --------------------------------------------------------------------------------------


def draw_world(
    choose: Choose, fewest: int, most: int, capabilities: Capabilities, cell: Cell | None
) -> ProgramWorld:
    """A world in which the cell, if one is given, can be hit."""
    needed, forced = 1, None
    if cell is not None:
        needed = {"unsorted": 2, "sorted": 2, "without 0": 3}.get(cell.group, 1)
        alone = cell.operation != "recv" and OPERATIONS[cell.operation].alone
        needed = max(needed, 1 if alone else 2)
        forced = cell.group if cell.group != "default" else None
    objects = cell is not None and cell.operation.startswith("smp.")
    if objects and forced in ("sorted", "without 0"):
        needed = 4  # two groups of the API, of two
    fewest = min(max(fewest, needed), most)
    ranks = fewest + choose(most - fewest + 1)
    groups = {}
    if Capability.GROUPS in capabilities:
        kinds: list[str | None] = [None] * choose(3)
        if forced is not None and not objects:
            kinds.insert(0, forced)
        for at, kind in enumerate(kinds):
            groups[f"g{at + 1}"] = _draw_group(choose, ranks, kind, capabilities)
    degrees = 1, 1
    if Capability.OBJECTS in capabilities:
        options = [
            (pipeline, tensor)
            for pipeline in range(1, ranks + 1)
            for tensor in range(1, ranks + 1)
            if ranks % (pipeline * tensor) == 0 and pipeline * tensor > 1
        ]
        options.sort(key=lambda degrees: (math.prod(degrees), degrees))  # the same for few ranks
        if objects and forced in ("sorted", "without 0"):
            options = [each for each in options if _has_kind(_api_groups(ranks, each), forced)]
            degrees = pick(choose, options) if options else degrees
        elif options and choose(4) == 3:
            degrees = pick(choose, options)
    return ProgramWorld(ranks, groups, degrees, _api_groups(ranks, degrees), capabilities)


def _draw_group(
    choose: Choose, ranks: int, kind: str | None, capabilities: Capabilities
) -> tuple[int, ...]:
    if kind is None:
        kinds = ["sorted", "of one", "without 0"]
        if Capability.GROUP_ORDER in capabilities:
            kinds.append("unsorted")
        kind = pick(choose, kinds)
    if kind == "of one" or ranks == 1:
        return (choose(ranks),)
    if kind == "without 0":
        return _subset(choose, range(1, ranks), 2)
    if kind == "sorted":
        return (0, *_subset(choose, range(1, ranks), 1))
    members = _subset(choose, range(ranks), 2)
    return _permuted(members, 1 + choose(math.factorial(len(members)) - 1))


def _subset(choose: Choose, ranks: range, at_least: int) -> tuple[int, ...]:
    """Ascending ranks; few and low are the simplest."""
    at_least = min(at_least, len(ranks))
    size = at_least + choose(len(ranks) - at_least + 1)
    left, members = [*ranks], []
    for _ in range(size):
        members.append(left.pop(choose(len(left))))
    return tuple(sorted(members))


def _permuted(members: Sequence[int], number: int) -> tuple[int, ...]:
    """A permutation by its number: 0 leaves the order."""
    left, permuted = [*members], []
    for size in range(len(members), 0, -1):
        at, number = divmod(number, math.factorial(size - 1))
        permuted.append(left.pop(at))
    return tuple(permuted)


@functools.lru_cache(maxsize=256)
def _api_groups(ranks: int, degrees: tuple[int, int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The groups of the API by kind: each group of each kind, WORLD first."""
    world = ("WORLD", tuple(range(ranks)))
    if degrees == (1, 1):
        return (world,)
    topology = Topology(ranks, *degrees)
    kinds = (GroupKind.MP, GroupKind.DP, GroupKind.PP, GroupKind.TP, GroupKind.RDP)
    return (
        world,
        *(
            (kind.name, tuple(members))
            for kind in kinds
            for members in dict.fromkeys(topology.group(kind, rank) for rank in range(ranks))
        ),
    )


def _has_kind(groups: Sequence[tuple[str, tuple[int, ...]]], kind: str) -> bool:
    return any(kind_of(Step(0, "", name, members)) == kind for name, members in groups)


# ---- Steps ---------------------------------------------------------------------------------------


def draw_step(choose: Choose, world: ProgramWorld, cell: Cell | None = None) -> Step:
    """A step, number 0; one that hits the cell, if one is given and the world has its group."""
    capabilities = world.capabilities
    if cell is not None and _fitting(world, cell):
        name = "send" if cell.operation == "recv" else cell.operation
        group, members = pick(choose, _fitting(world, cell))
    else:
        cell = None
        name = pick(choose, world.operations)
        groups = world.groups_for(name)
        kind = pick(choose, [*dict.fromkeys(group for group, _ in groups)])
        group, members = pick(choose, [each for each in groups if each[0] == kind])
    operation, size = OPERATIONS[name], len(members)
    step = Step(0, name, group, members)
    if name in ("send", "smp.send"):
        root = choose(size)
        peer = (root + 1 + choose(size - 1)) % size
        step = replace(step, root=members[root], peer=members[peer])
    elif operation.rooted or name == "smp.broadcast":
        step = replace(step, root=pick(choose, members))
    if operation.capability is Capability.OBJECTS:
        which = 0 if name == "smp.barrier" else choose(PAYLOADS)
        return replace(step, payload=which, lags=(None,) * len(step.participants))
    if name in ("send", "batch_isend_irecv") and Capability.TAGS in capabilities:
        step = replace(step, tag=choose(3))
    if name == "batch_isend_irecv":
        step = replace(step, shift=1 + choose(size - 1))
    if operation.has_tensors:
        step = _draw_tensors(choose, step, capabilities, cell)
    return _draw_modes(choose, step, cell)


def _fitting(world: ProgramWorld, cell: Cell) -> list[tuple[str, tuple[int, ...]]]:
    name = "send" if cell.operation == "recv" else cell.operation
    if name not in world.operations:
        return []
    return [
        group for group in world.groups_for(name) if kind_of(Step(0, name, *group)) == cell.group
    ]


def _draw_tensors(
    choose: Choose, step: Step, capabilities: Capabilities, cell: Cell | None
) -> Step:
    name, operation, size = step.operation, OPERATIONS[step.operation], len(step.members)
    dtype = cell.dtype if cell else pick(choose, claimed_dtypes(name, capabilities, size))
    reduce_op = ""
    if operation.reduces:
        reduce_op = pick(choose, reduce_ops(name, dtype, capabilities, size))
    lies = [
        Lie(pick(choose, layouts), pick(choose, (0, 0, 1, 3)))
        for layouts in claimed_layouts(name, capabilities)
    ]
    if cell:
        asked = int(
            operation.in_place
            or cell.operation == "recv"
            or (cell.operation != "send" and cell.layout != "expanded" and choose(2) == 1)
        )
        lies[asked] = lies[asked]._replace(layout=cell.layout)
    least = max(LAYOUTS[lie.layout].min_dims for lie in lies)
    if name in ("all_gather_single", "reduce_scatter_single", "all_to_all", "all_to_all_single"):
        least = max(least, 1)
    shape = _draw_shape(choose, least)
    rows: tuple[tuple[int, ...], ...] = ()
    if name.startswith("all_to_all"):
        base, slope, twist = choose(3), choose(3), choose(3)
        if name == "all_to_all" and Capability.UNEVEN not in capabilities:
            slope = twist = 0
        rows = tuple(
            tuple(
                (1 + base + slope * sender + twist * (receiver + sender * receiver)) % 4
                for receiver in range(size)
            )
            for sender in range(size)
        )
    return replace(
        step,
        dtype=dtype,
        reduce_op=reduce_op,
        shape=shape,
        rows=rows,
        input=PLAIN if operation.in_place else lies[0],
        output=lies[1],
    )


_SIDES = (1, 2, 3, 0, 5)


def _draw_shape(choose: Choose, least: int) -> Shape:
    """A small shape of at least so many dimensions; only its first side is sometimes 0 or 5."""
    dims = least + choose(max(1, 3 - least))
    return tuple(_SIDES[choose(5)] if at == 0 else _SIDES[choose(3)] for at in range(dims))


def _draw_modes(choose: Choose, step: Step, cell: Cell | None) -> Step:
    modes = OPERATIONS[step.operation].modes
    count = len(step.participants)
    if step.operation == "send":
        own = [pick(choose, modes), pick(choose, modes)]
        if cell:
            own[cell.operation == "recv"] = cell.mode
    else:
        own = [cell.mode if cell else pick(choose, modes)] * count
    if own == ["sync"] * count:
        return replace(step, lags=(None,) * count)
    first, turn = choose(len(_LAGS)), choose(len(_LAGS))
    lags = tuple(
        None if mode == "sync" else _LAGS[(first + at * turn) % len(_LAGS)]
        for at, mode in enumerate(own)
    )
    return replace(step, lags=lags, priority=choose(2))


# ---- Programs ------------------------------------------------------------------------------------


def assembled(world: ProgramWorld, steps: Sequence[Step]) -> Program:
    """The program of these steps, with what they use of the world."""
    used = {step.group for step in steps}
    groups = {name: members for name, members in world.groups.items() if name in used}
    names = {name: f"g{at + 1}" for at, name in enumerate(groups)}
    return Program(
        world.ranks,
        tuple(
            replace(step, number=at, group=names.get(step.group, step.group))
            for at, step in enumerate(steps)
        ),
        {names[name]: members for name, members in groups.items()},
        world.degrees if used - names.keys() - {"", "WORLD"} else (1, 1),
    )


def sample(
    choose: Choose,
    *,
    fewest_ranks: int = 1,
    most_ranks: int = MOST_RANKS,
    max_calls: int = 8,
    capabilities: Capabilities = EVERYTHING,
    cell: Cell | None = None,
) -> Program:
    """A program drawn without Hypothesis: ``choose(n)`` is ``random.Random(seed).randrange``, say.

    ``cell``: one of its steps hits this cell, if ``most_ranks`` allow.
    """
    world = draw_world(choose, fewest_ranks, most_ranks, capabilities, cell)
    steps = [draw_step(choose, world) for _ in range(1 + choose(max_calls))]
    if cell is not None:
        steps[choose(len(steps))] = draw_step(choose, world, cell)
    return assembled(world, steps)


@functools.lru_cache(maxsize=1024)
def _below(limit: int) -> SearchStrategy[int]:
    return st.integers(0, limit - 1)


def _chooser(draw: DrawFn) -> Choose:
    return lambda limit: draw(_below(limit)) if limit > 1 else 0


@st.composite
def _steps(draw: DrawFn, world: ProgramWorld) -> Step:
    return draw_step(_chooser(draw), world)


@st.composite
def draw_program(
    draw: DrawFn, fewest: int, most: int, max_calls: int, capabilities: Capabilities
) -> Program:
    """A strategy, with arguments already checked."""
    world = draw_world(_chooser(draw), fewest, most, capabilities, None)
    # A list of its own strategy: Hypothesis then takes whole steps out when it shrinks.
    return assembled(world, draw(st.lists(_steps(world), min_size=1, max_size=max_calls)))


def check_arguments(
    ranks: object, max_ranks: object, max_calls: object, capabilities: object, fewest: int
) -> tuple[int, int, int, Capabilities]:
    """Fewest and most ranks, and the others, as strategies take them."""
    most = check_int("max_ranks", max_ranks, at_least=fewest, at_most=MOST_RANKS)
    if ranks is not None:
        most = fewest = check_int("ranks", ranks, at_least=fewest, at_most=MOST_RANKS)
    calls = check_int("max_calls", max_calls, at_least=1)
    if not isinstance(capabilities, Capabilities):
        raise InvalidArgument(f"capabilities={capabilities!r}: must be a Capabilities")
    if not claimed(capabilities):
        raise InvalidArgument(f"capabilities={capabilities!r}: claim nothing that communicates")
    return fewest, most, calls, capabilities


def programs(
    *,
    ranks: int | None = None,
    max_ranks: int = MOST_RANKS,
    max_calls: int = 8,
    capabilities: Capabilities = EVERYTHING,
) -> SearchStrategy[Program]:
    """Draw communication programs that are valid by construction; see :class:`Program`, docs/programs.md.

    A program is a sequence of objects and tensors sent, tensor collectives and barriers over random,
    overlapping groups, synchronous or asynchronous with waits anywhere behind the calls, and what
    every rank must hold after each of them. ``program.run()`` on each of its ``program.ranks`` ranks
    runs and checks it::

        @given(program=programs())
        def test_my_backend(smp_world, program):
            smp_world.run(program.run, ranks=program.ranks)

    or, with a fixed number of ranks::

        @pytest.mark.smp(ranks=4)
        @given(program=programs(ranks=4))
        def test_my_backend(program):
            program.run()

    A failing example is printed as a test file that runs alone. Shrinks towards few ranks, few
    calls, small shapes, and synchronous calls on contiguous float32.

    Args:
        ranks: in the world of every program; None draws from 1 to ``max_ranks``.
        max_ranks: most ranks, up to 8: sums over more are not exact in the smallest dtypes.
        max_calls: most communications in a program.
        capabilities: of the backend, ``smp_world.capabilities``: nothing else is drawn.

    Raises:
        InvalidArgument: an argument is not as above, or nothing that communicates is claimed.
    """
    return draw_program(*check_arguments(ranks, max_ranks, max_calls, capabilities, 1))
