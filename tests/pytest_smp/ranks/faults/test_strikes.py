"""Faults on ranks: where they strike, what becomes of the run, and that the next one is clean.

The same on `sim` and on rank processes, but for what differs there.
"""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import (
    Claim,
    Corrupt,
    Drop,
    Exit,
    Garbled,
    Kill,
    Raise,
    Stall,
    Unpicklable,
)
from pytest_smp.ranks.protocols import ExecutorOptions, Job, OutcomeKind, Report, VerdictKind
from smp_core.errors import CrashError, InjectedError, PayloadError

RANKS = 3
WORLD_RANK = smp.RankType.WORLD_RANK


class _Arguments:
    def __init__(self, args):
        self.args = args

    def __call__(self, rank):
        return self.args, {}


@pytest.fixture(scope="module", params=["sim", "gloo", "gloo without the board"])
def executor(request):
    options = ExecutorOptions(ranks=RANKS, check=" " not in request.param)
    executor = open_backend(request.param.partition(" ")[0], options)
    yield executor
    executor.close()


@pytest.fixture
def simulated(executor):
    return Claim.PROCESSES not in executor.injects


@pytest.fixture
def run(executor):
    def run(body, *faults, args=(), timeout=60.0, **fields) -> Report:
        job = Job(body=body, arguments=_Arguments(args), timeout=timeout, faults=faults, **fields)
        return executor.open(RANKS).run(job)

    yield run
    report = run(_program)
    assert report.values == [_trace(0), _trace(1), _trace(2)], report


def _program(trace=None):
    """Two calls of each kind; returns what it has done."""
    done = []
    rank = smp.rank()
    for number in range(2):
        assert smp.allgather(rank, smp.WORLD) == [0, 1, 2]
        done.append(f"allgather {number}")
        tensor = torch.tensor([rank + 1])
        dist.all_reduce(tensor)
        assert tensor.item() == 6
        done.append(f"all_reduce {number}")
        work = dist.isend(torch.tensor([10 * rank]), (rank + 1) % 3)
        got = torch.zeros(1, dtype=torch.int64)
        dist.recv(got, (rank - 1) % 3)
        work.wait()
        assert got.item() == 10 * ((rank - 1) % 3)
        done.append(f"ring {number}")
        smp.barrier()
    return done


def _trace(rank):
    return [
        f"{what} {number}" for number in range(2) for what in ("allgather", "all_reduce", "ring")
    ]


PLACES = [
    {"at": "start"},
    {"at": "end"},
    *(
        {"at": at, "nth": nth, "when": when}
        for at in ("allgather", "all_reduce", "dist.send", "recv", "smp.barrier")
        for nth, when in ((1, "before"), (2, "after"))
    ),
]


def _id(place):
    return " ".join(map(str, place.values()))


@pytest.mark.parametrize("place", PLACES, ids=_id)
def test_a_killed_rank_is_named_with_its_signal(run, place):
    report = run(_program, Kill(rank=1, **place))
    assert report.verdict is VerdictKind.CRASHED
    assert report.root == 1
    assert report.outcomes[1].kind is OutcomeKind.CRASHED
    assert report.outcomes[1].detail == "crashed: killed by SIGKILL (signal 9)"
    assert isinstance(report.error, CrashError)
    text = str(report.error)
    assert text.startswith("rank 1 crashed: killed by SIGKILL (signal 9)")
    assert re.search(r"it wrote last:\n    smp_faults: kill (before|after)", text)


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_that_exits_has_crashed_whatever_its_code(run, code):
    report = run(_program, Exit(rank=2, at="allgather", nth=2, code=code))
    assert (report.verdict, report.root) == (VerdictKind.CRASHED, 2)
    assert str(report.error).startswith(f"rank 2 crashed: exit code {code}")


@pytest.mark.parametrize("place", PLACES, ids=_id)
def test_a_raise_comes_out_of_the_call(run, place):
    def body():
        try:
            return _program()
        except InjectedError as error:
            raise ValueError("mine") from error

    report = run(body, Raise(rank=1, **place))
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 1)
    if place["at"] in ("start", "end"):  # no call of the body's
        assert type(report.error) is InjectedError
    else:
        assert type(report.error) is ValueError
        assert type(report.error.__cause__) is InjectedError


def test_a_raise_is_of_the_error_that_was_given(run):
    fault = Raise(rank=0, at="barrier", error=OSError(5, "broken"))
    for _ in range(2):  # what a raise adds to it stays out of the next
        report = run(_program, fault)
        assert type(report.error) is OSError
        assert report.error.args == (5, "broken")
        assert report.error.__notes__[0] == "smp_faults: raise_ before call 1 of barrier"
    assert fault.error.__traceback__ is None
    assert type(run(_program, Raise(rank=0, error=KeyError)).error) is KeyError


