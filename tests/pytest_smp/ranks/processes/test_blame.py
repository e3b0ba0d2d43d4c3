"""A time-out names first the rank that keeps the others waiting, whatever that rank is doing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind

RANKS = 3


@pytest.fixture(scope="module")
def executor():
    executor = open_backend("gloo", ExecutorOptions(ranks=RANKS))
    yield executor
    executor.close()


def _once_inside(act):
    """Have a thread act when the main thread is in a barrier."""
    main = threading.get_ident()

    def watch():
        while True:
            frame = sys._current_frames()[main]
            while frame is not None:
                if frame.f_code.co_name == "barrier":
                    act()
                    return
                frame = frame.f_back
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()


def _a_thread_holds_the_interpreter():
    thread = threading.Thread(
        target=lambda: ctypes.PyDLL(None).sleep(600)
    )  # a PyDLL keeps the lock
    thread.start()
    thread.join()


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _wait_in_python():
    signal.pause()


def _wait_in_c():
    ctypes.CDLL(None).pause()


STUCK = {
    "a pause": _wait_in_python,
    "a pause in C": _wait_in_c,
    "stopped": _stop,
    "stopped in a call": lambda: _once_inside(_stop),
    "a thread holds the interpreter": _a_thread_holds_the_interpreter,
}


@pytest.mark.parametrize("how", sorted(STUCK))
def test_the_rank_that_keeps_the_others_is_named_first(executor, how, tmp_path):
    def body():
        if smp.rank() == 1:
            STUCK[how]()
        else:
            (tmp_path / str(smp.rank())).touch()
        dist.barrier()
        smp.barrier()

    def busy():
        """The others are on their way, or rank 1 is: time begins anew."""
        there = all((tmp_path / name).exists() for name in "02")
        stopped = executor._pool.state(executor._ranks[1]).stopped
        return not there or stopped is not how.startswith("stopped")

    job = Job(body=body, arguments=lambda rank: ((), {}), timeout=3.0, patience=busy)
    report = executor.open(RANKS).run(job)
    assert report.verdict is VerdictKind.TIMED_OUT, report.error
    blamed = str(report.error).splitlines()[1]
    assert blamed.startswith("rank 1 "), report.error
    assert ("its process is stopped" in str(report.error)) is how.startswith("stopped")
