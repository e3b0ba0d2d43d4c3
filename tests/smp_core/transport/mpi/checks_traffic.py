"""Point-to-point, asynchronous handles, groups and errors on 8 ranks of MPI."""

from __future__ import annotations

import datetime
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp_core.errors import (
    ArgumentError,
    CollectiveMismatchError,
    NotInitializedError,
    RankError,
    UnsupportedError,
)
from smp_core.transport.mpi import messenger
from smp_core.transport.protocols import Group

Tensor = torch.Tensor


def ones(count: int, value: float = 1.0) -> Tensor:
    return torch.full((count,), float(value))


def check_handles_in_any_order_on_several_groups(world: Any) -> None:
    """Each rank waits in an order of its own, for short and long calls in flight together."""
    me, size = world.rank, world.size
    evens = dist.new_group([6, 0, 4, 2], sort_ranks=False)
    odds = dist.new_group([1, 3, 5, 7])
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([7, 6, 5, 4], sort_ranks=False)]
    mine, half = (odds if me % 2 else evens), halves[me // 4]
    works: list[tuple[Any, Tensor, Tensor]] = []
    for number, count in enumerate((1, 40_000, 3, 9_000)):
        for group, members in (
            (dist.group.WORLD, range(size)),
            (mine, range(me % 2, size, 2)),
            (half, range(me // 4 * 4, me // 4 * 4 + 4)),
        ):
            value = torch.arange(float(count)) % 97 + 10 * me + number
            expected = sum(torch.arange(float(count)) % 97 + 10 * r + number for r in members)
            works.append((dist.all_reduce(value, group=group, async_op=True), value, expected))
    order = torch.randperm(len(works), generator=torch.Generator().manual_seed(me)).tolist()
    for at in order:
        work, value, expected = works[at]
        work.wait()
        assert work.is_completed()
        assert torch.equal(value, expected), at
        work.wait()
    for group in (mine, half):
        dist.destroy_process_group(group)


def check_a_handle(world: Any) -> None:
    me = world.rank
    value = ones(3, me)
    work = dist.all_reduce(value, async_op=True)
    future = work.get_future()
    assert future.done()
    assert future.value()[0] is value
    assert value.tolist() == [28.0] * 3
    work = dist.broadcast(ones(2), 3, async_op=True)
    while not work.is_completed():
        pass
    assert work.is_success()
    assert work.exception() is None
    output = ones(2)
    work = dist.all_reduce(output, async_op=True)
    assert work.result()[0] is output
    if me == 0:
        never = dist.irecv(ones(1), 1, tag=99)
        assert not never.is_completed()
        with pytest.raises(dist.DistBackendError, match=r"recv was not done after 0\.05 s"):
            never.wait(datetime.timedelta(seconds=0.05))


def check_messages_by_tag_and_order(world: Any) -> None:
    me, size = world.rank, world.size
    right, left = (me + 1) % size, (me - 1) % size
    tags = (3, 2**31 - 1, 0, 3)
    sends = [dist.isend(ones(at + 1, 10 * me + at), right, tag=tag) for at, tag in enumerate(tags)]
    for at in (2, 1, 0, 3):  # of tag 3 in the order of sending
        got = ones(at + 1, -1)
        assert dist.recv(got, left, tag=tags[at]) == left
        assert got.tolist() == [10 * left + at] * (at + 1)
    for send in reversed(sends):
        send.wait()


def check_a_send_is_done_when_it_was_taken(world: Any) -> None:
    me = world.rank
    work = dist.isend(ones(1, 5), 1) if me == 0 else None
    dist.barrier()
    dist.barrier()
    if work is not None:
        assert not work.is_completed()
    dist.barrier()
    if me == 1:
        got = ones(1)
        dist.recv(got, 0)
        assert got.item() == 5
    if work is not None:
        work.wait()


def check_from_any_source(world: Any) -> None:
    me, size = world.rank, world.size
    group = dist.new_group([5, 2, 7, 0], sort_ranks=False)
    if me == 2:
        seen: dict[int, list[float]] = {}
        for _ in range(6):
            got = ones(1)
            seen.setdefault(dist.recv(got, group=group, tag=4), []).append(got.item())
        assert seen == {5: [50.0, 51.0], 7: [70.0, 71.0], 0: [0.0, 1.0]}
    elif me in (5, 7, 0):
        for at in range(2):
            dist.send(ones(1, 10 * me + at), 2, group=group, tag=4)
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)
    if me == 3:
        values = [ones(1) for _ in range(size - 1)]
        works = [dist.irecv(value) for value in values]
        sources = []
        for work, value in zip(works, values, strict=True):
            work.wait()
            assert value.item() == work.source_rank()
            sources.append(value.item())
        assert sorted(sources) == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    else:
        dist.send(ones(1, me), 3)


def check_to_itself_and_batches(world: Any) -> None:
    me, size = world.rank, world.size
    for count in (3, 30_000):
        got = ones(count)
        receive = dist.irecv(got, me)
        value = ones(count, me)
        send = dist.isend(value, me)
        value.fill_(-1)
        receive.wait()
        send.wait()
        assert (got == me).all()
    inputs = [ones(rank + 1, 10 * me + rank) for rank in range(size)]
    outputs = [ones(me + 1, -1) for _ in range(size)]
    operations = [dist.P2POp(dist.isend, inputs[rank], rank) for rank in range(size) if rank != me]
    operations += [
        dist.P2POp(dist.irecv, outputs[rank], rank) for rank in range(size) if rank != me
    ]
    for work in reversed(dist.batch_isend_irecv(operations)):
        work.wait()
    for rank in range(size):
        assert outputs[rank].tolist() == [-1 if rank == me else 10 * rank + me] * (me + 1)


def check_views_are_sent_and_received(world: Any) -> None:
    me, size = world.rank, world.size
    block = torch.arange(36.0).view(6, 6) + 100 * me
    work = dist.isend(block[1:4, ::2], (me + 1) % size)
    output = torch.zeros(6, 6)
    dist.recv(output.T[1:4, ::2], (me - 1) % size)
    work.wait()
    expected = torch.zeros(6, 6)
    expected.T[1:4, ::2] = (torch.arange(36.0).view(6, 6) + 100 * ((me - 1) % size))[1:4, ::2]
    assert torch.equal(output, expected)


def check_long_messages_in_pieces(world: Any) -> None:
    """MPI counts in 32 bits: pieces of 1,000 bytes stand for those of 2**30."""
    me, size = world.rank, world.size
    before = messenger.LARGEST
    messenger.LARGEST = 1000
    try:
        edge = messenger.INLINE
        for count in (edge - 70, edge - 30, edge, 16_999, 17_000, 17_001, 100_003):
            generator = torch.Generator().manual_seed(count)
            base = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
            work = dist.isend(base + me, (me + 1) % size)
            later = dist.isend(ones(1, me), (me + 1) % size)
            got = torch.empty_like(base)
            dist.recv(got, (me - 1) % size)
            assert torch.equal(got, base + (me - 1) % size), count
            last = ones(1)
            dist.recv(last, (me - 1) % size)
            assert last.item() == (me - 1) % size
            work.wait()
            later.wait()
            value = (base % 5).float() + me
            dist.all_reduce(value)
            assert torch.equal(value, (base % 5).float() * size + 28)
    finally:
        messenger.LARGEST = before


def check_groups_of_any_ranks(world: Any) -> None:
    me, size = world.rank, world.size
    for members in ([3, 1], [7, 0, 5], [2], [4, 6, 1, 3, 0], [*range(size)][::-1]):
        group = dist.new_group(members, sort_ranks=False)
        if me not in members:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            value = ones(1, me)
            with pytest.warns(UserWarning, match="does not belong to the given group"):
                assert dist.all_reduce(value, group=group, async_op=True) is None
            assert value.item() == me
            continue
        assert dist.get_process_group_ranks(group) == members
        assert dist.get_rank(group) == members.index(me)
        outputs = [ones(1) for _ in members]
        dist.all_gather(outputs, ones(1, me), group=group)
        assert [output.item() for output in outputs] == members
        value = ones(1, me)
        dist.broadcast(value, members[-1], group=group)
        assert value.item() == members[-1]
        dist.barrier(group)
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="group"):
            dist.all_reduce(ones(1), group=group)
        with pytest.raises(NotInitializedError, match="has been destroyed"):
            group.allreduce([ones(1)])
    pair = dist.new_group([5, 2])
    if me in (2, 5):
        assert dist.get_process_group_ranks(pair) == [2, 5]
        dist.destroy_process_group(pair)


def check_groups_that_only_members_make(world: Any) -> None:
    """Also where members have made different numbers of groups before."""
    me = world.rank
    made = []
    if me in (0, 3):
        made.append(dist.new_group([0, 3], use_local_synchronization=True))
    for members in ([3, 6, 1], [3, 6, 1], [6, 1]):
        if me in members:
            group = dist.new_group(members, use_local_synchronization=True)
            value = ones(1, me)
            dist.all_reduce(value, group=group)
            assert value.item() == sum(members)
            made.append(group)
    for group in made:
        dist.destroy_process_group(group)


def check_groups_made_again_and_again(world: Any) -> None:
    """More than the 2,048 communicators that MPICH has."""
    me = world.rank
    for number in range(2_300):
        group = dist.new_group([0, 1])
        if me < 2:
            if number % 100 == 0:
                value = ones(1, me + number)
                dist.all_reduce(value, group=group)
                assert value.item() == 2 * number + 1
            dist.destroy_process_group(group)


def check_errors_before_anything_is_sent(world: Any) -> None:
    me, size = world.rank, world.size
    pair = dist.new_group([1, 4])
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ArgumentError, "7 output tensors", lambda: dist.all_gather([ones(1)] * 7, ones(1))),
        (
            ArgumentError,
            "do not cut",
            lambda: dist.all_to_all_single(ones(8), ones(8), [1] * 8, [2] * 8),
        ),
        (ArgumentError, "overlaps itself", lambda: dist.all_reduce(ones(1).expand(3))),
        (ArgumentError, "share memory", lambda: dist.all_gather([ones(1)] * size, ones(1))),
        (UnsupportedError, "AVG", lambda: dist.all_reduce(torch.ones(1).long(), dist.ReduceOp.AVG)),
        (RankError, "rank 8 is not in the group", lambda: dist.isend(ones(1), size)),
        (RankError, "send: rank -1 is not in the group", lambda: dist.isend(ones(1), -1)),
        (RankError, "recv: rank -1 is not in the group", lambda: dist.recv(ones(1), -1)),
        (RankError, "recv: rank -8 is not in the group", lambda: dist.irecv(ones(1), -8)),
        (RankError, "send: rank -2 .* are 0 to 7", lambda: dist.send(ones(1), group_dst=-2)),
        (RankError, f"recv: rank {2**40} ", lambda: dist.irecv(ones(1), group_src=2**40)),
        (RankError, "root -1 is not in the group", lambda: dist.broadcast(ones(1), -1)),
        (RankError, "root -1 is not in the group", lambda: dist.reduce(ones(1), -1)),
        (RankError, "root -8 is not in the group", lambda: dist.gather(ones(1), None, -8)),
        (RankError, "root 8 is not in the group", lambda: dist.scatter(ones(1), None, 8)),
        (ValueError, "own rank|current|self|itself", lambda: dist.send(ones(1), me)),
        (RankError, "root 9", lambda: dist.broadcast(ones(1), group_src=9)),
    ]
    for kind, match, call in wrong:
        try:
            with pytest.raises(kind, match=match):
                call()
        except BaseException as error:
            error.add_note(match)
            raise
        value = ones(1, me)
        dist.all_reduce(value)
        assert value.item() == 28
    if me in (1, 4):
        dist.destroy_process_group(pair)


