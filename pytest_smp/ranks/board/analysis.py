"""The verdicts that follow from the records of all ranks: mismatch, deadlock, leaks.

No I/O, and no clock of its own. Two rules make a verdict a fact.

*Mismatch*: two members of a group have made calls of one number that differ. A call counts once the
backend has taken it: one that it refuses is withdrawn.

*Deadlock*: every rank whose body is not over waits, and no wait can end. Records of different ranks
may be of different ages; that does no harm. Suppose that one of these ranks had gone on since, and
take the first: its wait ended because of calls that other ranks made before they went on from
where their records end, so all of those calls are on the board, and the wait is not one that cannot
end. The rule needs that nobody else can help a rank: a body with Python threads of its own, a callback
of a future that may run and has not returned, or a rank that does not wait in what is recorded, keeps
the verdict away, and the time limit decides; so do child processes of a rank where one waits for a key
of a store. This project's own threads (helper_threads) never help: they
communicate for the rank's thread while that one sleeps, or not at all.

A wait that *surely* cannot end (see calls) counts at once. One that would not end on `sim`, and
might on a backend that lets calls end early, or refuses them late, counts once nothing has happened
anywhere for ``patience`` seconds, and longer where much data may be on its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from pytest_smp.ranks.board.calls import (
    BoardMeeting,
    BoardPost,
    Box,
    GroupKey,
    Handover,
    Issued,
    Joined,
    KeyWait,
    Objects,
    Stray,
)
from pytest_smp.ranks.board.ranks import RankState
from pytest_smp.ranks.board.recorder import UNKNOWN
from pytest_smp.ranks.protocols import RaisesBlock, VerdictKind
from smp_core.errors import BackendError, CollectiveMismatchError, RankError, SmpError
from smp_core.transport import diagnosis, messages
from smp_core.transport.call_lines import CallLines, add_lines, line_of
from smp_core.transport.diagnosis import Wait, ranks_text, wait_lines
from smp_core.transport.handled import while_handling
from smp_core.transport.stack_frames import Place

#: Elements that a backend moves in a second at the very least.
_SLOWEST = 10_000_000


_MOST_UNWAITED = 4  # calls that a time-out lists for each rank


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A verdict.

    Attributes:
        error: CollectiveMismatchError, DeadlockError, or RankError where a rank has named one that
            there is not and the backend took it.
        root: the rank that it is raised on.
        waits: for each rank that waits, in what and for whom, in words.
        follows: some rank had caught the error of an earlier call, so what it did then may follow
            from another rank's death. Once a rank is gone, such calls are not compared.
        place: the line of the root's call.
    """

    error: SmpError
    root: int
    waits: dict[int, str]
    follows: bool = False
    place: Place | None = None

    def shown(self) -> SmpError:
        """The error, as if that line had raised it."""
        return self.error.with_traceback(None if self.place is None else self.place.traceback())

    @property
    def verdict(self) -> VerdictKind:
        """The verdict on the run that follows from it."""
        if isinstance(self.error, CollectiveMismatchError):
            return VerdictKind.MISMATCH
        return VerdictKind.FAILED if isinstance(self.error, RankError) else VerdictKind.DEADLOCK


