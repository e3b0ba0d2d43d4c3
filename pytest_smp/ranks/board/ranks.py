"""The board's knowledge of one rank: its records, read in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pytest_smp.ranks.board import records
from pytest_smp.ranks.board.calls import (
    BoardPost,
    GroupKey,
    Handover,
    Issued,
    Joined,
    KeyWait,
    Stray,
)
from pytest_smp.ranks.board.recorder import Description
from pytest_smp.ranks.protocols import RaisesBlock
from smp_core.errors import BackendError
from smp_core.transport.messages import Size
from smp_core.transport.peers import ANY, Source, is_member
from smp_core.transport.stack_frames import Place


class Calls(Protocol):
    """The listener to the ranks' calls."""

    def issued(self, call: Issued, partners: list[int]) -> None:
        """A new call; ``partners`` are the ranks that an object goes to or comes from."""

    def withdrawn(self, call: Issued) -> None:
        """The backend has refused the call."""

    def keys_set(self, keys: list[str]) -> None:
        """These keys of a store may be set by now."""

    def over(self, call: Issued) -> None:
        """The rank has learnt that the call is over."""


class RankState:
    """One rank in one run.

    Attributes:
        waits: the calls that its main thread waits for.
        inside: the call that its main thread makes and has not come back from, unless it waits.
        failed: the call that it has just raised out of.
        raised: whether any call of this run has raised.
        exception: what its main thread handled at its last call or wait, in words; empty if nothing.
        last: the call that it made last, on any thread.
        place: where it waits.
        block: the block of ``smp.raises`` that it is in.
        accompanied: whether other threads of the body may go on meanwhile.
        had_children: whether it has had child processes, which may set keys of a store.
        unsure: whether other threads have communicated, or have outlived the body.
        ended: whether its body is over.
    """

    def __init__(self, rank: int, calls: Calls) -> None:
        self.rank, self._calls_of_all = rank, calls
        self._reader = records.Reader(rank)
        self._run: int | None = None
        self.clear()

    def clear(self, run: int | None = None) -> None:
        """Forget all calls; nothing counts until run number ``run`` begins."""
        self.waits: list[Issued] = []
        self.inside: Issued | None = None
        self.failed: Issued | None = None
        self.last: Issued | None = None
        self.place: Place | None = None
        self.exception = ""
        self.block: RaisesBlock | None = None
        self.unsure = self.accompanied = self.ended = self.raised = False
        self.had_children = False
        self.calls: dict[int, Issued] = {}  # those that a record may still name
        self.callbacks: dict[int, list[Issued]] = {}  # that have not returned, and their calls
        self._groups: dict[int, tuple[GroupKey, str]] = {}
        self._places: dict[int, Place] = {}
        self._descriptions: dict[int, Description] = {}
        self._awaited, self._began = run, False

    def renew(self) -> None:
        """A new process has this rank's place: the rest of a line that never ended is void."""
        self._reader = records.Reader(self.rank)
        for call in self.calls.values():
            call.taken = True  # nobody is left to withdraw it
        self.callbacks.clear()

    def current(self) -> list[Issued]:
        """The calls that the rank is in."""
        return self.waits or ([self.inside] if self.inside is not None else [])

    def has_callbacks(self) -> bool:
        """Return whether a callback of the body's may run, in any thread: it has not returned, and its calls
        are over or may be.
        """
        return any(
            all(call.waited or not call.needs() for call in calls)
            for calls in self.callbacks.values()
        )

    def feed(self, data: bytes) -> int:
        """Read records; return how many counted.

        Raises BackendError for what is no record, or makes no sense.
        """
        counted = 0
        for record in self._reader.feed(data):
            kind, items = record[0], record[1:]
            if kind == records.BEGIN:
                self._began = self._awaited in (None, items[0])
            elif not self._began or self.ended:
                continue
            else:
                try:
                    _READ[kind](self, *items)
                except (LookupError, ValueError, TypeError, AttributeError) as error:
                    raise BackendError(
                        f"rank {self.rank}: its line to the board carries a record that makes no "
                        f"sense: {record!r:.200} ({error!r})"
                    ) from None
            counted += 1
        return counted

    # One function for each kind of record.

    def _end(self, thread: int) -> None:
        for call in self.calls.values():
            call.taken = True
        self.ended, self.waits, self.inside = True, [], None
        self.unsure |= thread != records.MAIN

    def _group(
        self, known: int, kind: str, name: str, shown: str, generation: int, ranks: list[Any]
    ) -> None:
        if not all(type(rank) is int for rank in ranks):
            raise ValueError("ranks must be integers")
        self._groups[known] = GroupKey(kind, name, generation, tuple(ranks)), shown

    def _place(
        self, known: int, file: str, line: int, function: str, direct: bool, entry: str
    ) -> None:
        self._places[known] = Place(file, line, function, direct, entry)

    def _description(
        self,
        known: int,
        operation: str,
        fields: Any,
        told: list[Any],
        sent: list[Any],
        expected: list[Any],
        elements: int,
    ) -> None:
        self._descriptions[known] = Description(
            operation,
            None if fields is None else tuple((str(name), value) for name, value in fields),
            tuple((str(name), value) for name, value in told),
            tuple(map(_size, sent)),
            tuple(map(_size, expected)),
            elements,
        )

    def _collective(
        self, number: int, group: int, description: int, place: int, thread: int
    ) -> None:
        key, shown = self._groups[group]
        where, said = self._places.get(place), self._descriptions[description]
        self._issue(Joined(self.rank, number, key, shown, where, said), thread)

    def _send(self, *items: int) -> None:
        self._post(True, *items)

    def _receive(self, *items: int) -> None:
        self._post(False, *items)

    def _receive_any(self, *items: int) -> None:
        *call, tag = items
        self._post(False, *call, ANY, tag)  # type: ignore[call-arg]

    def _post(
        self,
        sends: bool,
        number: int,
        group: int,
        description: int,
        place: int,
        thread: int,
        peer: Source,
        tag: int,
    ) -> None:
        key, shown = self._groups[group]
        where, said = self._places.get(place), self._descriptions[description]
        made = self.rank, number, key, shown, where, said
        call: Issued
        if peer is ANY:
            call = BoardPost(*made, sends=sends, peer=None, tag=tag)
        elif is_member(peer, len(key.ranks)):
            call = BoardPost(*made, sends=sends, peer=key.ranks[peer], tag=tag)
        else:
            call = Stray(*made, sends=sends, peer=peer, tag=tag)
        self._issue(call, thread)

    def _object(
        self,
        number: int,
        group: int,
        text: str,
        place: int,
        thread: int,
        to: list[Any],
        source: int,
    ) -> None:
        key, shown = self._groups[group]
        where = self._places.get(place)
        call: Issued
        if to or source >= 0:
            call = Handover(self.rank, number, key, shown, where, call=text, sends=bool(to))
        else:
            call = Joined(self.rank, number, key, shown, where, Description(text, ()))
        call.taken = True
        self._issue(call, thread, [*to] or [source])
        self._wait([number], place, thread)

    def _have_children(self) -> None:
        self.had_children = True

    def _set_keys(self, keys: list[Any]) -> None:
        self._calls_of_all.keys_set(_texts(keys))

    def _wait_for_keys(self, number: int, keys: list[Any], place: int, thread: int) -> None:
        group = GroupKey("store", "", 0, ())
        where = self._places.get(place)
        call = KeyWait(self.rank, number, group, "", where, taken=True, keys=tuple(_texts(keys)))
        self._issue(call, thread)
        self._wait([number], place, thread)

    def _issue(self, call: Issued, thread: int, partners: list[int] | None = None) -> None:
        if call.number in self.calls:
            raise ValueError("two calls of one number")
        call.late = self.raised
        call.exception = "" if thread == records.OTHER else self.exception
        if thread == records.OTHER:
            self.unsure = True
        else:
            self._take(self.inside)
            self.inside, self.accompanied = call, thread == records.ACCOMPANIED
            self.waits = []
        self.calls[call.number] = self.last = call
        self.failed = None
        self._calls_of_all.issued(call, partners or [])

    def _handle(self, exception: str) -> None:
        self.exception = exception

    def _took(self, number: int, source: int) -> None:
        call = self.calls.get(number)
        if (
            isinstance(call, BoardPost)
            and call.peer is None
            and is_member(source, len(call.group.ranks))
        ):
            call.source = call.group.ranks[source]

    def _returned(self, number: int) -> None:
        self._take(self.calls.get(number))

    def _take(self, call: Issued | None) -> None:
        if call is not None:
            call.taken = True
            if call is self.inside:
                self.inside = None

    def _withdraw(self, number: int) -> None:
        call = self.calls.pop(number, None)
        if call is not None:
            self.inside = None if call is self.inside else self.inside
            self.waits = [each for each in self.waits if each is not call]
            self.failed, self.raised = call, True
            self._calls_of_all.withdrawn(call)

    def _wait(self, numbers: list[Any], place: int, thread: int) -> None:
        calls = [self.calls[number] for number in numbers if number in self.calls]
        for call in calls:
            self._take(call)
        if thread == records.OTHER:
            self.unsure = True
            return
        self.accompanied = thread == records.ACCOMPANIED
        self.waits, self.place = calls, self._places.get(place)

    def _done(self, numbers: list[Any]) -> None:
        for number in numbers:
            call = self.calls.pop(number, None)
            if call is not None:
                self._take(call)
                call.waited = True
                self._calls_of_all.over(call)
        self.waits = [call for call in self.waits if not call.waited]
        self.failed = None

    def _enter_block(self, place: str, count: int, ranks: list[Any]) -> None:
        if not all(type(rank) is int for rank in ranks):
            raise ValueError("ranks must be integers")
        self.block = RaisesBlock(place, count, tuple(ranks)) if place else None

    def _future(self, numbers: list[Any]) -> None:
        for number in numbers:
            if number in self.calls:
                self.calls[number].has_future = True

    def _hook(self, callback: int, numbers: list[Any]) -> None:
        self.callbacks[callback] = [
            self.calls[number] for number in numbers if number in self.calls
        ]

    def _called(self, callback: int) -> None:
        self._done([call.number for call in self.callbacks.pop(callback, ())])

    def _fail(self, numbers: list[Any]) -> None:
        failed = self.waits[0] if self.waits else None
        for number in numbers:
            if number in self.calls:
                self.calls[number].raised = True
        self._done(numbers)
        self.failed, self.raised = failed, True


