"""Errors that the API promises: in the rank that makes the wrong call, which can go on."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

import smp_core.torch as smp
from conformance.draws import UNPICKLABLE, comm_groups, on_ranks, sizes, unpicklable, worlds
from conformance.layout import RANK_TYPES, members, parameters
from conformance.requirements import requirement
from pytest_smp.proxies import SmpWorld
from smp_core.errors import PayloadError, RankError

WORLD_RANK = smp.RankType.WORLD_RANK


def use_bad_rank(call: str, rank: int, group: smp.CommGroup, on: int) -> tuple[bool, list[int]]:
    """Whether the call is refused on rank ``on``, and what all ranks gather afterwards."""
    refused = False
    if smp.rank() == on:
        try:
            if call == "send":
                smp.send("lost", rank, RANK_TYPES[group])
            else:
                smp.recv_from(rank, RANK_TYPES[group])
        except RankError:
            refused = True
    return refused, smp.allgather(smp.rank(), smp.WORLD)


@requirement("COMM-ERROR-RANK")
@given(data=st.data(), group=comm_groups, call=st.sampled_from(["send", "recv_from"]))
@on_ranks
def test_a_rank_out_of_range_is_refused(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup, call: str
) -> None:
    world = data.draw(worlds(smp_world), "world")
    on = data.draw(st.integers(0, world.size - 1), "on")
    size = len(members(world, group, on))
    rank = data.draw(st.integers(size, 9) | st.integers(-9, -1), "rank")
    seen = smp_world.run(
        use_bad_rank, call, rank, group, on, ranks=world.size, config=parameters(world)
    )
    assert [refused for refused, _ in seen] == [rank == on for rank in range(world.size)]
    assert all(gathered == list(range(world.size)) for _, gathered in seen)


@requirement("COMM-ERROR-SELF")
@given(data=st.data(), group=comm_groups, call=st.sampled_from(["send", "recv_from"]))
@on_ranks
def test_oneself_is_refused(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup, call: str
) -> None:
    world = data.draw(worlds(smp_world), "world")
    on = data.draw(st.integers(0, world.size - 1), "on")
    rank = members(world, group, on).index(on)
    seen = smp_world.run(
        use_bad_rank, call, rank, group, on, ranks=world.size, config=parameters(world)
    )
    assert [refused for refused, _ in seen] == [rank == on for rank in range(world.size)]
    assert all(gathered == list(range(world.size)) for _, gathered in seen)


def send_unpicklable(call: str, what: str, nested: bool, src: int) -> tuple[bool, Any]:
    """Whether the bad object is refused on rank ``src``, and what a repeated call then gives."""
    me, others = smp.rank(), [rank for rank in range(smp.size()) if rank != smp.rank()]
    refused = False
    if me == src:
        bad = [1, {"key": unpicklable(what)}] if nested else unpicklable(what)
        try:
            if call == "send":
                smp.send(bad, others[0], WORLD_RANK)
            elif call == "broadcast":
                smp.broadcast(bad, smp.WORLD)
            else:
                smp.allgather(bad, smp.WORLD)
        except PayloadError:
            refused = True
    if call == "allgather":
        return refused, smp.allgather(me, smp.WORLD)
    if me == src:
        if call == "broadcast":
            smp.broadcast(me, smp.WORLD)
        else:
            for each in others:
                smp.send(me, each, WORLD_RANK)
        return refused, None
    return refused, smp.recv_from(src, WORLD_RANK)


@requirement("COMM-ERROR-PICKLE")
@given(
    data=st.data(),
    call=st.sampled_from(["send", "broadcast", "allgather"]),
    what=st.sampled_from(UNPICKLABLE),
    nested=st.booleans(),
)
@on_ranks
def test_an_unpicklable_object_is_refused(
    smp_world: SmpWorld, data: st.DataObject, call: str, what: str, nested: bool
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    seen = smp_world.run(send_unpicklable, call, what, nested, src, ranks=ranks)
    assert [refused for refused, _ in seen] == [rank == src for rank in range(ranks)]
    for rank, (_, got) in enumerate(seen):
        if call == "allgather":
            assert got == list(range(ranks))
        elif rank != src:
            assert got == src
