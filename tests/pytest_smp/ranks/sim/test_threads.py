"""Threads that ranks start on `sim`: they communicate, ask who they are, and have verdicts, in an order
that the program alone decides where it decides one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

import smp_core.torch as smp
from pytest_smp import strategies
from pytest_smp.ranks.protocols import OutcomeKind, VerdictKind
from pytest_smp.ranks.schedule import Schedule
from pytest_smp.ranks.sim import threads
from pytest_smp.ranks.sim.scheduler import Scheduler
from smp_core.errors import CollectiveMismatchError, DeadlockError
from smp_core.transport import current_rank, stack_frames

Work = Callable[[], Any]


def summed(value: float, group: Any = None) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


# Ways to run work in a thread, and to wait for its result.


def by_join(work: Work, meanwhile: Work) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="saver")
    thread.start()
    meanwhile()
    thread.join()
    return results[0]


def by_future(work: Work, meanwhile: Work) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1, "saver") as pool:
        future = pool.submit(work)
        meanwhile()
        return future.result()


def by_event(work: Work, meanwhile: Work) -> Any:
    results: list[Any] = []
    over = threading.Event()

    def run() -> None:
        results.append(work())
        over.set()

    threading.Thread(target=run, name="saver").start()
    meanwhile()
    over.wait()
    return results[0]


def by_queues(work: Work, meanwhile: Work) -> Any:
    tasks: queue.Queue[Work | None] = queue.Queue()
    results: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        while (task := tasks.get()) is not None:
            results.put(task())

    threading.Thread(target=serve, name="saver").start()
    tasks.put(work)
    meanwhile()
    result = results.get()
    tasks.put(None)
    return result


def by_polling(work: Work, meanwhile: Work) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="saver")
    thread.start()
    meanwhile()
    while thread.is_alive():
        time.sleep(0.001)
    return results[0]


WAYS = [by_join, by_future, by_event, by_queues, by_polling]
#: Those whose wait has no end of its own.
DEADLOCKING = [by_join, by_future, by_event, by_queues]


@given(
    way=st.sampled_from(WAYS),
    ranks=st.integers(1, 3),
    calls=st.integers(0, 3),
    calls_meanwhile=st.integers(0, 3),
    schedule=strategies.schedules(horizon=40),
)
def test_threads_communicate(
    smp_world: Any, way: Any, ranks: int, calls: int, calls_meanwhile: int, schedule: Schedule
) -> None:
    def body() -> tuple[Any, list[float]]:
        group, me = dist.new_group(), dist.get_rank()
        beside: list[float] = []
        result = way(
            lambda: [summed(me + call, group) for call in range(calls)],
            lambda: beside.extend(summed(10 * me) for _ in range(calls_meanwhile)),
        )
        dist.destroy_process_group(group)
        return result, beside

    total = sum(range(ranks))
    expected = [total + ranks * call for call in range(calls)], [10.0 * total] * calls_meanwhile
    assert smp_world.run(body, ranks=ranks, schedule=schedule) == [expected] * ranks


def test_rank_may_poll_a_lock_that_its_thread_releases(smp_world: Any) -> None:
    """The loop computes a little between two sleeps; the thread that is kept does not keep the run."""

    def body() -> tuple[float, threading.Thread]:
        sums: list[float] = []
        lock = threading.Lock()

        def run() -> None:
            sums.append(summed(1.0))
            lock.release()

        lock.acquire()
        thread = threading.Thread(target=run)
        thread.start()
        while not lock.acquire(timeout=0.005):
            pass
        thread.join()
        return sums[0], thread

    for result, thread in smp_world.run(body, ranks=2):
        assert result == 2.0
        assert thread.run == threading.Thread.run.__get__(thread)


@pytest.mark.parametrize("way", DEADLOCKING, ids=lambda way: way.__name__)
def test_deadlock_of_threads_is_told_with_thread_and_line(smp_world: Any, way: Any) -> None:
    def body() -> None:
        if dist.get_rank():
            way(lambda: dist.barrier(), lambda: None)  # the barrier of the saver

    report = smp_world.report(body, ranks=3)
    assert report.verdict is VerdictKind.DEADLOCK
    assert isinstance(report.error, DeadlockError)
    text = str(report.error)
    assert "deadlock: 2 of 3 ranks wait, and none can go on" in text
    assert "barrier() [group WORLD, call 1] in thread 'saver" in text
    assert f"test_threads.py:{body.__code__.co_firstlineno + 2} in <lambda>" in text
    assert "wait-for: rank 1 waits for rank 0, which has returned without a matching call" in text
    kinds = [outcome.kind for outcome in report.outcomes]
    assert kinds == [OutcomeKind.RETURNED, OutcomeKind.STUCK, OutcomeKind.STUCK]


def test_thread_that_nobody_joins_ends_its_calls(smp_world: Any) -> None:
    results: list[float] = []

    def body() -> None:
        group, first = dist.new_group(), threading.Event()

        def run() -> None:
            for _ in range(3):
                results.append(summed(1.0, group))
                first.set()
            dist.destroy_process_group(group)

        threading.Thread(target=run).start()
        first.wait()

    smp_world.run(body, ranks=2)
    assert results == [2.0] * 6


def test_call_of_a_thread_itself_is_shown_by_the_line_that_starts_it(smp_world: Any) -> None:
    def body() -> None:
        if dist.get_rank():
            thread = threading.Thread(target=dist.barrier, name="saver")
            thread.start()
            thread.join()

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.DEADLOCK
    assert f"test_threads.py:{body.__code__.co_firstlineno + 3} in body" in str(report.error)


def test_mismatch_of_calls_of_threads(smp_world: Any) -> None:
    def body() -> None:
        size = 3 if dist.get_rank() == 1 else 2
        by_join(lambda: dist.all_reduce(torch.ones(size)), lambda: None)

    report = smp_world.report(body, ranks=3)
    assert isinstance(report.error, CollectiveMismatchError)
    assert "odd one out: rank 1" in str(report.error)
    # Ranks 0 and 2 share a line, and rank 1 has the other.
    assert str(report.error).count("in <lambda> in thread 'saver'") == 2


def test_leak_of_a_thread(smp_world: Any) -> None:
    def body() -> None:
        by_join(lambda: dist.all_reduce(torch.ones(1), async_op=True), lambda: None)

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.LEAK
    assert f"test_threads.py:{body.__code__.co_firstlineno + 1}" in str(report.error)


def reduce(group: Any) -> float:
    return float(funcol.all_reduce(torch.ones(1), "sum", group))


def test_thread_knows_its_rank(smp_world: Any) -> None:
    def ask() -> tuple[Any, ...]:
        reduced = reduce(dist.group.WORLD)
        return (
            dist.get_rank(),
            dist.is_initialized(),
            dist.get_world_size(),
            smp.rank(),
            smp.size(),
            smp.is_initialized(),
            reduced,
        )

    def body() -> list[Any]:
        smp.init()
        return [way(ask, lambda: None) for way in WAYS]

    for rank, answers in enumerate(smp_world.run(body, ranks=2)):
        assert answers == [(rank, True, 2, rank, 2, True, 2.0)] * len(WAYS)


def test_groups_that_threads_make_are_their_ranks(smp_world: Any) -> None:
    """torch keeps the names of groups per thread on `sim`; functional collectives look there."""

    def body() -> list[float]:
        made: list[Any] = []

        def make() -> float:
            made.append(dist.new_group())
            return reduce(made[0])

        sums = [by_join(make, lambda: None), reduce(made[0])]
        made.append(dist.new_group())
        sums.append(by_join(lambda: reduce(made[1]), lambda: None))
        for group in made:
            dist.destroy_process_group(group)
        return sums

    assert smp_world.run(body, ranks=2) == [[2.0] * 3] * 2


def test_pool_that_ranks_share_works_for_the_rank_that_asks(smp_world: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def body() -> tuple[int, float]:
            rank = pool.submit(dist.get_rank).result()
            return rank, dist.get_rank()

        for _ in range(2):  # in the second run its thread is there
            assert smp_world.run(body, ranks=3) == [(rank, rank) for rank in range(3)]


def test_lock_that_a_thread_holds_over_a_barrier(smp_world: Any) -> None:
    """Python tells nobody who waits for a lock: the controller sees that the rank sleeps."""

    def body() -> int:
        lock, locked = threading.Lock(), threading.Event()

        def save() -> None:
            with lock:
                locked.set()
                dist.barrier()

        thread = threading.Thread(target=save)
        thread.start()
        locked.wait()
        with lock:
            rank = dist.get_rank()
        thread.join()
        return rank

    assert smp_world.run(body, ranks=3) == [0, 1, 2]


def test_thread_has_the_state_of_its_rank(smp_world: Any) -> None:
    """Between two calls a thread runs while its rank has the turn."""

    def draw() -> list[float]:
        torch.manual_seed(dist.get_rank())
        draws = []
        for _ in range(3):
            draws.append(torch.rand(1).item())
            dist.barrier()
        return draws

    def body() -> list[float]:
        draws: list[float] = by_join(draw, lambda: None)
        return draws

    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    expected = [[torch.rand(1, generator=each).item() for _ in range(3)] for each in generators]
    assert smp_world.run(body, ranks=3) == expected


def test_thread_that_has_had_no_core_keeps_the_turn(
    smp_world: Any, monkeypatch: Any, looks: _Looks
) -> None:
    """A busy machine may leave a thread without a core for many looks of the controller."""
    monkeypatch.setattr(threads, "_compute_seconds", lambda native_id: 0.0)
    monkeypatch.setattr(threads, "_sleeps", lambda thread: False)
    order: list[int] = []

    def work() -> None:
        looks.wait(4)
        order.append(0)

    def body() -> None:
        if dist.get_rank():
            order.append(1)
        else:
            by_join(work, lambda: None)

    smp_world.run(body, ranks=2)
    assert order == [0, 1]


def test_exception_in_a_thread_is_pythons(smp_world: Any, monkeypatch: Any) -> None:
    """The exception goes to threading.excepthook, by which pytest warns, and the deadlock that follows names it."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))

    def work() -> None:
        if dist.get_rank() == 0:
            raise ValueError("planted")
        dist.barrier()

    def body() -> None:
        thread = threading.Thread(target=work, name="saver")
        thread.start()
        thread.join()

    report = smp_world.report(body, ranks=2)
    assert [str(error) for error in raised] == ["planted"]  # and no unwinding of ours
    assert report.verdict is VerdictKind.DEADLOCK
    (note, *_) = report.error.__notes__
    assert note.startswith("thread 'saver' of rank 0 has ended with ValueError: planted\n")
    assert f"test_threads.py:{work.__code__.co_firstlineno + 2} in work" in note


