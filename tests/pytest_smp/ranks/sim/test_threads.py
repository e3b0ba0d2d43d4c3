"""Threads that ranks start on `sim`: they communicate, ask who they are, and have verdicts, in an order
that the program alone decides where it decides one.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

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
from smp_core.errors import CollectiveMismatchError, DeadlockError

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
