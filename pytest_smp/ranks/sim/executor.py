"""The executor of the `sim` backend: ranks are threads of this process that stay warm from run to run.

A run gives each thread a rank's part (a RankContext); the scheduler decides whose turn it is. When
a rank does not come back within the time limit, the threads of that run are abandoned and the next
run gets new ones.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import ctypes
import functools
import io
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TextIO

from pytest_smp.ranks.causes import Cause, root_cause, verdict_of
from pytest_smp.ranks.faults import Claim
from pytest_smp.ranks.isolation import Isolation
from pytest_smp.ranks.protocols import (
    PROTOCOL_VERSION,
    Executor,
    Job,
    Outcome,
    OutcomeKind,
    Report,
    VerdictKind,
    World,
)
from pytest_smp.ranks.rank_state import Variables
from pytest_smp.ranks.schedule import Schedule
from pytest_smp.ranks.sim.one_core import OneCore
from pytest_smp.ranks.sim.process_exit import ProcessExit
from pytest_smp.ranks.sim.rank_context import RankContext
from pytest_smp.ranks.sim.scheduler import Scheduler, ThreadState
from pytest_smp.ranks.sim.threads import LOOK, RankThreads
from smp_core.errors import (
    BackendError,
    Cancelled,
    CrashError,
    LeakError,
    RunTimeout,
    SmpError,
    VerdictError,
)
from smp_core.transport import current_rank, handled, stack_frames
from smp_core.transport.diagnosis import ranks_text, wait_lines
from smp_core.transport.launchers import launch_variables

_SLICE = 1.0  # seconds between two looks at the clock and at interruptions
_GRACE = 1.0  # seconds that an abandoned rank gets to unwind before its thread is given up


class ThreadFabric(Protocol):
    """The part of the fabric that belongs to one rank of one run."""

    def enter(self) -> None:
        """Called in the rank's thread before the body."""

    def in_flight(self) -> list[str]:
        """The operations that the rank has issued and not waited for, in words."""

    def leave(self) -> None:
        """Called in the rank's thread after the body, however it ended."""


class WorldFabric(Protocol):
    """The part of the fabric that all ranks of one run share."""

    def rank_fabric(self, context: RankContext) -> ThreadFabric: ...

    def leaks(self, strict: bool) -> tuple[list[str], list[str]]:
        """The leaks after all ranks have returned: those that fail the run, and those that are warnings."""

    def close(self) -> None: ...


class _RankThread:
    """A warm thread, which sleeps until its turn, runs the part that it was given, and sleeps again."""

    def __init__(self, rank: int) -> None:
        self.turn = _thread.allocate_lock()
        self.turn.acquire()
        self.part: Callable[[], None] | None = None
        self.abandoned = False
        self.thread = threading.Thread(target=self._serve, name=f"smp rank {rank}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.turn.acquire()
            _use_one_compute_thread()
            while self.part is not None:
                part, self.part = self.part, None
                contextvars.Context().run(part)
                del part
                if self.abandoned:
                    return
                self.turn.acquire()
        except Cancelled:  # injected into an abandoned rank that had just come back
            return

    def close(self) -> None:
        self.part = None
        self.turn.release()
        self.thread.join()


def _use_one_compute_thread() -> None:
    """Compute on this rank thread alone, as launchers of real ranks do by OMP_NUM_THREADS=1."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # torch sets its default in a thread at first use: have that behind us
        torch.set_num_threads(1)


def _keep_compute_threads() -> None:
    """Undo what the above does to the default of threads to come; called in the controller."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


def _set_streams(stdout: TextIO, stderr: TextIO) -> None:
    sys.stdout, sys.stderr = stdout, stderr


class _Output:
    """Stands in for sys.stdout or sys.stderr: each rank's text goes to a buffer of its own."""

    def __init__(self, outside: TextIO, size: int) -> None:
        self._outside = outside
        self._buffers: list[io.StringIO | None] = [None] * size

    def _target(self) -> TextIO:
        context = current_rank.current()
        rank = context.rank if context is not None else current_rank.parent_rank()
        if rank is None or rank >= len(self._buffers):
            return self._outside
        buffer = self._buffers[rank]
        if buffer is None:
            buffer = self._buffers[rank] = io.StringIO()
        return buffer

    def write(self, text: str) -> int:
        return self._target().write(text)

    def flush(self) -> None:
        self._target().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target() if name == "writelines" else self._outside, name)

    def text(self, rank: int) -> str:
        buffer = self._buffers[rank]
        return "" if buffer is None else buffer.getvalue()