class Board:
    """The records of ``size`` ranks in one run, and the findings that follow from them.

    ``patience``: the seconds without a record after which ranks in calls that some backends end early
    count as blocked. ``synchronous_sends``: the backend ends a send of a tensor only when its receive
    has been posted (Gloo does), so that a send without a receive is blocked at once.
    ``ordered_receives``: a message goes to the oldest receive that fits, from any source or not.
    """

    def __init__(
        self,
        size: int,
        *,
        patience: float = 1.0,
        synchronous_sends: bool = False,
        ordered_receives: bool = False,
    ) -> None:
        self.size, self._patience, self._meets = size, patience, synchronous_sends
        self._ordered = ordered_receives
        self._ranks = [RankState(rank, self) for rank in range(size)]
        self.reset()

    # Feeding.

    def reset(self, run: int | None = None) -> None:
        """Forget all records: a run starts.

        With ``run``, records count from that run's ``BoardRecorder.begin`` on, so that late records of the
        last run do no harm.
        """
        self._meetings: dict[tuple[GroupKey, int], BoardMeeting] = {}
        self._lines = CallLines(self.size)
        self._counts: dict[tuple[GroupKey, int], int] = {}
        self._boxes: dict[tuple[GroupKey, int | None, int], Box] = {}
        self._objects = Objects()
        self._set_keys: set[str] = set()
        #: Calls that differ, and when that was first seen.
        self._suspects: dict[BoardMeeting | tuple[BoardPost, BoardPost], float | None] = {}
        self._strays: list[Stray] = []  # that the backend has not refused
        self._spoilt: set[GroupKey] = set()  # whose numbers no longer mean anything
        self._gone: set[int] = set()
        self._fed = 0
        self._damaged = False
        self._since: dict[str, tuple[int, float]] = {}
        for rank in self._ranks:
            rank.clear(run)

    def feed(self, rank: int, data: bytes) -> None:
        """Read what a rank has written; it may end in the middle of a record.

        Raises BackendError, naming the rank, for what is no record. From then on there is no verdict
        in this run: nobody knows what was lost.
        """
        try:
            self._fed += self._ranks[rank].feed(data)
        except BackendError:
            self._damaged = True
            raise

    def gone(self, rank: int) -> None:
        """The rank's process is no more, and all that it wrote has been fed."""
        self._gone.add(rank)
        self._fed += 1
        self._ranks[rank].renew()

    # Calls, from RankState.

    def issued(self, call: Issued, partners: list[int]) -> None:
        """See ranks.Calls."""
        if isinstance(
            call, KeyWait
        ):  # only where the keys were not there yet: in no count of calls
            call.set_keys = self._set_keys
            return
        self._lines.called(call.rank, line_of(call.place))
        if isinstance(call, Joined):
            self._join(call)
        elif isinstance(call, BoardPost):
            self._post(call)
        elif isinstance(call, Stray):
            self._strays.append(call)
        elif isinstance(call, Handover):
            self._objects.add(call, partners)

    def withdrawn(self, call: Issued) -> None:
        """See ranks.Calls."""
        if isinstance(call, Joined):
            self._leave(call)
        elif isinstance(call, BoardPost) and call.box is not None:
            for pair in [
                each for each in self._suspects if isinstance(each, tuple) and call in each
            ]:
                del self._suspects[pair]
            call.box.withdraw(call)
        elif isinstance(call, Stray):
            self._strays.remove(call)
        elif isinstance(call, Handover):
            self._objects.withdraw(call)

    def keys_set(self, keys: list[str]) -> None:
        """See ranks.Calls."""
        self._set_keys.update(keys)

    def over(self, call: Issued) -> None:
        """See ranks.Calls."""
        if isinstance(call, BoardPost) and call.box is not None and call.box.wild:
            call.box.settle()

    def _join(self, call: Joined) -> None:
        if call.rank not in call.group.ranks:
            raise ValueError("a call on a group by a rank that is no member")
        member = call.group, call.rank
        number = self._counts[member] = self._counts.get(member, 0) + 1
        meeting = self._meetings.get((call.group, number))
        if meeting is None:
            meeting = self._meetings[call.group, number] = BoardMeeting(call.group, number)
        call.meeting = meeting
        if any(_differ(call, other) for other in meeting.calls.values()):
            self._suspects.setdefault(meeting, None)
        meeting.calls[call.rank] = call
        if meeting.complete:
            self._forget_old(call.group, number)
            self._note_lines(meeting, [*meeting.calls.values()])
            # Of a group of one, the sums of its split sizes say as much, and the backend checks them.
            alone = len(call.group.ranks) == 1
            if call.description.sent and not alone and _pairs(meeting) is not None:
                self._suspects.setdefault(meeting, None)

    def _note_lines(self, meeting: BoardMeeting, calls: Sequence[Joined]) -> None:
        lines = {call.rank: line_of(call.place) for call in calls}
        operation, shown = calls[0].description.operation, calls[0].shown
        self._lines.met(meeting.group, shown, meeting.number, operation, lines)

    def _forget_old(self, group: GroupKey, number: int) -> None:
        # The last but one: of the last, a member may still withdraw its call.
        old = self._meetings.get((group, number - 1))
        if old is not None and old.complete and old not in self._suspects:
            del self._meetings[group, number - 1]

    def _leave(self, call: Joined) -> None:
        meeting, member = call.meeting, (call.group, call.rank)
        assert meeting is not None
        if self._counts[member] != meeting.number:  # another thread has called since
            self._spoilt.add(call.group)
            return
        del meeting.calls[call.rank]
        self._counts[member] -= 1
        if len(set(_comparable([*meeting.calls.values()]).values())) < 2:
            self._suspects.pop(meeting, None)
        if not meeting.calls:
            self._meetings.pop((call.group, meeting.number), None)

    def _post(self, post: BoardPost) -> None:
        if post.rank not in post.group.ranks:
            raise ValueError("a call on a group by a rank that is no member")
        receiver = post.peer if post.sends else post.rank
        box = self._boxes.setdefault((post.group, receiver, post.tag), Box(self._ordered))
        post.box, post.meets = box, self._meets
        other = box.add(post)
        if other is not None:
            pair = (post, other) if post.sends else (other, post)
            if _post_difference(*pair):
                self._suspects[pair] = None

    # Looking.

    def look(self, running: Collection[int], now: float) -> Finding | None:
        """The verdict, if there is one. ``running``: the ranks whose outcome is not known.

        ``now`` are seconds of any clock that only goes forward. A rank that is not running counts
        as gone once its END has been fed, or ``gone`` was called: what it wrote last may still be
        on its way. Ranks that raised are not the board's business: the run has ended with them.
        """
        if self._damaged:
            return None
        pending = [
            state
            for state in self._ranks
            if not state.ended and (state.rank in running or state.rank not in self._gone)
        ]
        mismatch = self._mismatch(now, bool(pending))
        if mismatch is not None or pending:
            return mismatch or self._deadlock(pending, now)
        return self._astray()

    def _quiet(self, what: str, now: float) -> float:
        """The seconds since ``what`` saw a new record; below 0 if there are new ones now."""
        fed, since = self._since.get(what, (-1, now))
        if fed != self._fed:
            self._since[what] = self._fed, now
            return -1.0
        return now - since

    # Mismatches.

    def _mismatch(self, now: float, pending: bool) -> Finding | None:
        for suspect in self._suspects:
            calls: list[Issued] = [
                *(suspect.calls.values() if isinstance(suspect, BoardMeeting) else suspect)
            ]
            if self._gone:
                calls = [call for call in calls if not call.late]
            quiet = self._quiet("mismatch", now)
            # The other members' calls may be on their way, and show which rank is the odd one.
            early = pending and self._may_learn(suspect, now)
            if early or not calls or calls[0].group in self._spoilt:
                continue
            # A call that the backend never comes back from has not been refused either.
            inside = all(call.taken or self._ranks[call.rank].inside is call for call in calls)
            if inside and not all(call.taken for call in calls):
                patient = not pending or quiet >= self._patience
                calls = calls if patient else [call for call in calls if call.taken]
            else:
                calls = [call for call in calls if call.taken]
            found = self._verdict(suspect, calls)
            if found is not None:
                error, root = found
                follows = any(call.late for call in calls)
                place = next((call.place for call in calls if call.rank == root), None)
                return Finding(error, root, self._all_waits(), follows, place)
        return None

    def _may_learn(self, suspect: BoardMeeting | tuple[BoardPost, BoardPost], now: float) -> bool:
        """Return whether to wait for members whose calls have not come or are not taken yet.

        The wait lasts at least until the next look, and for ``patience`` while one of them is under way.
        """
        if not isinstance(suspect, BoardMeeting):
            return False
        absent = [*suspect.missing()]
        absent += [call.rank for call in suspect.calls.values() if not call.taken]
        if not absent:
            return False
        since = self._suspects[suspect]
        if since is None:
            self._suspects[suspect] = now
            return True
        return now - since < self._patience and any(self._under_way(rank) for rank in absent)

    def _under_way(self, rank: int) -> bool:
        state = self._ranks[rank]
        over = state.ended or state.failed is not None or rank in self._gone
        return not over and not self.blocked(rank)

    def _verdict(
        self, suspect: BoardMeeting | tuple[BoardPost, BoardPost], calls: Sequence[Issued]
    ) -> tuple[CollectiveMismatchError, int] | None:
        if isinstance(suspect, tuple):
            send, receive = suspect
            if len(calls) < 2 or send.partner is not receive:
                return None
            what = _post_difference(send, receive)
            error = messages.post_mismatch(send.shown, what, send.made(), receive.made())
            return error, receive.rank
        ordered = [
            call
            for rank in suspect.group.ranks
            if (call := suspect.calls.get(rank)) is not None and call in calls
        ]
        odd = _odd_one_out(ordered)
        if odd is None:
            return _pairs(suspect) if len(ordered) == len(suspect.group.ranks) else None
        if ordered[0].group.kind == _GROUPS:
            groups = {
                call.rank: (dict(call.description.fields or ()).get("ranks"), call.place)
                for call in ordered
            }
            return messages.group_mismatch(str(suspect.number), groups), odd
        said = _comparable(ordered)
        what, made = messages.differing([*said.values()]), [call.made() for call in ordered]
        error = messages.mismatch(suspect.number, ordered[0].shown, what, made, said)
        if suspect.number > 1:  # of the first, the text above has the lines
            self._note_lines(suspect, ordered)
        lines = [line_of(call.place) for call in ordered]
        add_lines(error, self._lines.tell(lines, [suspect.group]))
        return error, odd

    # Deadlocks.

    def _deadlock(self, pending: list[RankState], now: float) -> Finding | None:
        if not pending or any(state.unsure or state.has_callbacks() for state in self._ranks):
            return None
        waits: list[Wait] = []
        sure, elements = True, 0
        for state in pending:
            calls = state.current()
            blocked = [call for call in calls if call.group not in self._spoilt and call.blocked()]
            if not blocked or state.accompanied:
                return None
            sure &= any(call.taken and call.needs() for call in blocked)
            sure &= not any(call.may_end for call in calls)  # of several, one that raises ends all
            elements += sum(call.description.elements for call in calls)
            waits.append(self._wait(state, blocked))
        keys = any(isinstance(call, KeyWait) for state in pending for call in state.current())
        if keys and any(state.had_children for state in self._ranks):
            return None
        quiet = self._quiet("deadlock", now)
        if quiet < (0.0 if sure else self._patience + elements / _SLOWEST):
            return None
        astray = self._astray()
        if astray is not None:  # the stray call may be the reason for all waits
            return astray
        finished = [state.rank for state in self._ranks if state not in pending]
        error, root = diagnosis.deadlock(waits, finished, self.size)
        lines = [line_of(wait.issued or wait.place) for wait in waits]
        groups = [call.group for state in pending for call in state.current()]
        add_lines(error, self._lines.tell(lines, dict.fromkeys(groups)))
        place = next(wait.place for wait in waits if wait.rank == root)
        return Finding(error, root, {wait.rank: _lines(wait) for wait in waits}, place=place)

    def _wait(self, state: RankState, blocked: list[Issued]) -> Wait:
        missing = sorted({rank for call in blocked for rank in call.wants()})
        first = blocked[0]
        place = state.place if state.waits else first.place
        hint = None
        if isinstance(first, Handover) and first.sends:
            hint = self._hint(first)
        elif isinstance(first, BoardPost) and not first.sends:
            hint = self._tag_hint(first)
        hint = hint or self._open_call_hint(state.rank, missing)
        exception = state.exception
        return Wait(
            state.rank, first.described(), tuple(missing), place, hint, first.place, exception
        )

    def _astray(self) -> Finding | None:
        """The first call that names a member which its group does not have, and that the backend
        took without an error.
        """
        call = next((each for each in self._strays if not each.raised), None)
        if call is None:
            return None
        return Finding(call.error(), call.rank, self._all_waits(), place=call.place)

    def _hint(self, call: Handover) -> str | None:
        others: dict[str, list[int]] = {}
        for rank in call.open:
            for wait in self._ranks[rank].waits:
                if isinstance(wait, Handover) and wait.sends:
                    others.setdefault(wait.call, []).extend(wait.open)
        return messages.object_hint(call.call, call.rank, others)

    def _tag_hint(self, receive: BoardPost) -> str | None:
        wanted = receive.wants()
        sent = [
            (post.rank, tag)
            for (group, receiver, tag), box in self._boxes.items()
            if group == receive.group and receiver == receive.rank and tag != receive.tag
            for post in box.left()
            if post.sends and post.rank in wanted
        ]
        return messages.tag_hint(receive.rank, receive.tag, sent)

    def _open_call_hint(self, rank: int, missing: Collection[int]) -> str | None:
        """The call that a rank has come back from, as a backend may let it, and that waits on `sim`."""
        for call in self._left():
            state = self._ranks[call.rank]
            absent = isinstance(call, Joined) and call.rank in missing and rank in call.wants()
            if absent and call not in state.current():
                return messages.open_call_hint(call.rank, call.described(), rank, call.place)
        return None

    def _all_waits(self) -> dict[int, str]:
        return {
            state.rank: _lines(self._wait(state, calls))
            for state in self._ranks
            if (calls := state.current())
        }

    # For time-outs.

    def where(self, rank: int) -> str:
        """The call that a rank is in, the ranks that it waits for and the line; empty outside of calls.

        The form is ``in barrier() [group WORLD, call 3], waiting for rank 1`` with the line.
        """
        state = self._ranks[rank]
        calls = state.current()
        if not calls:
            return ""
        call = next((each for each in calls if each.blocked()), calls[0])
        missing = sorted({rank for each in calls for rank in each.wants()})
        named = missing and not isinstance(call, Stray | KeyWait)
        why = f", waiting for {ranks_text(missing)}" if named else call.met_text()
        place = state.place if state.waits else call.place
        why += while_handling(state.exception)
        return f"in {call.described()}{why}{messages.at(place)}"

    def last(self, rank: int) -> str:
        """The call that a rank made last, whether it is over or not, and its line, or nothing:
        ``after barrier() [group WORLD, call 3]`` and the line.
        """
        call = self._ranks[rank].last
        if call is None:
            return ""
        why = f": {call.why()}" if isinstance(call, Stray) else ""
        return f"after {call.described()}{why}{messages.at(call.place)}"

    def unwaited(self, rank: int) -> list[str]:
        """The calls of a rank that it has issued and not waited for, with their lines: some backends
        hang where such a call's handle is dropped.
        """
        state = self._ranks[rank]
        calls = [call for call in state.calls.values() if call not in state.current()]
        lines = [
            f"  rank {rank} has not waited for {call.described()}{messages.at(call.place)}"
            for call in calls[:_MOST_UNWAITED]
        ]
        rest = len(calls) - len(lines)
        return [*lines, *([f"  and {rest} more"] if rest else [])]

    def block(self, rank: int) -> RaisesBlock | None:
        """The block of ``smp.raises`` that a rank is in."""
        return self._ranks[rank].block

    def waits(self, rank: int) -> bool:
        """Return whether a rank is in a communication call, or has left its body by one that raised."""
        state = self._ranks[rank]
        return bool(state.current()) or state.failed is not None

    def parted(self) -> bool:
        """Return whether the members of a group may have counted its calls differently."""
        return any(True for _ in self._left())

    def body_is_over(self, rank: int) -> bool:
        """Return whether a rank's body is over, so that its outcome is on its way."""
        return self._ranks[rank].ended

    def settled(self) -> bool:
        """Return whether nothing is on its way: every body is over, every callback has returned, and every
        call has met its partners and is over too.
        """
        ended = all(state.ended and not state.unsure for state in self._ranks)
        calls = any(state.calls or state.callbacks for state in self._ranks)
        odd = bool(self._damaged or self._suspects or self._spoilt or self._strays) or any(
            True for _ in self._left()
        )
        return ended and not calls and not odd

    def unfinished(self, rank: int) -> bool:
        """Return whether a rank's call may still be under way in its backend, or a callback, though the body
        is over.
        """
        state = self._ranks[rank]
        return bool(self._damaged or state.calls or state.callbacks or state.raised or state.unsure)

    def blocked(self, rank: int) -> bool:
        """Return whether a rank is in a call that cannot end unless other ranks make theirs."""
        state = self._ranks[rank]
        return any(call.blocked() for call in state.current())

    def missing(self) -> list[str]:
        """The ranks that never arrived at calls that others wait in, one line a call."""
        lines: dict[int, str] = {}
        for state in self._ranks:
            for call in state.current():
                if absent := call.wants():
                    what = call.meeting if isinstance(call, Joined) else call
                    lines[id(what)] = f"{ranks_text(absent)} never arrived at {call.described()}"
        return list(lines.values())

    # Leaks.

    def leaks(self, strict: bool) -> tuple[list[str], list[str]]:
        """The leaks after every rank has returned: those that fail the run, and those that are warnings.

        The fabric looks after process groups (RankFabric.leave), so ``strict`` changes nothing here.
        """
        if self._damaged:
            return [], []
        # A call that raised is no leak: the body has got the error.
        kept = [call for call in self._left() if not call.raised]
        left = sorted(kept, key=lambda call: (call.rank, call.number))
        found = [(call.rank, f"{_never(call)}{messages.at(call.place)}") for call in left]
        for state in self._ranks:
            for call in state.calls.values():
                direct = call.place is None or call.place.direct
                awaited = call.has_future or isinstance(call, Handover)
                if call not in left and direct and not awaited:
                    name = call.description.operation if isinstance(call, Joined) else call.text()
                    found.append(
                        (call.rank, f"{name} was never waited for{messages.at(call.place)}")
                    )
        return messages.left(found), []

    def _left(self) -> Iterator[Issued]:
        for box in self._boxes.values():
            yield from box.left()
        for meeting in self._meetings.values():
            if not meeting.complete and meeting.group not in self._spoilt:
                yield from meeting.calls.values()


