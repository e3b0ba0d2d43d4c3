"""Properties of smp.broadcast, which only the root calls; the other ranks call recv_from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given

import smp_core.torch as smp
from conformance.cases.draws import be_late, comm_groups, on_ranks, sizes, some, worlds
from conformance.cases.layout import GROUPS, RANK_TYPES, groups, members, parameters
from conformance.cases.traffic import paddings
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld, TmpPath
from pytest_smp.strategies import objects, same
from smp_core.topology import Topology

WORLD_RANK = smp.RankType.WORLD_RANK


@st.composite
def roots(draw: st.DrawFn, world: Topology, group: smp.CommGroup) -> list[int]:
    """Draw a root for every group of the kind; return the world rank of its group's root for each rank."""
    drawn = {ranks[0]: draw(st.sampled_from(ranks)) for ranks in groups(world, group)}
    return [drawn[members(world, group, rank)[0]] for rank in range(world.size)]


def pass_on(world: Topology, group: smp.CommGroup, roots: list[int], sent: list[Any]) -> Any:
    """Broadcast in every group of the kind at once, and return the object that this rank receives."""
    me = smp.rank()
    root = roots[me]
    if me == root:
        smp.broadcast(sent[me], group)
        return None
    return smp.recv_from(members(world, group, me).index(root), RANK_TYPES[group])


@requirement("COMM-BROADCAST-VALUE")
@given(data=st.data(), group=comm_groups)
@on_ranks
def test_every_receiver_gets_the_object(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup
) -> None:
    world = data.draw(worlds(smp_world), "world")
    root = data.draw(roots(world, group), "roots")
    obj = data.draw(objects(), "object")
    sent = [(rank, obj) for rank in range(world.size)]  # each root's differs
    got = smp_world.run(
        pass_on, world, group, root, sent, ranks=world.size, config=parameters(world)
    )
    for rank, each in enumerate(got):
        assert each is None if rank == root[rank] else same(each, sent[root[rank]])


def broadcast_and_tell(world: Topology, group: smp.CommGroup, root: int, first: bool) -> Any:
    """Broadcast from the root to its group, and send another object to every rank outside the group.

    ``first`` says whether the broadcast comes before the sends. Returns the first object that this rank
    receives from the root.
    """
    me, inside = smp.rank(), members(world, group, root)
    if me != root:
        return smp.recv_from(root, WORLD_RANK)
    if first:
        smp.broadcast("inside", group)
    for each in range(world.size):
        if each not in inside:
            smp.send("outside", each, WORLD_RANK)
    if not first:
        smp.broadcast("inside", group)
    return None


@requirement("COMM-BROADCAST-GROUP")
@given(data=st.data(), group=st.sampled_from(GROUPS[1:]), first=st.booleans())
@on_ranks
def test_other_groups_are_not_reached(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup, first: bool
) -> None:
    world = data.draw(worlds(smp_world), "world")
    root = data.draw(st.integers(0, world.size - 1), "root")
    got = smp_world.run(
        broadcast_and_tell, world, group, root, first, ranks=world.size, config=parameters(world)
    )
    for rank, each in enumerate(got):
        if rank != root:
            assert each == ("inside" if rank in members(world, group, root) else "outside")


def follow(world: Topology, root: int, program: list[Any]) -> list[int]:
    """Run a program of the root: each step is a broadcast on a group, or a send to a rank.

    Returns the numbers of the steps that reached this rank, in the order of receiving.
    """
    me, got = smp.rank(), []
    for number, step in enumerate(program):
        if isinstance(step, smp.CommGroup):
            if me == root:
                smp.broadcast(number, step)
            elif me in members(world, step, root):
                src = members(world, step, me).index(root)
                got.append(smp.recv_from(src, RANK_TYPES[step]))
        elif me == root:
            smp.send(number, step, WORLD_RANK)
        elif me == step:
            got.append(smp.recv_from(root, WORLD_RANK))
    return got


