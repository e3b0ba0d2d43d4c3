"""The turn: which of a world's ranks runs, what the others wait for, and when none can run any
more.

Exactly one rank thread runs at any time. The turn passes only when a rank waits for something,
ends, or gives way, so a run is a function of the program, its inputs, and the schedule. Ranks that
can run stand in a queue and are served in order, but for the deviations of the schedule.

A rank that starts threads has several strands; threads.py decides which of them runs.

When a rank raises, or no rank can run, or two calls do not match, the run has *ended*: each rank
then still gets its turn, a rank whose wait is over goes on to its next communication call, and
every communication call unwinds its rank with Cancelled. So no rank is left behind, and a failure
that several ranks see is seen to be the same.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from pytest_smp.ranks.causes import origin_of
from pytest_smp.ranks.isolation import Isolation
from pytest_smp.ranks.schedule import ROUND_ROBIN, Schedule
from smp_core.errors import (
    BackendError,
    Cancelled,
    CollectiveMismatchError,
    DeadlockError,
    VerdictError,
)
from smp_core.transport import diagnosis
from smp_core.transport.call_lines import CallLines, add_lines, line_of
from smp_core.transport.stack_frames import Place, thread_frames


def _headroom(frames: int = 24) -> None:
    """Raise RecursionError here, where nothing has changed, rather than with the turn in hand."""
    if frames:
        _headroom(frames - 1)


class Operation(Protocol):
    """Something that a rank can wait for."""

    @property
    def done(self) -> bool:
        """True when the wait is over."""

    def describe(self, rank: int) -> str:
        """The call in words, as rank made it: operation, group, sequence number."""

    def missing(self, rank: int) -> Sequence[int]:
        """The world ranks without which this rank's wait cannot end."""


class Judgement(Operation, Protocol):
    """A verdict that is certain, and that says more once other ranks have made their next calls.

    A rank that waits for a judgement waits until the run ends.
    """

    @property
    def ripe(self) -> bool:
        """True if further calls of other ranks would add nothing to the verdict."""

    def verdict(self) -> tuple[BaseException, int]:
        """The error, and the rank to blame."""


class ThreadTurns(Protocol):
    """The turns of ranks that have several threads; see threads.py (RankThreads)."""

    def take_turn(self, context: Any) -> None: ...

    def fail(self, context: Any, failure: BaseException) -> None: ...

    def pass_turn(self, state: ThreadState, *, decided: bool) -> None: ...

    def finish(self, state: ThreadState) -> None: ...

    def wait_for_calls(self, context: Any) -> None: ...

    def may_come(self) -> bool: ...

    def look(self) -> None: ...

    def register_groups(self, context: Any) -> None: ...

    def counts_as_wait(self, state: ThreadState) -> bool: ...

    def waiting_name(self, state: ThreadState) -> str: ...

    def thread_of(self, state: ThreadState) -> threading.Thread | None: ...

    def place(self, state: ThreadState, frames: dict[int, Any]) -> Place | None: ...

    def blocked(self) -> list[tuple[int, str, Place | None]]: ...

    def unfinished(self) -> list[str]: ...

    def notes(self) -> list[str]: ...


#: Turns that the other ranks get before a judgement, for each rank: one that polls gives way for ever.
_TURNS = 1000


def _issued(operation: Operation, rank: int) -> Place | None:
    """The line at which this rank made the call that it waits for, if the operation knows it."""
    issued = getattr(operation, "issued", None)
    place: Place | None = None if issued is None else issued(rank)
    return place


def _no_exceptions(ranks: Iterable[int]) -> dict[int, str]:
    return dict.fromkeys(ranks, "")


class ThreadState:
    """The place of one rank, or of a thread of it, in the scheduler: the lock it sleeps on, and what it waits for."""

    __slots__ = ("deadline", "expired", "finished", "place", "rank", "turn", "waiting")

    def __init__(self, rank: int, turn: _thread.LockType) -> None:
        self.rank = rank
        self.turn = turn
        self.waiting: Operation | None = None
        self.deadline: float | None = None  # of the wait, on the simulated clock
        self.expired = False  # the deadline has passed; the thread does not know yet
        self.place: Place | None = None  # where it waited, kept when the run ends
        self.finished = False


