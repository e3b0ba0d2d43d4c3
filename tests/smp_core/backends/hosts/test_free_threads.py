"""The host of free-running threads, driven by torch's own group on threads: verdicts, and that
nothing of a run reaches the next.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp_core.torch as smp
from smp_core.backends import open_backend
from smp_core.backends.base import Job, OutcomeKind, Report, VerdictKind
from smp_core.backends.fabrics.threaded import ThreadedWorldFabric
from smp_core.backends.hosts import current
from smp_core.errors import BackendError, DeadlockError, LeakError, RunTimeout

RANKS = 3
TO = smp.RankType.WORLD_RANK


@pytest.fixture(scope="module")
def host():
    host = open_backend("torch:threaded")
    yield host
    host.close()


@pytest.fixture
def run(host):
    def run(body, *args, ranks=RANKS, timeout=20.0, **fields) -> Report:
        job = Job(body=body, arguments=lambda rank: (args, {}), timeout=timeout, **fields)
        return host.open(ranks).run(job)

    yield run
    report = run(_sum_of_ranks)  # whatever a test did, the next run is clean
    assert report.values == [3, 3, 3], report.error
    assert not dist.is_initialized()


def _sum_of_ranks() -> int:
    total = torch.tensor(smp.rank())
    dist.all_reduce(total)
    return int(total)


def kinds(report: Report) -> list[str]:
    return [str(outcome.kind) for outcome in report.outcomes]


def test_ranks_run_at_the_same_time(run):
    """Two that wait for each other by a plain lock: no scheduler takes part."""
    meeting = threading.Barrier(RANKS)
    assert run(lambda: meeting.wait(10) is not None).values == [True] * RANKS


def test_a_rank_that_raises_ends_the_run_and_is_the_cause(run):
    def body() -> None:
        if smp.rank() == 1:
            raise LookupError("here")
        dist.barrier()

    report = run(body)
    assert report.verdict is VerdictKind.FAILED
    assert (report.root, str(report.error)) == (1, "here")
    assert isinstance(report.error, LookupError)
    assert kinds(report) == ["cancelled", "raised", "cancelled"]
    assert report.outcomes[0].detail == "cancelled because of rank 1"


def test_of_several_that_raise_the_lowest_is_the_cause(run):
    def body() -> None:
        time.sleep(0.02 * (RANKS - smp.rank()))
        raise LookupError(str(smp.rank()))

    assert run(body).root == 0


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        pytest.param(lambda: dist.barrier(), "rank 0 waits", id="group"),
        pytest.param(
            lambda: smp.recv_from(1, TO),
            "rank 0 waits in smp.recv_from(world rank 1)",
            id="objects",
        ),
        pytest.param(lambda: dist.new_group([0, 1]), "rank 0 waits in store.wait for", id="store"),
    ],
)
def test_a_rank_that_waits_for_one_that_returned_is_a_deadlock(run, wait, text):
    report = run(lambda: wait() if smp.rank() == 0 else None, timeout=60.0)
    assert report.verdict is VerdictKind.DEADLOCK
    assert isinstance(report.error, DeadlockError)
    assert text in str(report.error)
    assert "rank 2 has returned" in str(report.error)
    assert "test_free_threads.py" in report.outcomes[0].detail
    assert kinds(report) == ["stuck", "returned", "returned"]


def test_a_wait_that_a_thread_of_the_bodys_can_end_is_no_deadlock(run):
    def body() -> None:
        changed, said = threading.Condition(), []

        def say() -> None:
            time.sleep(0.3)
            with changed:
                said.append(1)
                changed.notify()

        thread = threading.Thread(target=say)
        with changed:
            thread.start()
            while not said:
                changed.wait()
        thread.join()

    assert run(body).error is None


def test_a_loop_ends_at_the_time_limit_with_every_stack(run, host):
    def body() -> None:
        while smp.rank() == 2:
            pass
        dist.barrier()

    before = host.abandoned
    report = run(body, timeout=5)
    assert report.verdict is VerdictKind.TIMED_OUT
    assert isinstance(report.error, RunTimeout)
    assert "did not end within 5 s (--smp-timeout)" in str(report.error)
    assert "while smp.rank() == 2:" in str(report.error)
    assert "dist.barrier()" in str(report.error)
    assert kinds(report) == ["stuck"] * RANKS
    assert host.abandoned == before  # a loop in Python can be ended


def test_a_thread_that_cannot_be_ended_is_left_behind_and_told_of(run, host):
    release = threading.Lock()
    release.acquire()
    before = host.abandoned
    report = run(lambda: release.acquire() if smp.rank() == 1 else None, timeout=5)
    release.release()
    assert host.abandoned == before + 1
    assert any("rank 1 did not come back" in note for note in report.error.__notes__)


def test_patience_starts_the_clock_anew(run):
    asked = []

    def patience() -> bool:
        asked.append(1)
        return len(asked) < 3

    def body() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pass

    assert run(body, timeout=0.1, patience=patience).verdict is VerdictKind.TIMED_OUT
    assert len(asked) == 3


def test_random_state_is_the_jobs_and_the_callers_stays(run):
    random.seed(5)
    before = random.getstate()

    def body() -> float:
        return random.random() if smp.rank() == 0 else 0.0

    values = [run(body, seed=seed).values[0] for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]
    assert random.getstate() == before


def test_output_is_kept_apart(run):
    report = run(lambda: print("rank", smp.rank()), capture=True)
    assert [outcome.stdout for outcome in report.outcomes] == ["rank 0\n", "rank 1\n", "rank 2\n"]


def test_a_group_left_behind_is_a_warning_or_a_leak(run):
    def body() -> None:
        dist.new_group([0, 2])

    text = "process group 1 of ranks [0, 2] was never destroyed"
    report = run(body)
    assert report.error is None
    assert report.warnings == [text]
    report = run(body, strict=True)
    assert isinstance(report.error, LeakError)
    assert text in str(report.error)


def test_skips_are_told(run):
    def body() -> None:
        if smp.rank() == 1:
            raise KeyError("not here")

    report = run(body, skips=(KeyError,))
    assert report.verdict is VerdictKind.PASSED
    assert report.outcomes[1].kind is OutcomeKind.SKIPPED


def test_a_run_inside_a_run_is_refused(run, host):
    def body() -> str:
        with pytest.raises(BackendError, match="inside another run"):
            host.open(1).run(Job(body=lambda: None, arguments=lambda rank: ((), {})))
        return "refused"

    assert run(body).values == ["refused"] * RANKS


def test_a_world_without_ranks_is_refused(host):
    with pytest.raises(BackendError, match="at least one rank"):
        host.open(0)


def _objects() -> Any:
    rank, others = smp.rank(), [0, 2]
    seen: list[Any] = []
    if rank == 1:
        for number in range(3):
            smp.send({"number": number}, 0, TO)
        smp.broadcast([rank], smp.WORLD)
    elif rank == 0:
        seen += [smp.recv_from(1, TO) for _ in range(4)]
    else:
        seen.append(smp.recv_from(1, TO))
    seen.append(smp.allgather(rank * 10, smp.WORLD))
    smp.barrier()
    assert others
    return seen


def test_objects_arrive_in_the_order_of_sending(run):
    gathered = [0, 10, 20]
    assert run(_objects).values == [
        [{"number": 0}, {"number": 1}, {"number": 2}, [1], gathered],
        [gathered],
        [[1], gathered],
    ]


def test_a_send_returns_when_it_is_taken(run):
    taken = threading.Event()

    def body() -> bool:
        if smp.rank() == 0:
            smp.send("x", 1, TO)
            return taken.is_set()
        if smp.rank() == 1:
            time.sleep(0.05)
            taken.set()
            smp.recv_from(0, TO)
        return True

    assert run(body).values == [True] * RANKS


def test_what_a_rank_raises_while_it_is_ended_is_no_cause(run):
    def body():
        if smp.rank() == 2:
            raise ValueError("the cause")
        try:
            smp.recv_from(2, TO)
        finally:
            raise RuntimeError("while tidying up")

    report = run(body)
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 2)
    assert isinstance(report.error, ValueError)
    assert kinds(report) == ["raised"] * 3


def test_a_rank_on_its_way_out_is_left_alone(run, host, monkeypatch):
    """The others are interrupted again and again; it would lose the word that it has come back."""
    interrupted, lost = threading.Semaphore(0), []
    cancel, leave = ThreadedWorldFabric.cancel, current.set_current

    def cancel_and_tell(world):
        cancel(world)
        interrupted.release()

    def leave_late(context):
        if context is None and threading.current_thread().name == "smp rank 1":
            while interrupted.acquire(blocking=False):
                pass
            for _ in range(3):  # so that it was its turn at least once
                interrupted.acquire(timeout=10)
        leave(context)

    def body():
        if smp.rank() == 0:
            raise ValueError("the cause")
        smp.recv_from(0, TO)

    before = host.abandoned
    with monkeypatch.context() as patch:
        patch.setattr(ThreadedWorldFabric, "cancel", cancel_and_tell)
        patch.setattr(current, "set_current", leave_late)
        patch.setattr(threading, "excepthook", lost.append)
        report = run(body)
    assert kinds(report) == ["raised", "cancelled", "cancelled"]
    assert host.abandoned == before
    assert not lost
