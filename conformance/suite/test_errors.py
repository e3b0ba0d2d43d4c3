"""Properties of wrong calls: the calling rank gets an error, and can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import smp_core.torch as smp
from conformance.cases.draws import (
    UNPICKLABLE,
    Unreadable,
    comm_groups,
    needs,
    on_ranks,
    share,
    sizes,
    unpicklable,
    worlds,
)
from conformance.cases.layout import RANK_TYPES, members, parameters
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from smp_core.errors import PayloadError, RankError

WORLD_RANK = smp.RankType.WORLD_RANK


def use_bad_rank(call: str, rank: int, group: smp.CommGroup, on: int) -> tuple[bool, list[int]]:
    """Call send or recv_from with a wrong partner on rank ``on``, and then allgather on all ranks.

    Returns whether the call raised RankError on this rank, and the gathered ranks.
    """
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


#: Calls with an argument of a wrong type, by name.
MISTYPED: Mapping[str, Callable[[Any], object]] = {
    "group of broadcast": lambda wrong: smp.broadcast("lost", wrong),
    "group of allgather": lambda wrong: smp.allgather("lost", wrong),
    "group of barrier": lambda wrong: smp.barrier(wrong),
    "rank type of send": lambda wrong: smp.send("lost", 1 - smp.rank(), wrong),
    "rank type of recv_from": lambda wrong: smp.recv_from(1 - smp.rank(), wrong),
    "rank of send": lambda wrong: smp.send("lost", wrong, WORLD_RANK),
    "rank of recv_from": lambda wrong: smp.recv_from(wrong, WORLD_RANK),
}
NO_RANKS = (None, "1", 1.0, True, False, [1])
NO_NAMES = (None, "WORLD", 0, WORLD_RANK.value)


def use_bad_type(call: str, wrong: Any, on: int) -> tuple[bool, list[int]]:
    """Make a call of MISTYPED on rank ``on``, and then allgather on all ranks.

    Returns whether the call raised TypeError on this rank, and the gathered ranks.
    """
    refused = False
    if smp.rank() == on:
        try:
            MISTYPED[call](wrong)
        except TypeError:
            refused = True
    return refused, smp.allgather(smp.rank(), smp.WORLD)


@requirement("COMM-ERROR-TYPE")
@pytest.mark.parametrize("call", MISTYPED)
@given(data=st.data(), on=st.integers(0, 1))
@share(0.15)
def test_a_wrong_type_is_refused(
    smp_world: SmpWorld, data: st.DataObject, call: str, on: int
) -> None:
    needs(smp_world, 2)
    other = (smp.WORLD,) if call.startswith("rank type") else (WORLD_RANK,)
    wrong = data.draw(
        st.sampled_from(NO_RANKS if call.startswith("rank of") else (*NO_NAMES, *other)), "wrong"
    )
    seen = smp_world.run(use_bad_type, call, wrong, on, ranks=2)
    assert [refused for refused, _ in seen] == [rank == on for rank in range(2)]
    assert all(gathered == [0, 1] for _, gathered in seen)


def send_unpicklable(call: str, what: str, nested: bool, src: int) -> tuple[bool, Any]:
    """Send an object that cannot be pickled from rank ``src``, and then a good one by the same call.

    Returns whether the first call raised PayloadError on this rank, and the result of the second.
    """
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


def receive_unreadable(call: str, nested: bool, src: int) -> tuple[bool, list[int]]:
    """Send an object that cannot be unpickled from rank ``src``, and then allgather on all ranks.

    Returns whether this rank's call raised PayloadError, and the gathered ranks.
    """
    me, others = smp.rank(), [rank for rank in range(smp.size()) if rank != src]
    bad = [1, {"key": Unreadable(1, 2)}] if nested else Unreadable(1, 2)
    refused = False
    try:
        if call == "allgather":
            smp.allgather(bad if me == src else me, smp.WORLD)
        elif me != src:
            smp.recv_from(src, WORLD_RANK)
        elif call == "broadcast":
            smp.broadcast(bad, smp.WORLD)
        else:
            for other in others:
                smp.send(bad, other, WORLD_RANK)
    except PayloadError:
        refused = True
    return refused, smp.allgather(me, smp.WORLD)


@requirement("COMM-ERROR-UNPICKLE")
@given(
    data=st.data(),
    call=st.sampled_from(["send", "broadcast", "allgather"]),
    nested=st.booleans(),
)
@on_ranks
def test_an_object_that_cannot_be_unpickled_is_an_error_where_it_arrives(
    smp_world: SmpWorld, data: st.DataObject, call: str, nested: bool
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    seen = smp_world.run(receive_unreadable, call, nested, src, ranks=ranks)
    for rank, (refused, gathered) in enumerate(seen):
        # The sender alone need not raise: it may read its own object, or keep the original.
        assert refused or rank == src, (
            f"smp.{call}: rank {rank} took an object that nobody can read"
        )
        assert gathered == list(range(ranks))
