"""The timeline of a step as data: each rank's events, with their microbatch, phase and time; and the events that a
schedule forbids.

An activity is the body of a microbatch, or one module call for another rank. An *event* is one stretch of an activity,
from the moment at which it gets the baton until it pauses or ends, in one phase. One event of a rank runs at a time.
``begun`` and ``ended`` count beginnings and ends on the rank, so tests need no clock. ``started`` and ``seconds`` are
of the monotonic clock, which the ranks of one machine share.

    events = [*events_of_rank_0, *events_of_rank_1]         # gathered from several ranks
    assert timeline.violations(events, "interleaved", cap=4) == []
    timeline.write("step.json", events)                     # opens in https://ui.perfetto.dev

In Perfetto each rank is a process and each microbatch a track, with slices like ``F layers.0``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from smp_core.schedule import POLICIES, Phase


class Timed(Protocol):
    """The facts of an activity that an event records."""

    @property
    def microbatch(self) -> int:
        """The index of the microbatch."""

    @property
    def path(self) -> str | None:
        """The path of the module; None for the body of a microbatch."""

    @property
    def phase(self) -> Phase:
        """The phase of the next event."""


class Event(NamedTuple):
    """One uninterrupted stretch of an activity.

    Attributes:
        rank: the world rank.
        microbatch: its index.
        path: the module that another rank called, "" for the root; None for the body of the step.
        phase: ``F`` or ``B``.
        activity: the number of the activity on the rank, in the order of beginnings.
        begun: the zero-based position of the beginning among all beginnings and ends on the rank.
        ended: the zero-based position of the end among them.
        started: seconds of the monotonic clock.
        seconds: the duration.
        recompute: the event is a forward pass that an activation checkpoint repeats, inside of a ``B`` event.
    """

    rank: int
    microbatch: int
    path: str | None
    phase: Phase
    activity: int
    begun: int
    ended: int
    started: float
    seconds: float
    recompute: bool = False

    def __str__(self) -> str:
        what = "body" if self.path is None else self.path or "module"
        return f"{_kind(self)}{self.microbatch} {what} on rank {self.rank} ({self.begun} to {self.ended})"


class Timeline:
    """Records the events of one step on one rank. ``events`` lists those that have ended, in order."""

    def __init__(self, rank: int = 0) -> None:
        self.events: list[Event] = []
        self._rank = rank
        self._clock = 0
        self._numbers: dict[object, int] = {}
        self._running: dict[object, tuple[Phase, int, float]] = {}

    def begins(self, activity: Timed, now: float) -> None:
        """Note that an activity has got the baton, for the first time or again."""
        self._numbers.setdefault(activity, len(self._numbers))
        self._running[activity] = activity.phase, self._clock, now
        self._clock += 1

    def ends(self, activity: Timed, now: float) -> None:
        """Note that an activity has paused or ended."""
        phase, begun, started = self._running.pop(activity)
        self.events.append(
            Event(
                self._rank,
                activity.microbatch,
                activity.path,
                phase,
                self._numbers[activity],
                begun,
                self._clock,
                started,
                now - started,
            )
        )
        self._clock += 1

    @contextlib.contextmanager
    def recomputes(self, activity: Timed, path: str) -> Iterator[None]:
        """Record an event while the activity that has the baton repeats the forward pass of a module."""
        begun, started = self._clock, time.perf_counter()
        self._clock += 1
        try:
            yield
        finally:
            self.events.append(
                Event(
                    self._rank,
                    activity.microbatch,
                    path,
                    Phase.BACKWARD,
                    self._numbers.get(activity, -1),
                    begun,
                    self._clock,
                    started,
                    time.perf_counter() - started,
                    recompute=True,
                )
            )
            self._clock += 1


def violations(events: Iterable[Event], schedule: str, cap: int) -> list[str]:
    """The violations of a schedule in the timeline of a step, in words.

    ``events`` may be of several ranks. Under ``simple`` no backward event of a rank begins before the rank's last
    forward event has ended. Under ``interleaved`` at most ``cap`` microbatches are in flight on a rank. Under both,
    microbatches begin in the order of their indices. The step function must call ``backward`` once, after its forward.
    """
    policy = POLICIES[schedule]
    found = []
    passes = [event for event in events if not event.recompute]
    for rank, own in sorted(by_rank(passes).items()):
        forward = [event for event in own if event.phase is Phase.FORWARD]
        backward = [event for event in own if event.phase is Phase.BACKWARD]
        for late in forward:
            early = next((event for event in backward if event.begun < late.ended), None)
            if policy.turns_together and early is not None:
                found.append(f"{early} began before {late} had ended")
        if policy.capped and in_flight(own) > cap:
            found.append(f"{in_flight(own)} microbatches were in flight on rank {rank}, of {cap}")
        bodies = [event for event in forward if event.path is None]
        starts: list[int] = []
        for event in bodies:
            if event.microbatch not in starts:
                starts.append(event.microbatch)
        if starts != sorted(starts):
            found.append(f"microbatches began in the order {starts} on rank {rank}")
        for first, second in itertools.pairwise(own):
            if second.begun < first.ended:
                found.append(f"{second} ran during {first}")
    return found


def in_flight(events: Iterable[Event]) -> int:
    """The highest number of microbatches that were in progress at once. ``events`` are of one rank.

    A microbatch is in progress from its first event to its last one, and holds its activations for that time.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for event in events:
        first[event.microbatch] = min(first.get(event.microbatch, event.begun), event.begun)
        last[event.microbatch] = max(last.get(event.microbatch, 0), event.ended)
    return max(
        (sum(first[other] <= begun <= last[other] for other in first) for begun in first.values()),
        default=0,
    )


def by_rank(events: Iterable[Event]) -> Mapping[int, list[Event]]:
    """The events of each rank, in the order of beginnings."""
    ranks: dict[int, list[Event]] = {}
    for event in events:
        ranks.setdefault(event.rank, []).append(event)
    for own in ranks.values():
        own.sort(key=lambda event: event.begun)
    return ranks


def chrome_trace(events: Sequence[Event]) -> dict[str, object]:
    """The timeline in Chrome's trace format, as data for JSON. Times are microseconds since the first event."""
    zero = min((event.started for event in events), default=0.0)
    ranks = sorted({event.rank for event in events})
    tracks = sorted({(event.rank, event.microbatch) for event in events})
    records: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in ranks
    ]
    records += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": rank,
            "tid": microbatch,
            "args": {"name": f"microbatch {microbatch}"},
        }
        for rank, microbatch in tracks
    ]
    records += [
        {
            "ph": "X",
            "name": f"{_kind(event)} {'body' if event.path is None else event.path or 'module'}",
            "cat": _CATEGORIES[_kind(event)],
            "pid": event.rank,
            "tid": event.microbatch,
            "ts": (event.started - zero) * 1e6,
            "dur": event.seconds * 1e6,
            "args": {"activity": event.activity, "begun": event.begun, "ended": event.ended},
        }
        for event in sorted(events, key=lambda event: (event.rank, event.begun))
    ]
    return {"traceEvents": records, "displayTimeUnit": "ms"}


_CATEGORIES = {"F": "forward", "B": "backward", "R": "recompute"}


def _kind(event: Event) -> str:
    return "R" if event.recompute else event.phase.value


def write(path: str | os.PathLike[str], events: Sequence[Event]) -> None:
    """Write :func:`chrome_trace` to a file, for Perfetto."""
    Path(path).write_text(json.dumps(chrome_trace(events)), encoding="utf-8")
