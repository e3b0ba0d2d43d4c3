"""Rank processes on Gloo: what is recorded of real calls, and the verdicts that follow."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.board.recorder import BoardRecorder
from pytest_smp.ranks.protocols import Job
from pytest_smp.strategies.communication.faults import named
from smp_core.errors import CollectiveMismatchError, DeadlockError

from .real_ranks import Body, Seen, run


def passes(body: Body, size: int = 3) -> Seen:
    """Run a valid body; nothing may be found, raised or left."""
    seen = run(body, size)
    assert seen.finding is None, f"{seen.finding.error}\n{seen.errors}"
    assert not seen.errors, "\n".join(seen.errors.values())
    assert not seen.timed_out, [seen.board.where(rank) for rank in range(size)]
    assert seen.leaks == []
    return seen


def verdict(body: Body, size: int = 3) -> str:
    """Run an invalid body; its verdict."""
    seen = run(body, size)
    assert not seen.timed_out, [seen.board.where(rank) for rank in range(size)]
    assert seen.finding is not None, seen.errors
    return str(seen.finding.error)


def on_sim(body: Body, size: int = 3) -> str:
    """The error of `sim` for the same body."""
    executor = open_backend("sim")
    try:
        job = Job(body=body, arguments=lambda rank: ((rank,), {}), timeout=60)
        return str(executor.open(size).run(job).error)
    finally:
        executor.close()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


# ---- Valid bodies --------------------------------------------------------------------------------


def every_call(rank: int) -> None:
    x, rows = torch.ones(4), torch.ones(3, 2)
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.reduce(x, 2)
    dist.all_gather([torch.ones(4) for _ in range(3)], x)
    dist.all_gather_single(torch.ones(12), x)
    dist.gather(x, [torch.ones(4) for _ in range(3)] if rank == 1 else None, 1)
    dist.scatter(x, [torch.ones(4) for _ in range(3)] if rank == 1 else None, 1)
    dist.reduce_scatter_single(torch.ones(1, 2), rows)
    dist.reduce_scatter(torch.ones(2), [*rows])
    dist.all_to_all_single(torch.ones(3, 2), rows)
    dist.all_to_all_single(torch.ones(rank, 2), rows[: 0 if rank else 3], *_uneven(rank))
    dist.barrier()
    dist.monitored_barrier()
    objects: list[object] = [None] * 3
    dist.all_gather_object(objects, "x" * rank)
    dist.broadcast_object_list(objects, 2)
    dist.gather_object(rank, objects if rank == 0 else None, 0)
    dist.scatter_object_list([None], [1, 2, 3], 0)
    works = [dist.all_reduce(x, async_op=True), dist.barrier(async_op=True)]
    for work in reversed(works):
        assert work is not None
        work.wait()


def _uneven(rank: int) -> tuple[list[int], list[int]]:
    """Rank 0 sends row i - 1 to... nobody else sends: the splits of what is got and given."""
    return [rank, 0, 0], ([0, 1, 2] if rank == 0 else [0, 0, 0])


def every_message(rank: int) -> None:
    after, before = (rank + 1) % 3, (rank - 1) % 3
    x, y = torch.ones(5), torch.empty(5)
    send = dist.isend(x, after)
    dist.recv(y, before)
    assert send is not None
    send.wait()
    operations = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank:
        dist.send(x, 0, tag=7)
    else:
        assert {dist.recv(y, tag=7), dist.recv(y, tag=7)} == {1, 2}


def groups(rank: int) -> None:
    for members in ([2, 0], [1, 2]):
        group = dist.new_group(members)
        if rank in members:
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)
    local = dist.new_group([0, rank], use_local_synchronization=True) if rank == 2 else None
    if rank == 0:
        local = dist.new_group([0, 2], use_local_synchronization=True)
    if local is not None:
        dist.barrier(group=local)


def coalesced(rank: int) -> None:
    tensors = [torch.ones(2) for _ in range(3)]
    with c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)


def refused(rank: int) -> None:
    """Bad arguments on one rank alone; the others know nothing of it."""
    if rank == 1:
        with pytest.raises(TypeError):
            _world().broadcast([torch.ones(2)], dist.BroadcastOptions(), 1, 2)  # type: ignore[call-overload]
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather_single(torch.ones(5), torch.ones(2))
        with pytest.raises(TypeError, match="incompatible function arguments"):
            _world().send([torch.ones(2)], 0)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="Rank 99"):
            dist.new_group([99])
    dist.all_reduce(torch.ones(2))


def polled(rank: int) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0)


def by_future(rank: int) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    work.get_future().wait()


def by_store(rank: int) -> None:
    """Keys by another prefix, that are there already, and an error that the caller expects."""
    store = _store()
    time.sleep(0.01 * rank)
    dist.PrefixStore("of all", store).set(f"rank {rank}", "1")  # type: ignore[attr-defined]
    store.wait([f"of all/rank {other}" for other in range(3)])
    assert store.get("of all/rank 1") == b"1"
    if rank == 0:
        with pytest.raises(RuntimeError):
            store.wait(["rank 3"], timedelta(seconds=1.5))
    dist.barrier()


def by_functional(rank: int) -> None:
    total = functional.all_reduce(torch.ones(3), "sum", _world()) + 1
    assert total.tolist() == [4.0] * 3
    functional.all_gather_single(torch.ones(2), 0, _world()) + 1


def ddp(rank: int) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.00001)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    with model.no_sync():
        model(torch.randn(5, 4)).sum().backward()


def fsdp(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("body", "size", "calls"),
    [
        # How many calls each rank makes, by torch's documentation and source.
        (every_call, 3, 13 + 2 + 2 + 2 + 3 + 2),
        (every_message, 3, None),
        (groups, 3, None),
        (coalesced, 3, 1),
        (refused, 3, None),
        (polled, 3, 1),
        (by_future, 3, 1),
        (by_functional, 3, 2),
        (by_store, 3, 1),
        (ddp, 2, None),
        (fsdp, 4, None),
    ],
)
def test_valid_bodies_get_no_verdict(body: Body, size: int, calls: int | None) -> None:
    seen = passes(body, size)
    for data in seen.data.values():
        made = len(re.findall(rb'^\["c"', data, re.MULTILINE))
        assert made == calls if calls is not None else made > 0 or b'["s"' in data
        assert b'["x"' not in data or body is refused
    assert seen.board.settled() or body in (ddp,)


def set_by_a_child(rank: int) -> None:
    """The child of one rank sets a key while all ranks wait."""
    child = 0 if rank else os.fork()
    if rank == child == 0:
        signal.alarm(60)  # where the rank is killed
        try:
            _store().wait(["rank 0", "rank 1", "rank 2"])
            with pytest.raises(RuntimeError):  # meanwhile the board looks
                _store().wait(["nobody's"], timedelta(seconds=0.3))
            _store().set("the child's", "1")
        finally:
            os._exit(0)
    _store().set(f"rank {rank}", "1")
    if rank:
        _store().get("the child's")
    dist.barrier()
    if child:
        os.waitpid(child, 0)


def test_a_child_process_may_set_a_key() -> None:
    seen = run(set_by_a_child, 3, patience=0.0)
    assert seen.finding is None, seen.finding.error
    assert not seen.errors
    assert not seen.timed_out


def test_messages_by_keyword() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            _world().send(tag=1, tensors=[torch.ones(2)], dstRank=1).wait()  # type: ignore[call-overload]
        else:
            _world().recv([torch.ones(2)], tag=1, srcRank=0).wait()  # type: ignore[call-overload]

    assert passes(body, 2).board.settled()


def by_callbacks(rank: int) -> None:
    """All ranks wait while the second callback of a future computes, which then sets the key."""

    def set_key(future: Any) -> None:
        time.sleep(0.5)
        _store().set("by a callback", "1")

    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        last = work.get_future().then(lambda future: future.value()).then(set_key)
        _store().set("hooked", "1")  # a callback of a future that is done runs at once
        dist.all_reduce(torch.ones(2))
        last.wait()
    else:
        _store().get("hooked")
        dist.all_reduce(torch.ones(2))
        _store().get("by a callback")
        dist.all_reduce(torch.ones(2))


def test_all_ranks_may_wait_for_the_second_callback_of_a_future() -> None:
    seen = run(by_callbacks, 2, patience=0.1)
    assert seen.finding is None, str(seen.finding.error)
    assert (seen.errors, seen.leaks, seen.timed_out) == ({}, [], False)


def test_between_a_call_and_its_wait_a_rank_goes_on() -> None:
    """The options of a call do not say that its wait follows: only torch's own calls wait at once."""

    def body(rank: int) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        _world().allreduce([torch.ones(2)], options).wait()
        dist.all_reduce(torch.ones(2))

    for data in passes(body, 2).data.values():
        assert b'["k",1]\n' in data
        assert b'["k",2]\n' not in data