def test_same_threads_serve_after_a_deadlock_of_threads(smp_world: Any) -> None:
    def body() -> None:
        if dist.get_rank():
            by_event(dist.barrier, lambda: None)

    assert smp_world.report(body, ranks=3).verdict is VerdictKind.DEADLOCK
    assert smp_world.run(lambda: summed(1.0), ranks=3) == [3.0] * 3


def test_full_disk_reaches_a_thread(smp_world: Any, smp_faults: Any, tmp_path: Any) -> None:
    def write(folder: Any) -> int:
        try:
            (folder / f"{dist.get_rank()}.txt").write_text("x")
        except OSError:
            return 1
        return 0

    def body(folder: Any) -> list[int]:
        return [way(lambda: write(folder), lambda: None) for way in WAYS]

    smp_faults.full_disk(rank=1, below=tmp_path)
    assert smp_world.run(body, tmp_path, ranks=2) == [[0] * len(WAYS), [1] * len(WAYS)]


class _Looks:
    """Lets a test wait until the controller has looked at the threads of a run."""

    def __init__(self, monkeypatch: Any) -> None:
        self._looked = threading.Semaphore(0)
        look = threads.RankThreads.look

        def look_and_tell(rank_threads: Any) -> None:
            look(rank_threads)
            self._looked.release()

        monkeypatch.setattr(threads.RankThreads, "look", look_and_tell)

    def wait(self, count: int) -> None:
        """Spin: a wait that Python or the operating system tells of would be seen."""
        while count:
            count -= self._looked.acquire(blocking=False)


