"""Tensors that are lost or damaged on their way, on the ranks of an MPI job."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import Corrupt, Drop
from pytest_smp.ranks.protocols import ExecutorOptions, Job, OutcomeKind, Report, VerdictKind

RANKS = 3


@pytest.fixture(scope="module", params=["mpi", "mpi without the board"])
def executor(request):
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    executor = open_backend("mpi", ExecutorOptions(ranks=RANKS, check=" " not in request.param))
    yield executor
    executor.close()


def _no_arguments(rank):
    return (), {}


def _ring():
    """Everybody sends two tensors to the next; what came, and what is sent afterwards."""
    rank, got = smp.rank(), torch.zeros(3)
    sent = torch.tensor([rank + 0.5, 7.0, -1.0])
    for _ in range(2):
        work = dist.isend(sent, (rank + 1) % RANKS)
        dist.recv(got, (rank - 1) % RANKS)
        work.wait()
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    return [got.tolist(), sent.tolist(), total.item()]


def _kept(rank):
    return [rank + 0.5, 7.0, -1.0]


@pytest.fixture
def run(executor):
    def run(body, *faults, timeout=60.0) -> Report:
        job = Job(body=body, arguments=_no_arguments, timeout=timeout, faults=faults)
        return executor.open(RANKS).run(job)

    yield run
    report = run(_ring)  # the next run is clean
    assert report.values == [[_kept((rank - 1) % 3), _kept(rank), 3.0] for rank in range(3)], report


def _two_kinds():
    """Rank 0 sends a short tensor, a long one, and an integer one; rank 1 says what came."""
    kinds = [torch.full((2,), 1.5), torch.full((50_000,), 2.5), torch.tensor([3, 4])]
    if smp.rank() == 0:
        for tag, tensor in enumerate(kinds):
            dist.send(tensor, 1, tag=tag)
    if smp.rank() == 1:
        came = []
        for tag, tensor in enumerate(kinds):
            got = torch.zeros_like(tensor)
            dist.recv(got, 0, tag=tag)
            came.append([got[0].item(), got[1:].unique().tolist()])
        return came
    return None


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_damaged_tensor_is_damaged_in_its_first_element_alone(run, nth):
    """Short ones travel with their address, long ones behind it."""
    expected = [[1.5, [1.5]], [2.5, [2.5]], [3, [4]]]
    # Every bit of float32 1.5 (0x3fc00000) and 2.5 (0x40200000) turned, of int64 3: ~3.
    bits = [0xC03FFFFF - (1 << 32), 0xBFDFFFFF - (1 << 32)]
    turned = [torch.tensor([each], dtype=torch.int32).view(torch.float32).item() for each in bits]
    expected[nth - 1][0] = [*turned, -4][nth - 1]
    report = run(_two_kinds, Corrupt(rank=0, at="dist.send", nth=nth))
    assert report.values[1] == expected, report


def test_a_tensor_is_damaged_as_asked_and_the_senders_own_is_whole(run):
    report = run(_ring, Corrupt(rank=1, at="isend", nth=2, how=torch.neg))
    came = [_kept(2), _kept(0), [-1.5, -7.0, 1.0]]
    assert report.values == [[came[rank], _kept(rank), 3.0] for rank in range(3)], report


def _three():
    if smp.rank() == 2:
        for number in (1.0, 2.0, 3.0):
            dist.send(torch.full((20_000,), number), 0)
    if smp.rank() == 0:
        got = torch.zeros(20_000)
        came = []
        for _ in range(2):
            dist.recv(got, 2)
            came.append(got.unique().tolist())
        return came
    return None


@pytest.mark.parametrize(("nth", "came"), [(1, [[2.0], [3.0]]), (2, [[1.0], [3.0]])])
def test_a_lost_tensor_is_passed_over(run, nth, came):
    report = run(_three, Drop(rank=2, at="dist.send", nth=nth))
    assert report.values == [came, None, None], report


def _one():
    if smp.rank() == 0:
        dist.send(torch.tensor([1.0]), 1)
        return "went on"
    if smp.rank() == 1:
        dist.recv(torch.zeros(1), 0)
    return None


def test_who_waits_for_a_lost_tensor_is_told(run, executor):
    checked = getattr(executor, "_check", True)
    report = run(_one, Drop(rank=0, at="dist.send"), timeout=None if checked else 2.0)
    assert report.verdict is (VerdictKind.DEADLOCK if checked else VerdictKind.TIMED_OUT)
    assert report.outcomes[1].kind is OutcomeKind.STUCK
    assert report.outcomes[0].value == "went on"