class ThreadWorld:
    """A world of `size` rank threads."""

    def __init__(self, executor: ThreadExecutor, size: int) -> None:
        self.size = size
        self._executor = executor

    def run(self, job: Job) -> Report:
        """Run the job on every rank; see the World protocol."""
        return self._executor.run(job, self.size)


class ThreadExecutor(Executor):
    """Keeps the threads, and runs one job at a time on as many of them as it needs."""

    protocol = PROTOCOL_VERSION
    injects = frozenset({Claim.STRIKES, Claim.TENSORS})

    def __init__(self, make_fabric: Callable[[int], WorldFabric]) -> None:
        self._make_fabric = make_fabric
        self._threads: list[_RankThread] = []
        self._running = False
        self.abandoned = 0  # threads that never came back
        self.guards_exit = True  # os._exit on a rank ends the rank; in a script, the process

    def open(self, size: int) -> World:
        """A world of ``size`` ranks; threads are made when a run needs them."""
        if size < 1:
            raise BackendError(f"a world needs at least one rank, not {size}")
        return ThreadWorld(self, size)

    def close(self) -> None:
        """End all rank threads."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.close()

    def run(self, job: Job, size: int) -> Report:
        """Run ``job`` on ranks 0 to ``size`` - 1."""
        if self._running or current_rank.current() is not None:
            raise BackendError(
                "a run was started inside another run; a world runs one job at a time"
            )
        self._running = True
        try:
            return self._run(job, size)
        finally:
            self._running = False

    def _run(self, job: Job, size: int) -> Report:
        new = range(len(self._threads), size)
        self._threads += [_RankThread(rank) for rank in new]
        threads = self._threads[:size]
        thread_states = [ThreadState(rank, thread.turn) for rank, thread in enumerate(threads)]
        isolation = Isolation(size, job.seed, _variables(size))
        scheduler = Scheduler(
            thread_states,
            isolation,
            lambda ranks: _places(threads, ranks),
            job.schedule,
            lambda ranks: _exceptions(threads, ranks),
        )
        if job.simulated_timeouts:
            scheduler.clock = 0.0
        fabric = self._make_fabric(size)
        make: Callable[..., RankContext] = RankContext
        faults: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if job.faults:
            # Not at the top: it loads torch, for runs with faults alone.
            from pytest_smp.ranks.faults.simulated import FaultyRun

            faults = run = FaultyRun(job)
            make = run.context
        contexts = [make(rank, size, job, scheduler, thread) for rank, thread in enumerate(threads)]
        for context, thread in zip(contexts, threads, strict=True):
            thread.part = _Part(context, fabric)
        streams = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                RankThreads(scheduler, contexts, awaited=self.guards_exit).entered()
            )
            stack.enter_context(isolation.process.entered())
            stack.callback(fabric.close)
            stack.enter_context(faults)
            if self.guards_exit:
                stack.enter_context(ProcessExit(contexts))
            if new:
                stack.callback(_keep_compute_threads)
            stack.callback(_set_streams, sys.stdout, sys.stderr)  # a rank may leave others there
            if job.capture:
                streams = stack.enter_context(_captured(size))
            one_core = stack.enter_context(OneCore([thread.thread for thread in threads]))
            try:
                scheduler.start()
                came_back = _await(scheduler, job, one_core.follow)
            except BaseException as interruption:  # Ctrl-C, or a signal handler of another plugin
                self._give_up(scheduler, contexts, interruption, one_core)
                raise
            if came_back:
                report = _report(job, scheduler, contexts, fabric)
                if scheduler.threads is None:  # else a thread that goes on may look at them
                    for context in contexts:
                        context.release()
            else:
                unfinished = _unfinished(scheduler, contexts)
                timeout = _timeout(job, scheduler, contexts, unfinished)
                self._give_up(scheduler, contexts, timeout, one_core)
                outcomes = [
                    unfinished.get(each.rank) or each.finished_outcome() for each in contexts
                ]
                report = Report(VerdictKind.TIMED_OUT, outcomes, None, timeout)
            report.schedule = Schedule(tuple(scheduler.deviated))
            report.decisions = scheduler.decisions
        if streams is not None:
            for outcome in report.outcomes:
                outcome.stdout, outcome.stderr = (stream.text(outcome.rank) for stream in streams)
        return report

    def _give_up(
        self,
        scheduler: Scheduler,
        contexts: list[RankContext],
        reason: BaseException,
        one_core: OneCore,
    ) -> None:
        """Leave the ranks of a run that does not end behind; the next run gets new threads."""
        for context in contexts:
            context.thread.abandoned = True
        self._threads = self._threads[len(contexts) :]
        try:
            scheduler.abandon(reason)
            one_core.release(context.thread.thread.native_id for context in contexts)
            for _ in range(10):  # a body may swallow it, or the next rank may be another that loops
                running = scheduler.running
                if running is not None:
                    _interrupt(_thread_of(scheduler, contexts, running))
                scheduler.done.acquire(timeout=_GRACE / 10)
                if scheduler.over:
                    return
        finally:  # whatever fails here, the process gets its own state back
            if not scheduler.over:
                scheduler.restore()
                self.abandoned += sum(not context.body_state.finished for context in contexts)


def _thread_of(
    scheduler: Scheduler, contexts: list[RankContext], state: ThreadState
) -> threading.Thread:
    thread = None if scheduler.threads is None else scheduler.threads.thread_of(state)
    body: threading.Thread = contexts[state.rank].thread.thread
    return thread or body


def _await(scheduler: Scheduler, job: Job, meanwhile: Callable[[], None]) -> bool:
    """Wait for the ranks; whether they came back in time. ``meanwhile`` is called between slices.

    In slices: an interruption that no real signal delivers does not wake a sleeping main thread.
    """
    limit = math.inf if job.timeout is None else job.timeout
    start = followed = time.monotonic()
    while True:
        left = start + limit - time.monotonic()
        threads = scheduler.threads
        time_slice = _SLICE if threads is None else LOOK
        scheduler.done.acquire(timeout=max(0.0, min(left, time_slice)))
        if scheduler.over:
            return True
        if threads is not None:
            threads.look()
        elif scheduler.threads is not None:
            continue  # woken by a rank that has started a thread
        if left <= time_slice:
            if not job.patience():
                return False
            start = time.monotonic()
        if time.monotonic() >= followed + _SLICE:
            followed = time.monotonic()
            meanwhile()


@functools.lru_cache(maxsize=256)
def _variables(size: int) -> Variables:
    return functools.partial(launch_variables, size=size)


class _Part:
    """The work of one thread in one run."""

    __slots__ = ("_context", "_fabric")

    def __init__(self, context: RankContext, fabric: WorldFabric) -> None:
        self._context, self._fabric = context, fabric

    def __call__(self) -> None:
        context = self._context
        current_rank.set_current(context)
        try:
            if context.thread.abandoned:
                context.outcome = Outcome(
                    context.rank, OutcomeKind.CANCELLED, detail="the run was given up"
                )
            else:
                context.outcome = _outcome(context, self._fabric)
        except Cancelled as error:  # injected into the last lines of _outcome
            context.outcome = Outcome(context.rank, OutcomeKind.CANCELLED, detail=str(error))
        except BaseException as error:  # of ours, around the body: never a pass
            context.scheduler.fail(context.body_state, error)
            context.outcome = Outcome(context.rank, OutcomeKind.RAISED, error=error)
        finally:
            current_rank.set_current(None)
            context.scheduler.finish(context.body_state)


def _outcome(context: RankContext, fabric: WorldFabric) -> Outcome:
    """Run the body on this rank and say how it ended."""
    job, rank = context.job, context.rank
    rank_fabric = context.fabric = fabric.rank_fabric(context)
    try:
        rank_fabric.enter()
        args, kwargs = job.arguments(rank)
        entered = job.context()
        if entered is None:
            value = job.body(*args, **kwargs)
        else:
            with entered:
                value = job.body(*args, **kwargs)
        _wait_for_threads(context)
        return Outcome(rank, OutcomeKind.RETURNED, value)
    except Cancelled as error:
        if not context.scheduler.ended:  # of the body's own making
            _take_turn(context)
            context.scheduler.fail(context.body_state, error)
            return Outcome(rank, OutcomeKind.RAISED, error=error)
        return Outcome(rank, OutcomeKind.CANCELLED, detail=str(error))
    except job.skips as error:
        _take_turn(context)
        stack_frames.cut_traceback(error, ours=False)
        return Outcome(rank, OutcomeKind.SKIPPED, error=error)
    except BaseException as error:
        stack_frames.cut_traceback(error, ours=isinstance(error, SmpError))
        if not isinstance(error, VerdictError):
            for text in rank_fabric.in_flight():
                error.add_note(text)
        _take_turn(context)
        context.scheduler.fail(context.body_state, error)
        return Outcome(rank, OutcomeKind.RAISED, error=error)
    finally:
        rank_fabric.leave()


def _take_turn(context: RankContext) -> None:
    """The body ends: have the turn, which a thread of the rank may have had beside it."""
    threads = context.scheduler.threads
    if threads is not None:
        threads.take_turn(context)


def _wait_for_threads(context: RankContext) -> None:
    """The body returns: have the turn, and wait until the threads of the rank have ended."""
    threads = context.scheduler.threads
    if threads is not None:
        threads.take_turn(context)
        threads.wait_for_calls(context)


def _places(
    threads: list[_RankThread], ranks: Iterable[int]
) -> dict[int, stack_frames.Place | None]:
    """The user's line in which each of these ranks is, by one look at all threads."""
    stacks = stack_frames.thread_frames()
    return {
        rank: stack_frames.user_place(stacks.get(threads[rank].thread.ident or 0)) for rank in ranks
    }


