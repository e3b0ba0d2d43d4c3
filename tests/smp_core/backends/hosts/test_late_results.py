"""Between a rank's last line of the body and its next errand: what goes wrong there is told of the
right rank, and of the right run.
"""

from __future__ import annotations

import os
import time

import pytest

import smp_core.torch as smp
from pytest_smp.soak import leaks
from smp_core.backends import open_backend
from smp_core.backends.base import HostOptions, Job, VerdictKind
from smp_core.backends.faults import Kill

RANKS = 3


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def host(request):
    host = open_backend(request.param, HostOptions(ranks=RANKS))
    yield host
    host.close()


def _nothing(rank):
    return (), {}


def _run(host, body, *faults):
    job = Job(body=body, arguments=_nothing, timeout=60.0, faults=faults)
    return host.open(RANKS).run(job)


def _ranks():
    return smp.allgather(smp.rank(), smp.WORLD)


class Slow(Exception):
    """Takes a while to be sent: long enough for the board, which was told of the end, to see a deadlock."""

    def __reduce__(self):
        time.sleep(0.4)
        return Slow, self.args


def test_an_error_that_comes_late_is_the_cause(host):
    def body():
        if smp.rank() == 1:
            raise Slow("mine")
        _ranks()

    report = _run(host, body)
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 1), report.error
    assert type(report.error) is Slow


def test_a_rank_that_returned_too_early_is_a_deadlock_all_the_same(host):
    def body():
        if smp.rank() != 1:
            _ranks()

    report = _run(host, body)
    assert report.verdict is VerdictKind.DEADLOCK
    assert "rank 1, which has returned without a matching call" in str(report.error)


def test_a_death_after_the_result_is_not_the_next_runs(host):
    for rank in (RANKS - 1, 0):  # of an MPI job, too, whose other ranks end with it
        report = _run(host, lambda: None, Kill(rank=rank, at="sent"))
        told = f"the process of rank {rank} ended after its last run (killed by SIGKILL (signal 9))"
        shared = leaks.shared_memory(leaks.descendants())
        late = report.verdict is VerdictKind.PASSED
        report = _run(host, _ranks)
        assert report.values == [list(range(RANKS))] * RANKS, report.error
        assert any(told in text for text in report.warnings) is late
        assert not [path for path in shared if os.path.exists(path)]
