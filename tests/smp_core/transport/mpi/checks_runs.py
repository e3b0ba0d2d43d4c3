"""Runs that end in the midst of things, and several worlds in one process, on 8 ranks of MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from smp_core.errors import Cancelled
from smp_core.transport.protocols import Group


def works(fabric: Any, rank: int, size: int) -> None:
    """A round of everything in this world: nothing of an earlier run turns up in it."""
    group = Group("WORLD", tuple(range(size)))
    for count in (1, 30_000):
        value = torch.full((count,), float(rank))
        dist.all_reduce(value)
        assert (value == sum(range(size))).all()
        dist.broadcast(value.fill_(rank + 0.5), size - 1)
        assert (value == size - 0.5).all()
        got = torch.zeros(count)
        work = dist.isend(torch.full((count,), 100.0 + rank), (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        assert (got == 100 + (rank - 1) % size).all()
        work.wait()
    assert fabric.objects.allgather(("mine", rank), group) == [("mine", r) for r in range(size)]
    if rank == 0:
        fabric.objects.send("first", 1)
    if rank == 1:
        assert fabric.objects.recv_from(0) == "first"


def check_a_run_that_was_ended_leaves_nothing(world: Any) -> None:
    """Rank 7 never comes: the others wait in calls of every kind, short and long, when the run
    ends.
    """
    me, size, fabric = world.rank, world.size, world.fabric
    for count in (1, 60_000):
        for stuck in range(5):
            if me != 7:
                value = torch.full((count,), -1000.0)
                for _ in range(2):  # in flight, and never waited for
                    dist.all_reduce(value.clone(), async_op=True)
                    dist.isend(value, 7)
                    dist.irecv(value.clone(), 7)
                world.stop_after = world.asked + 3 + me
                calls: list[Callable[[], Any]] = [
                    lambda: dist.all_reduce(value),  # noqa: B023
                    lambda: dist.recv(value, 7),  # noqa: B023
                    lambda: dist.send(value, 7),  # noqa: B023
                    lambda: fabric.objects.send("stale" * count, 7),  # noqa: B023
                    lambda: fabric.objects.allgather("stale" * count, world.group),  # noqa: B023
                ]
                with pytest.raises(Cancelled):
                    calls[stuck]()
            else:
                world.stop_after = world.asked + 1
            assert fabric.leave() == []
            world.stop_after = None
            if stuck % 2:  # the same world serves again, or is formed anew
                fabric.close()
                fabric = world.fabric = world.form(size)
            fabric.enter()
            works(fabric, me, size)


def check_worlds_of_several_sizes_in_turn(world: Any) -> None:
    """The other ranks do nothing, not even MPI, meanwhile."""
    me, whole = world.rank, world.fabric
    whole.leave()
    sizes = (3, 1, 4, 2)
    fabrics = {size: world.form(size) for size in sizes}
    for _ in range(3):
        for size in sizes:
            if me < size:
                fabrics[size].enter()
                assert dist.get_world_size() == size
                if size > 1:
                    works(fabrics[size], me, size)
                pair = dist.new_group([0])
                left = fabrics[size].leave()
                assert len(left) == (1 if me == 0 else 0), left
                assert pair is not None
                assert not dist.is_initialized()
        whole.enter()
        assert dist.get_world_size() == world.size
        works(whole, me, world.size)
        whole.leave()
    for size in sizes:
        if me < size:
            fabrics[size].close()
    whole.enter()


def check_groups_left_behind_are_told_and_destroyed(world: Any) -> None:
    me = world.rank
    group = dist.new_group([2, 3])
    world.fabric.process_group(Group(f"MINE{me}", (me,)))  # ours: not a word
    left = world.fabric.leave()
    assert len(left) == (me in (2, 3))
    assert all("[2, 3]" in line for line in left)
    world.fabric.enter()
    assert len(dist.distributed_c10d._world.pg_map) == 1
    works(world.fabric, me, world.size)
    assert group is not None


def check_the_default_group_destroyed_by_a_body(world: Any) -> None:
    me, size = world.rank, world.size
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("nccl")
    works(world.fabric, me, size)
    dist.destroy_process_group()
    assert world.fabric.leave() == []
    world.fabric.enter()
    works(world.fabric, me, size)


def check_a_body_joins_the_ranks_that_are_there(world: Any) -> None:
    me, size = world.rank, world.size
    world.fabric.leave()
    world.fabric.close()
    fabric = world.fabric = world.form(size)
    for _ in range(2):  # the first run makes the groups
        fabric.enter()
        dist.init_process_group("gloo")
        works(fabric, me, size)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        dist.destroy_process_group()
        assert fabric.leave() == []
    fabric.enter()
    works(fabric, me, size)


def check_what_a_rank_left_in_flight_reaches_the_others(world: Any) -> None:
    """Rank 0 does not wait, and leaves; a long all_reduce takes two rounds."""
    me, size = world.rank, world.size
    for count in (5, 200_000):
        value = torch.full((count,), float(me))
        work = dist.all_reduce(value, async_op=True)
        if me:
            work.wait()
            assert (value == 28).all()
        world.fabric.leave()
        if me == 0:
            time.sleep(0.05)
        world.fabric.enter()
    works(world.fabric, me, size)
