"""The threads that simulated ranks start. Each is a further *strand* of its rank: it may communicate,
and takes turns.

The turn belongs to a rank. Among the strands of the rank one makes a communication call at a time: the one
that runs with the turn. The rank gives the turn up when no strand of it can go on, since each one waits in
a communication call, waits for a thread, a condition or a future, or has ended. So a saver thread and the
rank that joins it run in one order, however fast they are.

A thread that waits where Python does not tell (a lock, a C function) is seen asleep by the controller, which
looks at intervals while a run has threads, and the turn goes on without it.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import concurrent.futures.thread as pools
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_smp.ranks.sim.scheduler import Scheduler, ThreadState
from smp_core.errors import Cancelled
from smp_core.transport import current_rank, stack_frames
from smp_core.transport.stack_frames import Place

if TYPE_CHECKING:
    from pytest_smp.ranks.sim.rank_context import RankContext

#: Seconds between two looks of the controller at the strands that have the turn and do not come back.
LOOK = 0.02
#: Seconds that a run which has ended stays for threads that wait for each other outside of communication.
PATIENCE = 5.0
#: Looks after which the turn no longer stays for a sleeping thread, if no thread of its rank waits for the turn,
#: and the time that a thread may compute meanwhile, in looks.
_SPINNING = 50
#: The share of the time that a sleeping thread may compute between two looks.
_POLLING = 0.05

_join, _wait = threading.Thread.join, threading.Condition.wait
_new_lock = _thread.allocate_lock


class _Block:
    """A wait of a strand outside of communication.

    Attributes:
        text: the wait in words.
        holds: whether it goes on.
        limit: seconds after which it ends by itself; None if it never does.
    """

    def __init__(self, text: str, holds: Callable[[], bool], limit: float | None) -> None:
        self.text, self.holds, self.limit = text, holds, limit
        self.cancel: Callable[[], None] | None = None
        self.cancelled = False


class _Waiter:
    """A lock that a condition releases to notify a wait: the wait is over before its thread goes on."""

    def __init__(self) -> None:
        self.lock = _new_lock()
        self.lock.acquire()
        self.over = False

    def release(self) -> None:
        """Called by Condition.notify."""
        self.over = True
        self.lock.release()


class Strand:
    """One thread of a rank, or one task of a pool's thread: what the scheduler knows of it."""

    def __init__(
        self, context: RankContext, state: ThreadState, name: str, thread: threading.Thread | None
    ) -> None:
        self.context, self.state, self.name, self.thread = context, state, name, thread
        self.future: concurrent.futures.Future[Any] | None = None  # of a task of a pool
        self.daemon = thread is not None and thread.daemon  # the rank does not wait for its end
        self.started = stack_frames.caller_place()  # the user's line
        self.communicates = False  # it has made a communication call
        self.over = False
        self.block: _Block | None = None
        self.asleep = False  # seen asleep, and not heard of since
        self.passed_over = False  # the turn does not stay for it
        self.registered: set[str] = set()  # names of groups in torch's registry of this thread
        self.looks, self._computed, self._seconds, self._looked = 0, 0.0, 0.0, 0.0

    @property
    def is_main(self) -> bool:
        """True for the thread that runs the body."""
        return self.thread is self.context.thread.thread

    def blocks(self) -> bool:
        """Return whether the strand waits outside of communication."""
        return self.block is not None and self.block.holds()

    def heard(self) -> None:
        """Forget what looks at the thread have shown: it has just told what it does."""
        self.asleep = self.passed_over = False
        self.looks, self._computed, self._seconds, self._looked = 0, 0.0, 0.0, 0.0

    def look(self) -> None:
        """Look whether the thread sleeps. Called at intervals while the turn stays for it."""
        self.looks += 1
        thread = self.thread
        if thread is not None and thread.native_id is not None:
            seconds, now = _compute_seconds(thread.native_id), time.monotonic()
            # A loop that polls computes a little between two sleeps.
            little = (now - self._looked) * _POLLING
            if self._looked and seconds - self._seconds <= little and _sleeps(thread):
                self.asleep = True
            # On a busy machine a thread may not have had a core yet: its own time counts.
            self._computed += seconds - self._seconds if self._looked else 0.0
            self._seconds, self._looked = seconds, now
        most = _SPINNING if self.communicates else 1
        waits_for_worker = thread is None and self.looks > most  # of its pool
        self.passed_over = waits_for_worker or self._computed > LOOK * most