def test_a_backend_that_no_longer_is_instrumented_is_as_it_was() -> None:
    from pytest_smp.ranks.board.instrument import Instrument

    before = [(cls, dict(vars(cls))) for cls in (dist.ProcessGroup, dist.Work)]
    instrument = Instrument(BoardRecorder(0, lambda data: None))
    instrument.install()
    instrument.install()
    assert vars(dist.ProcessGroup)["allreduce"] is not before[0][1]["allreduce"]
    instrument.uninstall()
    for cls, attributes in before:
        assert dict(vars(cls)) == attributes


# ---- Invalid ones --------------------------------------------------------------------------------


def differs(rank: int) -> None:
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def swapped(rank: int) -> None:
    for size in (2, 4) if rank else (4, 2):
        dist.all_reduce(torch.ones(size), async_op=True)
    dist.barrier()


def other_splits(rank: int) -> None:
    received = [2, 0, 1] if rank == 1 else [1, 1, 1]
    dist.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2), received)


def returns_early(rank: int) -> None:
    if rank != 2:
        dist.all_reduce(torch.ones(2))


def both_receive(rank: int) -> None:
    if rank < 2:
        dist.recv(torch.ones(2), 1 - rank)


def both_send(rank: int) -> None:
    if rank < 2:
        dist.send(torch.ones(2), 1 - rank)


