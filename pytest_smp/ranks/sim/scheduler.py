"""The turn: which of a world's ranks runs, what the others wait for, and when none can run any
more.

Exactly one rank thread runs at any time. The turn passes only when a rank waits for something,
ends, or gives way, so a run is a function of the program, its inputs, and the schedule. Ranks that
can run stand in a queue and are served in order, but for the deviations of the schedule.

When a rank raises, or no rank can run, or two calls do not match, the run has *ended*: each rank
then still gets its turn, a rank whose wait is over goes on to its next communication call, and
every communication call unwinds its rank with Cancelled. So no rank is left behind, and a failure
that several ranks see is seen to be the same.
"""

from __future__ import annotations

import _thread
import collections
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NoReturn, Protocol

from pytest_smp.ranks.isolation import Isolation
from pytest_smp.ranks.schedule import ROUND_ROBIN, Schedule
from smp_core.errors import BackendError, Cancelled, CollectiveMismatchError, DeadlockError
from smp_core.transport import diagnosis
from smp_core.transport.stack_frames import Place


def _headroom(frames: int = 24) -> None:
    """Raise RecursionError here, where nothing has changed, rather than with the turn in hand."""
    if frames:
        _headroom(frames - 1)


class Operation(Protocol):
    """Something that a rank can wait for."""

    done: bool

    def describe(self, rank: int) -> str:
        """The call in words, as rank made it: operation, group, sequence number."""

    def missing(self, rank: int) -> Sequence[int]:
        """The world ranks without which this rank's wait cannot end."""


class Judgement(Operation, Protocol):
    """A verdict that is certain, and that says more once other ranks have shown what they do.

    Nobody's wait for it ends but with the run.
    """

    @property
    def ripe(self) -> bool:
        """Whether nothing more is to be learnt."""

    def verdict(self) -> tuple[BaseException, int]:
        """The error, and the rank to blame."""


#: Turns that the other ranks get before a judgement, for each rank: one that polls gives way for ever.
_TURNS = 1000


def _issued(operation: Operation, rank: int) -> Place | None:
    """Where this rank made the call that it waits for, if the operation knows."""
    issued = getattr(operation, "issued", None)
    place: Place | None = None if issued is None else issued(rank)
    return place


class Seat:
    """One rank's place in the scheduler: the lock it sleeps on, and what it waits for."""

    __slots__ = ("finished", "place", "rank", "turn", "waiting")

    def __init__(self, rank: int, turn: _thread.LockType) -> None:
        self.rank = rank
        self.turn = turn
        self.waiting: Operation | None = None
        self.place: Place | None = None  # where it waited, kept when the run ends
        self.finished = False


