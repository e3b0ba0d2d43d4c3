"""What verdicts say, word for word the same on simulated ranks and on rank processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

import smp_core.torch as smp
from smp_core.backends import open_backend
from smp_core.backends.base import Host, HostOptions, Job, OutcomeKind, Report, VerdictKind

RANKS = 3
Body = Callable[[], Any]


@pytest.fixture(scope="module", params=["sim", "gloo", "mpi"])
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, Host]]:
    name = str(request.param)
    host = open_backend(name, HostOptions(ranks=RANKS))
    yield name, host
    host.close()


@pytest.fixture
def run(backend: tuple[str, Host]) -> Callable[..., Report]:
    def run(body: Body, **how: Any) -> Report:
        job = Job(body=body, arguments=lambda rank: ((), {}), timeout=60, **how)
        return backend[1].open(how.pop("ranks", RANKS)).run(job)

    return run


def line_of(body: Body, text: str) -> str:
    """``test_words.py:NN in NAME:  SOURCE``, of the one line of a body with this text."""
    import inspect

    lines, first = inspect.getsourcelines(body)
    (at,) = [at for at, line in enumerate(lines) if text in line]
    return f"test_words.py:{first + at} in {body.__name__}:  {lines[at].strip()}"


# ---- Mismatches ----------------------------------------------------------------------------------


def calls_differ() -> None:
    if smp.rank() == 1:
        smp.barrier()
    else:
        smp.allgather("x", smp.WORLD)


def test_api_calls_that_differ_are_a_mismatch(run: Callable[..., Report]) -> None:
    report = run(calls_differ)
    assert report.verdict is VerdictKind.MISMATCH, report.error
    text = str(report.error)
    assert "call 1 on group WORLD differs in operation" in text
    assert re.search(r"rank 1: smp.barrier\(\)\n", text)
    assert line_of(calls_differ, "smp.barrier") in text
    assert re.search(r"ranks 0, 2: smp.allgather\(\)\n", text)
    assert line_of(calls_differ, "smp.allgather") in text


def one_of_three_reduces_another() -> None:
    dist.all_reduce(
        torch.ones(2), op=dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM
    )


def in_flight(rank: int = 2) -> None:
    work = dist.all_reduce(torch.ones(3 if dist.get_rank() == rank else 2), async_op=True)
    assert work is not None
    work.wait()


@pytest.mark.parametrize(
    ("body", "odd"),
    [
        (calls_differ, 1),
        (one_of_three_reduces_another, 0),
        (in_flight, 2),
    ],
)
def test_the_odd_one_of_three_is_named(run: Callable[..., Report], body: Body, odd: int) -> None:
    """Whichever rank is first to find it, and it is the one that raises."""
    report = run(body)
    assert report.verdict is VerdictKind.MISMATCH, report.error
    assert f"\nodd one out: rank {odd}" in str(report.error), report.error
    assert report.root == odd


def each_says_another() -> None:
    dist.all_reduce(torch.ones(dist.get_rank() + 1))


def test_where_no_most_ranks_agree_nobody_is_odd(run: Callable[..., Report]) -> None:
    report = run(each_says_another)
    assert report.verdict is VerdictKind.MISMATCH
    assert "odd one" not in str(report.error)
    for rank in range(RANKS):
        assert f"  rank {rank}: all_reduce(" in str(report.error)


def polls() -> None:
    work = dist.all_reduce(torch.ones(3 if dist.get_rank() == 1 else 2), async_op=True)
    assert work is not None
    while dist.get_rank() == 0 and not work.is_completed():
        pass
    work.wait()


def test_a_rank_that_polls_does_not_keep_the_verdict_away(smp_world: Any) -> None:
    """It never waits, so that others of its kind never are the only ones left."""
    report = smp_world.report(polls, ranks=RANKS)
    assert report.verdict is VerdictKind.MISMATCH, report.error
    assert "\nodd one out: rank 1" in str(report.error)


def absent() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken")
    if dist.get_rank() != 2:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


def mismatch_first() -> None:
    if dist.get_rank() == 3:
        for _ in range(5):
            dist.send(torch.ones(1), 4)
        raise ValueError("broken")
    if dist.get_rank() == 4:
        for _ in range(5):
            dist.recv(torch.ones(1), 3)
    elif dist.get_rank() == 1:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


def test_what_fails_while_a_mismatch_waits_to_be_told_is_no_cause(smp_world: Any) -> None:
    report = smp_world.report(mismatch_first, ranks=5)
    assert report.verdict is VerdictKind.MISMATCH, report.error
    assert "\nodd one out: rank 1" in str(report.error)
    assert report.root == 1
    assert report.outcomes[3].kind is OutcomeKind.RAISED
    assert smp_world.report(absent, ranks=3).root == 1  # here it came first