def crossed(rank: int) -> None:
    first, second = (dist.new_group([0, 1]), dist.new_group([0, 1]))
    if rank < 2:
        for group in (first, second) if rank else (second, first):
            dist.barrier(group=group)


def from_anybody(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(2))


def _store() -> dist.Store:
    return c10d._get_default_store()


def gather_object_that_one_rank_leaves_out(rank: int) -> None:
    if rank != 1:
        dist.gather_object(rank, [None] * 3 if rank == 0 else None)


def key_that_nobody_sets(rank: int) -> None:
    if rank:
        _store().set("other", "1")
        dist.barrier()
    _store().get("key")


def counter_that_stays_short(rank: int) -> None:
    """A barrier by a counter, which one rank leaves out."""
    if rank and _store().add("arrived", 1) < 3:
        _store().wait(["all have arrived"])


def by_its_future(rank: int) -> None:
    for _ in range(2 - rank):
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()  # type: ignore[union-attr]


def by_futures_of_it(rank: int) -> None:
    for _ in range(2 - rank):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        torch.futures.wait_all([work.get_future().then(lambda future: future.value())])


def uneven_ddp(rank: int) -> None:
    """The second forward pass begins with a broadcast of the order of the buckets."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(2 - rank):
        model(torch.ones(1, 3)).sum().backward()


def uneven_ddp_at_last(rank: int) -> None:
    """The third backward pass waits for its bucket."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(3 - rank):
        model(torch.ones(1, 3)).sum().backward()


def uneven_ddp_with_buffers(rank: int) -> None:
    """A forward pass begins with a broadcast of the buffers, in two parts."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    for _ in range(2 + rank):
        model(torch.ones(4, 3)).sum().backward()


def uneven_ddp_with_a_hook(rank: int) -> None:
    """The backward pass waits for a future that Python made."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(3 - rank):
        model(torch.ones(4, 3)).sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        returns_early,
        both_receive,
        both_send,
        from_anybody,
        gather_object_that_one_rank_leaves_out,
        key_that_nobody_sets,
        counter_that_stays_short,
        other_splits,
    ],
)
def test_verdicts_read_as_on_sim(body: Body) -> None:
    assert verdict(body) == on_sim(body)


@pytest.mark.parametrize(
    ("body", "tensor"),
    [
        (by_its_future, "[2]"),
        (by_futures_of_it, "[2]"),
        (uneven_ddp, "[3], tensor=the order of DDP's buckets"),
        (uneven_ddp_at_last, "[8], tensor=DDP's bucket"),
        (uneven_ddp_with_buffers, "[4], tensor=DDP's buffers"),
        (uneven_ddp_with_a_hook, "[8], tensor=DDP's bucket"),
    ],
)
def test_waits_for_futures_and_in_ddp_read_as_on_sim(body: Body, tensor: str) -> None:
    """Of two ranks: Gloo carries a broadcast from rank to rank, so of more it lets some go on."""
    message = verdict(body, 2)
    assert f"shape={tensor}) [group WORLD" in message
    assert message == on_sim(body, 2)


def test_groups_entered_in_different_orders() -> None:
    message = verdict(crossed)
    assert message.startswith("deadlock: 2 of 3 ranks wait, and none can go on\n")
    assert "wait-for cycle: rank 0 -> rank 1 -> rank 0" in message


