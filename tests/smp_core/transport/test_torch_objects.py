"""Object calls on different groups never meet: the transports over torch end as `sim`'s own does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from smp_core.errors import VerdictError
from smp_core.transport import current_rank, launched
from smp_core.transport.protocols import Group
from smp_core.transport.torch_objects import GroupObjects, StoreObjects

RANKS = 3
GROUPS = [Group(name, ranks) for name, ranks in (
    ("WORLD", (0, 1, 2)), ("PP_GROUP", (0, 1, 2)), ("TP_GROUP", (2, 0, 1)), ("DP_GROUP", (0, 1)),
    ("RDP_GROUP", (1, 0)), ("MP_GROUP", (1, 2)),
)]  # fmt: skip


class ObjectCall(NamedTuple):
    """A call of all members of a group, or an object from the root to one member or to all."""

    operation: str
    group: Group
    root: int
    dest: int
    length: int  # of what each member contributes: a long object travels in two parts

    def members(self) -> tuple[int, ...]:
        return (self.root, self.dest) if self.operation == "send" else self.group.ranks


Plans = list[list[ObjectCall]]


@st.composite
def calls(draw: st.DrawFn, groups: list[Group]) -> ObjectCall:
    group = draw(st.sampled_from(groups))
    root, dest = draw(st.permutations(group.ranks))[:2]
    operation = draw(st.sampled_from(["allgather", "allgather", "barrier", "send", "broadcast"]))
    return ObjectCall(operation, group, root, dest, draw(st.sampled_from([1, 3000])))


@st.composite
def plans(draw: st.DrawFn) -> Plans:
    """Draw the calls of each rank, in one order but for two neighbours that some ranks exchange."""
    groups = draw(st.lists(st.sampled_from(GROUPS), min_size=2, max_size=2, unique=True))
    program = draw(st.lists(calls(groups), min_size=2, max_size=5))
    crossing = [*program]
    at = draw(st.integers(0, len(program) - 2))
    crossing[at : at + 2] = program[at + 1], program[at]
    crosses = draw(st.lists(st.booleans(), min_size=RANKS, max_size=RANKS))
    return [
        [call for call in (crossing if crosses[rank] else program) if rank in call.members()]
        for rank in range(RANKS)
    ]


def _made(kind: str) -> Any:
    context = current_rank.current()
    assert context is not None
    environment = launched._environment(context.rank, context.size, Path())
    if kind == "GroupObjects":
        return GroupObjects(environment, dist.group.WORLD)
    if kind == "StoreObjects":
        return StoreObjects(environment, dist.distributed_c10d._get_default_store())
    return context.fabric.objects


def run_plan(plans: Plans, kind: str) -> list[Any]:
    """Make the calls of this rank and return the objects that came."""
    objects, rank = _made(kind), dist.get_rank()
    came: list[Any] = []
    for number, call in enumerate(plans[rank]):
        value = (rank, number, "x" * call.length)
        if call.operation == "allgather":
            came.append(objects.allgather(value, call.group))
        elif call.operation == "barrier":
            objects.barrier(call.group)
        elif rank != call.root:
            came.append(objects.recv_from(call.root))
        elif call.operation == "send":
            objects.send(value, call.dest)
        else:
            objects.broadcast(value, call.group)
    return came


@pytest.mark.parametrize("kind", ["GroupObjects", "StoreObjects"])
@given(plans=plans())
def test_calls_meet_as_on_sim(smp_world: Any, kind: str, plans: Plans) -> None:
    try:
        expected = smp_world.run(run_plan, plans, "native", ranks=RANKS)
    except VerdictError:
        with pytest.raises(VerdictError):
            smp_world.run(run_plan, plans, kind, ranks=RANKS)
    else:
        assert smp_world.run(run_plan, plans, kind, ranks=RANKS) == expected


def test_crossed_calls_on_rank_processes_are_a_deadlock() -> None:
    """The board gives the verdict, and no rank may have gone on from its call."""
    both = [ObjectCall("allgather", group, 0, 1, 1) for group in GROUPS[:2]]
    crossed = [both[:: -1 if rank else 1] for rank in range(RANKS)]
    executor = open_backend("gloo", ExecutorOptions(ranks=RANKS))
    try:
        job = Job(body=run_plan, arguments=lambda rank: ((crossed, "native"), {}), timeout=60)
        assert executor.open(RANKS).run(job).verdict is VerdictKind.DEADLOCK
    finally:
        executor.close()
