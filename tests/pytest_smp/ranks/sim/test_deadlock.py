"""Deadlock verdicts on `sim`: when no rank can run, every wait is named at once, whatever it waits
in, with the wait-for graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, OutcomeKind, Report, VerdictKind
from smp_core.errors import DeadlockError

THIS_FILE = "test_deadlock.py"


def deadlock(report: Report) -> list[str]:
    """The message's lines, after checking that this is a deadlock, raised on the root."""
    assert report.verdict is VerdictKind.DEADLOCK
    assert isinstance(report.error, DeadlockError)
    assert report.root is not None
    return str(report.error).splitlines()


def kinds(report: Report) -> list[OutcomeKind]:
    return [outcome.kind for outcome in report.outcomes]


def ones(count: int = 1) -> torch.Tensor:
    return torch.ones(count)


# The wait-for graph.


@given(
    st.integers(2, 4).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
    st.sampled_from(["barrier", "all_reduce", "recv"]),
)
def test_an_exception_that_a_rank_handles_while_it_waits_is_told(
    smp_world: Any, world: tuple[int, int], call: str
) -> None:
    """Cleaning up is often a call that no other rank makes; the exception then never leaves the rank."""
    size, bad = world
    calls: dict[str, Callable[[], object]] = {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(ones()),
        "recv": lambda: dist.recv(ones(), (bad + 1) % size),
    }

    def body() -> None:
        dist.barrier()
        group = dist.new_group()
        try:
            if dist.get_rank() == bad:
                raise RuntimeError("bad batch 17\nand more")
            dist.all_reduce(ones(), group=group)
        finally:
            if dist.get_rank() == bad:
                calls[call]()

    report = smp_world.report(body, ranks=size)
    lines = deadlock(report)
    line = body.__code__.co_firstlineno + 5
    told = f", while it handles RuntimeError: bad batch 17 ({THIS_FILE}:{line})"
    assert report.root == bad
    assert lines[1].startswith(f"  rank {bad} waits in {call}")
    assert lines[1].endswith(told)
    assert "\n".join(lines).count("while it handles") == 1
    assert report.outcomes[bad].detail.splitlines()[0].endswith(told)


@pytest.mark.parametrize("bad", range(2))
def test_of_two_calls_that_differ_that_of_a_rank_which_handles_an_exception_is_the_odd_one(
    smp_world: Any, bad: int
) -> None:
    def body() -> None:
        try:
            if dist.get_rank() == bad:
                raise RuntimeError("bad batch 17")
            dist.all_reduce(ones())
        finally:
            dist.barrier()

    report = smp_world.report(body, ranks=2)
    assert (report.verdict, report.root) == (VerdictKind.MISMATCH, bad)
    line = body.__code__.co_firstlineno + 3
    told = f"barrier(), while it handles RuntimeError: bad batch 17 ({THIS_FILE}:{line})"
    assert f"\n  rank {bad}: {told}\n" in str(report.error)


def test_a_rank_has_returned(smp_world: Any) -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            return "early"
        dist.all_reduce(ones(4))  # where they wait
        return "late"

    report = smp_world.report(body, ranks=3)
    lines = deadlock(report)
    call = "all_reduce(reduce op=SUM, dtype=float32, shape=[4]) [group WORLD, call 1]"
    assert lines[:2] == [
        "deadlock: 2 of 3 ranks wait, and none can go on",
        f"  ranks 0, 2 wait in {call} for rank 1",
    ]
    line = body.__code__.co_firstlineno + 3
    assert f"{THIS_FILE}:{line} in body:  dist.all_reduce(ones(4))  # where they wait" in lines[2]
    assert lines[3:] == [
        "  rank 1 has returned",
        "wait-for: rank 0 waits for rank 1, which has returned without a matching call",
    ]
    assert report.root == 0
    assert kinds(report) == [OutcomeKind.STUCK, OutcomeKind.RETURNED, OutcomeKind.STUCK]
    assert report.outcomes[1].value == "early"
    assert "waits in all_reduce" in report.outcomes[2].detail


def test_several_ranks_have_returned(smp_world: Any) -> None:
    """All of them are named, in the wait and in the end."""

    def body() -> None:
        if dist.get_rank() in (0, 4):
            dist.barrier()

    lines = deadlock(smp_world.report(body, ranks=6))
    assert lines[1] == "  ranks 0, 4 wait in barrier() [group WORLD, call 1] for ranks 1-3, 5"
    assert lines[-2:] == [
        "  ranks 1-3, 5 have returned",
        "wait-for: rank 0 waits for ranks 1-3, 5, which have returned without a matching call",
    ]


