"""Properties of smp.allgather: order, values, and the matching of calls."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given

import smp_core.torch as smp
from conformance.cases.draws import comm_groups, on_ranks, sizes, worlds
from conformance.cases.layout import GROUPS, groups, members, parameters
from conformance.cases.traffic import paddings
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import objects, same
from smp_core.topology import Topology


def gather(sent: list[Any], group: smp.CommGroup) -> list[Any]:
    """Gather the objects of this rank's group."""
    return smp.allgather(sent[smp.rank()], group)


@requirement("COMM-ALLGATHER-ORDER")
@given(data=st.data(), group=comm_groups)
@on_ranks
def test_element_i_comes_from_the_ith_rank(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup
) -> None:
    world = data.draw(worlds(smp_world), "world")
    sent = data.draw(st.lists(st.integers(), min_size=world.size, max_size=world.size), "objects")
    got = smp_world.run(gather, sent, group, ranks=world.size, config=parameters(world))
    assert got == [[sent[each] for each in members(world, group, r)] for r in range(world.size)]


def fill(size: int, rank: int) -> bytes:
    """Make ``size`` bytes that differ in every place from another rank's."""
    pattern = bytes((each + rank) % 251 for each in range(251))
    return (pattern * (size // 251 + 1))[:size]


def gather_uneven(plan: list[Any], large: list[int]) -> list[Any]:
    """Gather the planned objects of all ranks, or ``large[rank]`` bytes in place of one where not 0."""
    rank = smp.rank()
    return smp.allgather(fill(large[rank], rank) if large[rank] else plan[rank], smp.WORLD)


@requirement("COMM-ALLGATHER-VALUE")
@given(data=st.data())
@on_ranks
def test_objects_of_any_type_and_size(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    sent = data.draw(st.lists(objects(), min_size=ranks, max_size=ranks), "objects")
    lengths = st.sampled_from([0, 0, 4096, 200_000])  # below and above one packet of a transport
    large = data.draw(st.lists(lengths, min_size=ranks, max_size=ranks), "large")
    whole = [fill(large[r], r) if large[r] else sent[r] for r in range(ranks)]
    for got in smp_world.run(gather_uneven, sent, large, ranks=ranks):
        assert same(got, whole)


def gather_often(program: list[smp.CommGroup]) -> list[list[Any]]:
    """Call allgather on each group of the program, and return the results."""
    return [smp.allgather((n, smp.rank()), group) for n, group in enumerate(program)]


def gathered(world: Topology, program: list[smp.CommGroup], rank: int) -> list[list[Any]]:
    """The expected results of the program's calls on ``rank``."""
    return [[(n, each) for each in members(world, g, rank)] for n, g in enumerate(program)]


@requirement("COMM-ALLGATHER-REPEATED")
@given(data=st.data(), group=comm_groups, calls=st.integers(2, 6))
@on_ranks
def test_nth_call_meets_nth_call(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup, calls: int
) -> None:
    world = data.draw(worlds(smp_world), "world")
    program = [group] * calls
    got = smp_world.run(gather_often, program, ranks=world.size, config=parameters(world))
    assert got == [gathered(world, program, rank) for rank in range(world.size)]


@requirement("COMM-ALLGATHER-KINDS")
@given(data=st.data(), program=st.lists(st.sampled_from(GROUPS), min_size=2, max_size=8))
@on_ranks
def test_kinds_of_group_do_not_mix(
    smp_world: SmpWorld, data: st.DataObject, program: list[smp.CommGroup]
) -> None:
    # Kinds of groups often have equal members: WORLD and DP without pipeline, MP and PP without tensor
    # parallelism, and all kinds in a world of one.
    world = data.draw(worlds(smp_world), "world")
    got = smp_world.run(gather_often, program, ranks=world.size, config=parameters(world))
    assert got == [gathered(world, program, rank) for rank in range(world.size)]


def gather_in_turn(
    rounds: list[int], order: list[list[int]], group: smp.CommGroup
) -> list[list[Any]]:
    """Gather after the previous group in ``order`` has finished; then tell the next group.

    The first rank of a group sends a message to every rank of the next group.
    """
    rank = smp.rank()
    turn = next(index for index, ranks in enumerate(order) if rank in ranks)
    if turn > 0:
        smp.recv_from(order[turn - 1][0], smp.RankType.WORLD_RANK)
    got = [smp.allgather((n, rank), group) for n in range(rounds[turn])]
    if rank == order[turn][0] and turn + 1 < len(order):
        for each in order[turn + 1]:
            smp.send("your turn", each, smp.RankType.WORLD_RANK)
    return got


@requirement("COMM-ALLGATHER-GROUP")
@given(data=st.data(), group=comm_groups)
@on_ranks
def test_groups_of_a_kind_do_not_wait_for_each_other(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup
) -> None:
    world = data.draw(worlds(smp_world), "world")
    order = data.draw(st.permutations(groups(world, group)), "order")
    rounds = data.draw(
        st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)), "rounds"
    )
    got = smp_world.run(
        gather_in_turn, rounds, order, group, ranks=world.size, config=parameters(world)
    )
    for ranks, count in zip(order, rounds, strict=True):
        for rank in ranks:
            assert got[rank] == [[(n, each) for each in ranks] for n in range(count)]


def gather_and_change(group: smp.CommGroup, padding: int) -> tuple[Any, list[Any]]:
    """Gather, change the own object on every rank, and then change the received objects on every rank.

    Returns the own object and the received ones after the changes of all ranks.
    """
    me = smp.rank()
    own: dict[str, Any] = {"list": [me], "tensor": torch.full((3,), me), "pad": bytes(padding)}
    got = smp.allgather(own, group)
    own["list"].append("owner")
    own["tensor"][0] = -1
    smp.barrier()
    for each in got:
        each["list"].append(f"receiver {me}")
        each["tensor"][1] = 100 + me
    smp.barrier()
    return (own["list"], own["tensor"].tolist()), [(e["list"], e["tensor"].tolist()) for e in got]


@requirement("COMM-ALLGATHER-COPY")
@given(data=st.data(), group=comm_groups, padding=paddings)
@on_ranks
def test_elements_are_copies(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup, padding: int
) -> None:
    world = data.draw(worlds(smp_world), "world")
    seen = smp_world.run(
        gather_and_change, group, padding, ranks=world.size, config=parameters(world)
    )
    for rank, (own, got) in enumerate(seen):
        assert own == ([rank, "owner"], [-1, rank, rank])
        assert got == [
            ([each, f"receiver {rank}"], [each, 100 + rank, each])
            for each in members(world, group, rank)
        ]
