"""The turn: one rank at a time, in order; what ends a run, and what each rank then says."""

from __future__ import annotations

import decimal
import gc
import io
import os
import sys
import threading

import pytest
import torch
from torch import distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import PROTOCOL_VERSION, Job, OutcomeKind, VerdictKind
from pytest_smp.ranks.rank_state import RankStates
from smp_core.errors import BackendError, Cancelled, DeadlockError, RunTimeout
from smp_core.transport import diagnosis

log: list[object] = []


@pytest.fixture(autouse=True)
def empty_log():
    log.clear()


@pytest.fixture
def executor():
    executor = open_backend("sim")
    yield executor
    executor.close()


def run(executor, body, ranks, **how):
    return executor.open(ranks).run(Job(body=body, arguments=lambda rank: ((), {}), **how))


def kinds(report):
    return [str(outcome.kind) for outcome in report.outcomes]


def test_ranks_take_turns_in_order_and_only_in_communication(smp_world):
    def body():
        for step in range(2):
            log.append((smp.rank(), step))
            log.append((smp.rank(), step))  # nobody comes between
            smp.barrier()

    smp_world.run(body, ranks=3)
    once = [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    # The last to come goes on at once; the others follow in the order in which they waited.
    then = [(2, 1), (2, 1), (0, 1), (0, 1), (1, 1), (1, 1)]
    assert log == once + then


def test_the_same_program_runs_the_same_way(smp_world):
    def body():
        right, left = (smp.rank() + 1) % 4, (smp.rank() - 1) % 4
        for step in range(3):
            request = dist.isend(torch.tensor([step]), right)
            dist.recv(torch.empty(1, dtype=torch.int64), left)
            request.wait()
            log.append((smp.rank(), step))

    smp_world.run(body, ranks=4)
    first = list(log)
    for _ in range(5):
        log.clear()
        smp_world.run(body, ranks=4)
        assert log == first


def test_after_a_failure_each_rank_goes_on_to_its_next_communication(smp_world):
    def body():
        smp.barrier()
        log.append(smp.rank())
        if smp.rank() == 2:  # the last to come: first to go on
            raise ValueError("planted")
        smp.barrier()
        log.append("never")

    report = smp_world.report(body, ranks=3)
    assert log == [2, 0, 1]
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 2)
    assert kinds(report) == ["cancelled", "cancelled", "raised"]
    assert report.outcomes[0].detail.startswith("cancelled because of rank 2")


def test_a_failure_that_all_see_is_seen_on_all(smp_world):
    def body():
        assert smp.allgather(smp.rank(), smp.WORLD) == []

    report = smp_world.report(body, ranks=3)
    assert kinds(report) == ["raised"] * 3


def test_unwinding_passes_except_exception_and_runs_finally(smp_world):
    def body():
        if smp.rank() == 1:
            raise ValueError("planted")
        try:
            smp.barrier()
        except Exception as error:
            log.append(error)
        except BaseException as error:
            log.append(type(error))
            raise
        finally:
            with pytest.raises(Cancelled):
                smp.barrier()

    report = smp_world.report(body, ranks=2)
    assert log == [Cancelled]
    assert report.root == 1


def test_a_verdict_stays_though_the_body_swallows_it(smp_world):
    def body():
        try:
            smp.recv_from(1 - smp.rank(), smp.RankType.WORLD_RANK)
        except BaseException:
            return "swallowed"

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.DEADLOCK
    assert isinstance(report.error, DeadlockError)


def test_deadlock_names_the_chain_that_ends_at_a_returned_rank(smp_world):
    """TORCH 1.8: a stuck world need not contain a cycle."""

    def body():
        if smp.rank() < 2:
            smp.recv_from(smp.rank() + 1, smp.RankType.WORLD_RANK)

    report = smp_world.report(body, ranks=3)
    text = str(report.error)
    assert report.root == 1
    assert "deadlock: 2 of 3 ranks wait" in text
    assert "rank 0 waits in smp.recv_from(world rank 1) for rank 1" in text
    assert "wait-for: rank 1 waits for rank 2, which has returned without a matching call" in text
    assert kinds(report) == ["stuck", "stuck", "returned"]


def test_deadlock_names_the_cycle_and_each_line(smp_world):
    def body():
        if smp.rank() == 0:
            smp.recv_from(0, smp.RankType.WORLD_RANK) if smp.size() < 3 else smp.barrier()
        else:
            smp.send(1, 3 - smp.rank(), smp.RankType.WORLD_RANK)

    report = smp_world.report(body, ranks=3)
    text = str(report.error)
    assert "wait-for cycle: rank 1 -> rank 2 -> rank 1" in text
    assert "test_scheduler.py" in text
    assert "hint: smp.send returns after the matching smp.recv_from" in text
    assert report.root == 1