def _texts(items: list[Any]) -> list[str]:
    if not all(type(item) is str for item in items):
        raise ValueError("keys must be texts")
    return items


def _size(item: Any) -> Size:
    lengths = item if isinstance(item, list) else [item]
    if not all(type(length) is int for length in lengths):
        raise ValueError("sizes must be integers")
    return tuple(item) if isinstance(item, list) else int(item)


_READ: dict[str, Callable[..., None]] = {
    records.END: RankState._end,
    records.GROUP: RankState._group,
    records.PLACE: RankState._place,
    records.DESCRIPTION: RankState._description,
    records.COLLECTIVE: RankState._collective,
    records.SEND: RankState._send,
    records.RECEIVE: RankState._receive,
    records.RECEIVE_ANY: RankState._receive_any,
    records.OBJECT: RankState._object,
    records.RETURNED: RankState._returned,
    records.TOOK: RankState._took,
    records.WITHDRAWN: RankState._withdraw,
    records.WAITS: RankState._wait,
    records.DONE: RankState._done,
    records.FAILED: RankState._fail,
    records.HANDLES: RankState._handle,
    records.INSIDE: RankState._enter_block,
    records.FUTURE: RankState._future,
    records.CALLBACK: RankState._hook,
    records.CALLED: RankState._called,
    records.CHILDREN: RankState._have_children,
    records.SETS_KEYS: RankState._set_keys,
    records.WAITS_FOR_KEYS: RankState._wait_for_keys,
}