def _compute_seconds(native_id: int) -> float:
    """The CPU time of a thread; 0 of one that has ended, or where the operating system does not say.

    The clock is the one of pthread_getcpuclockid, which must not be called for a thread that has ended.
    """
    try:
        return time.clock_gettime((~native_id << 3) | 6)  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
    except OSError:
        return 0.0


def _sleeps(thread: threading.Thread) -> bool:
    """Return whether the operating system says that a thread sleeps; True where it does not say."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"S"
    except OSError:
        return True


class _Local(threading.local):
    """The strand of the calling thread."""

    strand: Strand | None = None  # that it is
    starts: bool = (
        False  # it waits for a thread that it starts: not a wait for what another one does
    )
    stands_for: Strand | None = None  # whose work it does: a thread of this project's own


_local = _Local()


class _EndOfThreads:
    """A body has ended, and threads of its rank go on. An Operation of the scheduler.

    As at the interpreter's exit, daemon threads are left alone, but for a call that they are in.
    """

    def __init__(self, threads: RankThreads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    @property
    def done(self) -> bool:
        """True if every other strand of the rank has ended, or is a daemon's that is in no call."""
        return not any(
            not strand.daemon or (strand.communicates and self._threads.is_under_way(strand))
            for strand in self._threads.strands_of(self._rank)
            if not strand.is_main
        )

    def describe(self, rank: int) -> str:
        """See Operation."""
        return "the end of its threads"

    def missing(self, rank: int) -> tuple[int, ...]:
        """See Operation."""
        return ()


