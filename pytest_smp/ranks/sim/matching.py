"""Matching collective calls: the n-th call of one member of a group meets the n-th call of every
other.

Calls that meet must agree in everything that their description names: operation, reduce op, root,
dtype, shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pytest_smp.ranks.sim.rank_context import RankContext
from smp_core.errors import CollectiveMismatchError
from smp_core.transport import messages, stack_frames
from smp_core.transport.call_lines import Line, add_lines, line_of
from smp_core.transport.handled import while_handling
from smp_core.transport.protocols import Group
from smp_core.transport.stack_frames import Place

Fields = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(slots=True)
class Call:
    """One member's call: operation and ``fields`` (compared), the tensors it brings (``data``), its line."""

    operation: str
    fields: Fields
    data: Any
    place: Place | None = None
    rank: int = -1  # in the world; set when the call meets the others
    told: Fields = ()  # values that may differ, for messages
    line: Line | None = None
    given_up: bool = False  # the wait for it has timed out
    thread: str = ""  # that makes it, in words; empty for the body's own

    def text(self) -> str:
        """The call in words: ``all_reduce(reduce op=SUM, dtype=float32, shape=[4])``."""
        return messages.call_text(self.operation, (*self.fields, *self.told))


class Meeting:
    """The calls that meet: one per member of the group. An Operation of the scheduler."""

    __slots__ = (
        *("arrived", "calls", "channel", "differs", "done", "first", "number", "parted", "result"),
    )

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number
        self.calls: list[Call | None] = [None] * len(channel.group.ranks)
        self.first: Call | None = None  # the one that arrived first
        self.arrived = 0
        self.done = self.differs = False
        self.parted = False  # the calls were not all made from the same line
        self.result: Any = None

    def describe(self, rank: int) -> str:
        """See Operation."""
        call = self.calls[self.channel.position[rank]]
        assert call is not None
        return f"{call.text()} [group {self.channel.shown}, call {self.number}]"

    def missing(self, rank: int) -> Sequence[int]:
        """See Operation."""
        ranks = self.channel.group.ranks
        return [rank for rank, call in zip(ranks, self.calls, strict=True) if call is None]

    def issued(self, rank: int) -> Place | None:
        """The line of this member's call."""
        call = self.calls[self.channel.position[rank]]
        return None if call is None else call.place

    def give_up(self, rank: int) -> None:
        """See TensorOperation."""
        call = self.calls[self.channel.position[rank]]
        assert call is not None
        call.given_up = True

    def values(self, rank: int) -> Any:
        """A member's part of the result, once done, if the result has a part for each member."""
        return self.result[self.channel.position[rank]]


Complete = Callable[[list[Call]], Any]


class Channel:
    """The collective calls of one group, matched by number. Numbers count from 1."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.shown = messages.group_text(group.name, group.ranks)
        self.position = {rank: index for index, rank in enumerate(group.ranks)}
        self._counts = [0] * len(group.ranks)
        self._open: dict[int, Meeting] = {}

    def join(self, context: RankContext, call: Call, complete: Complete) -> Meeting:
        """Take part in the next meeting. The last to come runs ``complete`` on all calls, in group
        order.

        Does not return if the call differs from those that came before: once the other members have
        come as well, or will not, the run ends with a CollectiveMismatchError.
        """
        context.scheduler.check(context.thread_state)
        position, call.rank = self.position[context.rank], context.rank
        place = call.place
        line = call.line = stack_frames.user_line(1) if place is None else line_of(place)
        context.scheduler.call_lines.called(context.rank, line)
        number = self._counts[position] = self._counts[position] + 1
        if context.scheduler.threads is not None:
            call.thread = context.scheduler.threads.waiting_name(context.thread_state)
        meeting = self._open.get(number)
        if meeting is None:
            meeting = self._open[number] = Meeting(self, number)
        if meeting.first is None:
            meeting.first = call
        elif line != meeting.first.line:
            meeting.parted = True
        differs = meeting.differs or not self._agrees(meeting.first, call)
        meeting.calls[position] = call
        meeting.arrived += 1
        if differs:
            meeting.differs = True
            context.scheduler.judge(context.thread_state, Mismatch(meeting, context))
        if meeting.arrived == len(meeting.calls):
            del self._open[number]
            calls: list[Call] = meeting.calls  # type: ignore[assignment]
            if meeting.parted:
                self.note_lines(context, number, calls)
            try:
                meeting.result = complete(calls)
            except (
                Exception
            ) as error:  # nothing that the caller could catch and go on from: the others wait
                context.scheduler.fail(context.thread_state, error)
                raise
            meeting.done = True
            for rank in self.group.ranks:
                context.scheduler.wake(rank, meeting)
        return meeting

    def note_lines(self, context: RankContext, number: int, calls: Sequence[Call]) -> None:
        """Note from which lines the members made a call."""
        lines = {call.rank: call.line for call in calls}
        context.scheduler.call_lines.met(self, self.shown, number, calls[0].operation, lines)

    def _agrees(self, first: Call, call: Call) -> bool:
        return first.operation == call.operation and first.fields == call.fields

    def unfinished(self) -> list[Meeting]:
        """The meetings that some members have not come to."""
        return list(self._open.values())


class Mismatch:
    """The verdict on a meeting whose calls differ.

    A Judgement of the scheduler: a rank that comes to such a meeting waits, so that the verdict can tell
    which of the members are the odd ones.
    """

    def __init__(self, meeting: Meeting, context: RankContext) -> None:
        self._meeting, self._context = meeting, context
        self.done = False

    def describe(self, rank: int) -> str:
        """See Operation."""
        return self._meeting.describe(rank)

    def missing(self, rank: int) -> Sequence[int]:
        """See Operation."""
        return self._meeting.missing(rank)

    @property
    def ripe(self) -> bool:
        """True if every member has come."""
        return self._meeting.arrived == len(self._meeting.calls)

    def verdict(self) -> tuple[CollectiveMismatchError, int]:
        """The error, with the difference and every call that was made, and the rank to blame."""
        group, meeting = self._meeting.channel.group, self._meeting
        calls = {
            rank: call
            for rank, call in zip(group.ranks, meeting.calls, strict=True)
            if call is not None
        }
        unknown = [rank for rank, call in calls.items() if call.place is None]
        for rank, place in self._context.scheduler.locate(unknown).items():
            calls[rank].place = place  # each waits in this call, or makes it now
        said = {rank: (call.operation, call.fields) for rank, call in calls.items()}
        exceptions = self._context.scheduler.exceptions(calls)
        made = [
            (rank, call.text() + while_handling(exceptions[rank]), _place_in_thread(call))
            for rank, call in calls.items()
        ]
        what = messages.differing([*said.values()])
        error = messages.mismatch(meeting.number, meeting.channel.shown, what, made, said)
        if meeting.number > 1:  # of the first, the text above has the lines
            meeting.channel.note_lines(self._context, meeting.number, [*calls.values()])
        lines = [call.line for call in calls.values()]
        add_lines(error, self._context.scheduler.call_lines.tell(lines, [meeting.channel]))
        return error, messages.rank_to_blame(said, exceptions)


def _place_in_thread(call: Call) -> Place | None:
    """The line of a call, with the thread that makes it, as the records of rank processes tell it."""
    place = call.place
    if place is None or not call.thread:
        return place
    function = place.function + call.thread
    return Place(place.filename, place.lineno, function, place.direct, place.entry)
