"""Between a rank's last line of the body and its next task: what goes wrong there is told of the
right rank, and of the right run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing import Pipe

import pytest

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import Kill
from pytest_smp.ranks.processes import executor as process_executor
from pytest_smp.ranks.processes.worker_pool import Ended
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from tools.soak import leaks

#: Ranks on gloo are forked. Each of an MPI job imports torch for a second, and most tests here start the job anew.
RANKS = {"gloo": 3, "mpi": 2}


@pytest.fixture(scope="module", params=RANKS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(backend):
    return RANKS[backend]


@pytest.fixture(scope="module")
def executor(backend, ranks):
    executor = open_backend(backend, ExecutorOptions(ranks=ranks))
    yield executor
    executor.close()


def _nothing(rank):
    return (), {}


def _run(executor, ranks, body, *faults):
    job = Job(body=body, arguments=_nothing, timeout=60.0, faults=faults)
    return executor.open(ranks).run(job)


def _ranks():
    return smp.allgather(smp.rank(), smp.WORLD)


class Slow(Exception):
    """Takes a while to be sent: long enough for the board, which was told of the end, to see a deadlock."""

    def __reduce__(self):
        time.sleep(0.4)
        return Slow, self.args


def test_an_error_that_comes_late_is_the_cause(executor, ranks):
    def body():
        if smp.rank() == 1:
            raise Slow("mine")
        _ranks()

    report = _run(executor, ranks, body)
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 1), report.error
    assert type(report.error) is Slow


def test_a_rank_that_returned_too_early_is_a_deadlock_all_the_same(executor, ranks):
    def body():
        if smp.rank() != 1:
            _ranks()

    report = _run(executor, ranks, body)
    assert report.verdict is VerdictKind.DEADLOCK
    assert "rank 1, which has returned without a matching call" in str(report.error)


def test_a_death_after_the_result_is_not_the_next_runs(executor, ranks):
    for rank in (ranks - 1, 0):  # of an MPI job, too, whose other ranks end with it
        report = _run(executor, ranks, lambda: None, Kill(rank=rank, at="sent"))
        told = f"the process of rank {rank} ended after its last run (killed by SIGKILL (signal 9))"
        shared = leaks.shared_memory(leaks.descendants())
        late = report.verdict is VerdictKind.PASSED
        report = _run(executor, ranks, _ranks)
        assert report.values == [list(range(ranks))] * ranks, report.error
        assert any(told in text for text in report.warnings) is late
        assert not [path for path in shared if os.path.exists(path)]


def _crash(executor, ranks):
    report = _run(executor, ranks, lambda: None, Kill(rank=1, at="start"))
    assert report.verdict is VerdictKind.CRASHED


def test_an_end_of_the_last_processes_is_none_of_the_next_ones(executor, ranks, monkeypatch):
    """Of an MPI job all end, and are started again, with the same numbers; who ended how is told of
    some only.
    """
    monkeypatch.setattr(process_executor, "_SETTLE", 0.5)
    pids = _run(executor, ranks, lambda: os.getpid()).values
    ended, told = executor._pool.ended, [Ended(0, pids[0], -signal.SIGKILL)]

    def only_of_rank_0():
        ended()
        return [told.pop()] if told else []

    jobs = getattr(executor._pool, "_jobs", 0)
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
    monkeypatch.setattr(executor._pool, "ended", only_of_rank_0)
    executor.selector.select(10.0)
    report = _run(executor, ranks, _ranks)
    assert report.values == [list(range(ranks))] * ranks, report.error
    assert getattr(executor._pool, "_jobs", 0) <= jobs + 1
    assert any("the process of rank 0 ended after its last run" in text for text in report.warnings)


def test_what_was_told_before_a_world_failed_to_form_is_not_lost(executor, ranks, monkeypatch):
    """Of two ranks that ended, one is seen before the world forms, and one while it forms."""
    _run(executor, ranks, _ranks)
    form, failures = executor._form, []

    def fails_once(size):
        if failures:
            raise failures.pop()
        form(size)

    monkeypatch.setattr(executor, "_form", fails_once)
    [dead] = _run(executor, ranks, lambda: os.getpid() if smp.rank() == 0 else None).values[:1]
    failures.append(process_executor._ProcessLost("rank 1: its process has ended"))
    os.kill(dead, signal.SIGKILL)
    executor.selector.select(10.0)
    report = _run(executor, ranks, _ranks)
    assert report.values == [list(range(ranks))] * ranks, report.error
    assert any("the process of rank 0 ended after its last run" in text for text in report.warnings)


def test_a_connection_of_a_dead_process_is_no_rank(executor, ranks):
    """The connection was being made while the process ended."""
    _crash(executor, ranks)
    ends = [Pipe() for _ in range(2)]
    hello = {"slot": 1, "pid": _dead_process(), "host": "here", "folder": "/nowhere"}
    for (ours, theirs), wire in zip(ends, ("control", "line"), strict=True):
        theirs.close()
        executor._pending.welcome(ours, {**hello, "wire": wire})
    report = _run(executor, ranks, _ranks)
    assert report.values == [list(range(ranks))] * ranks, report.error


def test_a_late_connection_of_a_dead_process_leaves_the_one_in_its_place(executor, ranks):
    """The new process of its rank has connected before."""
    _crash(executor, ranks)
    slot = 1
    executor._start(
        [slot for slot in range(ranks) if slot not in {*executor._ranks, *executor._starting}]
    )
    pending = executor._pending
    with pending._changed:
        assert pending._changed.wait_for(lambda: slot in pending._ready, 60.0)
    hello = {"slot": slot, "pid": _dead_process(), "host": "here", "folder": "/nowhere"}
    for wire in ("control", "line"):
        ours, theirs = Pipe()
        theirs.close()
        pending.welcome(ours, {**hello, "wire": wire})
    report = _run(executor, ranks, _ranks)
    assert report.values == [list(range(ranks))] * ranks, report.error


def _dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid
