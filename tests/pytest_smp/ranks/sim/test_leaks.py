"""Leaks on `sim`: a message never received, a call never joined, a work never waited for and a group
never destroyed are told, each with its rank, call and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Executor, Job, OutcomeKind, Report, VerdictKind
from pytest_smp.running import GroupLeftWarning
from smp_core.errors import LeakError

THIS_FILE = "test_leaks.py"
ALL_REDUCE = "all_reduce(reduce op=SUM, dtype=float32, shape=[4])"


def ones(count: int = 1) -> torch.Tensor:
    return torch.ones(count)


def leak(report: Report) -> list[str]:
    """The leftovers that a report names, a line each, with the user's line behind it."""
    assert report.verdict is VerdictKind.LEAK
    assert isinstance(report.error, LeakError)
    head, *lines = str(report.error).splitlines()
    assert head == "leak: the run left something behind"
    assert all(THIS_FILE in line for line in lines[1::2])
    return [line.strip() for line in lines[::2]]


LEFT: list[tuple[str, Callable[[], Any], list[str]]] = [
    (
        "a send that nobody receives",
        lambda: dist.isend(ones(4), 1, tag=3) if dist.get_rank() == 0 else None,
        ["rank 0: send to rank 1 (float32, shape [4], tag 3) was never matched"],
    ),
    (
        "a receive that nobody sends to",
        lambda: dist.irecv(ones(4), 0) if dist.get_rank() == 1 else None,
        ["rank 1: recv from rank 0 (float32, shape [4], tag 0) was never matched"],
    ),
    (
        "a receive from any source",
        lambda: dist.irecv(ones(4)) if dist.get_rank() == 1 else None,
        ["rank 1: recv from any rank (float32, shape [4], tag 0) was never matched"],
    ),
    (
        "a call that some have not joined",
        lambda: dist.all_reduce(ones(4), async_op=True) if dist.get_rank() == 1 else None,
        [
            f"rank 1: {ALL_REDUCE} [group WORLD, call 1] was never joined by rank 0",
        ],
    ),
    (
        "a work that nobody waits for",
        lambda: dist.all_reduce(ones(4), async_op=True),
        ["ranks 0-1: all_reduce was never waited for"],
    ),
    (
        "a message that has arrived, without a wait",
        lambda: dist.isend(ones(4), 1) if dist.get_rank() == 0 else dist.irecv(ones(4), 0),
        [
            "rank 0: send to rank 1 (float32, shape [4], tag 0) was never waited for",
            "rank 1: recv from rank 0 (float32, shape [4], tag 0) was never waited for",
        ],
    ),
    (
        "a barrier",
        lambda: dist.barrier(async_op=True),
        ["ranks 0-1: barrier was never waited for"],
    ),
]


@pytest.mark.parametrize(
    ("call", "expected"), [case[1:] for case in LEFT], ids=[c[0] for c in LEFT]
)
def test_what_is_left_behind_fails_the_run(smp_world: Any, call: Any, expected: Any) -> None:
    def body() -> None:
        call()

    assert leak(smp_world.report(body, ranks=2)) == expected


def test_one_of_many_works_is_found(smp_world: Any) -> None:
    def body() -> None:
        works: list[Any] = [dist.all_reduce(ones(slot), async_op=True) for slot in range(4)]
        for slot, work in enumerate(works):
            if (dist.get_rank(), slot) != (1, 2):
                work.wait()

    assert leak(smp_world.report(body, ranks=3)) == ["rank 1: all_reduce was never waited for"]


@pytest.mark.parametrize("way", ["wait", "get_future", "is_completed", "result", "synchronize"])
def test_every_way_of_waiting_counts(smp_world: Any, way: str) -> None:
    def body() -> None:
        work = dist.all_reduce(ones(), async_op=True)
        if way == "is_completed":
            while not work.is_completed():
                pass
        else:
            getattr(work, way)()

    smp_world.run(body, ranks=3)


def test_coalesced_works_count_as_one(smp_world: Any) -> None:
    def body() -> None:
        with dist.distributed_c10d._coalescing_manager(
            device=torch.device("cpu"), async_ops=True
        ) as manager:
            dist.broadcast(ones(), 0, async_op=True)
            dist.broadcast(ones(), 1, async_op=True)
        if dist.get_rank() == 0:
            manager.wait()

    expected = ["rank 1: broadcast was never waited for"] * 2
    assert leak(smp_world.report(body, ranks=2)) == expected


def test_a_sub_groups_messages_are_seen(smp_world: Any) -> None:
    def body() -> None:
        group = dist.new_group([2, 1], sort_ranks=False)
        if dist.get_rank() == 2:
            dist.isend(ones(), 1, group=group)
        if dist.get_rank():
            dist.destroy_process_group(group)

    expected = "rank 2: send to rank 1 (float32, shape [1], tag 0) was never matched"
    assert leak(smp_world.report(body, ranks=3)) == [expected]


def test_a_failure_is_told_before_a_leak(smp_world: Any) -> None:
    """The leftovers of a run that failed are no news."""

    def body() -> None:
        if dist.get_rank() == 0:
            dist.isend(ones(), 1)
            raise LookupError("the cause")

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.FAILED
    assert isinstance(report.error, LookupError)


