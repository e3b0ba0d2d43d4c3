"""The host whose ranks are free-running threads of this process, for process groups that live on
threads.

Nobody hands out turns here, as the scheduler of `sim` does: the ranks of a run are as many new
threads, all of them running at once. What they share in a process they share: random generators,
default dtype, environment, modules. A thread cannot be killed. When a run ends before its ranks do,
the fabric wakes those that wait, the others get an exception at their next line of Python, and who
does not come back within the grace is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from smp_core.backends import frames
from smp_core.backends.base import (
    PROTOCOL_VERSION,
    Fabric,
    Job,
    Outcome,
    OutcomeKind,
    Report,
    VerdictKind,
    World,
)
from smp_core.backends.hosts import current
from smp_core.backends.hosts.diagnosis import ranks_text
from smp_core.backends.hosts.isolation import Isolation
from smp_core.backends.hosts.threads import (
    _captured,
    _keep_compute_threads,
    _set_streams,
    _use_one_compute_thread,
)
from smp_core.errors import (
    BackendError,
    Cancelled,
    DeadlockError,
    LeakError,
    RunTimeout,
    SmpError,
)

_TICK = 0.02  # seconds between two looks at ranks that have not come back
_LOOKS = 3  # in a row that find every rank waiting for ever, before that is a verdict
_PATIENCE = 0.5  # seconds that the others get after a rank has failed, to end by themselves
_GRACE = 1.0  # seconds that ranks get to unwind before their threads are left behind
_WAIT = threading.Condition.wait.__code__


class RankFabric(Fabric, Protocol):
    """What the fabric keeps for one rank of one run."""

    def enter(self) -> None:
        """Called in the rank's thread before the body."""

    def leave(self) -> list[str]:
        """Called in the rank's thread after the body, however it ended. The process groups that the
        body made and left, in words.
        """


class WorldFabric(Protocol):
    """What the fabric keeps for all ranks of one run."""

    def rank_fabric(self, rank: int) -> RankFabric: ...

    def waits(self, rank: int) -> str:
        """The call of ours in which a rank waits, in words, or an empty text."""

    def cancel(self) -> None:
        """The run has ended: ranks that wait in the fabric raise Cancelled or SystemExit.

        Called again and again until all have come back.
        """

    def close(self) -> None: ...


@dataclasses.dataclass(slots=True, eq=False)
class FreeRank:
    """One rank of one run, as its own thread sees it (compare rank_context.RankContext)."""

    rank: int
    size: int
    job: Job
    fabric: Any = None
    runtime: Any = None  # what smp.init builds
    thread: threading.Thread | None = None
    outcome: Outcome | None = None
    groups: list[str] = dataclasses.field(default_factory=list)
    safe: bool = False  # nothing is injected into its thread any more

    def frame(self, stacks: dict[int, types.FrameType]) -> types.FrameType | None:
        """Where its thread is."""
        return None if self.thread is None else stacks.get(self.thread.ident or 0)


class FreeThreadWorld:
    """A world of ``size`` rank threads."""

    def __init__(self, host: FreeThreadHost, size: int) -> None:
        self.size = size
        self._host = host

    def run(self, job: Job) -> Report:
        """Run the job on every rank; see the World protocol."""
        return self._host.run(job, self.size)


class FreeThreadHost:
    """Runs one job at a time, on new threads."""

    protocol = PROTOCOL_VERSION
    steady = False  # threads that take turns as the machine likes: no deadline on an example

    def __init__(self, make_fabric: Callable[[int], WorldFabric]) -> None:
        self._make_fabric = make_fabric
        self._running = False
        self.abandoned = 0  # threads that never came back

    def open(self, size: int) -> World:
        """A world of ``size`` ranks; each run starts threads of its own."""
        if size < 1:
            raise BackendError(f"a world needs at least one rank, not {size}")
        return FreeThreadWorld(self, size)

    def close(self) -> None:
        """Nothing is left between runs."""

    def run(self, job: Job, size: int) -> Report:
        """Run ``job`` on ranks 0 to ``size`` - 1."""
        if self._running or current.current() is not None:
            raise BackendError(
                "a run was started inside another run; a world runs one job at a time"
            )
        self._running = True
        try:
            return self._run(job, size)
        finally:
            self._running = False

    def _run(self, job: Job, size: int) -> Report:
        streams = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(current.child_threads())
            stack.callback(_keep_compute_threads)
            stack.callback(_set_streams, sys.stdout, sys.stderr)  # a rank may leave others there
            isolation = Isolation(1, job.seed)  # the ranks share one state, and leave the caller's
            isolation.switch(None, 0)
            stack.callback(isolation.switch, 0, None)
            if job.capture:
                streams = stack.enter_context(_captured(size))
            fabric = self._make_fabric(size)
            stack.callback(fabric.close)
            run = _Run(fabric, job, size)
            try:
                report = run.report()
            finally:
                self.abandoned += run.give_up()
        if streams is not None:
            for outcome in report.outcomes:
                outcome.stdout, outcome.stderr = (stream.text(outcome.rank) for stream in streams)
        return report