def _exceptions(threads: list[_RankThread], ranks: Iterable[int]) -> dict[int, str]:
    """The exception that each of these ranks handles, in words, by one look at all threads."""
    exceptions = handled.thread_exceptions()
    return {
        rank: handled.exception_text(exceptions.get(threads[rank].thread.ident or 0))
        for rank in ranks
    }


def _interrupt(thread: threading.Thread) -> None:
    """Raise Cancelled in a thread at its next bytecode: ends a loop in Python, not one in C."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(Cancelled)
    )


@contextlib.contextmanager
def _captured(size: int) -> Iterator[tuple[_Output, _Output]]:
    outside = sys.stdout, sys.stderr
    streams = _Output(sys.stdout, size), _Output(sys.stderr, size)
    sys.stdout, sys.stderr = streams
    try:
        yield streams
    finally:
        sys.stdout, sys.stderr = outside


def _unfinished(scheduler: Scheduler, contexts: list[RankContext]) -> dict[int, Outcome]:
    """The outcome of each rank that has not returned when time is up, with its state in words."""
    unfinished = {}
    exceptions = scheduler.exceptions(range(len(contexts)))
    for context in contexts:
        rank, waiting, kind = context.rank, context.body_state.waiting, OutcomeKind.STUCK
        if context.body_state.finished:
            continue
        if context.fabric is None:
            detail, kind = "has not started", OutcomeKind.CANCELLED
        elif waiting is not None:
            missing = waiting.missing(rank)
            detail = f"waits in {waiting.describe(rank)}"
            detail += f" for {ranks_text(missing)}" if missing else ""
            detail += handled.while_handling(exceptions[rank])
        elif context.body_state is scheduler.running:
            detail = "never came back: it computes, or waits where the scheduler cannot see"
        else:
            detail = "can go on, and has no turn"
        unfinished[rank] = Outcome(rank, kind, detail=f"rank {rank} {detail}")
    return unfinished


def _timeout(
    job: Job,
    scheduler: Scheduler,
    contexts: list[RankContext],
    unfinished: dict[int, Outcome],
) -> RunTimeout:
    """The verdict on a run that did not end in time: every rank's state and stack."""
    stacks = stack_frames.thread_frames()
    lines = [f"timeout: the run did not end within {job.timeout:g} s ({job.timeout_origin})"]
    for context in sorted(contexts, key=lambda each: each.body_state is not scheduler.running):
        outcome = unfinished.get(context.rank)  # the one to blame first
        if outcome is None:
            ended = context.finished_outcome()
            text = "" if ended.error is None else f" {type(ended.error).__name__}: {ended.error}"
            lines.append(f"rank {context.rank} has {ended.kind}{text}")
            continue
        lines.append(outcome.detail)
        frame = stacks.get(context.thread.thread.ident or 0)
        if frame is not None and outcome.kind is OutcomeKind.STUCK:
            lines.append(stack_frames.stack_text(frame))
    if scheduler.threads is not None:
        lines += scheduler.threads.unfinished()
    if scheduler.judgement is not None and not scheduler.ended:
        lines.append(str(scheduler.verdict()[0]))
    timeout = RunTimeout("\n".join(lines))
    timeout.__cause__ = scheduler.failure
    return timeout