@requirement("COMM-BROADCAST-ORDER")
@given(data=st.data())
@on_ranks
def test_broadcasts_and_sends_keep_their_order(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    root = data.draw(st.integers(0, world.size - 1), "root")
    others = [rank for rank in range(world.size) if rank != root]
    step = st.one_of(comm_groups, *([st.sampled_from(others)] if others else []))
    program = data.draw(st.lists(step, min_size=2, max_size=8), "program")
    got = smp_world.run(follow, world, root, program, ranks=world.size, config=parameters(world))
    for rank in others:
        reached = [
            number
            for number, step in enumerate(program)
            if (
                rank in members(world, step, root)
                if isinstance(step, smp.CommGroup)
                else step == rank
            )
        ]
        assert got[rank] == reached


def broadcast_and_change(root: int, padding: int) -> list[Any]:
    """Broadcast an object and change it on every rank.

    Returns this rank's object after the changes of all ranks.
    """
    me = smp.rank()
    obj: dict[str, Any]
    if me == root:
        obj = {"list": [], "tensor": torch.zeros(2 + padding, dtype=torch.int64)}
        smp.broadcast(obj, smp.WORLD)
    else:
        obj = smp.recv_from(root, WORLD_RANK)
    obj["list"].append(me)
    obj["tensor"][0] += me + 1
    smp.barrier()
    return [obj["list"], obj["tensor"][:2].tolist()]


@requirement("COMM-BROADCAST-COPY")
@given(data=st.data(), padding=paddings)
@on_ranks
def test_receivers_hold_objects_of_their_own(
    smp_world: SmpWorld, data: st.DataObject, padding: int
) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    root = data.draw(st.integers(0, ranks - 1), "root")
    seen = smp_world.run(broadcast_and_change, root, padding, ranks=ranks)
    assert seen == [[[rank], [rank + 1, 0]] for rank in range(ranks)]


def broadcast_and_look(root: int, count: int, late: list[int], folder: Path) -> list[list[int]]:
    """Broadcast ``count`` times, late receivers last.

    Returns, on the root, the ranks that had not come to their recv_from when each broadcast returned.
    """
    me, missing = smp.rank(), []
    for number in range(count):
        if me in late:
            be_late(late)
        if me != root:
            (folder / f"{me} receives {number}").touch()
            smp.recv_from(root, WORLD_RANK)
        else:
            smp.broadcast(number, smp.WORLD)
            others = [rank for rank in range(smp.size()) if rank != root]
            missing.append([r for r in others if not (folder / f"{r} receives {number}").exists()])
    return missing


@requirement("COMM-BROADCAST-SYNC")
@given(data=st.data(), count=st.integers(1, 3))
@on_ranks
def test_broadcast_returns_after_all_receives_were_called(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject, count: int
) -> None:
    """Files show who has come, as in test_send_recv.

    A receiver makes its file before its call of recv_from, so all files exist when a correct broadcast
    returns, on any backend and at any speed. The ``late`` receivers exchange messages first, so a broadcast
    that does not wait, or waits for some receivers only, is likely to return too early.
    """
    ranks = data.draw(sizes(smp_world), "ranks")
    root = data.draw(st.integers(0, ranks - 1), "root")
    receivers = [rank for rank in range(ranks) if rank != root]
    late = data.draw(some(receivers), "late")
    seen = smp_world.run(broadcast_and_look, root, count, late, smp_tmp_path.fresh(), ranks=ranks)
    for number, missing in enumerate(seen[root]):
        assert not missing, f"broadcast {number} returned before ranks {missing} called recv_from"


def broadcast_alone(alone: list[smp.CommGroup]) -> bool:
    """Broadcast in groups of one rank, and return True."""
    for group in alone:
        smp.broadcast("nobody hears this", group)
    return True


@requirement("COMM-BROADCAST-ALONE")
@given(data=st.data())
@on_ranks
def test_a_group_of_one_has_no_receiver(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    alone = [group for group in GROUPS if members(world, group, 0) == [0]]
    assert all(smp_world.run(broadcast_alone, alone, ranks=world.size, config=parameters(world)))