def test_a_rank_that_never_comes_back(executor):
    def body():
        if smp.rank() == 1:
            while True:
                pass
        smp.barrier()

    report = run(executor, body, 3, timeout=5)
    assert (report.verdict, type(report.error)) == (VerdictKind.TIMED_OUT, RunTimeout)
    text = str(report.error)
    assert "did not end within 5 s" in text
    assert text.index("rank 1 never came back") < text.index("rank 0 waits in smp.barrier()")
    assert "rank 2 has not started" in text
    assert "in body" in text
    assert "objects.py" not in text  # none of our own frames
    assert run(executor, lambda: smp.rank(), 3).values == [0, 1, 2]  # on new threads


def test_a_lock_held_over_a_barrier_is_found_by_the_time_limit(executor):
    """TORCH 1.3: the scheduler does not see what waits in Python's own locks."""
    lock = threading.Lock()

    def body():
        with lock:
            smp.barrier()

    report = run(executor, body, 2, timeout=5)
    assert report.verdict is VerdictKind.TIMED_OUT
    assert "with lock:" in str(report.error)


def test_patience_starts_the_time_anew(executor):
    asked = []

    def patience():
        asked.append(1)
        return len(asked) < 3

    def body():
        while True:
            pass

    report = run(executor, body, 1, timeout=0.2, patience=patience)
    assert report.verdict is VerdictKind.TIMED_OUT
    assert len(asked) == 3


def test_an_interruption_of_the_controller_ends_the_run_and_passes_through(executor):
    started = threading.Event()

    def body():
        started.set()
        while True:
            pass

    def interrupt():
        import _thread

        started.wait()
        _thread.interrupt_main()

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        run(executor, body, 2)
    helper.join()
    assert run(executor, lambda: smp.rank(), 2).values == [0, 1]


def test_a_run_inside_a_run_is_refused(executor):
    def body():
        return str(run(executor, lambda: 1, 1).error)

    report = run(executor, body, 1)
    assert isinstance(report.error, BackendError)
    assert "inside another run" in str(report.error)


def test_worlds_of_different_sizes_take_turns_on_the_same_threads(executor):
    for ranks in (1, 5, 2, 5, 3):
        report = run(executor, lambda: threading.current_thread().name, ranks)
        assert report.values == [f"smp rank {rank}" for rank in range(ranks)]


def test_names_and_protocols():
    with pytest.raises(BackendError, match=r"unknown backend 'simm'.*did you mean 'sim'"):
        open_backend("simm")
    executor = open_backend("sim")
    assert executor.protocol == PROTOCOL_VERSION
    with pytest.raises(BackendError, match="at least one rank, not 0"):
        executor.open(0)
    executor.close()


def test_output_belongs_to_the_rank(executor):
    def body():
        print("out", smp.rank())
        smp.barrier()
        print("err", smp.rank(), file=sys.stderr)

    report = run(executor, body, 2, capture=True)
    texts = [(outcome.stdout, outcome.stderr) for outcome in report.outcomes]
    assert texts == [("out 0\n", "err 0\n"), ("out 1\n", "err 1\n")]


def test_a_rank_may_skip(executor):
    class Skip(Exception):
        pass

    def body():
        raise Skip("not here")

    report = run(executor, body, 2, skips=(Skip,))
    assert report.verdict is VerdictKind.PASSED
    assert [outcome.kind for outcome in report.outcomes] == [OutcomeKind.SKIPPED] * 2


def test_a_recursion_without_end_is_a_recursion_error(executor):
    """The turn is not lost, at whichever call of the backend the recursion ends."""

    def body():
        smp.allgather(1, smp.WORLD)
        body()

    for _ in range(5):
        report = run(executor, body, 2, timeout=60)
        assert report.verdict is VerdictKind.FAILED
        assert isinstance(report.error, RecursionError)