def test_messages_in_a_group_name_world_ranks(smp_world: Any) -> None:
    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group([3, 1], sort_ranks=False)
        if rank == 3:
            dist.send(ones(), 1, group=group)
        elif rank == 1:
            dist.send(ones(), 3, group=group)

    lines = deadlock(smp_world.report(body, ranks=4))
    calls = [line.split(" (float32")[0] for line in lines if "float32" in line and "[group" in line]
    assert calls == ["  rank 1 waits in send to rank 3", "  rank 3 waits in send to rank 1"]
    assert lines[-1] == "wait-for cycle: rank 1 -> rank 3 -> rank 1"


def test_a_rank_has_raised(smp_world: Any) -> None:
    """No deadlock: the error ends the run, and is the verdict; the others say where they were."""

    def body() -> None:
        if dist.get_rank() == 1:
            dist.recv(ones(), 2)
            raise LookupError("no such thing")
        if dist.get_rank() == 2:
            dist.send(ones(), 1)
        dist.barrier()  # where they wait

    report = smp_world.report(body, ranks=3)
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 1)
    assert isinstance(report.error, LookupError)
    assert kinds(report) == [OutcomeKind.CANCELLED, OutcomeKind.RAISED, OutcomeKind.CANCELLED]
    assert report.outcomes[2].detail.startswith("cancelled because of rank 1 at ")
    assert "dist.barrier()  # where they wait" in report.outcomes[2].detail


def test_a_cycle_of_sends(smp_world: Any) -> None:
    """B047: everybody sends first, and a send returns only when it has been received."""

    def body() -> None:
        rank = dist.get_rank()
        dist.send(ones(), (rank + 1) % 4)
        dist.recv(ones(), (rank - 1) % 4)

    report = smp_world.report(body, ranks=4)
    lines = deadlock(report)
    assert lines[0] == "deadlock: 4 of 4 ranks wait, and none can go on"
    for rank in range(4):
        peer = (rank + 1) % 4
        start = f"  rank {rank} waits in send to rank {peer} (float32, shape [1], tag 0)"
        assert sum(line.startswith(start) for line in lines) == 1
    assert lines[-1] == "wait-for cycle: rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0"
    assert kinds(report) == [OutcomeKind.STUCK] * 4


def test_a_tag_that_nobody_sends(smp_world: Any) -> None:
    """B052: matched by tag too, so both wait, and the message shows the tags."""

    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(ones(), 1, tag=3)
        else:
            dist.recv(ones(), 0, tag=4)

    text = "\n".join(deadlock(smp_world.report(body, ranks=2)))
    assert "rank 0 waits in send to rank 1 (float32, shape [1], tag 3)" in text
    assert "rank 1 waits in recv from rank 0 (float32, shape [1], tag 4)" in text
    assert "wait-for cycle: rank 0 -> rank 1 -> rank 0" in text


def test_a_rank_that_waits_for_itself(smp_world: Any) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            work = dist.irecv(ones(), 1)
            assert work is not None
            work.wait()

    lines = deadlock(smp_world.report(body, ranks=2))
    assert lines[-1] == "wait-for cycle: rank 1 -> rank 1"


def test_seven_ranks_in_five_groups_while_the_eighth_has_returned(smp_world: Any) -> None:
    """TORCH 1.8: a chain through several groups, and no cycle."""
    groups = [[0, 7], [1, 0], [2, 1], [4, 3, 2], [3, 6, 5]]
    waits_in = {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 4, 6: 4}

    def body() -> None:
        made = [dist.new_group(ranks, sort_ranks=False) for ranks in groups]
        rank = dist.get_rank()
        if rank != 7:
            dist.barrier(made[waits_in[rank]])

    report = smp_world.report(body, ranks=8)
    lines = deadlock(report)
    assert lines[0] == "deadlock: 7 of 8 ranks wait, and none can go on"
    waiting = [line.split(" [group")[0] for line in lines if " wait" in line and "[group" in line]
    assert waiting == [
        "  rank 0 waits in barrier()",
        "  rank 1 waits in barrier()",
        "  rank 2 waits in barrier()",
        "  ranks 3-4 wait in barrier()",
        "  ranks 5-6 wait in barrier()",
    ]
    targets = [line.split("] for ")[1] for line in lines if "] for " in line]
    assert targets == ["rank 7", "rank 0", "rank 1", "rank 2", "rank 3"]
    assert lines[-2:] == [
        "  rank 7 has returned",
        "wait-for: rank 0 waits for rank 7, which has returned without a matching call",
    ]
    assert (report.root, kinds(report)[7]) == (0, OutcomeKind.RETURNED)