def _cause(scheduler: Scheduler) -> Cause | None:
    """The root cause among what ended the run and what ranks have raised."""
    ends = [] if scheduler.failure is None else [(scheduler.failure, scheduler.root)]
    return root_cause(
        Cause(verdict_of(error), rank, error) for error, rank in [*ends, *scheduler.raised]
    )


def _report(
    job: Job,
    scheduler: Scheduler,
    contexts: list[RankContext],
    fabric: WorldFabric,
) -> Report:
    """Put the ranks' outcomes together and find the verdict on the world."""
    outcomes = []
    cause = _cause(scheduler)
    waits = {wait.rank: wait for wait in scheduler.stuck}
    for context in contexts:
        outcome = context.finished_outcome()
        if context.crashed and cause is None:  # by a thread, when all bodies had ended
            crash = CrashError(f"rank {context.rank} {outcome.detail}")
            cause = Cause(VerdictKind.CRASHED, context.rank, crash)
        if outcome.rank in waits:
            outcome.kind = OutcomeKind.STUCK
            outcome.detail = "\n".join(wait_lines([waits[outcome.rank]])).strip()
        elif outcome.kind is OutcomeKind.CANCELLED:
            place = (
                f" at {context.body_state.place}" if context.body_state.place is not None else ""
            )
            root = scheduler.root if cause is None else cause.root
            outcome.detail = f"cancelled because of rank {root}{place}"
        outcomes.append(outcome)
    if cause is not None:
        return Report(cause.verdict, outcomes, cause.root, cause.error)
    if any(outcome.kind is OutcomeKind.SKIPPED for outcome in outcomes):
        return Report(VerdictKind.PASSED, outcomes)  # a rank that skips may leave work behind
    fatal, minor = fabric.leaks(job.strict)
    if fatal:
        error = LeakError(
            "\n".join(["leak: the run left something behind", *(f"  {line}" for line in fatal)])
        )
        return Report(VerdictKind.LEAK, outcomes, None, error, warnings=minor)
    return Report(VerdictKind.PASSED, outcomes, warnings=minor)