def test_a_deadlock_in_a_folder_that_is_gone(executor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def body():
        if smp.rank() == 0:
            (tmp_path / "gone").mkdir()
            os.chdir(tmp_path / "gone")
            (tmp_path / "gone").rmdir()
        else:
            smp.barrier()

    report = run(executor, body, 2, timeout=60)
    assert report.verdict is VerdictKind.DEADLOCK


def test_a_diagnosis_that_fails_is_a_deadlock_all_the_same(executor, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(diagnosis, "deadlock", broken)
    report = run(executor, lambda: smp.rank() and smp.barrier(), 2, timeout=60)
    assert report.verdict is VerdictKind.DEADLOCK
    assert "the diagnosis failed: ZeroDivisionError" in str(report.error)


def test_a_body_that_raises_our_unwinding_exception_does_not_pass(executor):
    def body():
        raise Cancelled("by the body")

    assert run(executor, body, 2).verdict is VerdictKind.FAILED


def test_a_failure_before_the_time_limit_is_told(executor):
    def body():
        if smp.rank() == 0:
            raise ValueError("the root of it")
        while True:
            pass

    report = run(executor, body, 2, timeout=5)
    assert report.verdict is VerdictKind.TIMED_OUT
    assert "rank 0 has raised ValueError: the root of it" in str(report.error)
    assert isinstance(report.error.__cause__, ValueError)


def test_what_a_thread_has_of_its_own_does_not_reach_the_next_run(executor):
    def leaves():
        decimal.getcontext().prec = 3
        torch.set_autocast_enabled("cpu", True)

    def looks():
        return decimal.getcontext().prec, torch.is_autocast_enabled("cpu")

    run(executor, leaves, 2)
    assert run(executor, looks, 2).values == [(decimal.getcontext().prec, False)] * 2


def test_streams_that_a_rank_replaced_are_put_back(executor):
    before = sys.stdout, sys.stderr

    def body():
        sys.stdout = sys.stderr = io.StringIO()

    for capture in (False, True):
        run(executor, body, 2, capture=capture)
        assert (sys.stdout, sys.stderr) == before


class FreesALocal:
    """Its collection frees a ``threading.local``, which takes a lock of the interpreter's."""

    def __init__(self):
        self.local = threading.local()
        self.local.value = self
        self.me = self


@pytest.mark.parametrize("threshold", [1, 2, 5])
def test_a_collection_while_frames_are_taken_does_not_hang(executor, threshold):
    """CPython 3.11 deadlocks where sys._current_frames() meets a collection that frees a local."""

    def body():
        for _ in range(20):
            FreesALocal()
        if smp.rank() != 3:
            smp.barrier()

    before = gc.get_threshold()
    try:
        for _ in range(20):
            gc.set_threshold(threshold)
            report = run(executor, body, 8, timeout=60)
            assert report.verdict is VerdictKind.DEADLOCK
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("body", "entering"),
    [(smp.barrier, 0), (smp.barrier, 1), (smp.barrier, None), (smp.rank, 1), (smp.rank, None)],
)
def test_state_that_cannot_be_put_back_ends_the_run_and_not_its_turns(
    executor, monkeypatch, body, entering
):
    """The error is the same if a rank enters, and if the controller does at the end."""
    switch, broken = RankStates.switch, []

    def breaks(self, leaving, following):
        switch(self, leaving, following)
        if leaving is not None and following == entering and not broken:
            broken.append(leaving)
            raise OSError("no such folder")

    monkeypatch.setattr(RankStates, "switch", breaks)
    report = run(executor, body, 2, timeout=30)
    assert report.verdict is VerdictKind.FAILED
    assert isinstance(report.error, BackendError)
    assert "could not be put back" in str(report.error)
    assert "no such folder" in str(report.error)
    monkeypatch.undo()
    assert run(executor, smp.barrier, 2).verdict is VerdictKind.PASSED


def test_a_mismatch_is_told_though_another_rank_polls(executor):
    def body():
        if smp.rank() == 0:
            dist.all_reduce(torch.ones(1))
        elif smp.rank() == 1:
            dist.broadcast(torch.ones(1), 0)
        else:
            work = dist.irecv(torch.ones(1), 0)
            while not work.is_completed():
                pass

    report = run(executor, body, 3, timeout=30)
    assert report.verdict is VerdictKind.MISMATCH
    assert "differs in operation" in str(report.error)


def test_a_mismatch_that_cannot_be_put_into_words_ends_the_run(executor, monkeypatch):
    def fails(*_):
        raise ValueError("no words")

    monkeypatch.setattr("smp_core.transport.messages.mismatch", fails)

    def body():
        if smp.rank() == 0:
            dist.all_reduce(torch.ones(1))
        elif smp.rank() == 1:
            dist.broadcast(torch.ones(1), 0)

    report = run(executor, body, 3, timeout=30)
    assert report.verdict is VerdictKind.MISMATCH
    assert "the diagnosis failed: ValueError('no words')" in str(report.error)