def check_calls_that_differ_are_a_mismatch(world: Any) -> None:
    """All ranks catch it: each has heard of a call that is not its own."""
    me, size = world.rank, world.size
    odd = me == 5
    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: dist.all_reduce(
            torch.ones(2, dtype=torch.int32 if odd else torch.float32)
        ),
        "op": lambda: dist.all_reduce(ones(2), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "shape": lambda: dist.all_reduce(torch.ones((2, 3) if odd else (3, 2))),
        "operation": lambda: dist.barrier() if odd else dist.all_reduce(ones(1)),
        "long": lambda: dist.all_reduce(ones(50_000 + odd)),
        "count": lambda: dist.all_gather([ones(3 if r == 5 else 2) for r in range(size)], ones(2)),
    }
    for number, (name, call) in enumerate(calls.items(), 1):
        if name == "count" and odd:  # it brings less than the others expect, and hears of nothing
            dist.all_gather([ones(2) for _ in range(size)], ones(2))
            continue
        with pytest.raises(CollectiveMismatchError, match=f"call {number} on group") as caught:
            call()
        assert "rank 5: " in str(caught.value), caught.value
        assert f"rank {me}: " in str(caught.value)
    if me == 0:
        dist.isend(ones(3), 1)
    if me == 1:
        with pytest.raises(
            CollectiveMismatchError, match=r"3 elements of float32\n.*2 elements of"
        ):
            dist.recv(ones(2), 0)
    world.stop_after = world.asked  # what rank 0 has sent is never waited for


