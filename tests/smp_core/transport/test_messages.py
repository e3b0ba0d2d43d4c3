"""The messages of verdicts, word for word the same on simulated ranks and on rank processes."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import (
    Executor,
    ExecutorOptions,
    Job,
    OutcomeKind,
    Report,
    VerdictKind,
)

RANKS = 3
Body = Callable[[], Any]


@pytest.fixture(scope="module", params=["sim", "gloo", "mpi"])
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, Executor]]:
    name = str(request.param)
    executor = open_backend(name, ExecutorOptions(ranks=RANKS))
    yield name, executor
    executor.close()


@pytest.fixture
def run(backend: tuple[str, Executor]) -> Callable[..., Report]:
    def run(body: Body, **how: Any) -> Report:
        job = Job(body=body, arguments=lambda rank: ((), {}), timeout=60, **how)
        return backend[1].open(how.pop("ranks", RANKS)).run(job)

    return run


def line_of(body: Body, text: str) -> str:
    """``test_messages.py:NN in NAME:  SOURCE``, of the one line of a body with this text."""
    import inspect

    lines, first = inspect.getsourcelines(body)
    (at,) = [at for at, line in enumerate(lines) if text in line]
    return f"test_messages.py:{first + at} in {body.__name__}:  {lines[at].strip()}"


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
    """The polling rank never waits, so ranks that wait are never the only ones left."""
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


# ---- Leaks ---------------------------------------------------------------------------------------


def groups_left() -> None:
    dist.new_group([0, 1])  # left by both
    kept = dist.new_group([2, 0, 1], sort_ranks=False)  # left by one
    if dist.get_rank() != 1:
        dist.destroy_process_group(kept)
    dist.barrier()


def test_a_group_left_is_told_by_the_members_that_left_it(run: Callable[..., Report]) -> None:
    report = run(groups_left)
    assert report.verdict is VerdictKind.PASSED, report.error
    warnings = [text.splitlines() for text in report.warnings]
    assert [[line.strip() for line in lines] for lines in warnings] == [
        [
            "ranks 0-1: process group 1 of ranks [0, 1] was never destroyed",
            f"tests/smp_core/transport/{line_of(groups_left, 'left by both')}",
        ],
        [
            "rank 1: process group 2 of ranks [2, 0, 1] was never destroyed",
            f"tests/smp_core/transport/{line_of(groups_left, 'left by one')}",
        ],
    ]


def works_left() -> None:
    group = dist.new_group([0, 2])
    dist.barrier()
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(2), async_op=True)
    elif dist.get_rank() == 1:
        dist.isend(torch.ones(2), 0)
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(3), group=group, async_op=True)


def test_what_is_left_is_told_by_line_and_rank(run: Callable[..., Report]) -> None:
    report = run(works_left)
    assert report.verdict is VerdictKind.LEAK, report.error
    _head, *lines = str(report.error).splitlines()
    left = {
        line.strip(): place.strip() for line, place in zip(lines[::2], lines[1::2], strict=True)
    }
    here = "tests/smp_core/transport/"
    reduced = "all_reduce(reduce op=SUM, dtype=float32, shape="
    assert left == {
        "rank 1: send to rank 0 (float32, shape [2], tag 0) was never matched": (
            f"{here}{line_of(works_left, 'isend')}"
        ),
        f"ranks 0, 2: {reduced}[2]) [group WORLD, call 2] was never joined by rank 1": (
            f"{here}{line_of(works_left, 'ones(2), async_op')}"
        ),
        f"rank 2: {reduced}[3]) [group 1 (ranks 0, 2), call 1] was never joined by rank 0": (
            f"{here}{line_of(works_left, 'ones(3), group')}"
        ),
    }


# ---- Groups --------------------------------------------------------------------------------------


def waits_in_groups() -> None:
    turned = dist.new_group([2, 0], sort_ranks=False)
    if dist.get_rank() == 2:
        dist.barrier(group=turned)  # the wait in a group
    elif dist.get_rank() == 1:
        smp.broadcast("x", smp.DP_GROUP)


def test_a_group_is_shown_with_its_ranks(run: Callable[..., Report]) -> None:
    report = run(waits_in_groups, parameters={"pipeline_parallel_degree": 1})
    assert report.verdict is VerdictKind.DEADLOCK, report.error
    text = str(report.error)
    assert (
        "rank 2 waits in barrier() [group 1 (ranks 2, 0 in this order), call 1] for rank 0" in text
    )
    assert "rank 1 waits in smp.broadcast(group DP_GROUP (ranks 0-2)) for ranks 0, 2" in text


# ---- Lines ---------------------------------------------------------------------------------------


def waits_for_a_request() -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(2), 1)
        assert work is not None
        dist.get_world_size()
        work.wait()  # where it waits


def test_a_deadlock_shows_where_a_pending_request_was_issued(run: Callable[..., Report]) -> None:
    report = run(waits_for_a_request)
    assert report.verdict is VerdictKind.DEADLOCK, report.error
    text = str(report.error)
    assert line_of(waits_for_a_request, "where it waits") in text
    issued = f"      issued at tests/smp_core/transport/{line_of(waits_for_a_request, 'irecv')}"
    assert issued in text.splitlines()


@pytest.mark.parametrize(
    ("body", "text"), [(waits_for_a_request, "where it waits"), (calls_differ, "smp.barrier")]
)
def test_a_verdict_is_raised_at_the_line_of_its_rank(
    run: Callable[..., Report], body: Body, text: str
) -> None:
    """pytest shows that line, and the section at the end repeats it."""
    report = run(body)
    assert report.error is not None
    last = traceback.extract_tb(report.error.__traceback__)[-1]
    where = f"test_messages.py:{last.lineno} in {last.name}:  {last.line}"
    assert where == line_of(body, text)
    assert last.filename == __file__


def drops_a_request(note: Path) -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(2), 1)  # dropped
        note.touch()
    time.sleep(3600)


def test_a_time_out_names_what_was_not_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "note"
    executor = open_backend("gloo", ExecutorOptions(ranks=2))
    try:
        job = Job(
            body=drops_a_request,
            arguments=lambda rank: ((note,), {}),
            timeout=1,
            patience=lambda: not note.exists(),
        )
        report = executor.open(2).run(job)
    finally:
        executor.close()
    assert report.verdict is VerdictKind.TIMED_OUT, report.error
    text = str(report.error)
    said = "  rank 0 has not waited for send to rank 1 (float32, shape [2], tag 0) [group WORLD]"
    assert f"{said}\n      tests/smp_core/transport/{line_of(drops_a_request, 'dropped')}" in text
    assert "rank 1 has not waited" not in text