class RankThreads:
    """The strands of one run."""

    def __init__(
        self, scheduler: Scheduler, contexts: list[RankContext], *, awaited: bool = True
    ) -> None:
        """``awaited``: whether a rank waits for its threads at its end; a script's rank does so by itself."""
        self._scheduler, self._contexts, self._awaited = scheduler, contexts, awaited
        # Held while a strand's state changes. Reentrant: the garbage collector may run what waits.
        self._gate = threading.RLock()
        self._strands: dict[int, list[Strand]] = {}  # by rank, the body's thread first
        self._by_state: dict[ThreadState, Strand] = {}
        self._closing: list[tuple[int, _EndOfThreads]] = []
        self._failures: list[str] = []  # of threads that have raised
        self._leaving: dict[int, list[threading.Thread]] = {}  # by rank: their work has ended
        self._turn_rank = -1
        self._idle_since: float | None = None
        self._closed = False

    # The run.

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While entered, threads and tasks of pools that ranks start are theirs."""
        with (
            _Replacements(
                *_WAITS,
                (threading.Thread, "__init__", self._new_thread),
                (threading.Thread, "start", _quiet_start(self._forget_thread)),
                (pools._WorkItem, "__init__", _adopted_item(self._adopt_task)),
            ),
            current_rank.child_threads(self._adopt_thread),
        ):
            try:
                yield
            finally:
                with self._gate:
                    self._closed = True
                    for strands in self._strands.values():
                        for strand in strands:
                            strand.registered.clear()
                if _Active.threads is self:
                    _Active.threads = None

    def _begin(self, context: RankContext) -> None:
        """Keep track of strands from now on: a rank starts its first thread."""
        scheduler = self._scheduler
        with self._gate:
            if scheduler.threads is not None:
                return
            for each in self._contexts:
                strand = Strand(each, scheduler.thread_states[each.rank], "", each.thread.thread)
                strand.communicates = True
                self._strands[each.rank], self._by_state[strand.state] = [strand], strand
            self._turn_rank = context.rank
            scheduler.threads = _Active.threads = self
        with contextlib.suppress(RuntimeError):  # the controller looks at the run from now on
            scheduler.done.release()

    # Strands.

    def _new_strand(
        self, context: RankContext, name: str, thread: threading.Thread | None
    ) -> Strand:
        context.fabric.torch_world()  # made before several threads ask for it
        self._begin(context)
        turn = _new_lock()
        turn.acquire()
        strand = Strand(context, ThreadState(context.rank, turn), name, thread)
        with self._gate:
            self._strands[context.rank].append(strand)
            self._by_state[strand.state] = strand
            self._scheduler.helpers.append(strand.state)
        return strand

    def _new_thread(
        self, original: Callable[..., None], thread: threading.Thread, *args: Any, **kwargs: Any
    ) -> None:
        """Stands in for Thread.__init__: the thread of a body is a main thread, which is no daemon."""
        original(thread, *args, **kwargs)
        context: Any = current_rank.current()
        inherits = self._awaited and kwargs.get("daemon") is None
        if inherits and not self._closed and context in self._contexts:
            thread._daemonic = _local.strand is not None and _local.strand.daemon  # type: ignore[attr-defined]

    def _adopt_thread(self, context: Any, thread: threading.Thread) -> None:
        """A rank is about to start a thread."""
        if self._closed or context not in self._contexts or thread._started.is_set():  # type: ignore[attr-defined]
            return
        daemon = thread.daemon or not self._awaited
        if self._awaited:
            # One that does not come back must not hold up the end of the interpreter.
            thread._daemonic = True  # type: ignore[attr-defined]
        target: Any = getattr(thread, "_target", None)
        if target is pools._worker:
            return  # its tasks are strands
        code = getattr(target, "__code__", None)
        run: Any = thread.run
        if code is not None and stack_frames.is_own_code(code):
            thread.run = functools.partial(_stand_for, self._current(context), run)  # type: ignore[method-assign]
            return
        strand = self._new_strand(context, thread.name, thread)
        strand.daemon = daemon
        thread.run = functools.partial(self._run_thread, strand, run)  # type: ignore[method-assign]

    def _forget_thread(self, thread: threading.Thread) -> None:
        """A thread that was adopted could not be started."""
        strand = self._strand_of(thread)
        if strand is not None and not thread._started.is_set():  # type: ignore[attr-defined]
            run: Any = thread.run
            thread.run = run.args[1]  # type: ignore[method-assign]
            thread._daemonic = thread.daemon and strand.daemon  # type: ignore[attr-defined]
            self._end_strand(strand)

    def _adopt_task(self, item: Any) -> None:
        """Make a task of a pool a strand of the rank that submits it."""
        context: Any = current_rank.current()
        if self._closed or context not in self._contexts:
            return
        run = item.run
        strand = self._new_strand(context, "task of a pool", None)
        strand.future, strand.daemon = item.future, not self._awaited

        def run_task(*args: Any) -> Any:
            del item.run  # the item would keep itself
            thread = threading.current_thread()
            strand.name, strand.thread = thread.name, thread
            with self._running(strand):
                return run(*args)

        item.run = run_task

    def _run_thread(self, strand: Strand, run: Callable[[], None]) -> None:
        scheduler = self._scheduler
        try:
            with self._running(strand):
                run()
        except Cancelled:
            if not scheduler.ended:
                raise
        except BaseException as error:
            if error is scheduler.failure:  # it is in the report
                stack_frames.cut_traceback(error, ours=True)
                return
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = stack_frames.user_place(trace.tb_frame if trace is not None else None)
            text = f"thread {strand.name!r} of rank {strand.state.rank} has ended with {type(error).__name__}"
            self._failures.append(f"{text}: {error}" + (f"\n      {place}" if place else ""))
            raise
        finally:
            vars(strand.thread).pop("run", None)  # a thread that is kept does not keep its run

    @contextlib.contextmanager
    def _running(self, strand: Strand) -> Iterator[None]:
        """While entered, the calling thread is the strand."""
        outer = _local.strand
        _local.strand = strand
        try:
            with current_rank.adopted(strand.context, lambda: not self._closed):
                if not self._closed:
                    strand.context.fabric.forget_groups()
                    self.register_groups(strand.context)
                yield
        finally:
            _local.strand = outer
            self._end_strand(strand)

    def _end_strand(self, strand: Strand) -> None:
        with self._gate:
            over, strand.over = strand.over, True
            if self._closed or over:
                return
            strand.context.fabric.forget_groups()
            if strand.thread is not None and strand.future is None and strand.thread.is_alive():
                leaving = self._leaving.get(strand.state.rank, [])
                self._leaving[strand.state.rank] = [
                    *filter(threading.Thread.is_alive, leaving),
                    strand.thread,
                ]
            self._strands[strand.state.rank].remove(strand)
            self._scheduler.helpers.remove(strand.state)
            del self._by_state[strand.state]
            if self._scheduler.running is strand.state:
                self._scheduler.running = None
            self._advance()

    def strands_of(self, rank: int) -> tuple[Strand, ...]:
        """The strands of a rank that have not ended, the body's own first."""
        return tuple(self._strands[rank])

    def _all_strands(self) -> list[Strand]:
        return [strand for rank in tuple(self._strands) for strand in self.strands_of(rank)]

    def _strand_of(self, thread: threading.Thread) -> Strand | None:
        """The strand that a thread runs at present."""
        return next((strand for strand in self._all_strands() if strand.thread is thread), None)

    def _current(self, context: RankContext) -> Strand | None:
        """The strand of a rank that the calling thread is; the body's own, unless another is known."""
        if self._scheduler.threads is None:
            return None
        strand = _local.strand or _local.stands_for
        return self._strands[context.rank][0] if strand is None else strand

    def _own(self) -> Strand | None:
        """The strand that the calling thread is; None in threads that do a strand's work, and in strange ones."""
        if _local.starts:
            return None
        strand = _local.strand
        context: Any = current_rank.current()
        if self._closed or context not in self._contexts:
            return None
        if strand is None:
            main = self._strands[context.rank][0]
            strand = main if main.thread is threading.current_thread() else None
        return None if strand is None or strand.block is not None else strand

    def register_groups(self, context: RankContext) -> None:
        """Enter the rank's groups in torch's registry, which each thread has for itself on `sim`."""
        strand = self._current(context)
        if strand is not None:
            context.fabric.register_groups(strand.registered)

    # The turn. Everything below changes states with the gate held.

    def take_turn(self, context: RankContext) -> None:
        """Return when the calling strand runs with its rank's turn: each communication call begins here."""
        strand = self._current(context)
        assert strand is not None
        scheduler, state = self._scheduler, strand.state
        with self._gate:
            strand.heard()
            strand.communicates = True
            if scheduler.running is state:
                return
            if scheduler.thread_states[state.rank].finished and not strand.is_main:
                text = f"thread {strand.name!r} made a communication call, and the body of rank {state.rank}"
                raise Cancelled(
                    f"{text} has ended: join the thread in the body, or make it no daemon"
                )
            self._request(strand)
        state.turn.acquire()
        self.register_groups(context)

    def _request(self, strand: Strand) -> None:
        scheduler = self._scheduler
        scheduler.enqueue(strand.state)
        running = scheduler.running
        same = running is not None and running.rank == strand.state.rank
        if running is not None and same and self._by_state[running].blocks():
            scheduler.running = None
        self._advance()

    def fail(self, context: RankContext, failure: BaseException) -> None:
        """End the run because of what the calling thread does, even if it can have no turn any more."""
        if current_rank.current() is context:
            with contextlib.suppress(Cancelled):  # the body has ended
                self.take_turn(context)
        with self._gate:
            self._scheduler.fail(context.body_state, failure)
            self._advance()

    def pass_turn(self, state: ThreadState, *, decided: bool) -> None:
        """The strand waits, or gives way; return when it has the turn again."""
        with self._gate:
            self._scheduler.running = None
            # One that polls gives way to others of the same rank and of other ranks alike.
            self._advance(decided=decided, prefers=state.waiting is not None)
        state.turn.acquire()

    def finish(self, state: ThreadState) -> None:
        """A body has ended."""
        with self._gate:
            state.finished = True
            if self._scheduler.running is state:
                self._scheduler.running = None
            self._advance()

    def wait_for_calls(self, context: RankContext) -> None:
        """The body returns: wait until its threads have ended."""
        scheduler, rank = self._scheduler, context.rank
        operation = _EndOfThreads(self, rank)
        if not scheduler.ended and not operation.done:
            self._closing.append((rank, operation))
            scheduler.wait(scheduler.thread_states[rank], operation)
        for thread in self._leaving.pop(rank, []):
            _join(thread)  # its exception is told within the run

    def is_under_way(self, strand: Strand) -> bool:
        """Return whether the strand is in a communication call, or runs."""
        state = strand.state
        queued = self._scheduler.is_queued(state)
        return (
            state.waiting is not None
            or queued
            or self._scheduler.running is state
            or (self._is_active(strand))
        )

    def _is_active(self, strand: Strand) -> bool:
        """Return whether a strand runs without the turn, and so may come for it."""
        state = strand.state
        return not (
            strand.over
            or strand.asleep
            or strand.passed_over
            or state.finished
            or state.waiting is not None
            or state is self._scheduler.running
            or strand.blocks()
            or self._scheduler.is_queued(state)
        )

    def _advance(self, *, decided: bool = False, prefers: bool = True) -> None:
        """Give the turn to the next strand, if nobody runs with it and its rank has nobody who may come."""
        scheduler = self._scheduler
        for rank, operation in list(self._closing):
            if operation.done:
                self._closing.remove((rank, operation))
                scheduler.wake(rank, operation)
        if scheduler.running is not None or scheduler.over:
            return
        rank = self._turn_rank
        finished = scheduler.thread_states[rank].finished
        if prefers and not decided:
            if scheduler.has_queued(rank):
                scheduler.prefer(rank)
                following = scheduler.take_next(False)
                assert following is not None
                self._grant(following)
                return
            if not finished and any(map(self._is_active, self._strands[rank])):
                return
        following = scheduler.take_next(decided)
        if following is not None:
            self._grant(following)
        elif all(state.finished for state in scheduler.thread_states):
            scheduler.end_run(self._turn_rank)
        else:
            if self._idle_since is None:
                self._idle_since = time.monotonic()
            patient = time.monotonic() - self._idle_since < PATIENCE
            if scheduler.ended and not (patient and self.may_come()):
                self._cancel_blocks()

    def _grant(self, state: ThreadState) -> None:
        scheduler, strand = self._scheduler, self._by_state[state]
        if state.rank != self._turn_rank:
            scheduler.switch(self._turn_rank, state.rank)
            self._turn_rank = state.rank
        self._idle_since = None
        strand.context.thread_state = scheduler.running = state
        state.turn.release()

    def may_come(self) -> bool:
        """Return whether a strand outside of communication may still come, when nobody can run."""
        return any(
            self._may_come(strand)
            for strands in self._strands.values()
            if not strands[0].state.finished
            for strand in strands
        )

    def _may_come(self, strand: Strand) -> bool:
        """Return False only if the strand waits for what another one does: what a sleeping one does is not known."""
        if strand.over or strand.state.waiting is not None:
            return False
        block = strand.block
        return block is None or block.limit is not None or not block.holds()

    def look(self) -> None:
        """Called by the controller at intervals: pass the turn over strands that sleep."""
        scheduler = self._scheduler
        with self._gate:
            running = scheduler.running
            if scheduler.over:
                return
            if running is None:
                for strand in self._all_strands():
                    if strand.thread is None and strand.future is not None and strand.future.done():
                        self._end_strand(strand)  # its pool was shut down before it began
                    elif self._is_active(strand) or strand.passed_over:
                        strand.look()
                self._advance()
                return
            strand = self._by_state[running]
            if scheduler.has_queued(None):
                strand.look()
                patient = strand.looks <= _SPINNING and not scheduler.has_queued(running.rank)
                if strand.asleep and not patient and not self._is_inside(strand):
                    scheduler.running = None  # it waits for a lock that a queued one may hold
                    self._advance()

    def _is_inside(self, strand: Strand) -> bool:
        """Return whether a strand is inside of this project's code, above the user's."""
        thread = strand.thread
        frame = stack_frames.thread_frames().get((thread.ident if thread else None) or 0)
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        below = True
        for code in reversed(codes):
            below = below and stack_frames.is_plumbing(code)
            if not below and stack_frames.is_own_code(code):
                return True
        return below

    def _cancel_blocks(self) -> None:
        """The run has ended: unwind strands that wait for what will not come."""
        for strand in self._all_strands():
            if strand.blocks() and strand.block is not None and strand.block.cancel:
                strand.block.cancelled = True
                strand.block.cancel()

    # Words.

    def waiting_name(self, state: ThreadState) -> str:
        """The thread of a waiting strand in words; empty for the body's own."""
        strand = self._by_state[state]
        return "" if strand.is_main else f" in thread {strand.name!r}"

    def thread_of(self, state: ThreadState) -> threading.Thread | None:
        """The thread of a strand that has not ended."""
        strand = self._by_state.get(state)
        return None if strand is None else strand.thread

    def place(self, state: ThreadState, frames: dict[int, Any]) -> Place | None:
        """The user's line in which a thread is, or the line that has started it."""
        strand = self._by_state.get(state)
        if strand is None:
            return None
        ident = None if strand.thread is None else strand.thread.ident
        return stack_frames.user_place(frames.get(ident or 0)) or strand.started

    def blocked(self) -> list[tuple[int, str, Place | None]]:
        """The waits of strands outside of communication: rank, words, line. Of ranks that have not ended."""
        frames = stack_frames.thread_frames()
        return [
            (
                strand.state.rank,
                f"{strand.block.text}{self.waiting_name(strand.state)}",
                stack_frames.user_place(frames.get(strand.thread.ident or 0)),
            )
            for strand in self._all_strands()
            if strand.blocks() and strand.block is not None and strand.thread is not None
            if strand.block.limit is None and not strand.context.body_state.finished
        ]

    def unfinished(self) -> list[str]:
        """The threads of ranks that have not ended, and what each one does."""
        frames = stack_frames.thread_frames()
        lines = []
        for strand in self._all_strands():
            if strand.is_main or strand.context.body_state.finished:
                continue
            rank, waiting, block = strand.state.rank, strand.state.waiting, strand.block
            text = f"thread {strand.name!r} of rank {rank} has not ended"
            if waiting is not None:
                text += f": it waits in {waiting.describe(rank)}"
            elif block is not None:
                text += f": it waits in {block.text}"
            place = self.place(strand.state, frames)
            lines.append(text + ("" if place is None else f"\n    {place}"))
        return lines

    def notes(self) -> list[str]:
        """Notes on the threads that have raised."""
        return list(self._failures)

    def counts_as_wait(self, state: ThreadState) -> bool:
        """Return whether the wait is a call of the user's."""
        return not isinstance(state.waiting, _EndOfThreads)

    # Waits outside of communication.

    @contextlib.contextmanager
    def _blocked(self, strand: Strand, block: _Block) -> Iterator[None]:
        """While entered, the strand waits; afterwards the body's own has the turn again."""
        scheduler, state = self._scheduler, strand.state
        with self._gate:
            strand.heard()
            strand.block = block
            if scheduler.running is state and len(self._strands[state.rank]) > 1:
                scheduler.running = None
                self._advance()
            elif scheduler.running is None:
                self._advance()
        try:
            yield
        finally:
            with self._gate:
                strand.block = None
                strand.heard()
                comes = strand.is_main and scheduler.running is not state and not self._closed
                if comes:
                    self._request(strand)
            if comes:
                state.turn.acquire()
            if not self._closed:
                self.register_groups(strand.context)

    def join(
        self, original: Callable[..., None], thread: threading.Thread, timeout: float | None = None
    ) -> None:
        """Stands in for Thread.join."""
        strand = self._own()
        run: Any = vars(thread).get("run")
        works_for_strand = isinstance(run, functools.partial) and run.func is _stand_for
        timed = timeout is not None and timeout <= 0
        if strand is None or works_for_strand or timed or not thread.is_alive():
            original(thread, timeout)
            return
        text = f"Thread.join() of thread {thread.name!r}"
        if (
            current_rank.parent_rank(thread) is not None
        ):  # of a pool's thread, its tasks are strands
            block = _Block(text, lambda: self._strand_of(thread) is not None, timeout)
        else:
            block = _Block(text, thread.is_alive, math.inf if timeout is None else timeout)
        with self._blocked(strand, block):
            original(thread, timeout)

    def sleep(self, original: Callable[..., None], seconds: float) -> None:
        """Stands in for time.sleep."""
        strand = self._own()
        if strand is None:
            original(seconds)
            return
        with self._blocked(strand, _Block("time.sleep()", lambda: True, seconds)):
            original(seconds)

    def wait(
        self, original: Callable[..., bool], condition: Any, timeout: float | None = None
    ) -> bool:
        """Stands in for Condition.wait, by which events, queues, futures and semaphores wait, too."""
        strand = self._own()
        foreign = original is not _wait or not condition._is_owned()
        if strand is None or foreign or (timeout is not None and timeout <= 0):
            return original(condition, timeout)
        waiter = _Waiter()
        block = _Block("threading.Condition.wait()", lambda: not waiter.over, timeout)

        def cancel() -> None:
            with contextlib.suppress(ValueError, RuntimeError):  # notified meanwhile
                condition._waiters.remove(waiter)
                waiter.release()

        block.cancel = cancel
        condition._waiters.append(waiter)
        saved = condition._release_save()
        notified = False
        try:
            with self._blocked(strand, block):
                notified = waiter.lock.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            condition._acquire_restore(saved)
            if not notified:
                with contextlib.suppress(ValueError):
                    condition._waiters.remove(waiter)
        if block.cancelled:
            raise Cancelled("the run has ended")
        return notified


class _Active:
    """The run whose strands wait by the functions below."""

    threads: RankThreads | None = None


class _Replacements:
    """While entered, functions are called in the place of attributes.

    ``replacements``: an owner, a name, and the function, which gets the attribute as first argument.
    """

    def __init__(self, *replacements: tuple[Any, str, Callable[..., Any]]) -> None:
        self._replacements = replacements
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        for owner, name, function in self._replacements:
            original = getattr(owner, name)
            call = _calling(function, original)
            self._undo.append((owner, name, original, call))
            setattr(owner, name, call)

    def __exit__(self, *_: object) -> None:
        for owner, name, original, call in reversed(self._undo):
            if getattr(owner, name) is call:  # else somebody has replaced it, and puts this back
                setattr(owner, name, original)


def _calling(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return call


def _dispatched(name: str) -> Callable[..., Any]:
    """A function that waits as the active run does, and refers to no run: a module may keep it."""

    def wait(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        threads = _Active.threads
        if threads is None:
            return original(*args, **kwargs)
        return getattr(threads, name)(original, *args, **kwargs)

    return wait


#: The functions by which strands wait.
_WAITS = (
    (threading.Thread, "join", _dispatched("join")),
    (threading.Condition, "wait", _dispatched("wait")),
    (time, "sleep", _dispatched("sleep")),
)


def _stand_for(strand: Strand | None, run: Callable[[], None]) -> None:
    """Run a thread of this project's own, which does the work of a strand while that one sleeps."""
    _local.stands_for = strand
    run()


def _quiet_start(failed: Callable[[threading.Thread], None]) -> Callable[..., None]:
    """Have the turn not pass while a thread begins: its starter may hold a lock of all ranks.

    ``failed`` is called with a thread that could not be started.
    """

    def start(original: Callable[..., None], thread: threading.Thread) -> None:
        outer, _local.starts = _local.starts, True
        try:
            original(thread)
        except BaseException:
            failed(thread)
            raise
        finally:
            _local.starts = outer

    return start


def _adopted_item(adopt: Callable[[Any], None]) -> Callable[..., None]:
    """Have the tasks that ranks give to pools of threads adopted."""

    def __init__(original: Callable[..., None], item: Any, *args: Any, **kwargs: Any) -> None:
        original(item, *args, **kwargs)
        if current_rank.current() is not None:
            adopt(item)

    return __init__