def check_ddp_and_fsdp(world: Any) -> None:
    """Of four ranks, because each imports for it as much as for all else. Every rank makes the groups."""
    me, size = world.rank, 4
    group = dist.new_group(list(range(size)))
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    if me < size:
        ddp_and_fsdp(me, size, group, mesh)
    for each in list(dist.distributed_c10d._world.pg_map):
        if each is not dist.group.WORLD:
            dist.destroy_process_group(each)


def ddp_and_fsdp(me: int, size: int, group: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        linear = torch.nn.Sequential(
            torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 2, bias=False)
        )
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter) % 5 - 2)
        return linear

    def rows(rank: int) -> Tensor:
        return torch.tensor([[1.0 + rank, 2.0, -rank]])

    plain = model()
    for rank in range(size):
        (plain(rows(rank)).sum() / size).backward()
    expected = [parameter.grad for parameter in plain.parameters()]

    parallel = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.00001)
    parallel(rows(me)).sum().backward()
    for parameter, gradient in zip(parallel.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)

    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(rows(me)).sum().backward()
    for parameter, gradient in zip(sharded.parameters(), expected, strict=True):
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(parameter.grad.full_tensor(), gradient)


def check_functional_collectives(world: Any) -> None:
    """Of four ranks, which import torch._dynamo for it."""
    me, size = world.rank, 4
    group = dist.new_group(list(range(size)))
    if me < size:
        value = funcol.all_reduce(ones(2, me), "sum", group)
        assert value.tolist() == [6.0, 6.0]
        whole = funcol.all_gather_tensor(ones(1, me), 0, group)
        assert whole.tolist() == [float(rank) for rank in range(size)]
        funcol.all_reduce(ones(1), "sum", group)  # never waited for
        dist.destroy_process_group(group)


