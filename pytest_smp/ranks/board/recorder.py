"""The rank's side of the board: calls and waits become records.

Groups, lines of code and descriptions of calls are sent once and then named by a number, so that a call
in a loop costs some tens of bytes. A record is written before the call that it announces, so that the
controller never knows less than the other ranks can observe.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_smp.ranks.board import records
from pytest_smp.ranks.board.child_processes import ChildProcesses
from pytest_smp.ranks.board.records import ACCOMPANIED, FRAMES, MAIN, OTHER, encode
from pytest_smp.ranks.protocols import RaisesBlock
from smp_core.errors import CollectiveMismatchError
from smp_core.transport import helper_threads, messages, stack_frames
from smp_core.transport.handled import exception_text
from smp_core.transport.messages import Size
from smp_core.transport.peers import ANY, Source
from smp_core.transport.protocols import Group

if TYPE_CHECKING:
    from pytest_smp.ranks.call_records import CommunicationCall

Fields = tuple[tuple[str, str | int], ...]

_COLLECTIVE, _SEND, _RECEIVE, _RECEIVE_ANY = (
    FRAMES[kind]
    for kind in (records.COLLECTIVE, records.SEND, records.RECEIVE, records.RECEIVE_ANY)
)
_TOOK = FRAMES[records.TOOK]
_CALLED = FRAMES[records.CALLED]
_RETURNED, _WITHDRAWN = FRAMES[records.RETURNED], FRAMES[records.WITHDRAWN]
_WAITS = f'["{records.WAITS}",[%b],%d,%d]\n'.encode()
_DONE = f'["{records.DONE}",[%b]]\n'.encode()


def _listed(numbers: Sequence[int]) -> bytes:
    return b"%d" % numbers[0] if len(numbers) == 1 else ",".join(map(str, numbers)).encode()


#: Calls of the object transport that a body can make; the others belong to the transport.
OBJECT_CALLS = frozenset(
    {"smp.send", "smp.broadcast", "smp.recv_from", "smp.allgather", "smp.barrier"}
)

#: Stands in ``fields`` for an unknown value.
UNKNOWN = "?"


class Description(NamedTuple):
    """The description of a call.

    ``fields`` are the values that all members of the group must agree on, None if they are not known;
    ``told`` are further values for messages. ``sent`` and ``expected`` are sizes that are compared by
    pairs of members: the shapes of tensors or of their parts, of a message its number of elements.
    ``elements`` is the number of elements that the call moves, 0 if some of its tensors are empty.
    """

    operation: str
    fields: Fields | None
    told: Fields = ()
    sent: tuple[Size, ...] = ()
    expected: tuple[Size, ...] = ()
    elements: int = 1


class _Depth(threading.local):
    """The number of recorded calls and ``quiet`` blocks that this thread is in."""

    depth = 0


class BoardRecorder:
    """Writes one rank's records. Implements ``CallRecorder`` (smp_core/transport/protocols.py).

    Nothing is recorded before ``begin`` and after ``end``, in a child that the body forks, inside
    ``quiet()``, and inside a recorded call: a transport's calls on a private group are no calls of the
    body. ``quiet`` counts in ``inside.depth``, for callers that cannot afford a context manager.
    """

    def __init__(self, rank: int, write: Callable[[bytes], object]) -> None:
        self.rank = rank
        self.run = 0  # the number of begins, by which others notice a new run
        self._write, self._on, self._pid = write, False, 0
        self._words = b""  # records that must precede the next one, written with it
        self._exception = ""  # that the main thread handles, as it was last told
        self._children: ChildProcesses | None = None  # None once they have been told of
        self._lock = threading.Lock()
        self.inside = _Depth()
        self._main = self._threads = self._number = 0
        # Not begun anew with a run: a callback may outlive its run, and is then unknown in the next.
        self._callbacks = itertools.count(1)
        self.calls: list[CommunicationCall] | None = None  # of the run, if they are wanted
        self._groups: dict[tuple[object, ...], int] = {}
        self._members: list[tuple[int, ...]] = []  # of groups, by number
        self._places: dict[tuple[str, int, str, bool, str], int] = {}
        self._descriptions: dict[object, int] = {}

    # A run.

    def begin(self, run: int = 0) -> None:
        """Record calls from now on, as those of run number ``run``.

        Called by the thread that then runs the body.
        """
        for table in (self._groups, self._places, self._descriptions):
            table.clear()
        self._members.clear()
        self._main, self._threads = _thread.get_ident(), helper_threads.count_other_threads()
        self._number, self._on, self._pid = 0, True, os.getpid()
        self._children = ChildProcesses()
        self.run += 1
        self._words, self._exception = encode(records.BEGIN, run), ""

    def end(self) -> None:
        """The body is over, however it ended; nothing is recorded any more."""
        with self._lock:
            if self._on:
                self._on = False
                self._tell(encode(records.END, self._thread()))

    @property
    def active(self) -> bool:
        """True if a call that this thread makes now is to be recorded."""
        return self._on and not self.inside.depth and os.getpid() == self._pid

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While entered, this thread's calls are not recorded."""
        self.inside.depth += 1
        try:
            yield
        finally:
            self.inside.depth -= 1

    # Synchronous calls as a whole.

    @contextlib.contextmanager
    def call(
        self, call: str, group: Group, *, to: Sequence[int] = (), source: int | None = None
    ) -> Iterator[None]:
        """See CallRecorder.

        Entered when nothing but the other ranks can keep the call from ending: the arguments have
        been checked, the object has been pickled.
        """
        if not self.active:
            with self.quiet():
                yield
            return
        self._note_exception()
        with self._lock:
            number = self._next()
            shown = messages.group_text(group.name, group.ranks)
            own = self._group("smp", group.name, shown, 0, group.ranks)
            place = self._place(sys._getframe(1))
            from_ = -1 if source is None else source
            thread = self._thread()
            text = messages.object_call_text(call, shown, to, source)
            self._tell(encode(records.OBJECT, number, own, text, place, thread, [*to], from_))
        if self.calls is not None and call in OBJECT_CALLS and stack_frames.is_called_by_body():
            self._keep(own, (call, ()))
        try:
            with self.quiet():
                yield
        except CollectiveMismatchError:  # the call took part: the board knows the other calls
            self.failed((number,))
            raise
        except BaseException:
            self.withdrawn(number)
            raise
        self.done((number,))

    # Called by instrumentation. A number names the call from then on.

    def collective(
        self, group: int, key: object, describe: Callable[[], Description], place: int | None = None
    ) -> int:
        """A call that all members of the group join. ``key`` stands for the description."""
        self._note_exception()
        with self._lock:
            number, description = self._next(), self._description(key, describe)
            where = self._place(sys._getframe(1)) if place is None else place
            thread = self._thread()
            self._tell(_COLLECTIVE % (number, group, description, where, thread))
        if self.calls is not None:
            self._keep(group, key)
        return number

    def post(
        self,
        sends: bool,
        group: int,
        peer: Source,
        tag: int,
        key: object,
        describe: Callable[[], Description],
    ) -> int:
        """A send to, or a receive from, the group's member number ``peer``, or a receive from ANY.

        The number is recorded as the caller gave it: the group may have no such member.
        """
        self._note_exception()
        with self._lock:
            number, description = self._next(), self._description(key, describe)
            where, thread = self._place(sys._getframe(1)), self._thread()
            if peer is ANY:
                self._tell(_RECEIVE_ANY % (number, group, description, where, thread, tag))
            else:
                frame = _SEND if sends else _RECEIVE
                self._tell(frame % (number, group, description, where, thread, peer, tag))
        if self.calls is not None:
            self._keep(group, key)
        return number

    def returned(self, number: int) -> None:
        """The backend has taken the call."""
        self._say(_RETURNED % number)

    def took(self, number: int, source: int) -> None:
        """A receive from any source has received from the group's member number ``source``."""
        self._say(_TOOK % (number, source))

    def withdrawn(self, number: int) -> None:
        """The backend has refused the call: it counts nowhere."""
        self._say(_WITHDRAWN % number)

    def waits(self, numbers: Sequence[int]) -> None:
        """This thread waits until these calls are over."""
        self._note_exception()
        with self._lock:
            place = self._place(sys._getframe(1))
            self._tell(_WAITS % (_listed(numbers), place, self._thread()))

    def done(self, numbers: Sequence[int]) -> None:
        """This thread has learnt that these calls are over."""
        self._say(_DONE % _listed(numbers))

    @contextlib.contextmanager
    def waiting(self, numbers: Sequence[int]) -> Iterator[None]:
        """While entered, this thread waits until these calls are over; then it has learnt that."""
        self.waits(numbers)
        try:
            with self.quiet():
                yield
        except BaseException:
            self.failed(numbers)
            raise
        self.done(numbers)

    def sets_keys(self, keys: Sequence[str]) -> None:
        """This rank is about to set these keys of a store."""
        self._say(encode(records.SETS_KEYS, [*keys]))

    @contextlib.contextmanager
    def waiting_for_keys(self, keys: Sequence[str]) -> Iterator[None]:
        """While entered, this thread waits until these keys of the world's store are set."""
        self._note_exception()
        with self._lock:
            number, place = self._next(), self._place(sys._getframe(1))
            self._tell(encode(records.WAITS_FOR_KEYS, number, [*keys], place, self._thread()))
        try:
            with self.quiet():
                yield
        except BaseException:
            self.failed((number,))
            raise
        self.done((number,))

    def future(self, numbers: Sequence[int]) -> None:
        """The body has a future of these calls."""
        self._say(encode(records.FUTURE, [*numbers]))

    def callback(self, numbers: Sequence[int]) -> int:
        """A function of the body's runs once these calls are over: the number of the callback."""
        number = next(self._callbacks)
        self._say(encode(records.CALLBACK, number, [*numbers]))
        return number

    def called(self, callback: int) -> None:
        """The function of this callback has returned, so the calls are over, or it will never run."""
        self._say(_CALLED % callback)

    def failed(self, numbers: Sequence[int]) -> None:
        """Waiting for these calls has raised."""
        self._say(encode(records.FAILED, [*numbers]))

    def inside_block(self, block: RaisesBlock | None) -> None:
        """The body is in this block of ``smp.raises`` from now on, or in none."""
        place, count, ranks = ("", 0, ()) if block is None else block
        self._say(encode(records.INSIDE, place, count, [*ranks]))

    def group(self, kind: str, name: str, shown: str, generation: int, ranks: Sequence[int]) -> int:
        """The number of a group: of this kind and name, made as the n-th of that name in this run."""
        with self._lock:
            return self._group(kind, name, shown, generation, tuple(ranks))

    def _keep(self, group: int, key: Any) -> None:
        """Keep a call as data. ``key``: as `fingerprint` makes it, but for those of new_group."""
        from pytest_smp.ranks.call_records import call_record  # it imports torch

        first, last = key if isinstance(key, tuple) else (key, ())
        if first == "new_group" or self.calls is None:
            return
        # A collective's arguments and the size of its group, or an operation and its tensors.
        operation, specs = (
            (first, last) if isinstance(first, str) else (first.operation, first.brings)
        )
        self.calls.append(call_record(self.rank, operation, self._members[group], specs))

    def _note_exception(self) -> None:
        """Have the next record preceded by the exception that the main thread handles, if that has changed."""
        error = sys.exception()
        if (error is None and not self._exception) or _thread.get_ident() != self._main:
            return
        with self.quiet():  # the exception's class makes the text, and may communicate
            text = exception_text(error)
        if text != self._exception:
            self._exception = text
            with self._lock:
                self._words += encode(records.HANDLES, text)

    # Inside; the caller has the lock.

    def _say(self, record: bytes) -> None:
        with self._lock:
            if self._on and os.getpid() == self._pid:
                self._tell(record)

    def _tell(self, record: bytes) -> None:
        self._write(self._words + record)
        self._words = b""

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _thread(self) -> int:
        if _thread.get_ident() != self._main and self._other_thread():
            return OTHER
        if self._children is not None and self._children.any_since():
            self._children = None
            self._words += encode(records.CHILDREN)
        return ACCOMPANIED if helper_threads.count_other_threads() > self._threads else MAIN

    def _group(
        self, kind: str, name: str, shown: str, generation: int, ranks: tuple[int, ...]
    ) -> int:
        key = kind, name, generation, ranks
        known = self._groups.get(key)
        if known is None:
            known = self._groups[key] = len(self._groups)
            self._members.append(ranks)
            self._words += encode(records.GROUP, known, kind, name, shown, generation, [*ranks])
        return known

    def _description(self, key: object, describe: Callable[[], Description]) -> int:
        known = self._descriptions.get(key)
        if known is None:
            known = self._descriptions[key] = len(self._descriptions)
            self._words += encode(records.DESCRIPTION, known, *describe())
        return known

    def _place(self, frame: types.FrameType | None) -> int:
        """The number of the user's line in this stack, or -1; in another thread than the rank's own, that
        thread stands with the line, or alone.
        """
        frame, direct, entry = stack_frames.user_frame(frame)
        thread = "" if _thread.get_ident() == self._main else self._other_thread()
        if frame is None and not thread:
            return -1
        file, line, function = "", 0, thread
        if frame is not None:
            code = frame.f_code
            file, line, function = code.co_filename, frame.f_lineno, code.co_name
            function += f" in {thread}" if thread else ""
        key = file, line, function, direct, entry
        known = self._places.get(key)
        if known is None:
            known = self._places[key] = len(self._places)
            self._words += encode(records.PLACE, known, *key)
        return known

    def _other_thread(self) -> str:
        """The name of the calling thread, or nothing if it is the rank's own."""
        if _thread.get_ident() == self._main or helper_threads.acting_thread() == self._main:
            return ""
        return f"thread {threading.current_thread().name!r}"
