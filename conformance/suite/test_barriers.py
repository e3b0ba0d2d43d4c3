"""Properties of barriers: the ranks that each rank waits for."""

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

#: The ways to call a barrier, by their text. Ranks get the text, because it can be pickled.
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
    """Enter barriers one after the other; return the members that were missing when each one returned.

    Args:
        inside: the members of each rank's group.
        spellings: the text of each rank's call, for every barrier.
        late: ranks that enter later than the others.
        folder: a folder that all ranks see.
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
    """Check that no rank leaves a barrier before all have entered, for any spelling on each rank.

    Files show who has entered, as in test_send_recv. Each rank makes its file before its call, so all
    files exist when a correct barrier returns, on any backend and at any speed. The ``late`` ranks exchange
    messages first, so a barrier that does not wait is likely to return too early.
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
    """Enter the barrier after the previous group in ``order`` has left; then tell the next group.

    The first rank of a group sends a message to every rank of the next group. Returns True.
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
    """Check that a group leaves its barrier while other groups have not entered.

    Each group enters after the previous one has left, so a barrier that waited for other groups would
    deadlock.
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


#: The calls of mp_barrier and dp_barrier, by their groups.
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