@pytest.mark.parametrize(("body", "what"), [(differs, "reduce op"), (swapped, "shape")])
def test_mismatches_name_the_ranks_and_the_lines(body: Body, what: str) -> None:
    seen = run(body, 3)
    assert seen.finding is not None
    assert isinstance(seen.finding.error, CollectiveMismatchError)
    message = str(seen.finding.error)
    assert message.startswith(f"mismatch: call 1 on group WORLD differs in {what}\n")
    assert seen.finding.root in named(message)
    assert 1 in named(message) if body is differs else 0 in named(message)
    assert f"{__name__.rpartition('.')[2]}.py" in message


def test_a_group_that_cannot_be_made_because_others_make_another() -> None:
    """The mismatch is the cause of the error that the backend raises on one of them, as smddp does."""

    def body(rank: int) -> None:
        if rank == 2:
            c10d._new_process_group_helper = _refused
        dist.new_group([0, 1] if rank < 2 else [0, 1, 2])

    message = verdict(body)
    assert "mismatch: new_group number 1 differs in its ranks\n  ranks 0-1: ranks [0, 1]" in message
    assert "odd one out: rank 2" in message


def _refused(*arguments: object, **options: object) -> None:
    raise RuntimeError("the shared memory of member 0 is of another size")


def test_a_call_of_a_background_thread_is_shown_with_the_thread() -> None:
    def body(rank: int) -> None:
        with ThreadPoolExecutor(1, "saver") as pool:
            if rank == 0:
                pool.submit(dist.barrier).result()
            elif rank == 1:
                pool.submit(lambda: dist.barrier()).result()
            else:
                dist.all_reduce(torch.ones(2))

    message = verdict(body)
    assert "rank 0: barrier()\n      thread 'saver_0'\n" in message
    assert "in <lambda> in thread 'saver_0':  pool.submit(lambda: dist.barrier())" in message


def test_ddp_whose_other_rank_stops() -> None:
    def body(rank: int) -> None:
        model = DistributedDataParallel(nn.Linear(4, 4))
        for step in range(3):
            if (rank, step) == (1, 2):
                return
            model(torch.ones(1, 4)).sum().backward()

    message = verdict(body)
    assert (
        "ranks 0, 2 wait in all_reduce(reduce op=SUM, dtype=float32, shape=[20], tensor=DDP's bucket)"
        in message
    )
    assert ", by Tensor.backward:  model(torch.ones(1, 4))" in message
    assert "which has returned without a matching call" in message


def test_ddp_that_one_rank_does_not_build() -> None:
    def body(rank: int) -> None:
        if rank != 1:
            DistributedDataParallel(nn.Linear(4, 4))

    assert "in body, by DistributedDataParallel:  DistributedDataParallel(" in verdict(body)


def test_fsdp_whose_other_rank_stops() -> None:
    def body(rank: int) -> None:
        model = nn.Linear(4, 4)
        fully_shard(model)
        for step in range(2):
            if (rank, step) == (2, 1):
                return
            model(torch.ones(1, 4)).sum().backward()

    assert "ranks 0-1 wait in all_gather_single(" in verdict(body)


def test_a_functional_collective_that_one_rank_leaves_out() -> None:
    def body(rank: int) -> None:
        if rank:
            functional.all_reduce(torch.ones(3), "sum", _world()) + 1

    assert "ranks 1-2 wait in all_reduce(dtype=float32, shape=[3])" in verdict(body)


def test_what_is_left() -> None:
    def body(rank: int) -> None:
        dist.all_reduce(torch.ones(2), async_op=True)
        with c10d._coalescing_manager(async_ops=True):
            dist.all_reduce(torch.ones(2))
        if rank == 0:
            dist.isend(torch.ones(2), 1)

    seen = run(body, 2)
    assert seen.finding is None
    assert [line.split("\n")[0] for line in seen.leaks] == [
        "rank 0: send to rank 1 (float32, shape [2], tag 0) was never matched",
        "ranks 0-1: all_reduce was never waited for",
        "ranks 0-1: all_reduce_coalesced was never waited for",
    ]


def test_a_verdict_says_which_error_it_is() -> None:
    seen = run(returns_early, 3)
    assert seen.finding is not None
    assert isinstance(seen.finding.error, DeadlockError)
    assert seen.finding.root == 0
    assert {*seen.finding.waits} == {0, 1}


def test_a_group_made_anew_is_another_group() -> None:
    """torch gives it the same name."""

    def body(rank: int) -> None:
        dist.barrier()
        dist.destroy_process_group()
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.barrier()

    seen = passes(body, 1)
    named_groups = re.findall(rb'^\["g",\d+,"torch","0","WORLD",(\d+)', seen.data[0], re.MULTILINE)
    assert named_groups == [b"0", b"1"]