def test_two_groups_in_opposite_order(smp_world: Any) -> None:
    """Each rank waits in the group that the other comes to second."""

    def body() -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (first, second) if dist.get_rank() == 0 else (second, first):
            dist.barrier(group)

    lines = deadlock(smp_world.report(body, ranks=2))
    assert lines[-1] == "wait-for cycle: rank 0 -> rank 1 -> rank 0"


def test_a_cycle_beside_ranks_that_could_have_gone_on(smp_world: Any) -> None:
    """Ranks 0 and 1 wait for the cycle of 2, 3 and 4: the cycle is named, its rank is the root."""

    def body() -> None:
        rank = dist.get_rank()
        if rank >= 2:
            dist.recv(ones(), 2 + (rank - 1) % 3)
        dist.barrier()

    report = smp_world.report(body, ranks=5)
    lines = deadlock(report)
    assert lines[-1] == "wait-for cycle: rank 2 -> rank 3 -> rank 4 -> rank 2"
    assert report.root == 2


# The operations that ranks wait in. In each, rank 1 takes part and rank 0 does not; beside it stand the words of
# the wait.


def _backward_hook() -> None:
    leaf = ones().requires_grad_()
    leaf.register_hook(lambda gradient: (dist.all_reduce(gradient), gradient)[1])
    (2 * leaf).backward()


def _in_the_autograd_graph() -> None:
    leaf = ones().requires_grad_()
    world: Any = dist.group.WORLD
    output = funcol.all_gather_single_autograd(leaf, 0, world)
    output.sum().backward()


def _get_future() -> None:
    dist.all_reduce(ones(), async_op=True).get_future()


def _is_waited_for_late() -> None:
    work = dist.all_reduce(ones(), async_op=True)
    assert not work.is_completed()
    work.wait()


def _functional() -> None:
    world: Any = dist.group.WORLD
    funcol.all_reduce(ones(), "sum", world).tolist()


def _store() -> None:
    dist.distributed_c10d._get_default_store().wait(["a key"])


def _store_get() -> None:
    dist.distributed_c10d._get_default_store().get("a key")


def _prefix_store() -> None:
    """A C++ store around ours."""
    inner = dist.distributed_c10d._get_default_store()
    dist.PrefixStore("mine", inner).get("a key")


def _batch() -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, ones(), 0)]):
        work.wait()


def _coalesced() -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(ones())
        dist.all_reduce(ones())


def _api() -> None:
    import smp_core.torch as smp

    smp.barrier()


def _api_receive() -> None:
    import smp_core.torch as smp

    smp.recv_from(0, smp.RankType.WORLD_RANK)


WAITS: list[tuple[Callable[[], Any], str]] = [
    (_backward_hook, "all_reduce(reduce op=SUM, dtype=float32, shape=[1]) [group WORLD, call 1]"),
    (_in_the_autograd_graph, "all_gather_single_coalesced(dtype=float32, shape=[1])"),
    (_get_future, "all_reduce(reduce op=SUM, dtype=float32, shape=[1]) [group WORLD, call 1]"),
    (_is_waited_for_late, "all_reduce(reduce op=SUM, dtype=float32, shape=[1])"),
    (_functional, "all_reduce(reduce op=SUM, dtype=float32, shape=[1])"),
    (_store, "store.wait for 'a key'"),
    (_store_get, "store.wait for 'a key'"),
    (_prefix_store, "store.wait for 'mine/a key'"),
    (_batch, "recv from rank 0 (float32, shape [1], tag 0) [group WORLD]"),
    (_coalesced, "all_reduce_coalesced(reduce op=SUM, dtype=float32, shape=[1] [1])"),
    (lambda: dist.recv(ones()), "recv from any rank (float32, shape [1], tag 0) [group WORLD]"),
    (lambda: dist.send(ones(), 0), "send to rank 0 (float32, shape [1], tag 0) [group WORLD]"),
    (lambda: dist.barrier(), "barrier() [group WORLD, call 1]"),
    (lambda: dist.all_gather_object([None, None], 1), "all_gather(dtype=int64, shape=[1])"),
    (_api, "smp.barrier"),
    (_api_receive, "smp.recv_from(world rank 0)"),
]


@pytest.mark.parametrize(
    ("wait", "words"),
    WAITS,
    ids=[f"{words.split('(')[0]}-{i}" for i, (_, words) in enumerate(WAITS)],
)
def test_every_kind_of_wait(smp_world: Any, wait: Any, words: str) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            wait()

    report = smp_world.report(body, ranks=2)
    lines = deadlock(report)
    assert lines[0] == "deadlock: 1 of 2 ranks wait, and none can go on"
    assert lines[1].startswith(f"  rank 1 waits in {words}")
    assert THIS_FILE in lines[2]
    assert "  rank 0 has returned" in lines
    assert report.root == 1