class Scheduler:
    """Passes the turn between the ranks of one run."""

    def __init__(
        self,
        seats: list[Seat],
        isolation: Isolation,
        locate: Callable[[Iterable[int]], dict[int, Place | None]],
        schedule: Schedule = ROUND_ROBIN,
    ) -> None:
        self.seats = seats
        self.ended = False
        self.failure: BaseException | None = None  # what ended the run
        self.root: int | None = None  # the rank that it belongs to
        self.running: Seat | None = None  # who has the turn
        self.done = _thread.allocate_lock()  # released when the last rank has finished
        self.done.acquire()
        self.stuck: list[diagnosis.Wait] = []  # who waited for whom when no rank could run
        self._ready: collections.deque[Seat] = collections.deque(seats)
        self._isolation = isolation
        self.locate = locate
        self._given_up = False
        self._must_raise: Seat | None = None  # the root of a verdict, until its thread raises it
        self.judgement: Judgement | None = None  # to be given when the others can go no further
        self._judge: Seat | None = None  # who found it first
        self._turns = _TURNS * len(seats)  # until it is given anyway
        self._deviations = dict(schedule)
        self.decisions = 0  # made so far
        self.deviated: list[tuple[int, int]] = []  # the deviations that took effect

    # What ranks call. The caller has the turn.

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

    def enter(self, seat: Seat) -> None:
        """Every communication call starts here, and may let another rank go first."""
        if self.ended:
            self._unwind(seat)
        if not self._deviations:  # as nearly always: what `decide` would do, without the calls
            self.decisions += bool(self._ready)
            return
        choice = self.decide(1 + len(self._ready))
        if choice:
            _headroom()
            first = self._ready[choice - 1]
            self._ready.remove(first)
            self._ready.append(seat)
            self._ready.appendleft(first)
            self._pass_turn(seat, decided=True)
            self.check(seat)

    def check(self, seat: Seat) -> None:
        """Unwind the rank if the run has ended."""
        if self.ended:
            self._unwind(seat)

    def wait(self, seat: Seat, operation: Operation) -> None:
        """Return when ``operation.done``; meanwhile the others run."""
        _headroom()
        while not operation.done:
            if self.ended:
                self._unwind(seat)
            seat.waiting = operation
            self._pass_turn(seat)

    def wake(self, rank: int, operation: Operation) -> None:
        """Put a rank back into the queue if it waits for ``operation``."""
        seat = self.seats[rank]
        if seat.waiting is operation:
            seat.waiting = None
            self._ready.append(seat)

    def give_way(self, seat: Seat) -> None:
        """Let every rank that can run have a turn before this one goes on."""
        self.check(seat)
        _headroom()
        if self._ready:
            self._ready.append(seat)
            self._pass_turn(seat)
            self.check(seat)
        elif self.judgement is not None:  # who polls alone would poll until the time limit
            self._count_turns(len(self.seats))
            self.check(seat)

    def others_ready(self, slow: Collection[Seat]) -> bool:
        """Whether a rank that is not among ``slow`` could have the turn."""
        return any(seat not in slow for seat in self._ready)

    def fail(self, seat: Seat, failure: BaseException) -> None:
        """End the run because of ``failure``, which this rank is about to raise or has raised."""
        if self.ended:
            return
        if self.judgement is not None:  # it came first
            self._give_judgement()
        else:
            self._end(failure, seat.rank)

    def judge(self, seat: Seat, judgement: Judgement) -> NoReturn:
        """End the run by a verdict, after the other ranks have had the time to show what they do."""
        if self.judgement is None:
            self.judgement, self._judge = judgement, seat
        if not judgement.ripe:
            self.wait(seat, judgement)
        if not self.ended:
            self._give_judgement()
        self._unwind(seat)

    def finish(self, seat: Seat) -> None:
        """The rank's body is over; it does not run again."""
        seat.finished = True
        self._hand_over(seat, self._next())

    # What the controller calls, while no rank has the turn or after it has given up on them.

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

    def restore(self) -> None:
        """Load the controller's own process-wide state again, after ranks that did not come back."""
        self._given_up = True  # a rank that comes back later must not load its own
        running = self.running
        self._switch(None if running is None else running.rank, None)

    # Inside.

    def _next(self, decided: bool = False) -> Seat | None:
        if self.judgement is not None and not self.ended:
            self._count_turns(1 if self._ready else self._turns + 1)
        if not self._ready and self.ended:
            self._release_waiting()  # after `abandon`: nobody has done it yet
        elif not self._ready:
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
        waiting = [seat.rank for seat in self.seats if seat.waiting is not None]
        if not waiting:
            return  # all have finished
        finished = [seat.rank for seat in self.seats if seat.finished]
        try:
            self.stuck = self._waits()
            failure, root = diagnosis.deadlock(self.stuck, finished, len(self.seats))
        except Exception as error:  # the turn must go on, whatever became of the words
            text = f"deadlock: {len(waiting)} of {len(self.seats)} ranks wait, and none can go on"
            failure, root = DeadlockError(f"{text} (the diagnosis failed: {error!r})"), waiting[0]
        self._end(failure, root)
        self._must_raise = self.seats[root]

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
        seat = self.seats[blamed]
        if seat.waiting is None and seat is not self.running:  # it would not raise it at its call
            seat = self._judge
        self._end(failure, seat.rank)
        self._must_raise = seat

    def _waits(self) -> list[diagnosis.Wait]:
        places = self.locate(seat.rank for seat in self.seats if seat.waiting is not None)
        return [
            diagnosis.Wait(
                seat.rank,
                seat.waiting.describe(seat.rank),
                tuple(seat.waiting.missing(seat.rank)),
                places[seat.rank],
                getattr(seat.waiting, "hint", None),
                _issued(seat.waiting, seat.rank),
            )
            for seat in self.seats
            if seat.waiting is not None
        ]

    def _end(self, failure: BaseException, root: int) -> None:
        self.ended, self.failure, self.root = True, failure, root
        places = self.locate(seat.rank for seat in self.seats if seat.waiting is not None)
        for rank, place in places.items():
            self.seats[rank].place = place
        self._release_waiting()

    def _release_waiting(self) -> None:
        waiting = [seat for seat in self.seats if seat.waiting is not None]
        waiting.sort(key=lambda seat: seat.rank != self.root)  # the root first
        for seat in waiting:
            seat.waiting = None
        self._ready.extend(waiting)

    def _unwind(self, seat: Seat) -> NoReturn:
        if self._must_raise is seat:
            self._must_raise = None
            assert self.failure is not None
            raise self.failure
        why = "was given up" if self.root is None else f"has ended because of rank {self.root}"
        raise Cancelled(f"the run {why}")

    def _pass_turn(self, seat: Seat, decided: bool = False) -> None:
        following = self._next(decided)
        if following is not seat:
            self._hand_over(seat, following)
            seat.turn.acquire()

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
            self._must_raise = self.seats[root]

    def _hand_over(self, seat: Seat, following: Seat | None) -> None:
        if not self._given_up:
            self._switch(seat.rank, None if following is None else following.rank)
        self.running = following
        (self.done if following is None else following.turn).release()
