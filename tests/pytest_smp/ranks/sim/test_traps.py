"""The traps of simulated ranks behind a torch process group, a test each (TORCH 1, in its order)."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job, VerdictKind
from pytest_smp.ranks.sim import torch_private
from smp_core.errors import DeadlockError, ThreadError


def total() -> float:
    """An all_reduce that works: 1 for every rank."""
    mine = torch.ones(1)
    dist.all_reduce(mine)
    return mine.item()


def test_trap_1_ddp_waits_in_c_plus_plus_on_the_future(smp_world: Any) -> None:
    """A future that is completed later would take the turn with it: here rank 0 reaches DDP's wait
    long before rank 1 starts its backward."""

    def body() -> float:
        rank = dist.get_rank()
        linear = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model = DistributedDataParallel(linear)
        loss = model(torch.tensor([[1.0 + rank, 3.0]])).sum()
        pair = dist.new_group([1, 2])
        for _ in range(5 if rank else 0):
            dist.barrier(pair)
        loss.backward()
        if rank:
            dist.destroy_process_group(pair)
        assert linear.weight.grad is not None
        return linear.weight.grad[0, 0].item()

    assert smp_world.run(body, ranks=3) == [2.0] * 3  # (1 + 2 + 3) / 3


def test_trap_1_the_future_is_complete_when_it_is_given(smp_world: Any) -> None:
    def body() -> bool:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        return work.get_future().done()

    assert smp_world.run(body, ranks=3) == [True] * 3


def test_trap_2_another_ranks_group_is_refused_at_once(smp_world: Any) -> None:
    """As when a default argument was evaluated on rank 0 and is used on all."""
    captured: list[Any] = []

    def body() -> None:
        if dist.get_rank() == 0:
            captured.append(dist.group.WORLD)
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=captured[0])

    report = smp_world.report(body, ranks=3)
    assert isinstance(report.error, ThreadError)
    assert report.root in (1, 2)
    assert "this process group belongs to rank 0" in str(report.error)
    assert "default argument or a module global" in str(report.error)


@pytest.mark.parametrize(
    "ask", [dist.get_rank, dist.get_backend, dist.get_process_group_ranks], ids=lambda f: f.__name__
)
def test_trap_2_a_question_about_another_ranks_group_is_refused(smp_world: Any, ask: Any) -> None:
    """By name, and not as a group that nobody knows."""
    captured: list[Any] = []

    def body() -> None:
        if dist.get_rank() == 0:
            captured.append(dist.group.WORLD)
            dist.barrier()
        else:
            dist.barrier()
            ask(captured[0])

    report = smp_world.report(body, ranks=2)
    assert isinstance(report.error, ThreadError)
    assert "this process group belongs to rank 0" in str(report.error)


@pytest.mark.parametrize("use", ["wait", "is_completed", "get_future", "result", "synchronize"])
def test_trap_2_another_ranks_work_is_refused_at_once(smp_world: Any, use: str) -> None:
    """A wait there would put the wrong rank to sleep, and the run would not end."""
    captured: list[Any] = []

    def body() -> None:
        if dist.get_rank() == 0:
            captured.append(dist.barrier(async_op=True))
            captured[0].wait()
            captured.append(dist.all_reduce(torch.ones(1), async_op=True))
            captured[1].wait()
        else:
            dist.barrier()
            while len(captured) < 2:
                dist.get_rank()
                torch_private.c10d._get_default_store().check(["nothing"])
            getattr(captured[1], use)()

    report = smp_world.report(body, ranks=2, timeout=60)
    assert isinstance(report.error, ThreadError)
    assert report.root == 1


def test_trap_2_a_group_of_an_earlier_run_is_refused(smp_world: Any) -> None:
    """A module global that outlives its run."""
    kept: dict[int, Any] = {}

    def first() -> None:
        kept[dist.get_rank()] = dist.group.WORLD

    def second() -> None:
        group = kept[dist.get_rank()]
        group.barrier()

    smp_world.run(first, ranks=2)
    report = smp_world.report(second, ranks=2)
    assert isinstance(report.error, ThreadError)
    assert "process group belongs to rank 0" in str(report.error)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "function", "parameter"),
    [
        ("torch.distributed.nn.functional", "all_reduce", "group"),
        ("torch.distributed.optim.zero_redundancy_optimizer", "_broadcast_object", "group"),
        ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler", "process_group"),
    ],
)
def test_trap_2_default_arguments_of_torch_hold_no_group(
    smp_world: Any, module: str, function: str, parameter: str
) -> None:
    """A rank imports the module, and the default means "the caller's own" all the same."""

    def body() -> Any:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
        assert dist.group.WORLD is not None
        return inspect.signature(getattr(fresh, function)).parameters[parameter].default

    assert smp_world.run(body, ranks=2) == [None, None]


def test_trap_3_polling_is_completed_hands_over(smp_world: Any) -> None:
    def body() -> int:
        mine, polls = torch.ones(1), 0
        if dist.get_rank() == 0:
            work = dist.all_reduce(mine, async_op=True)
            while not work.is_completed():
                polls += 1
        else:
            total_of_pair = torch.ones(1)
            pair = group_of_two()
            dist.all_reduce(total_of_pair, group=pair)
            dist.all_reduce(mine)
            dist.destroy_process_group(pair)
        assert mine.item() == 3
        return polls

    def group_of_two() -> Any:
        return dist.new_group([1, 2], use_local_synchronization=True)

    polls, *_ = smp_world.run(body, ranks=3)
    assert polls >= 1


def test_trap_3_a_lock_held_over_a_barrier_is_found_by_the_timeout() -> None:
    """No scheduler sees a `threading.Lock`. The next run gets ranks that work. (On an executor of its
    own: a session with ranks that never came back fails, and this one shall not.)"""
    lock = threading.Lock()
    over = threading.Event()

    def body() -> None:
        if dist.get_rank() == 0:
            with lock:
                dist.barrier()
        else:
            while not lock.acquire(timeout=0.01):  # ends with the test
                if over.is_set():
                    return
            lock.release()
            dist.barrier()

    def no_arguments(rank: int) -> tuple[tuple[()], dict[str, Any]]:
        return (), {}

    executor = open_backend("sim")
    try:
        world = executor.open(2)
        report = world.run(Job(body=body, arguments=no_arguments, timeout=5))
        over.set()
        assert report.verdict is VerdictKind.TIMED_OUT
        text = str(report.error)
        assert "rank 1 never came back: it computes, or waits where the scheduler cannot" in text
        assert "lock.acquire" in text
        assert world.run(Job(body=total, arguments=no_arguments)).values == [2.0, 2.0]
    finally:
        over.set()
        executor.close()


def test_trap_4_excepthook_does_not_grow(smp_world: Any) -> None:
    """init_process_group wraps it at every call."""
    before = sys.excepthook

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("sim", rank=rank, world_size=size, store=dist.HashStore())
        assert total() == size

    for _ in range(1000):
        smp_world.run(body, ranks=2)
        assert sys.excepthook is before


def test_trap_4_excepthook_comes_back_after_a_failure(smp_world: Any) -> None:
    before = sys.excepthook

    def body() -> None:
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("sim", rank=rank, world_size=2, store=dist.HashStore())
        if rank == 0:
            dist.barrier()

    assert isinstance(smp_world.report(body, ranks=2).error, DeadlockError)
    assert sys.excepthook is before


def test_trap_5_equal_reduce_ops_are_equal(smp_world: Any) -> None:
    """The objects are compared by `op`: their own text tells where they lie in memory."""

    def body() -> tuple[float, float]:
        first, second = torch.ones(1), torch.ones(1)
        operation = dist.ReduceOp(dist.ReduceOp.SUM) if dist.get_rank() else dist.ReduceOp.SUM
        dist.all_reduce(first, op=operation)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        group: Any = dist.group.WORLD
        group.allreduce([second], options).wait()
        return first.item(), second.item()

    assert smp_world.run(body, ranks=2) == [(2.0, 2.0)] * 2


def test_trap_6_what_c_plus_plus_calls_back(smp_world: Any) -> None:
    """The operations that functional collectives and DDP reach from C++, through the dispatcher."""

    def body() -> list[Any]:
        world: Any = dist.group.WORLD
        name, ops = world.group_name, torch.ops._c10d_functional
        rank, wait = dist.get_rank(), torch.ops._c10d_functional.wait_tensor
        mine = torch.tensor([1.0, 2.0]) + 10 * rank
        return [
            wait(each).tolist()
            for each in (
                ops.all_reduce(mine, "sum", name),
                *ops.all_reduce_coalesced([mine, 2 * mine], "sum", name),
                ops.all_gather_into_tensor(mine, 2, name),
                *ops.all_gather_into_tensor_coalesced([mine, 2 * mine], 2, name),
                ops.reduce_scatter_tensor(mine, "sum", 2, name),
                *ops.reduce_scatter_tensor_coalesced([mine, 2 * mine], "sum", 2, name),
                ops.all_to_all_single(mine, [1, 1], [1, 1], name),
                ops.broadcast(mine, 1, name),
            )
        ]

    for rank, got in enumerate(smp_world.run(body, ranks=2)):
        summed, gathered = [12.0, 14.0], [1.0, 2.0, 11.0, 12.0]
        part = [12.0 + 2 * rank]
        assert got == [
            summed,
            summed,
            [24.0, 28.0],
            gathered,
            gathered,
            [2.0, 4.0, 22.0, 24.0],
            part,
            part,
            [2 * part[0]],
            [1.0 + rank, 11.0 + rank],
            [11.0, 12.0],
        ]


def test_trap_6_c_plus_plus_broadcasts_and_verifies_for_ddp(smp_world: Any) -> None:
    """DDP's constructor: parameter shapes are compared, and rank 0's values sent, from C++."""

    def body() -> list[float]:
        linear = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            linear.weight.fill_(5.0 + dist.get_rank())
        DistributedDataParallel(linear)
        result: list[float] = linear.weight.flatten().tolist()
        return result

    assert smp_world.run(body, ranks=3) == [[5.0, 5.0]] * 3


def test_trap_7_a_thread_that_outlives_its_run_gets_our_message(smp_world: Any) -> None:
    over = threading.Event()
    errors: list[str] = []

    def child() -> None:
        over.wait()
        for call in (smp.rank, dist.get_rank, lambda: dist.all_reduce(torch.ones(1))):
            try:
                call()
            except ThreadError as error:
                errors.append(str(error))

    def body() -> threading.Thread:
        thread = threading.Thread(target=child, name="loader", daemon=True)
        thread.start()
        return thread

    (thread,) = smp_world.run(body, ranks=1)

    def next_body() -> None:
        over.set()
        thread.join()

    smp_world.run(next_body, ranks=1)
    text = "thread 'loader' was started by rank 0, whose run is over"
    assert [error.partition(":")[0] for error in errors] == [text] * 3


def test_trap_7_a_thread_that_does_not_communicate_is_left_alone(smp_world: Any) -> None:
    def body() -> float:
        results: list[float] = []
        thread = threading.Thread(target=lambda: results.append(torch.ones(3).sum().item()))
        thread.start()
        thread.join()
        return results[0]

    assert smp_world.run(body, ranks=2) == [3.0, 3.0]


def test_trap_7_after_the_run_threads_start_as_before(smp_world: Any) -> None:
    before = threading.Thread.start
    smp_world.run(total, ranks=2)
    assert threading.Thread.start is before


def test_trap_8_no_cycle_is_needed(smp_world: Any) -> None:
    """The whole case stands in test_deadlock.py; here is the shortest: a chain that ends at a rank
    that has returned."""

    def body() -> None:
        rank = dist.get_rank()
        if rank < 2:
            dist.recv(torch.ones(1), rank + 1)

    report = smp_world.report(body, ranks=3)
    assert isinstance(report.error, DeadlockError)
    assert "wait-for: rank 1 waits for rank 2, which has returned" in str(report.error)
    assert "cycle" not in str(report.error)


# Trap 9: threads that are no ranks keep the process's own torch.distributed.


@pytest.fixture
def own_group() -> Iterator[Any]:
    """A user's own default group, of one process, made in the controller."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def use_in_python(group: Any) -> None:
    assert dist.group.WORLD is group
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    mine = torch.tensor([3.0])
    dist.all_reduce(mine)
    assert mine.item() == 3.0