def test_before_is_before_and_after_is_after(run):
    """A rank that catches its fault has done the call, or has not."""

    def body(when):
        values = []
        for number in range(3):
            tensor = torch.tensor([number])
            try:
                if smp.rank() == 0 and number == 1 and when == "before":
                    with pytest.raises(InjectedError):
                        dist.all_reduce(tensor)
                dist.all_reduce(tensor)
            except InjectedError:
                values.append("caught")
            values.append(tensor.item())
        return values

    for when, expected in (("before", [0, 3, 6]), ("after", [0, "caught", 3, 6])):
        report = run(body, Raise(rank=0, at="all_reduce", nth=2, when=when), args=(when,))
        assert report.values == [expected, [0, 3, 6], [0, 3, 6]], report.error
        assert [outcome.struck for outcome in report.outcomes] == [(0,), (), ()]


def test_a_bare_name_counts_calls_of_both_apis(run):
    def body():
        smp.barrier()
        dist.barrier()
        return "both"

    report = run(body, Raise(rank=1, at="barrier", nth=2, when="after"))
    assert "after call 2 of barrier" in str(report.error)
    report = run(body, Raise(rank=1, at="dist.barrier", nth=2))
    assert report.values == ["both"] * RANKS
    assert all(outcome.struck == () for outcome in report.outcomes)


def test_calls_of_new_groups_are_struck(run):
    def body():
        group = dist.new_group([0, 2])
        if smp.rank() != 1:
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
        smp.barrier()

    for fault in (
        Raise(rank=1, at="new_group"),
        Raise(rank=2, at="new_group", when="after"),
        Raise(rank=2, at="all_reduce"),
    ):
        report = run(body, fault)
        assert (report.root, type(report.error)) == (fault.rank, InjectedError)


def test_a_stalled_rank_is_the_one_to_blame(run, executor, simulated):
    def unstruck():
        return "smp_faults: stall" not in executor._pool.written(executor._ranks[1])[1]

    limit = {"timeout": None} if simulated else {"timeout": 1.5, "patience": unstruck}
    report = run(_program, Stall(rank=1, at="allgather", nth=2), **limit)
    assert report.outcomes[1].kind is OutcomeKind.STUCK
    if simulated:
        assert (report.verdict, report.root) == (VerdictKind.DEADLOCK, 1)
        assert "rank 1 waits in smp_faults: stall before call 2 of smp.allgather" in str(
            report.error
        )
        others = "ranks 0, 2 wait in smp.allgather() [group WORLD, call 3] for rank 1"
        assert others in str(report.error)
        return
    assert report.verdict is VerdictKind.TIMED_OUT
    if executor._check:
        assert str(report.error).splitlines()[1] == "rank 1 never came back"
    assert "smp_faults: stall before call 2 of smp.allgather" in report.outcomes[1].stderr


def test_a_delay_changes_nothing(run):
    def body():
        _program()
        return smp.allgather(smp.rank(), smp.WORLD)

    faults = [Stall(rank=rank, at="allgather", nth=2, seconds=0.01) for rank in (0, 2)]
    report = run(body, *faults)
    assert report.values == [[0, 1, 2]] * RANKS
    assert [outcome.struck for outcome in report.outcomes] == [(0,), (), (1,)]


def _to_one():
    """Rank 0 sends twice to rank 1; returns what comes."""
    if smp.rank() == 0:
        smp.send("first", 1, WORLD_RANK)
        smp.send("second", 1, WORLD_RANK)
    if smp.rank() == 1:
        return smp.recv_from(0, WORLD_RANK)
    return None


def _to_one_twice():
    got = _to_one()
    if smp.rank() == 1:
        return [got, smp.recv_from(0, WORLD_RANK)]
    return None


def test_a_lost_message_never_arrives(run, executor):
    report = run(_to_one, Drop(rank=0, at="send"))
    assert report.values == [None, "second", None]
    limit = None if getattr(executor, "_check", True) else 10.0
    report = run(_to_one_twice, Drop(rank=0, at="send", nth=2), timeout=limit)
    assert report.verdict is (VerdictKind.DEADLOCK if limit is None else VerdictKind.TIMED_OUT)
    assert report.outcomes[1].kind is OutcomeKind.STUCK
    assert report.outcomes[0].kind is OutcomeKind.RETURNED  # it went on