@pytest.fixture
def looks(monkeypatch: Any) -> _Looks:
    return _Looks(monkeypatch)


@pytest.fixture
def uncaught(monkeypatch: Any) -> list[BaseException]:
    """The exceptions of threads, for which pytest would warn."""
    raised: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    return raised


def after_the_body(smp_world: Any, work: Work) -> Any:
    """The report of a run in which a daemon thread of rank 0 works once the body of rank 0 has returned."""
    begin, end = threading.Lock(), threading.Lock()  # of which Python tells nobody
    begin.acquire()
    end.acquire()

    def run() -> None:
        begin.acquire()
        try:
            work()
        finally:
            end.release()

    thread = threading.Thread(target=run, name="saver", daemon=True)

    def body() -> None:
        if dist.get_rank() == 0:
            thread.start()
        else:
            begin.release()
            end.acquire()

    report = smp_world.report(body, ranks=2)
    thread.join()
    return report


def test_crash_after_the_body_is_no_pass(smp_world: Any, uncaught: list[BaseException]) -> None:
    report = after_the_body(smp_world, lambda: os._exit(3))
    assert report.verdict is VerdictKind.CRASHED
    assert "rank 0 crashed: exit code 3" in str(report.error)
    assert report.outcomes[0].kind is OutcomeKind.CRASHED


