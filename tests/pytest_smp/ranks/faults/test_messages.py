"""Messages of tensors that are hit, beside the board that records them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import Corrupt, Drop
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from smp_core.errors import ArgumentTypeError

RANKS = 2


@pytest.fixture(params=["sim", "mpi"])
def run(request):
    """On ranks that have run nothing yet."""
    if request.param == "mpi":
        pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    executor = open_backend(request.param, ExecutorOptions(ranks=RANKS))

    def run(*faults):
        job = Job(body=_to_one, arguments=lambda rank: ((), {}), timeout=60.0, faults=faults)
        return executor.open(RANKS).run(job)

    yield run
    executor.close()


def _to_one():
    world, x = dist.group.WORLD, torch.ones(1)
    if smp.rank() == 0:
        world.send([x], dstRank=1, tag=3).wait()
        return None
    world.recv([x], srcRank=0, tag=3).wait()
    return x.item()


def test_the_board_sees_what_comes_after_a_first_run_with_faults(run):
    assert run(Corrupt(rank=0, at="dist.send", how=torch.neg)).values == [None, -1.0]
    report = run()
    assert report.verdict is VerdictKind.PASSED, report.error
    assert report.values == [None, 1.0]
    lost = run(Drop(rank=0, at="dist.send"))
    assert (lost.verdict, lost.root) == (VerdictKind.DEADLOCK, 1), lost.error
    assert lost.outcomes[0].struck == (0,)


def test_what_makes_no_tensor_of_one_is_told(run):
    report = run(Corrupt(rank=0, at="dist.send", how=lambda tensor: None))
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 0)
    assert type(report.error) is ArgumentTypeError
    assert "corrupt: how made None of a tensor" in str(report.error)