def test_a_run_leaves_nothing_to_the_next(smp_world: Any) -> None:
    """B157: the message of a failed run is not received in the next."""

    def first() -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.tensor([1.0]), 1)

    def second() -> float:
        mine = torch.tensor([2.0])
        if dist.get_rank() == 0:
            dist.send(mine, 1)
        else:
            mine.zero_()
            dist.recv(mine, 0)
        return mine.item()

    leak(smp_world.report(first, ranks=2))
    assert smp_world.run(second, ranks=2) == [2.0, 2.0]


# Groups.


def leave_groups() -> None:
    dist.new_group([0, 1])
    kept = dist.new_group([2, 0], sort_ranks=False)
    if dist.get_rank() != 1:
        dist.destroy_process_group(kept)


def test_a_group_left_is_a_warning(smp_world: Any) -> None:
    with pytest.warns(GroupLeftWarning) as caught:
        report = smp_world.report(leave_groups, ranks=3)
    assert report.verdict is VerdictKind.PASSED
    (left,) = report.warnings
    text, place = left.splitlines()
    assert text == "ranks 0-1: process group 1 of ranks [0, 1] was never destroyed"
    assert place.endswith("in leave_groups:  dist.new_group([0, 1])")
    assert [str(each.message) for each in caught] == report.warnings


def test_a_group_that_some_ranks_left_is_a_warning(smp_world: Any) -> None:
    def body() -> None:
        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)

    with pytest.warns(GroupLeftWarning, match="rank 1: process group 1 of ranks"):
        smp_world.run(body, ranks=2)


@pytest.fixture
def executor() -> Iterator[Executor]:
    opened = open_backend("sim")
    yield opened
    opened.close()


def test_a_group_left_is_a_failure_when_strict(executor: Executor) -> None:
    job = Job(body=leave_groups, arguments=lambda rank: ((), {}), strict=True)
    report = executor.open(3).run(job)
    assert report.verdict is VerdictKind.LEAK
    assert leak(report) == ["ranks 0-1: process group 1 of ranks [0, 1] was never destroyed"]
    assert report.warnings == []


def test_the_default_group_and_those_of_the_api_are_not_the_users(executor: Executor) -> None:
    def body() -> None:
        import smp_core.torch as smp

        dist.all_reduce(ones())
        dist.all_reduce(ones(), group=smp.get_dp_process_group())

    job = Job(body=body, arguments=lambda rank: ((), {}), parameters={"ddp": True}, strict=True)
    assert executor.open(3).run(job).verdict is VerdictKind.PASSED


def test_destroying_everything_leaves_nothing(executor: Executor) -> None:
    def body() -> None:
        for first in range(3):
            dist.new_group([first, (first + 1) % 3])
        dist.destroy_process_group()

    job = Job(body=body, arguments=lambda rank: ((), {}), strict=True)
    assert executor.open(3).run(job).verdict is VerdictKind.PASSED


def test_groups_of_a_device_mesh_are_no_leak(executor: Executor) -> None:
    """torch makes them, and gives no call that destroys a mesh. A body's own group stays one."""

    def body(group: bool) -> None:
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"].get_group()
        if group:
            dist.new_subgroups(2)

    for group in (False, True):
        job = Job(body=body, arguments=lambda rank, group=group: ((group,), {}), strict=True)
        report = executor.open(4).run(job)
        assert report.verdict is (VerdictKind.LEAK if group else VerdictKind.PASSED)
    assert str(report.error).count("was never destroyed") == 2  # of either group, by its two ranks


def test_a_coalescing_manager_that_is_never_waited_for(smp_world: Any) -> None:
    """Its operation is issued at the end of the block, by the body's own line."""

    def body() -> None:
        with c10d._coalescing_manager(async_ops=True):
            for _ in range(2):
                dist.all_reduce(torch.ones(2))

    report = smp_world.report(body, ranks=2)
    assert isinstance(report.error, LeakError)
    assert "ranks 0-1: all_reduce_coalesced was never waited for" in str(report.error)


@pytest.mark.parametrize("late", [1, 3])
def test_new_group_called_by_some_ranks_only(smp_world: Any, late: int) -> None:
    """torch: every process must call it, whether it becomes a member or not."""

    def body() -> None:
        if dist.get_rank() < late:
            dist.new_group([0])

    report = smp_world.report(body, ranks=4)
    text = str(report.error)
    absent = "ranks 1-3" if late == 1 else "rank 3"
    assert isinstance(report.error, LeakError)
    assert f"rank 0: new_group number 1 of ranks [0] was never called by {absent}" in text
    assert "test_leaks.py" in text


def test_works_that_torch_itself_leaves_are_no_leak(smp_world: Any) -> None:
    """DDP.join() with uneven inputs starts all-reduces that it never waits for."""

    def body() -> int:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        steps = 0
        with model.join():
            for _ in range(1 + dist.get_rank()):
                model(torch.ones(1, 2)).sum().backward()
                steps += 1
        return steps

    assert smp_world.run(body, ranks=3) == [1, 2, 3]


def test_who_skips_leaves_nothing_behind(smp_world: Any) -> None:
    def body() -> None:
        dist.all_reduce(torch.zeros(1), async_op=True)
        pytest.skip("not here")

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.PASSED
    assert [outcome.kind for outcome in report.outcomes] == [OutcomeKind.SKIPPED] * 2
