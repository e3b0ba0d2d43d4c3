"""Properties of smp.send and smp.recv_from: values, order, rank types, and the moment send returns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import smp_core.torch as smp
from conformance.cases.draws import be_late, needs, on_ranks, pairs, sizes, worlds
from conformance.cases.layout import GROUPS, RANK_TYPES, members, parameters
from conformance.cases.traffic import paddings
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld, TmpPath
from pytest_smp.strategies import TensorSpec, objects, same, tensors
from pytest_smp.strategies.numbers import PICKLABLE
from smp_core.topology import Topology

WORLD_RANK = smp.RankType.WORLD_RANK


class TypedMessage(NamedTuple):
    """One send and its recv_from; each side names the other rank by its own choice of rank type."""

    src: int
    dest: int
    sent_as: smp.CommGroup = smp.CommGroup.WORLD
    received_as: smp.CommGroup = smp.CommGroup.WORLD


def walk(world: Topology, program: list[TypedMessage], sent: list[Any]) -> list[Any]:
    """Send and receive this rank's messages of a program; return the received objects in order.

    All ranks follow the same order, so the synchronous calls cannot wait in a circle.
    """
    me, got = smp.rank(), []
    for message, obj in zip(program, sent, strict=True):
        if me == message.src:
            dest = members(world, message.sent_as, me).index(message.dest)
            smp.send(obj, dest, RANK_TYPES[message.sent_as])
        elif me == message.dest:
            src = members(world, message.received_as, me).index(message.src)
            got.append(smp.recv_from(src, RANK_TYPES[message.received_as]))
    return got


def check_walk(
    smp_world: SmpWorld, world: Topology, program: list[TypedMessage], sent: list[Any]
) -> None:
    """Run a program, and check that every rank receives its objects in the program's order."""
    got = smp_world.run(walk, world, program, sent, ranks=world.size, config=parameters(world))
    for rank in range(world.size):
        to_rank = [obj for each, obj in zip(program, sent, strict=True) if each.dest == rank]
        assert same(got[rank], to_rank)


@requirement("COMM-SEND-VALUE")
@given(data=st.data(), sent=st.lists(objects(), min_size=1, max_size=4))
@on_ranks
def test_values_arrive_as_they_are(
    smp_world: SmpWorld, data: st.DataObject, sent: list[Any]
) -> None:
    world = data.draw(worlds(smp_world, least=2), "world")
    src, dest = data.draw(pairs(world.size), "src, dest")
    check_walk(smp_world, world, [TypedMessage(src, dest)] * len(sent), sent)


#: Values of every built-in type, with pairs that are easily mistaken for each other.
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        ...,
        0,
        1,
        -1,
        2**70,
        0.0,
        -0.0,
        1.0,
        math.inf,
        1j,
        "",
        "\u00fc",
        b"",
        b"\0",
    ),
    *((), (1,), [], [[]], {}, {1: "int", "1": "str"}, set(), {1}, frozenset(), range(3), int),
]


@requirement("COMM-SEND-VALUE")
@pytest.mark.parametrize("nested", [False, True], ids=["each", "in one list"])
def test_values_of_every_type_arrive(smp_world: SmpWorld, nested: bool) -> None:
    needs(smp_world, 2)
    sent: list[Any] = [VALUES] if nested else VALUES
    check_walk(smp_world, Topology(2), [TypedMessage(1, 0)] * len(sent), sent)


def send_tensors(specs: list[TensorSpec], src: int, dest: int) -> Any:
    """Send the tensors that the recipes make on rank ``src``; return the received ones on ``dest``."""
    if smp.rank() == src:
        smp.send([spec.make(src, smp.size()) for spec in specs], dest, WORLD_RANK)
    return smp.recv_from(src, WORLD_RANK) if smp.rank() == dest else None


@requirement("COMM-SEND-VALUE")
@given(
    data=st.data(),
    specs=st.lists(tensors(dtype=st.sampled_from(PICKLABLE)), min_size=1, max_size=3),
)
@on_ranks
def test_tensors_arrive_as_they_are(
    smp_world: SmpWorld, data: st.DataObject, specs: list[TensorSpec]
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    got = smp_world.run(send_tensors, specs, src, dest, ranks=ranks)[dest]
    assert same(got, [spec.make(src, ranks) for spec in specs])


@requirement("COMM-SEND-ORDER")
@given(data=st.data(), count=st.integers(2, 8))
@on_ranks
def test_messages_of_a_pair_keep_their_order(
    smp_world: SmpWorld, data: st.DataObject, count: int
) -> None:
    world = data.draw(worlds(smp_world, least=2), "world")
    src, dest = data.draw(pairs(world.size), "src, dest")
    back = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), "back")
    program = [TypedMessage(dest, src) if turned else TypedMessage(src, dest) for turned in back]
    check_walk(smp_world, world, program, list(range(count)))


def fan_in(dest: int, order: list[int]) -> list[int]:
    """Send from all ranks to ``dest``, which receives in the given order of sources."""
    if smp.rank() != dest:
        smp.send(smp.rank(), dest, WORLD_RANK)
        return []
    return [smp.recv_from(src, WORLD_RANK) for src in order]