_GROUPS = "new_group"  # the kind of group whose meetings are calls of new_group


def _never(call: Issued) -> str:
    if isinstance(call, Joined) and call.meeting is not None:
        return messages.never_joined(call.described(), ranks_text(call.meeting.missing()))
    return f"{call.text()} was never matched"


def _lines(wait: Wait) -> str:
    return "\n".join(wait_lines([wait])).strip()


def _differ(one: Issued, other: Issued) -> bool:
    said, heard = one.description, other.description
    if said.fields == heard.fields and said.operation == heard.operation:
        return False  # nearly always
    return len(set(_comparable([one, other]).values())) > 1


def _comparable(calls: Sequence[Issued]) -> dict[int, tuple[str, messages.Fields]]:
    """Operation and fields by rank, without the fields that nobody knows of some call."""
    known = {call.rank: call.description for call in calls if call.description.fields is not None}
    unknown = {
        name
        for description in known.values()
        for name, value in description.fields or ()
        if value == UNKNOWN
    }
    return {
        rank: (
            description.operation,
            tuple(field for field in description.fields or () if field[0] not in unknown),
        )
        for rank, description in known.items()
    }


def _odd_one_out(calls: list[Joined]) -> int | None:
    """The rank to blame for calls that differ; None if they are all equal."""
    said = _comparable(calls)
    if len(set(said.values())) < 2:
        return None
    return messages.rank_to_blame(said, {call.rank: call.exception for call in calls})


def _post_difference(send: BoardPost, receive: BoardPost) -> str:
    """The name of the value in which a send and its receive differ; empty if they agree."""
    one, other = (dict(post.description.fields or ()) for post in (send, receive))
    if not one or not other:
        return ""
    if one["dtype"] != other["dtype"]:
        return "dtype"
    return "" if send.description.sent == receive.description.sent else "element count"


def _pairs(meeting: BoardMeeting) -> tuple[CollectiveMismatchError, int] | None:
    """The verdict on members that disagree on how much one sends to another, and the rank to blame."""
    calls = [meeting.calls[rank] for rank in meeting.group.ranks]
    return messages.pair_mismatch(
        calls[0].description.operation,
        {call.rank: call.place for call in calls},
        [call.description.sent for call in calls],
        [call.description.expected for call in calls],
    )
