"""Barriers: who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given

import smp_core.torch as smp
from conformance.cases.draws import be_late, comm_groups, on_ranks, some, worlds
from conformance.cases.layout import groups, members, parameters
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld, TmpPath
from smp_core.topology import Topology

WORLD_RANK = smp.RankType.WORLD_RANK

#: The ways to say a barrier, by name: a call is made on a rank, so a rank is told the name.
SPELLINGS: Mapping[str, Callable[[], None]] = {
    **{f"smp.barrier(smp.{g.name})": lambda g=g: smp.barrier(g) for g in smp.CommGroup},  # type: ignore[misc]
    "smp.barrier()": lambda: smp.barrier(),
    "smp.barrier(group=smp.WORLD)": lambda: smp.barrier(group=smp.WORLD),
    "smp.mp_barrier()": lambda: smp.mp_barrier(),
    "smp.dp_barrier()": lambda: smp.dp_barrier(),
}


def meet_and_look(
    inside: list[list[int]], spellings: list[list[str]], late: list[int], folder: Path
) -> list[list[int]]:
    """Come to one barrier after the other; for each, the members that had not come when it let go.

    Args:
        inside: for every rank the members of its group.
        spellings: for every barrier how each rank says it.
        late: ranks that come later than the others.
        folder: what all ranks see.
    """
    me, missing = smp.rank(), []
    for number, spelled in enumerate(spellings):
        if me in late:
            be_late(late)
        (folder / f"{me} at {number}").touch()
        SPELLINGS[spelled[me]]()
        missing.append([r for r in inside[me] if not (folder / f"{r} at {number}").exists()])
    return missing


def check_all_come(
    smp_world: SmpWorld,
    folder: TmpPath,
    data: st.DataObject,
    world: Topology,
    group: smp.CommGroup,
    spellings: list[str],
) -> None:
    """Nobody leaves before all have come, whichever spelling each rank uses.

    Observed by files, as in test_send_recv: a rank makes its file before it calls, so all files are
    there whenever a barrier that waits lets a rank go, on any backend and at any speed. ``late`` ranks
    exchange messages first, so that one that does not wait is likely to let a rank go too early.
    """
    inside = [members(world, group, rank) for rank in range(world.size)]
    each = st.lists(st.sampled_from(spellings), min_size=world.size, max_size=world.size)
    program = data.draw(st.lists(each, min_size=1, max_size=3), "spellings")
    late = data.draw(some(range(world.size)), "late")
    arguments = inside, program, late, folder.fresh()
    seen = smp_world.run(meet_and_look, *arguments, ranks=world.size, config=parameters(world))
    for rank, missing in enumerate(seen):
        for number, ranks in enumerate(missing):
            assert not ranks, f"rank {rank} left barrier {number} before ranks {ranks} came to it"


def take_turns(order: list[list[int]], spelled: str) -> bool:
    """Come to the barrier once the group before in ``order`` has left it; then tell the next one.

    The first rank of a group tells every rank of the next.
    """
    me = smp.rank()
    turn = next(index for index, ranks in enumerate(order) if me in ranks)
    if turn > 0:
        smp.recv_from(order[turn - 1][0], WORLD_RANK)
    SPELLINGS[spelled]()
    if me == order[turn][0] and turn + 1 < len(order):
        for each in order[turn + 1]:
            smp.send("your turn", each, WORLD_RANK)
    return True


def check_no_other_waits(
    smp_world: SmpWorld, data: st.DataObject, world: Topology, group: smp.CommGroup, spelled: str
) -> None:
    """A group leaves the barrier although the next one cannot come before it has left.

    If the barrier waited for other groups, no rank could ever go on.
    """
    order = data.draw(st.permutations(groups(world, group)), "order")
    assert all(
        smp_world.run(take_turns, order, spelled, ranks=world.size, config=parameters(world))
    )


@requirement("COMM-BARRIER-ALL")
@given(data=st.data(), group=comm_groups)
@on_ranks
def test_nobody_leaves_before_all_have_come(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject, group: smp.CommGroup
) -> None:
    world = data.draw(worlds(smp_world), "world")
    spellings = [f"smp.barrier(smp.{group.name})"]
    check_all_come(smp_world, smp_tmp_path, data, world, group, spellings)


@requirement("COMM-BARRIER-GROUP")
@given(data=st.data(), group=comm_groups)
@on_ranks
def test_other_groups_are_not_waited_for(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup
) -> None:
    world = data.draw(worlds(smp_world), "world")
    check_no_other_waits(smp_world, data, world, group, f"smp.barrier(smp.{group.name})")


@requirement("COMM-BARRIER-DEFAULT")
@given(data=st.data())
@on_ranks
def test_the_default_is_the_world(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    world = data.draw(worlds(smp_world), "world")
    spellings = ["smp.barrier()", "smp.barrier(smp.WORLD)", "smp.barrier(group=smp.WORLD)"]
    check_all_come(smp_world, smp_tmp_path, data, world, smp.CommGroup.WORLD, spellings)


#: mp_barrier and dp_barrier: the group of each, and how it is said.
SHORT = {
    smp.CommGroup.MP_GROUP: "smp.mp_barrier()",
    smp.CommGroup.DP_GROUP: "smp.dp_barrier()",
}


@requirement("COMM-BARRIER-MP-DP")
@given(data=st.data(), group=st.sampled_from(list(SHORT)))
@on_ranks
def test_mp_and_dp_barriers_wait_for_their_group(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject, group: smp.CommGroup
) -> None:
    world = data.draw(worlds(smp_world), "world")
    spellings = [SHORT[group], f"smp.barrier(smp.{group.name})"]
    check_all_come(smp_world, smp_tmp_path, data, world, group, spellings)


@requirement("COMM-BARRIER-MP-DP")
@given(data=st.data(), group=st.sampled_from(list(SHORT)))
@on_ranks
def test_mp_and_dp_barriers_wait_for_no_other(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup
) -> None:
    world = data.draw(worlds(smp_world), "world")
    check_no_other_waits(smp_world, data, world, group, SHORT[group])