def use(group: Any) -> None:
    """By Python and, by name and by object, through C++."""
    use_in_python(group)
    assert funcol.all_reduce(torch.tensor([4.0]), "sum", group.group_name).item() == 4.0
    assert funcol.all_gather_single(torch.tensor([5.0]), 0, group).item() == 5.0


def test_trap_9_a_users_own_group_works_before_between_and_after_runs(
    smp_world: Any, own_group: Any
) -> None:
    use(own_group)
    for _ in range(2):
        assert smp_world.run(total, ranks=3) == [3.0] * 3
        use(own_group)


def test_trap_9_after_every_kind_of_failure(smp_world: Any, own_group: Any) -> None:
    def raises() -> None:
        raise LookupError

    def mismatches() -> None:
        dist.all_reduce(torch.ones(1 + dist.get_rank()))

    def hangs() -> None:
        if dist.get_rank():
            dist.barrier()

    def leaks() -> None:
        dist.barrier(async_op=True)

    for body in (raises, mismatches, hangs, leaks):
        assert smp_world.report(body, ranks=2).verdict is not VerdictKind.PASSED
        use(own_group)


def test_trap_9_names_of_groups_do_not_collide(smp_world: Any, own_group: Any) -> None:
    """The user's first group and each rank's have one name, in C++'s table of names too."""
    outer = dist.new_group([0])

    def body() -> float:
        group: Any = dist.new_group([0, 1])
        result = funcol.all_reduce(torch.ones(1), "sum", group.group_name).item()
        dist.destroy_process_group(group)
        return result

    assert smp_world.run(body, ranks=2) == [2.0, 2.0]
    assert funcol.all_reduce(torch.tensor([7.0]), "sum", outer).item() == 7.0
    dist.destroy_process_group(outer)