def test_body_that_raises_beside_its_thread_has_the_turn(
    smp_world: Any, monkeypatch: Any, looks: _Looks
) -> None:
    """The body goes on without the turn once it has a lock that its thread held over a barrier."""
    turns: list[bool] = []
    fail = Scheduler.fail

    def fail_and_tell(scheduler: Scheduler, state: Any, failure: BaseException) -> None:
        turns.append(scheduler.running is state)
        fail(scheduler, state, failure)

    monkeypatch.setattr(Scheduler, "fail", fail_and_tell)

    def body() -> None:
        lock, locked = threading.Lock(), threading.Event()

        def save() -> None:
            with lock:
                locked.set()
                dist.barrier()
            looks.wait(3)
            dist.barrier()

        threading.Thread(target=save).start()
        locked.wait()
        with lock:
            raise ValueError("planted")

    report = smp_world.report(body, ranks=1)
    assert isinstance(report.error, ValueError)
    assert turns == [True]


def by_sleep(work: Work) -> None:
    time.sleep(0.01)
    work()


def by_event_timeout(work: Work) -> None:
    threading.Event().wait(0.01)
    work()


def by_two_calls(work: Work) -> None:
    dist.barrier()
    time.sleep(0.01)
    work()


@pytest.mark.parametrize("way", [by_sleep, by_event_timeout, by_two_calls])
def test_body_ends_after_its_threads(smp_world: Any, way: Callable[[Work], None]) -> None:
    """As the interpreter joins threads at its exit, and tasks of pools."""
    results: list[float] = []

    def body() -> None:
        def work() -> None:
            way(lambda: results.append(summed(1.0)))

        if dist.get_rank():
            concurrent.futures.ThreadPoolExecutor(1).submit(work)
        else:
            threading.Thread(target=lambda: threading.Thread(target=work).start()).start()

    smp_world.run(body, ranks=2)
    assert results == [2.0, 2.0]


def test_assertion_of_a_thread_that_nobody_joins_is_told(
    smp_world: Any, uncaught: list[BaseException]
) -> None:
    def work() -> None:
        by_two_calls(dist.barrier)
        raise AssertionError("planted")

    smp_world.run(lambda: threading.Thread(target=work).start(), ranks=2)
    assert [str(error) for error in uncaught] == ["planted"] * 2


def test_body_does_not_wait_for_a_cancelled_task(smp_world: Any) -> None:
    def body() -> list[bool]:
        pool, begun = concurrent.futures.ThreadPoolExecutor(1), threading.Event()

        def run() -> None:
            begun.set()
            dist.barrier()

        pool.submit(run)
        tasks = [pool.submit(dist.barrier) for _ in range(2)]
        begun.wait()
        tasks[0].cancel()
        pool.shutdown(wait=False, cancel_futures=True)
        return [task.cancelled() for task in tasks]

    assert smp_world.run(body, ranks=2) == [[True, True]] * 2


def test_body_whose_thread_never_ends_is_a_deadlock(smp_world: Any) -> None:
    def body() -> None:
        threading.Thread(target=threading.Event().wait, name="saver").start()

    report = smp_world.report(body, ranks=1)
    assert report.verdict is VerdictKind.DEADLOCK
    assert "rank 0 waits in threading.Condition.wait() in thread 'saver'" in str(report.error)


def test_call_of_a_daemon_thread_after_the_body_is_told(
    smp_world: Any, uncaught: list[BaseException]
) -> None:
    assert after_the_body(smp_world, dist.barrier).verdict is VerdictKind.PASSED
    (error,) = uncaught
    assert "thread 'saver' made a communication call, and the body of rank 0 has ended" in str(
        error
    )