def test_a_lost_message_must_be_one_that_can_be_sent(run):
    def body():
        if smp.rank() == 0:
            smp.send(threading.Lock(), 1, WORLD_RANK)

    report = run(body, Drop(rank=0))
    assert (report.root, type(report.error)) == (0, PayloadError)


def test_a_damaged_message_is_garbled(run):
    report = run(_to_one_twice, Corrupt(rank=0, nth=2))
    first, second = report.values[1]
    assert first == "first"
    assert type(second) is Garbled
    assert "on the message of call 2 of smp.send" in second.text


def test_a_message_is_damaged_as_asked(run):
    report = run(_to_one_twice, Corrupt(rank=0, nth=1, how=str.upper))
    assert report.values[1] == ["FIRST", "second"]


def test_a_broadcast_is_lost_for_everybody(run):
    def body():
        if smp.rank() == 2:
            smp.broadcast("one", smp.WORLD)
            smp.broadcast("two", smp.WORLD)
            return None
        return smp.recv_from(2, WORLD_RANK)

    report = run(body, Drop(rank=2, at="broadcast"))
    assert report.outcomes[0].value == "two", report


def _tensors():
    rank = smp.rank()
    if rank == 0:
        for number in (1.5, 2.5):
            dist.send(torch.tensor([number, 7.0]), 1)
    if rank == 1:
        got = torch.zeros(2)
        dist.recv(got, 0)
        return got.tolist()
    return None


@pytest.fixture
def tensors(executor):
    if Claim.TENSORS not in executor.injects:
        pytest.skip("messages of tensors belong to torch there")


@pytest.mark.usefixtures("tensors")
def test_a_lost_tensor_never_arrives(run):
    report = run(_tensors, Drop(rank=0, at="dist.send"))
    assert report.values[1] == [2.5, 7.0]


@pytest.mark.usefixtures("tensors")
def test_a_damaged_tensor_differs_in_its_first_element(run):
    def body():
        if smp.rank() == 0:
            sent = torch.tensor([1.5, 7.0])
            dist.send(sent, 1)
            return sent.tolist()
        got = torch.zeros(2)
        if smp.rank() == 1:
            dist.recv(got, 0)
        return got.tolist()

    report = run(body, Corrupt(rank=0, at="dist.send"))
    # Every bit of 1.5 (0x3fc00000) turned is 0xc03fffff.
    expected = torch.tensor([0xC03FFFFF - (1 << 32)], dtype=torch.int32).view(torch.float32).item()
    assert report.values[:2] == [[1.5, 7.0], [expected, 7.0]]  # the sender's own is whole
    report = run(body, Corrupt(rank=0, at="dist.send", how=torch.neg))
    assert report.values[1] == [-1.5, -7.0]


def test_an_unpicklable_result_is_told(run, simulated):
    if simulated:
        pytest.skip("results of simulated ranks are not pickled")
    report = run(_program, Unpicklable(rank=2))
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 2)
    assert type(report.error) is PayloadError
    assert "cannot be pickled" in str(report.error)


def test_a_death_after_the_result_harms_no_later_run(run, simulated):
    if simulated:
        pytest.skip("simulated ranks send no results")
    for number in range(5):
        report = run(_program, Kill(rank=number % RANKS, at="sent"))
        told = f"the process of rank {number % RANKS} ended after its last run (killed by SIGKILL"
        if report.verdict is VerdictKind.PASSED:  # nobody had to wait for anybody
            report = run(_program)
            assert report.verdict is VerdictKind.PASSED, report.error
            assert told in report.warnings[0]
        else:
            assert (report.verdict, report.root) == (VerdictKind.CRASHED, number % RANKS)


def test_counts_begin_anew_with_each_run(run):
    fault = Raise(rank=0, at="allgather", nth=3)
    for _ in range(3):
        assert run(_program, fault).verdict is VerdictKind.PASSED


def test_two_faults_of_one_run(run):
    report = run(
        _program,
        Stall(rank=1, at="allgather", seconds=0.0),
        Raise(rank=1, at="allgather", nth=2),
        Raise(rank=0, at="allgather", nth=7),
    )
    assert report.outcomes[1].struck == (0, 1)
    assert report.outcomes[0].struck == ()


def test_a_killed_rank_cannot_save_itself(run):
    def body():
        try:
            smp.barrier()
        except BaseException:
            return "alive"
        return "untouched"

    report = run(body, Kill(rank=1, at="barrier"))
    assert (report.verdict, report.root) == (VerdictKind.CRASHED, 1)
    assert report.outcomes[1].kind is OutcomeKind.CRASHED
    assert report.outcomes[1].value is None
