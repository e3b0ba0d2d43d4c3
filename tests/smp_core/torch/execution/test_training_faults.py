"""A rank that dies, stands still, comes late or loses a message in the midst of a training step: the
verdict names it, and the next run trains as if nothing had happened.

Two pipelines of two ranks; rank 1 fails. Its third message is the output of its module in step 2, its
fourth message the gradient of that module's input.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import Corrupt, Drop, Exit, Kill, Raise, Stall
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from smp_core.errors import CrashError, InjectedError

RANKS = 4
CONFIG = {
    "pipeline_parallel_degree": 2,
    "ddp": True,
    "auto_partition": False,
    "default_partition": 0,
    "skip_tracing": True,
}
STEPS = 2
#: Where rank 1 is in the second step.
PHASES = {
    "waits for work": ("dist.recv", 5),
    "forward": ("dist.send", 3),
    "backward": ("dist.send", 4),
    "reduction": ("dist.all_to_all_single", 2),
    "agreement at the end": ("smp.allgather", 6),
    "after the last step": ("end", 1),
}
phases = pytest.mark.parametrize(("at", "nth"), PHASES.values(), ids=PHASES)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        with smp.partition(1):
            self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def _weights(module):
    """Numbers with few bits."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 8 - 0.25)


def _train():
    module = Model()
    _weights(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(model, x):
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step(model, torch.eye(2)).reduce_sum()))
        optimizer.step()
    return losses


@functools.cache
def _expected():
    """The same by plain PyTorch: both replicas have the same data, so the mean is what each has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    _weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.eye(2)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _prepare():
    import torch._dynamo  # noqa: F401  else each rank that is replaced imports it, for its optimizer


def _nothing(rank):
    return (), {}


@pytest.fixture(scope="module", params=["sim", "gloo"])
def executor(request):
    executor = open_backend(request.param, ExecutorOptions(ranks=RANKS, prelude=_prepare))
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def sim():
    executor = open_backend("sim", ExecutorOptions(ranks=RANKS))
    yield executor
    executor.close()


def _run(executor, *faults, timeout=60.0):
    job = Job(body=_train, arguments=_nothing, parameters=CONFIG, timeout=timeout, faults=faults)
    return executor.open(RANKS).run(job)


def _trains(executor):
    assert _run(executor).values == [_expected()] * RANKS


@phases
def test_a_rank_that_dies_is_named(executor, at, nth):
    report = _run(executor, Kill(rank=1, at=at, nth=nth))
    assert (report.verdict, report.root) == (VerdictKind.CRASHED, 1), report
    assert isinstance(report.error, CrashError)
    _trains(executor)


def test_a_rank_that_exits_is_named(executor):
    report = _run(executor, Exit(rank=1, at="dist.send", nth=3, when="after", code=0))
    assert (report.verdict, report.root) == (VerdictKind.CRASHED, 1), report
    _trains(executor)


@pytest.mark.parametrize("phase", ["forward", "reduction"])
def test_a_rank_that_stands_still_is_named(executor, phase):
    at, nth = PHASES[phase]
    _trains(executor)  # ranks are there, and warm: the time limit is for the run alone
    report = _run(executor, Stall(rank=1, at=at, nth=nth), timeout=5.0)
    assert report.verdict in (VerdictKind.DEADLOCK, VerdictKind.TIMED_OUT), report
    first = re.search(r"rank \d", str(report.error))  # of a run out of time, the first to blame
    assert report.root == 1 or (first is not None and first[0] == "rank 1"), str(report.error)
    _trains(executor)


@phases
def test_a_rank_that_comes_late_changes_nothing(executor, at, nth):
    report = _run(executor, Stall(rank=1, at=at, nth=nth, seconds=0.05))
    assert report.verdict is VerdictKind.PASSED, report.error
    assert report.values == [_expected()] * RANKS


@pytest.mark.parametrize("phase", ["forward", "backward", "reduction"])
def test_a_call_that_fails_is_told_as_it_is(executor, phase):
    at, nth = PHASES[phase]
    report = _run(executor, Raise(rank=1, at=at, nth=nth))
    assert report.verdict is VerdictKind.FAILED, report
    assert isinstance(report.error, InjectedError)
    assert f"rank 1: before call {nth} of {at}" in str(report.error)  # whichever rank tells it
    _trains(executor)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_lost_message_is_a_deadlock(sim, phase):
    at, nth = PHASES[phase]
    report = _run(sim, Drop(rank=1, at=at, nth=nth))
    assert report.verdict is VerdictKind.DEADLOCK, report
    _trains(sim)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_damaged_message_does_not_hang(sim, phase):
    at, nth = PHASES[phase]
    report = _run(sim, Corrupt(rank=1, at=at, nth=nth, how=torch.zeros_like))
    assert report.verdict is VerdictKind.FAILED, report
    _trains(sim)