def test_thread_that_waits_in_a_loop_is_no_deadlock(smp_world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(threads, "PATIENCE", 0.02)

    def work() -> None:
        for _ in range(20):
            time.sleep(0.005)
        dist.barrier()

    def body() -> None:
        if dist.get_rank():
            dist.barrier()
        else:
            by_join(work, lambda: None)

    smp_world.run(body, ranks=2)


def test_sleeping_thread_is_named_when_time_is_up(smp_world: Any, monkeypatch: Any) -> None:
    """Nobody knows which calls it would make, once it goes on: no verdict."""
    monkeypatch.setattr(threads, "PATIENCE", 0.02)
    tasks: queue.SimpleQueue[None] = queue.SimpleQueue()

    def body() -> None:
        threading.Thread(target=lambda: tasks.get(), name="saver", daemon=True).start()
        if dist.get_rank():
            dist.barrier()
        else:
            threading.Thread(target=lambda: tasks.get(), name="server").start()

    report = smp_world.report(body, ranks=2, timeout=0.5)
    for _ in range(3):
        tasks.put(None)
    assert report.verdict is VerdictKind.TIMED_OUT
    text = str(report.error)
    assert "rank 0 waits in the end of its threads" in text
    line = (
        f"tests/pytest_smp/ranks/sim/test_threads.py:{body.__code__.co_firstlineno + 1} in <lambda>"
    )
    assert f"thread 'saver' of rank 1 has not ended\n    {line}" in text
    assert "thread 'server' of rank 0 has not ended" in text


def test_notified_thread_that_has_not_gone_on_is_no_deadlock(
    smp_world: Any, monkeypatch: Any, looks: _Looks
) -> None:
    blocked = threads.RankThreads._blocked

    @contextlib.contextmanager
    def slow(rank_threads: Any, strand: Any, block: Any) -> Any:
        with blocked(rank_threads, strand, block):
            yield
            if strand.is_main and "Condition" in block.text:
                looks.wait(5)

    monkeypatch.setattr(threads.RankThreads, "_blocked", slow)

    def body() -> None:
        group, event = dist.new_group(), threading.Event()

        def work() -> None:
            looks.wait(1)
            event.set()
            dist.barrier(group)

        if dist.get_rank() == 0:
            thread = threading.Thread(target=work)
            thread.start()
            event.wait()
            dist.barrier()
            thread.join()
        else:
            dist.barrier()
            dist.barrier(group)
        dist.destroy_process_group(group)

    smp_world.run(body, ranks=2)


def test_replacement_of_sleep_in_a_body_ends_with_it(smp_world: Any) -> None:
    sleep, join, wait = time.sleep, threading.Thread.join, threading.Condition.wait

    def body() -> None:
        with mock.patch("time.sleep"):
            thread = threading.Thread(target=dist.barrier)
            thread.start()
        thread.join()

    smp_world.run(body, ranks=2)
    assert (time.sleep, threading.Thread.join, threading.Condition.wait) == (sleep, join, wait)


def test_replacement_of_sleep_before_a_run_is_called(smp_world: Any, monkeypatch: Any) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def body() -> None:
        by_join(dist.barrier, lambda: time.sleep(0.125))

    smp_world.run(body, ranks=2)
    assert slept == [0.125, 0.125]


def test_sleep_imported_in_a_body_keeps_no_run(smp_world: Any) -> None:
    imported: list[Any] = []

    def body() -> Any:
        by_join(dist.barrier, lambda: None)
        from time import sleep

        imported.append(sleep)
        sleep(0)
        context: Any = current_rank.current()
        return weakref.ref(context.scheduler.threads)

    (run,) = smp_world.run(body, ranks=1)
    gc.collect()
    assert run() is None
    imported[0](0)
    (run,) = smp_world.run(lambda: (body(), imported[0](0))[0], ranks=1)
    gc.collect()
    assert run() is None


def test_thread_that_cannot_start_is_none(smp_world: Any, monkeypatch: Any, looks: _Looks) -> None:
    def body() -> list[str]:
        texts = []
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        thread.join()
        late = threading.Thread(target=dist.barrier)
        with monkeypatch.context() as patches:
            names = ("_start_new_thread", "_start_joinable_thread")  # the second since Python 3.13
            for name in names:
                patches.setattr(
                    threading, name, mock.Mock(side_effect=RuntimeError("planted")), raising=False
                )
            for twice in (thread, late):
                with pytest.raises(RuntimeError) as caught:
                    twice.start()
                texts.append(str(caught.value))
        looks.wait(3)
        context: Any = current_rank.current()
        assert [strand.is_main for strand in context.scheduler.threads.strands_of(0)] == [True]
        late.start()
        late.join()
        return texts

    assert smp_world.run(body, ranks=1) == [["threads can only be started once", "planted"]]
    smp_world.run(dist.barrier, ranks=1)


def test_join_of_a_thread_of_this_project(smp_world: Any, monkeypatch: Any, looks: _Looks) -> None:
    is_own_code = stack_frames.is_own_code

    def work() -> None:
        looks.wait(5)

    monkeypatch.setattr(
        stack_frames, "is_own_code", lambda code: code is work.__code__ or is_own_code(code)
    )

    def body() -> None:
        group = dist.new_group()
        if dist.get_rank() == 0:
            saver = threading.Thread(target=lambda: dist.barrier(group))
            saver.start()
            own = threading.Thread(target=work)
            own.start()
            own.join()
            dist.barrier()
            saver.join()
        else:
            dist.barrier()
            dist.barrier(group)
        dist.destroy_process_group(group)

    smp_world.run(body, ranks=2)


def test_idle_thread_of_a_rank_that_has_returned_does_not_wait(smp_world: Any) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            tasks: queue.Queue[None] = queue.Queue()
            threading.Thread(target=tasks.get, daemon=True).start()
        else:
            dist.barrier()

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.DEADLOCK
    assert "rank 1 waits" not in str(report.error)
    kinds = [outcome.kind for outcome in report.outcomes]
    assert kinds == [OutcomeKind.STUCK, OutcomeKind.RETURNED]


def test_mismatch_is_raised_in_the_thread_that_made_the_call(smp_world: Any, looks: _Looks) -> None:
    def work(group: Any, size: int) -> None:
        dist.all_reduce(torch.ones(size), group=group)

    def body() -> None:
        group, rank = dist.new_group(), dist.get_rank()
        thread = threading.Thread(target=work, args=(group, 3 if rank == 0 else 2))
        thread.start()
        if rank == 0:
            dist.recv(torch.ones(1), 1)
        thread.join()

    report = smp_world.report(body, ranks=3)
    assert isinstance(report.error, CollectiveMismatchError)
    frames = traceback.extract_tb(report.error.__traceback__)
    assert "work" in [frame.name for frame in frames]


def test_tasks_wait_for_the_worker_of_their_pool(smp_world: Any) -> None:
    def body() -> list[float]:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return [future.result() for future in [pool.submit(summed, 1.0) for _ in range(3)]]

    assert smp_world.run(body, ranks=2, timeout=20) == [[2.0] * 3] * 2


def test_exit_of_a_pool_whose_task_waits_for_ever_is_a_deadlock(smp_world: Any) -> None:
    def body() -> None:
        if dist.get_rank():
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(dist.barrier)

    assert smp_world.report(body, ranks=2).verdict is VerdictKind.DEADLOCK


def test_task_that_has_ended_is_forgotten(smp_world: Any) -> None:
    class Argument:
        pass

    def body() -> list[Any]:
        references = []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for _ in range(3):
                argument = Argument()
                references.append(weakref.ref(argument))
                pool.submit(lambda _: None, argument).result()
                del argument
            pool.submit(dist.barrier).result()
        context: Any = current_rank.current()
        strands = len(context.scheduler.threads._by_state)
        return [strands, *(reference() for reference in references)]

    gc.disable()
    try:
        assert smp_world.run(body, ranks=1) == [[1, None, None, None]]
    finally:
        gc.enable()


def test_run_after_one_whose_controller_fails_has_new_threads(
    smp_world: Any, monkeypatch: Any, uncaught: list[BaseException]
) -> None:
    environment, alive = dict(os.environ), set(threading.enumerate())
    held = threading.Lock()

    def body() -> None:
        by_join(dist.barrier, lambda: None)
        with held:
            pass

    with monkeypatch.context() as patches:
        look = mock.Mock(side_effect=RuntimeError("planted"))
        patches.setattr(threads.RankThreads, "look", look)
        with held, pytest.raises(RuntimeError, match="planted"):
            smp_world.run(body, ranks=2)
    assert dict(os.environ) == environment
    for thread in set(threading.enumerate()) - alive:
        # On a busy machine it comes to its call after the run was given up.
        if thread.name == "saver":
            thread.join()
    smp_world.run(body, ranks=2)