class WaitExpired(Exception):
    """Raised in a rank whose wait was the first to exceed its time-out when no rank could go on."""


class Scheduler:
    """Passes the turn between the ranks of one run."""

    def __init__(
        self,
        thread_states: list[ThreadState],
        isolation: Isolation,
        locate: Callable[[Iterable[int]], dict[int, Place | None]],
        schedule: Schedule = ROUND_ROBIN,
        exceptions: Callable[[Iterable[int]], dict[int, str]] = _no_exceptions,
    ) -> None:
        self.thread_states = thread_states  # of the threads that run the bodies, by rank
        self.helpers: list[ThreadState] = []  # of further threads of ranks
        self.threads: ThreadTurns | None = None  # since a rank has started one
        self.ended = False
        self.over = False  # all bodies have ended
        self.failure: BaseException | None = None  # the exception that ended the run
        self.root: int | None = None  # the rank that it belongs to
        #: Exceptions of ranks in order of time, but for those that a verdict has brought about.
        self.raised: list[tuple[BaseException, int]] = []
        self.running: ThreadState | None = None  # the rank that has the turn
        self.done = _thread.allocate_lock()  # released when the last rank has finished
        self.done.acquire()
        self.stuck: list[diagnosis.Wait] = []  # the waits when no rank could run
        self._ready: collections.deque[ThreadState] = collections.deque(thread_states)
        self._isolation = isolation
        self.locate, self.exceptions = locate, exceptions
        self._given_up = False
        self._must_raise: ThreadState | None = (
            None  # the root of a verdict, until its thread raises it
        )
        self.judgement: Judgement | None = None  # to be given when the others can go no further
        self._judge: ThreadState | None = None  # the rank that found it first
        self._turns = _TURNS * len(thread_states)  # until it is given anyway
        self._deviations = dict(schedule)
        self.decisions = 0  # made so far
        self.clock: float | None = None  # simulated seconds, if time-outs fire (--smp-timeouts)
        self.call_lines = CallLines(len(thread_states))
        self.deviated: list[tuple[int, int]] = []  # the deviations that took effect

    # Called by ranks. The caller has the turn.

    def decide(self, options: int) -> int:
        """The schedule's choice among so many, 0 to ``options`` - 1."""
        if options < 2 or self.ended:
            return 0
        decision, self.decisions = self.decisions, self.decisions + 1
        if not self._deviations:
            return 0
        choice = self._deviations.pop(decision, 0) % options
        if choice:
            self.deviated.append((decision, choice))
        return choice

    def enter(self, thread_state: ThreadState) -> None:
        """Every communication call starts here, and may let another rank go first."""
        if self.ended:
            self._unwind(thread_state)
        if not self._deviations:  # nearly always: the result of `decide`, without the calls
            self.decisions += bool(self._ready)
            return
        choice = self.decide(1 + len(self._ready))
        if choice:
            _headroom()
            first = self._ready[choice - 1]
            self._ready.remove(first)
            self._ready.append(thread_state)
            self._ready.appendleft(first)
            self._pass_turn(thread_state, decided=True)
            self.check(thread_state)

    def check(self, thread_state: ThreadState) -> None:
        """Unwind the rank if the run has ended."""
        if self.ended:
            self._unwind(thread_state)

    def wait(
        self, thread_state: ThreadState, operation: Operation, timeout: timedelta | None = None
    ) -> None:
        """Return when ``operation.done``; meanwhile the others run.

        Raises WaitExpired after ``timeout`` on the simulated clock, which stands still while a rank can go on.
        """
        _headroom()
        deadline = None
        if timeout and self.clock is not None:
            deadline = self.clock + timeout.total_seconds()
        while not operation.done:
            if self.ended:
                self._unwind(thread_state)
            thread_state.waiting, thread_state.deadline = operation, deadline
            self._pass_turn(thread_state)
            if thread_state.expired:
                thread_state.expired = False
                if not operation.done and not self.ended:
                    raise WaitExpired

    def _expire(self) -> bool:
        """End the wait whose deadline comes first; return whether there was one."""
        due = [state for state in self._states() if state.waiting and state.deadline is not None]
        if not due or self.clock is None:
            return False
        first = min(due, key=lambda state: state.deadline or 0.0)
        self.clock = first.deadline
        first.waiting, first.expired = None, True
        self._ready.append(first)
        return True

    def wake(self, rank: int, operation: Operation) -> None:
        """Put a rank back into the queue if it waits for ``operation``."""
        thread_state = self.thread_states[rank]
        if thread_state.waiting is operation:
            thread_state.waiting = None
            self._ready.append(thread_state)
        if self.helpers:
            for helper in tuple(self.helpers):  # others of them end meanwhile
                if helper.waiting is operation and helper.rank == rank:
                    helper.waiting = None
                    self._ready.append(helper)

    def give_way(self, thread_state: ThreadState) -> None:
        """Let every rank that can run have a turn before this one goes on."""
        self.check(thread_state)
        _headroom()
        if self._ready:
            self._ready.append(thread_state)
            self._pass_turn(thread_state)
            self.check(thread_state)
        elif self.judgement is not None:  # a lone polling rank would poll for ever
            self._count_turns(len(self.thread_states))
            self.check(thread_state)

    def others_ready(self, slow: Collection[ThreadState]) -> bool:
        """Return whether a rank that is not among ``slow`` could have the turn."""
        return any(thread_state not in slow for thread_state in self._ready)

    def fail(self, thread_state: ThreadState, failure: BaseException) -> None:
        """End the run because of ``failure``, which this rank is about to raise or has raised.

        If it tells of an exception of another rank, that one first gets the time to raise it.
        """
        if self.ended:
            if not isinstance(self.failure, VerdictError):
                self.raised.append((failure, thread_state.rank))
        elif self.judgement is not None:  # it came first
            self._give_judgement()
        else:
            self.raised.append((failure, thread_state.rank))
            origin = origin_of(failure, thread_state.rank)
            if origin is None or self.thread_states[origin].finished:
                self._end(failure, thread_state.rank)

    def judge(self, thread_state: ThreadState, judgement: Judgement) -> NoReturn:
        """End the run by a verdict, after the other ranks have had the time to show what they do."""
        if self.judgement is None:
            self.judgement, self._judge = judgement, thread_state
        if not judgement.ripe:
            self.wait(thread_state, judgement)
        if not self.ended:
            self._give_judgement()
        self._unwind(thread_state)

    def finish(self, thread_state: ThreadState) -> None:
        """The rank's body is over; it does not run again."""
        if self.threads is not None:
            self.threads.finish(thread_state)
            return
        thread_state.finished = True
        self._hand_over(thread_state, self._next())

    # Called by the controller, while no rank has the turn or after it has given up on them.

    def start(self) -> None:
        """Give the first rank its turn."""
        first = self._next()
        assert first is not None
        self._isolation.switch(None, first.rank)
        self.running = first
        first.turn.release()

    def abandon(self, failure: BaseException) -> None:
        """Make every rank unwind at its next communication call.

        Called without the turn: sets one flag.
        """
        if self.failure is None:
            self.failure = failure
        self.ended = True
        if self.threads is not None:
            self.threads.look()

    def restore(self) -> None:
        """Load the controller's own process-wide state again, after ranks that did not come back."""
        self._given_up = True  # a rank that comes back later must not load its own
        running = self.running
        self._switch(None if running is None else running.rank, None)

    # Called by RankThreads, which holds its gate.

    def enqueue(self, thread_state: ThreadState) -> None:
        """Put a thread into the queue that asks for the turn."""
        self._ready.append(thread_state)

    def is_queued(self, thread_state: ThreadState) -> bool:
        """Return whether a thread can go on when its turn comes."""
        return thread_state in self._ready

    def has_queued(self, rank: int | None) -> bool:
        """Return whether a thread of this rank, or of any, can go on when its turn comes."""
        if rank is None:
            return bool(self._ready)
        # A copy: a rank that runs may wake others meanwhile.
        return any(thread_state.rank == rank for thread_state in tuple(self._ready))

    def prefer(self, rank: int) -> None:
        """Let the first thread of this rank in the queue be the next."""
        for thread_state in tuple(self._ready):
            if thread_state.rank == rank:
                self._ready.remove(thread_state)
                self._ready.appendleft(thread_state)
                return

    def take_next(self, decided: bool) -> ThreadState | None:
        """The next thread, out of the queue; None if none can go on."""
        return self._next(decided)

    def end_run(self, rank: int) -> None:
        """All bodies have ended, on this rank last."""
        self._hand_over(self.thread_states[rank], None)

    def switch(self, leaving: int, entering: int) -> None:
        """Put the state of the process away for one rank, and load another's."""
        if not self._given_up:
            self._switch(leaving, entering)

    # Inside.

    def _states(self) -> list[ThreadState]:
        return [*self.thread_states, *self.helpers] if self.helpers else self.thread_states

    def _next(self, decided: bool = False) -> ThreadState | None:
        if self.judgement is not None and not self.ended:
            self._count_turns(1 if self._ready else self._turns + 1)
        if not self._ready and self.ended:
            self._release_waiting()  # after `abandon`, which has not done so
        elif not self._ready:
            if self.threads is not None and self.threads.may_come():
                return None
            self._look_for_deadlock()
        if not self._ready:
            return None
        if decided or len(self._ready) == 1:
            return self._ready.popleft()
        choice = self.decide(len(self._ready))
        if choice:
            self._ready.rotate(-choice)
            following = self._ready.popleft()
            self._ready.rotate(choice)
            return following
        return self._ready.popleft()

    def _look_for_deadlock(self) -> None:
        waiting = [
            thread_state.rank for thread_state in self._states() if thread_state.waiting is not None
        ]
        if not waiting:
            return  # all have finished
        if self.raised:
            self._end(*self.raised[0])
            return
        if self._expire():
            return
        finished = [
            thread_state.rank for thread_state in self.thread_states if thread_state.finished
        ]
        try:
            self.stuck = self._waits()
            failure, root = diagnosis.deadlock(self.stuck, finished, len(self.thread_states))
            channels = [
                getattr(thread_state.waiting, "channel", None)
                for thread_state in self.thread_states
            ]
            lines = [line_of(wait.issued or wait.place) for wait in self.stuck]
            add_lines(failure, self.call_lines.tell(lines, channels))
        except Exception as error:  # the turn must go on, whatever became of the words
            text = f"deadlock: {len(waiting)} of {len(self.thread_states)} ranks wait, and none can go on"
            failure, root = DeadlockError(f"{text} (the diagnosis failed: {error!r})"), waiting[0]
        if self.threads is not None:
            for note in self.threads.notes():
                failure.add_note(note)
        raising = [state for state in self._called() if state.rank == root]
        self._end(failure, root)
        self._must_raise = raising[0] if raising else self.thread_states[root]

    def _count_turns(self, turns: int) -> None:
        self._turns -= turns
        if self._turns < 0:
            self._give_judgement()

    def verdict(self) -> tuple[BaseException, int]:
        """The judgement that is waiting to be given: the error, and the rank to blame."""
        assert self.judgement is not None
        assert self._judge is not None
        try:
            return self.judgement.verdict()
        except Exception as error:  # the turn must go on, whatever became of the words
            rank = self._judge.rank
            text = f"mismatch: the call that rank {rank} made differs from the one that it met"
            return CollectiveMismatchError(f"{text} (the diagnosis failed: {error!r})"), rank

    def _give_judgement(self) -> None:
        assert self._judge is not None
        failure, blamed = self.verdict()
        thread_state = self._judge
        if blamed != thread_state.rank:
            thread_state = self._thread_in_judgement(blamed) or thread_state
        self._end(failure, thread_state.rank)
        self._must_raise = thread_state

    def _thread_in_judgement(self, rank: int) -> ThreadState | None:
        """The thread of a rank that has made the call which the judgement is about, and has not gone on."""
        assert self.judgement is not None
        call = self.judgement.describe(rank)
        for state in self._called():
            waiting = state.waiting
            if state.rank == rank and waiting is not None and waiting.describe(rank) == call:
                return state
        running = self.running
        return running if running is not None and running.rank == rank else None

    def _waits(self) -> list[diagnosis.Wait]:
        exceptions = self.exceptions(range(len(self.thread_states)))
        called = self._called()
        places = self._places(called)
        waits = [
            diagnosis.Wait(
                state.rank,
                state.waiting.describe(state.rank) + self._thread_name(state),
                tuple(state.waiting.missing(state.rank)),
                places[state],
                getattr(state.waiting, "hint", None),
                _issued(state.waiting, state.rank),
                exceptions[state.rank] if state not in self.helpers else "",
            )
            for state in called
            if state.waiting is not None
        ]
        if self.threads is not None:
            waits += [
                diagnosis.Wait(rank, text, (), place)
                for rank, text, place in self.threads.blocked()
            ]
        return sorted(waits, key=lambda wait: wait.rank)

    def _called(self) -> list[ThreadState]:
        """The threads that wait in calls of the user's."""
        return [
            state
            for state in self._states()
            if state.waiting is not None
            and (self.threads is None or self.threads.counts_as_wait(state))
        ]

    def _thread_name(self, state: ThreadState) -> str:
        return "" if self.threads is None else self.threads.waiting_name(state)

    def _places(self, states: list[ThreadState]) -> dict[ThreadState, Place | None]:
        """The user's line in which each of these threads is."""
        bodies = {state.rank: state for state in states if state not in self.helpers}
        located = self.locate(bodies)
        places = {bodies[rank]: place for rank, place in located.items()}
        if self.threads is not None:
            frames = thread_frames()
            for state in states:
                if state in self.helpers:
                    places[state] = self.threads.place(state, frames)
        return places

    def _end(self, failure: BaseException, root: int) -> None:
        self.ended, self.failure, self.root = True, failure, root
        for state, place in self._places(
            [state for state in self._states() if state.waiting is not None]
        ).items():
            state.place = place
        self._release_waiting()

    def _release_waiting(self) -> None:
        waiting = [
            thread_state for thread_state in self._states() if thread_state.waiting is not None
        ]
        waiting.sort(key=lambda thread_state: thread_state.rank != self.root)  # the root first
        for thread_state in waiting:
            thread_state.waiting = None
        self._ready.extend(waiting)

    def _unwind(self, thread_state: ThreadState) -> NoReturn:
        if self._must_raise is thread_state:
            self._must_raise = None
            assert self.failure is not None
            raise self.failure
        why = "was given up" if self.root is None else f"has ended because of rank {self.root}"
        raise Cancelled(f"the run {why}")

    def _pass_turn(self, thread_state: ThreadState, decided: bool = False) -> None:
        if self.threads is not None:
            self.threads.pass_turn(thread_state, decided=decided)
            return
        following = self._next(decided)
        if following is not thread_state:
            self._hand_over(thread_state, following)
            thread_state.turn.acquire()

    def _switch(self, leaving: int | None, entering: int | None) -> None:
        """An error ends the run, and goes no further: the turn must go on."""
        try:
            self._isolation.switch(leaving, entering)
        except Exception as error:
            whose = "the process" if entering is None else f"rank {entering}"
            text = f"sim: what {whose} had (working folder, environment, generators, torch's switches) "
            text += (
                f"could not be put back, and what follows would compute with another's: {error!r}"
            )
            if self.failure is not None:
                self.failure.add_note(text)
                return
            failure, root = BackendError(text), leaving if entering is None else entering
            failure.__cause__ = error
            if root is None:
                self.abandon(failure)
                return
            self._end(failure, root)
            self._must_raise = self.thread_states[root]

    def _hand_over(self, thread_state: ThreadState, following: ThreadState | None) -> None:
        if not self._given_up:
            self._switch(thread_state.rank, None if following is None else following.rank)
        self.running = following
        if following is not None:
            following.turn.release()
            return
        self.over = True
        with contextlib.suppress(RuntimeError):  # released to tell that there are threads
            self.done.release()