def test_trap_9_a_group_made_between_runs(smp_world: Any) -> None:
    assert smp_world.run(total, ranks=2) == [2.0, 2.0]
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        use(dist.group.WORLD)
        assert smp_world.run(total, ranks=2) == [2.0, 2.0]
        use(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert smp_world.run(total, ranks=2) == [2.0, 2.0]


def test_trap_9_a_foreign_thread_during_a_run(smp_world: Any, own_group: Any) -> None:
    """A thread that was there before the run, and uses the process's group while ranks run. (Not by
    name: C++ keeps its table of names apart for every thread as long as a run lasts.)"""
    ask, answered = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def foreign() -> None:
        ask.wait()
        try:
            use_in_python(own_group)
        except BaseException as error:
            failures.append(error)
        answered.set()

    thread = threading.Thread(target=foreign)
    thread.start()

    def body() -> float:
        if dist.get_rank() == 0:
            ask.set()
            answered.wait()
        return total()

    try:
        assert smp_world.run(body, ranks=2) == [2.0, 2.0]
    finally:
        ask.set()
        thread.join()
    assert failures == []


def test_trap_9_threads_share_the_table_of_names_again_after_a_run(smp_world: Any) -> None:
    """C++ keeps it apart for every thread during a run, and no longer."""
    results: list[float] = []
    smp_world.run(total, ranks=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD

        def other_thread() -> None:
            results.append(funcol.all_reduce(torch.tensor([4.0]), "sum", group.group_name).item())

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    finally:
        dist.destroy_process_group()
    assert results == [4.0]


def test_trap_9_torch_world_is_put_back(smp_world: Any) -> None:
    before = dist.distributed_c10d._world
    smp_world.run(total, ranks=2)
    assert dist.distributed_c10d._world is before


def test_trap_9_the_backend_exists_on_ranks_only(smp_world: Any) -> None:
    smp_world.run(total, ranks=2)  # the name is known from the first run on
    with pytest.raises(ThreadError, match="exists on the ranks of a sim world"):
        dist.init_process_group("sim", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