def test_waits_of_all_kinds_at_once(smp_world: Any) -> None:
    """One graph over the process group, the store and the object transport."""

    def body() -> None:
        import smp_core.torch as smp

        rank = dist.get_rank()
        if rank == 0:
            dist.recv(ones(), 1)
        elif rank == 1:
            smp.recv_from(2, smp.RankType.WORLD_RANK)
        elif rank == 2:
            _backward_hook()
        else:
            _store()

    report = smp_world.report(body, ranks=4)
    lines = deadlock(report)
    assert lines[0] == "deadlock: 4 of 4 ranks wait, and none can go on"
    assert lines[-1] == "wait-for cycle: rank 0 -> rank 1 -> rank 2 -> rank 0"


# The end of the ranks.


def test_the_error_ends_at_the_users_line(smp_world: Any) -> None:
    """Hypothesis tells failures apart by the traceback's last line: it is not one of ours."""

    def body() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    report = smp_world.report(body, ranks=2)
    deadlock(report)
    assert report.error is not None
    trace = report.error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_code is body.__code__
    assert trace.tb_lineno == body.__code__.co_firstlineno + 2


def test_a_deadlock_cannot_be_swallowed(smp_world: Any) -> None:
    def body() -> str:
        if dist.get_rank() != 1:
            with contextlib.suppress(Exception):
                dist.all_reduce(ones())
        return "went on"

    deadlock(smp_world.report(body, ranks=3))


def test_a_rank_that_catches_everything_is_unwound_at_its_next_call(smp_world: Any) -> None:
    reached: list[int] = []

    def body() -> None:
        if dist.get_rank() == 0:
            return
        with contextlib.suppress(BaseException):
            dist.barrier()
        dist.barrier()
        reached.append(dist.get_rank())

    report = smp_world.report(body, ranks=3)
    deadlock(report)
    assert reached == []


def test_cleaning_up_runs_on_every_rank(smp_world: Any) -> None:
    cleaned: list[int] = []

    def body() -> None:
        try:
            if dist.get_rank() != 2:
                dist.barrier()
        finally:
            cleaned.append(dist.get_rank())

    deadlock(smp_world.report(body, ranks=4))
    assert sorted(cleaned) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wait", [_backward_hook, _in_the_autograd_graph, _functional, _prefix_store]
)
def test_the_same_threads_serve_afterwards(smp_world: Any, wait: Any) -> None:
    """Unwinding passes through autograd and C++ and leaves them usable."""

    def bad() -> None:
        if dist.get_rank() != 2:
            wait()

    def good() -> list[float]:
        leaf = ones(2).requires_grad_()
        leaf.register_hook(lambda gradient: (dist.all_reduce(gradient), gradient)[1])
        (leaf * (1 + dist.get_rank())).sum().backward()
        assert leaf.grad is not None
        result: list[float] = leaf.grad.tolist()
        return result

    for _ in range(3):
        deadlock(smp_world.report(bad, ranks=4))
        assert smp_world.run(good, ranks=4) == [[10.0, 10.0]] * 4


TAGS = (
    "rank 0 receives with tag 5; from rank 2 a message with tag 3 is there, which nobody receives"
)


def other_tag() -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.recv(torch.zeros(2), 2, tag=5)
    elif rank == 2:
        dist.send(torch.ones(2), 0, tag=3)


@pytest.mark.parametrize("backend", ["sim", "gloo", "mpi"])
def test_a_message_with_another_tag_is_told(backend: str) -> None:
    executor = open_backend(backend, ExecutorOptions(ranks=3))
    try:
        job = Job(body=other_tag, arguments=lambda rank: ((), {}), timeout=30)
        report = executor.open(3).run(job)
    finally:
        executor.close()
    assert report.verdict is VerdictKind.DEADLOCK, report.error
    assert f"hint: {TAGS}" in str(report.error)


def test_a_call_of_the_api_is_named_beside_the_one_inside(smp_world: Any) -> None:
    """The script has no line that gathers."""

    def body() -> None:
        model = smp.DistributedModel(torch.nn.Linear(3, 1))
        if smp.rank() == 0:
            smp.save_checkpoint("nowhere", tag="first", model=model)

    report = smp_world.report(body, ranks=2)
    assert isinstance(report.error, DeadlockError)
    assert "in smp.allgather()" in str(report.error)
    assert "in body, by smp.save_checkpoint:  smp.save_checkpoint(" in str(report.error)

    def gathers() -> None:
        if dist.get_rank() == 0:
            dist.gather_object(1, [None, None])

    assert "in gathers, by gather_object:  dist." in str(smp_world.report(gathers, ranks=2).error)