class _Run:
    """One run: from starting the threads to every rank's outcome."""

    def __init__(self, fabric: WorldFabric, job: Job, size: int) -> None:
        self._fabric, self._job = fabric, job
        self._ranks = [FreeRank(rank, size, job) for rank in range(size)]
        self._unfinished = dict(enumerate(self._ranks))
        self._back: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended = False
        self._gate = threading.Lock()  # of what is injected

    def report(self) -> Report:
        """Run, and say how it went."""
        for rank in self._ranks:
            rank.thread = threading.Thread(
                target=self._serve, args=(rank,), name=f"smp rank {rank.rank}", daemon=True
            )
            rank.thread.start()
        verdict = self._wait()
        stuck = dict(self._unfinished)
        error: BaseException | None = None
        if verdict is VerdictKind.TIMED_OUT:
            error = RunTimeout(self._timeout_text())
        elif verdict is VerdictKind.DEADLOCK:
            error = DeadlockError(self._deadlock_text())
        details = self._details() if error is not None else {}
        self.give_up()
        outcomes = [self._outcome(rank) for rank in self._ranks]
        root = self._root(each for each in outcomes if each.rank not in stuck)
        if error is None and root is not None:
            verdict, error = VerdictKind.FAILED, outcomes[root].error
        for number in stuck:
            outcome = outcomes[number]
            if number in details:
                outcome.kind, outcome.error = OutcomeKind.STUCK, None
                outcome.detail = details[number]
            elif outcome.kind is OutcomeKind.CANCELLED:
                outcome.detail = f"cancelled because of rank {root}"
        if error is not None and self._unfinished:
            error.add_note(
                f"{ranks_text(self._unfinished)} did not come back within {_GRACE:g} s: a thread "
                "cannot be killed, and was left behind"
            )
        if error is not None:
            return Report(verdict, outcomes, None if details else root, error)
        return self._leaks(outcomes)

    # In the rank's thread.

    def _serve(self, rank: FreeRank) -> None:
        try:
            try:
                current.set_current(rank)
                _use_one_compute_thread()
                rank.outcome = self._body(rank)
            except BaseException as error:  # of ours, around the body, or injected: never a pass
                kind = OutcomeKind.CANCELLED if self._ended else OutcomeKind.RAISED
                rank.outcome = Outcome(rank.rank, kind, error=None if self._ended else error)
        except Cancelled:  # injected in the lines above
            rank.outcome = Outcome(rank.rank, OutcomeKind.CANCELLED)
        try:
            self._be_safe(rank)
        except Cancelled:  # the last
            self._be_safe(rank)
        current.set_current(None)
        self._back.put(rank.rank)

    def _be_safe(self, rank: FreeRank) -> None:
        """Nothing is injected into this thread any more, nor still to come: it would end the thread
        before the controller has heard of it, with a traceback.
        """
        with self._gate:
            rank.safe = True
        _inject(rank, None)

    def _body(self, rank: FreeRank) -> Outcome:
        job, number = self._job, rank.rank
        fabric = rank.fabric = self._fabric.rank_fabric(number)
        try:
            fabric.enter()
            args, kwargs = job.arguments(number)
            with job.context() or contextlib.nullcontext():
                value = job.body(*args, **kwargs)
            return Outcome(number, OutcomeKind.RETURNED, value)
        except job.skips as error:
            frames.cut_traceback(error, ours=False)
            return Outcome(number, OutcomeKind.SKIPPED, error=error)
        except BaseException as error:
            if self._ended and isinstance(error, (Cancelled, SystemExit)):
                return Outcome(number, OutcomeKind.CANCELLED, detail="the run had ended")
            frames.cut_traceback(error, ours=isinstance(error, SmpError))
            return Outcome(number, OutcomeKind.RAISED, error=error)
        finally:
            rank.groups = fabric.leave()

    # In the controller's.

    def _wait(self) -> VerdictKind:
        """Until all ranks have come back, one has failed, or there is nothing to wait for."""
        limit = math.inf if self._job.timeout is None else self._job.timeout
        start = time.monotonic()
        failed_at = math.inf
        waiting: tuple[Any, ...] | None = None
        looks = 0
        while self._unfinished:
            came = self._hear(_TICK)
            now = time.monotonic()
            if any(_failed(rank) for rank in self._ranks):
                failed_at = min(failed_at, now)
            seen = None if came else self._waiting()
            looks = looks + 1 if seen is not None and seen == waiting else 0
            waiting = seen
            if looks >= _LOOKS or now - failed_at > _PATIENCE:
                return VerdictKind.FAILED if failed_at < math.inf else VerdictKind.DEADLOCK
            if now - start > limit:
                if failed_at < math.inf:
                    return VerdictKind.FAILED
                if not self._job.patience():
                    return VerdictKind.TIMED_OUT
                start = now
        return VerdictKind.PASSED

    def _hear(self, timeout: float) -> bool:
        try:
            self._unfinished.pop(self._back.get(timeout=timeout), None)
        except queue.Empty:
            return False
        return True

    def _waiting(self) -> tuple[Any, ...] | None:
        """What every rank waits for, if all wait for ever and no thread is left that could wake
        them.

        That is a condition variable without a time limit: the lock of such a wait is free from
        ``notify`` until the thread has run. The process group, the object transport and the store
        wait there; a wait in C++, or for a plain lock, is not seen.
        """
        locks = []
        stacks = frames.thread_frames()
        for rank in self._unfinished.values():
            frame = rank.frame(stacks)
            if frame is None or frame.f_code is not _WAIT:
                return None
            names = frame.f_locals
            lock = names.get("waiter")
            if lock is None or names.get("timeout") is not None or not lock.locked():
                return None
            locks.append(lock)
        if any(current.parent_rank(thread) is not None for thread in threading.enumerate()):
            return None
        return tuple(locks)

    def give_up(self) -> int:
        """End the ranks that are still there; how many were left behind."""
        self._ended = True
        deadline = time.monotonic() + _GRACE
        while self._unfinished and time.monotonic() < deadline:
            self._fabric.cancel()
            with self._gate:
                for rank in self._unfinished.values():
                    if not rank.safe:
                        _inject(rank, Cancelled)
            while self._hear(_TICK):
                pass
        return len(self._unfinished)

    def _outcome(self, rank: FreeRank) -> Outcome:
        if rank.outcome is None:
            return Outcome(rank.rank, OutcomeKind.STUCK, detail=f"rank {rank.rank} never came back")
        return rank.outcome

    @staticmethod
    def _root(outcomes: Iterable[Outcome]) -> int | None:
        """The lowest rank that raised, not the first in time: the same failure must look the same
        again. What ranks raise while they are ended is no cause.
        """
        raised = (each.rank for each in outcomes if each.kind is OutcomeKind.RAISED)
        return min(raised, default=None)

    def _leaks(self, outcomes: list[Outcome]) -> Report:
        if any(outcome.kind is OutcomeKind.SKIPPED for outcome in outcomes):
            return Report(VerdictKind.PASSED, outcomes)
        left = list(dict.fromkeys(text for rank in self._ranks for text in rank.groups))
        if left and self._job.strict:
            lines = ["leak: the run left something behind", *(f"  {text}" for text in left)]
            return Report(VerdictKind.LEAK, outcomes, None, LeakError("\n".join(lines)))
        return Report(VerdictKind.PASSED, outcomes, warnings=left)

    # Words.

    def _details(self) -> dict[int, str]:
        stacks = frames.thread_frames()
        details = {}
        for number, rank in self._unfinished.items():
            call, frame = self._fabric.waits(number), rank.frame(stacks)
            place = frames.user_place(frame)
            waits = frame is not None and frame.f_code is _WAIT
            text = f"waits in {call}" if call else "waits" if waits else "has not come back"
            details[number] = f"rank {number} {text}" + (f"\n      {place}" if place else "")
        return details

    def _ended_lines(self) -> list[str]:
        lines = []
        for rank in self._ranks:
            if rank.rank not in self._unfinished and rank.outcome is not None:
                error = rank.outcome.error
                text = "" if error is None else f" {type(error).__name__}: {error}"
                lines.append(f"rank {rank.rank} has {rank.outcome.kind}{text}")
        return lines

    def _deadlock_text(self) -> str:
        lines = [*self._details().values(), *self._ended_lines()]
        return "\n".join(["deadlock: no rank can go on", *(f"  {line}" for line in lines)])

    def _timeout_text(self) -> str:
        limit = f"{self._job.timeout:g} s (--smp-timeout)"
        lines = [f"timeout: the run did not end within {limit}"]
        details, stacks = self._details(), frames.thread_frames()
        for number, rank in self._unfinished.items():
            lines.append(details[number].partition("\n")[0])
            frame = rank.frame(stacks)
            if frame is not None:
                lines.append(frames.stack_text(frame))
        return "\n".join([*lines, *self._ended_lines()])


def _failed(rank: FreeRank) -> bool:
    return rank.outcome is not None and rank.outcome.kind is OutcomeKind.RAISED


def _inject(rank: FreeRank, exception: type[BaseException] | None) -> None:
    """Raise this in the rank's thread at its next bytecode, which ends a loop in Python, not one in C;
    None takes back what has not been raised yet.
    """
    if rank.thread is not None and rank.thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(rank.thread.ident),
            None if exception is None else ctypes.py_object(exception),
        )