def check_object_lists(world: Any) -> None:
    me, size = world.rank, world.size
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": me, "text": "x" * (1000 * me)})
    assert objects == [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(size)]
    wanted: list[Any] = [None]
    dist.scatter_object_list(
        wanted, [f"for {rank}" for rank in range(size)] if me == 2 else None, 2
    )
    assert wanted == [f"for {me}"]


def check_process_groups_of_the_api(world: Any) -> None:
    me, fabric = world.rank, world.fabric
    assert fabric.process_group(world.group) is dist.group.WORLD
    for name, ranks in (("TP", (1, 0, 3)), ("DP", (1, 0, 3)), ("PP", (6,))):
        if me in ranks:
            group = fabric.process_group(Group(name, ranks))
            assert fabric.process_group(Group(name, ranks)) is group
            assert dist.get_process_group_ranks(group) == list(ranks)
            outputs = [ones(1) for _ in ranks]
            dist.all_gather(outputs, ones(1, me), group=group)
            assert [output.item() for output in outputs] == list(ranks)
    if me in (1, 0, 3):
        group = fabric.process_group(Group("TP", (1, 0, 3)))
        dist.destroy_process_group(group)
        again = fabric.process_group(Group("TP", (1, 0, 3)))
        assert again is not group
        value = ones(1, me)
        dist.all_reduce(value, group=again)
        assert value.item() == 4


def check_works_of_a_destroyed_group_come_to_their_end(world: Any) -> None:
    """The last rank makes its calls when the others have destroyed the group."""
    me, size, objects = world.rank, world.size, world.fabric.objects
    group = dist.new_group(list(range(size)))
    last = size - 1
    if me == last:
        assert [objects.recv_from(rank) for rank in range(last)] == ["destroyed"] * last
    short, long = torch.tensor([float(me)]), torch.full((60_000,), float(me))
    sent, got = torch.tensor([me + 0.5]), torch.zeros(1)
    works = [dist.all_reduce(each, group=group, async_op=True) for each in (short, long)]
    works.append(dist.irecv(got, (me - 1) % size, group=group))
    works.append(dist.isend(sent, (me + 1) % size, group=group))
    dist.destroy_process_group(group)
    if me != last:
        objects.send("destroyed", last)
    for work in works:
        assert work is not None
        work.wait()
    assert short.item() == sum(range(size))
    assert (long == sum(range(size))).all()
    assert got.item() == (me - 1) % size + 0.5


def check_another_thread_moves_messages_meanwhile(world: Any) -> None:
    """As a hook of autograd may; threads take turns as often as Python lets them."""
    me, size, over = world.rank, world.size, threading.Event()

    def move() -> None:
        while not over.is_set():
            world.fabric.messenger.progress()
            os.sched_yield()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=move)
    thread.start()
    try:
        for number in range(100):
            value, got = torch.tensor([float(me + number)]), torch.zeros(1)
            dist.all_reduce(value)
            assert value.item() == sum(range(size)) + size * number
            work = dist.isend(value, (me + 1) % size)
            dist.recv(got, (me - 1) % size)
            assert work is not None
            work.wait()
            assert got.item() == value.item()
            if number % 10 == 0:
                long = torch.full((60_000,), float(me))
                dist.all_reduce(long)
                assert (long == sum(range(size))).all()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


def check_a_wait_asks_though_messages_keep_coming(world: Any) -> None:
    """A wait asks whether the run was ended, and how late it is; the messages are not those that it waits for."""
    messenger, asked = world.fabric.messenger, world.asked
    messenger.progress = lambda: True
    try:
        assert not messenger.wait(lambda: False, 0.01)
    finally:
        del messenger.progress
    assert world.asked > asked