@requirement("COMM-RECV-SOURCE")
@given(data=st.data())
@on_ranks
def test_the_named_source_is_received_from(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    dest = data.draw(st.integers(0, ranks - 1), "dest")
    others = [rank for rank in range(ranks) if rank != dest]
    order = data.draw(st.permutations(others), "order")
    assert smp_world.run(fan_in, dest, order, ranks=ranks)[dest] == order


@st.composite
def messages(draw: st.DrawFn, world: Topology, mixed: bool) -> TypedMessage:
    """Draw a message between two ranks of a drawn group; with ``mixed`` each side draws its rank type."""
    group = draw(st.sampled_from([g for g in GROUPS if len(members(world, g, 0)) > 1]))
    src = draw(st.integers(0, world.size - 1))
    dest = draw(st.sampled_from([each for each in members(world, group, src) if each != src]))
    if not mixed:
        return TypedMessage(src, dest, group, group)
    names = [each for each in GROUPS if dest in members(world, each, src)]
    return TypedMessage(src, dest, draw(st.sampled_from(names)), draw(st.sampled_from(names)))


def programs(world: Topology, mixed: bool) -> st.SearchStrategy[list[TypedMessage]]:
    """Draw one to eight messages; each number is equally likely."""
    lists = [st.lists(messages(world, mixed), min_size=n, max_size=n) for n in range(1, 9)]
    return st.one_of(lists)


@requirement("COMM-RANK-TYPE")
@given(data=st.data())
@on_ranks
def test_ranks_count_in_the_group_of_their_type(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world, least=2), "world")
    program = data.draw(programs(world, mixed=False), "program")
    check_walk(smp_world, world, program, list(range(len(program))))


@requirement("COMM-RANK-TYPE-MIXED")
@given(data=st.data())
@on_ranks
def test_rank_types_only_name_the_partner(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world, least=2), "world")
    program = data.draw(programs(world, mixed=True), "program")
    check_walk(smp_world, world, program, list(range(len(program))))


def send_and_change(src: int, dest: int, padding: int) -> Any:
    """Send an object, and change it on both sides afterwards.

    Returns, on each side, the own object after the other side's change.
    """
    if smp.rank() == src:
        obj: dict[str, Any] = {"list": [1], "tensor": torch.arange(3), "pad": bytes(padding)}
        smp.send(obj, dest, WORLD_RANK)
        obj["list"].append("sender")
        obj["tensor"][0] = 10
        smp.send("changed", dest, WORLD_RANK)
        smp.recv_from(dest, WORLD_RANK)
        return obj["list"], obj["tensor"].tolist()
    if smp.rank() == dest:
        got = smp.recv_from(src, WORLD_RANK)
        smp.recv_from(src, WORLD_RANK)
        seen = list(got["list"]), got["tensor"].tolist()
        got["list"].append("receiver")
        got["tensor"][1] = 20
        smp.send("changed", src, WORLD_RANK)
        return seen
    return None


@requirement("COMM-SEND-COPY")
@given(data=st.data(), padding=paddings)
@on_ranks
def test_objects_are_copied_when_sent(
    smp_world: SmpWorld, data: st.DataObject, padding: int
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    seen = smp_world.run(send_and_change, src, dest, padding, ranks=ranks)
    assert seen[dest] == ([1], [0, 1, 2])
    assert seen[src] == ([1, "sender"], [10, 1, 2])


def send_and_look(src: int, dest: int, count: int, late: list[int], folder: Path) -> list[bool]:
    """Send ``count`` objects from ``src`` to ``dest``, the ``late`` ranks last.

    Returns, on ``src``, whether the destination had come to its recv_from when each send returned.
    """
    me, seen = smp.rank(), []
    for number in range(count):
        if me in late:
            be_late(late)
        if me == dest:
            (folder / f"receives {number}").touch()
            smp.recv_from(src, WORLD_RANK)
        elif me == src:
            smp.send(number, dest, WORLD_RANK)
            seen.append((folder / f"receives {number}").exists())
    return seen


@requirement("COMM-SEND-SYNC")
@given(data=st.data(), count=st.integers(1, 3))
@on_ranks
def test_send_returns_after_the_receive_was_called(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject, count: int
) -> None:
    """A file shows whether the destination has come.

    Results of calls cannot show that, because a program with named partners computes the same whether or not
    a send waits. The destination makes the file before its call of recv_from, so the file exists when a
    correct send returns, on any backend and at any speed. A conforming backend never fails here. A send
    that does not wait fails if the sender looks before the destination comes, and the messages that the
    ``late`` ranks exchange first make that likely. All ranks see the folder of smp_tmp_path.
    """
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    bystanders = [rank for rank in range(ranks) if rank not in (src, dest)]
    late = [dest, *bystanders] if bystanders else []
    seen = smp_world.run(send_and_look, src, dest, count, late, smp_tmp_path.fresh(), ranks=ranks)
    assert seen[src] == [True] * count


def call_by_keyword(keywords: bool) -> list[Any]:
    """Make every call that takes arguments, between ranks 0 and 1, by position or by keyword."""
    if not keywords:
        if smp.rank() == 0:
            smp.send("sent", 1, WORLD_RANK)
            smp.broadcast("broadcast", smp.WORLD)
            got = []
        else:
            got = [smp.recv_from(0, WORLD_RANK), smp.recv_from(0, WORLD_RANK)]
        smp.barrier(smp.WORLD)
        return [*got, *smp.allgather(smp.rank(), smp.WORLD)]
    if smp.rank() == 0:
        smp.send(obj="sent", dest_rank=1, rank_type=WORLD_RANK)
        smp.broadcast(obj="broadcast", group=smp.WORLD)
        got = []
    else:
        got = [smp.recv_from(src_rank=0, rank_type=WORLD_RANK) for _ in range(2)]
    smp.barrier(group=smp.WORLD)
    return [*got, *smp.allgather(obj=smp.rank(), group=smp.WORLD)]


@requirement("COMM-KEYWORDS")
@pytest.mark.parametrize("keywords", [False, True], ids=["positions", "keywords"])
def test_arguments_by_position_and_keyword(smp_world: SmpWorld, keywords: bool) -> None:
    needs(smp_world, 2)
    seen = smp_world.run(call_by_keyword, keywords, ranks=2)
    assert seen == [[0, 1], ["sent", "broadcast", 0, 1]]
