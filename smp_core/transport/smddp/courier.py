"""Couriers: they copy what a member of a group writes into its machine's memory to the memory of the other machines.

Each machine has a segment of the group, with room for all members, so that a courier copies bytes to the same place.
The row of a round goes once to each other machine, to one member there, and only the bytes that its members read.
Cells and pieces of messages go to their receiver, and the counts of those that were taken come back.

Note [In flight]: the bytes are sent from the shared memory, and those of at most SLOTS rounds are on their way to a
machine: a member that comes to round k has read round k - AHEAD, so all have come to that, and have read, so received,
round k - SLOTS, whose slot round k takes. A cell or piece is written again when its receiver has counted it as taken.

Note [Ends]: the stream that brings a member's rows is also the one whose end says that it comes to no more: all bytes
are read before. Messages come by another stream, whose end says the same for them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing.util
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smp_core.errors import BackendError
from smp_core.transport import ending
from smp_core.transport.smddp import futex
from smp_core.transport.smddp.segment import DIGEST, ENDED, LARGEST, SLOTS, SharedSegment
from smp_core.transport.smddp.streams import Outbound, Peer, Places, StreamError, Streams

_GROUP = 8  # bytes of a group's name on the wire
#: The group, the kind, the member that sends, the number of ranges of its segment that follow, four numbers.
_FRAME = struct.Struct(f"<{_GROUP}sBII4Q")
_RANGE = struct.Struct("<QQ")  # its begin and its end
_ROUND, _MAIL, _LEFT = range(3)
_SETTLING = 10.0  # seconds in which the connections of a member that leaves must be there

Range = tuple[int, int]


def chosen(machines: Sequence[str], sender: int, machine: str) -> int:
    """The member of another machine that receives the rows of a member for all there."""
    beside = [member for member, each in enumerate(machines) if each == machines[sender]]
    there = [member for member, each in enumerate(machines) if each == machine]
    return there[beside.index(sender) % len(there)]


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """The same bytes in as few ranges as their order allows, without empty ones."""
    first = last = 0
    for begin, end in ranges:
        if begin == last:
            last = end
        elif begin < end:
            if first < last:
                yield first, last
            first, last = begin, end
    if first < last:
        yield first, last


class Courier:
    """The courier of one group on one member."""

    def __init__(
        self, segment: SharedSegment, machines: Sequence[str], timeout: datetime.timedelta
    ) -> None:
        """Return when the members of all machines are connected.

        Raises BackendError if they are not after ``timeout``.
        """
        self.segment, self._me = segment, segment.me
        here = machines[segment.me]
        self._machines = machines
        self._far = {member for member, each in enumerate(machines) if each != here}
        carriers = {member: chosen(machines, member, here) for member in self._far}
        segment.carriers = carriers
        #: Those whose rows come to this member.
        self._charges = {member for member, carrier in carriers.items() if carrier == self._me}
        self._peers: list[Peer] = []
        self._streams: dict[int, Outbound] = {}  # by member
        self._routes: list[tuple[Outbound, list[int]]] = []  # to each machine, with its members
        # Why members come to no more that have said so on their own stream.
        self._gone: dict[int, int] = {}
        self.key = b""
        traffic = None
        try:
            traffic = self._traffic = _Traffic.join(segment)
            self._connect(timeout)
        except BaseException as error:
            # First: the others must not take the end of the streams for the reason.
            segment.refuse(error)
            if traffic is not None:
                traffic.remove(self)
            raise

    def _connect(self, timeout: datetime.timedelta) -> None:
        segment, traffic = self.segment, self._traffic
        group = secrets.token_hex(_GROUP) if self._me == 0 else ""
        self.key = bytes.fromhex(segment.exchange("group", group, timeout)[0])
        traffic.couriers[self.key] = self
        told = segment.exchange("stream", json.dumps(traffic.streams.peer()), timeout)
        self._peers = [Peer(*json.loads(each)) for each in told]
        for machine in dict.fromkeys(self._machines[each] for each in sorted(self._far)):
            member = chosen(self._machines, self._me, machine)
            there = [each for each, name in enumerate(self._machines) if name == machine]
            self._routes.append((self._stream(member), there))
        for stream, (member, *_) in self._routes:
            if not stream.settled.wait(timeout.total_seconds()) or stream.reason:
                segment.told("stream")
                raise BackendError(
                    f"group {segment.name}: member {self._me} cannot reach machine {segment.far[member]} at "
                    f"{stream.peer.address}, port {stream.peer.port}: {stream.reason or 'no answer'}. A rank listens "
                    "at the address by which it reaches MASTER_ADDR: the other machines must reach that, too"
                )
        segment.exchange("ready", "", timeout)
        for member in self._charges:  # may have ended before its name was known here
            if self._peers[member].identity in traffic.streams.ended:
                segment.mark(member, ENDED)

    def _stream(self, member: int) -> Outbound:
        stream = self._streams.get(member)
        if stream is None:
            stream = self._streams[member] = self._traffic.streams.to(self._peers[member])
        return stream

    def is_far(self, member: int) -> bool:
        """Return whether a member is on another machine."""
        return member in self._far

    # Sending: in the threads of the rank.

    def ship_round(self, number: int, described: int, parts: Any) -> None:
        """Send what this member has written of a round: ``described`` bytes of its call, and of the slot the
        ``parts(members)`` that the members of a machine read.
        """
        layout, slot = self.segment.layout, number % SLOTS
        place = slot * layout.size + self._me
        head = []
        if described:
            digest, text = layout.digests + place * DIGEST, layout.heads + place * layout.head
            head = [(digest, digest + DIGEST), (text, text + described)]
        data = layout.data + slot * layout.size * LARGEST
        for stream, members in self._routes:
            body = [(data + begin, data + end) for begin, end in parts(members)]
            self._send(stream, _ROUND, [*head, *body], number)

    def ship_mail(self, member: int, written: Sequence[Range], counts: Sequence[int]) -> None:
        """Send cells and pieces to a member, and the counts of what was written to it and taken from it."""
        self._send(self._stream(member), _MAIL, written, *counts)

    def _send(self, stream: Outbound, kind: int, ranges: Sequence[Range], *numbers: int) -> None:
        ranges = list(_merged(ranges))
        counts = [*numbers, 0, 0, 0, 0][:4]
        head = _FRAME.pack(self.key, kind, self._me, len(ranges), *counts)
        head += b"".join(_RANGE.pack(*each) for each in ranges)
        view = self.segment.view
        stream.send([memoryview(head), *(view[begin:end] for begin, end in ranges)])

    def settle(self) -> None:
        """Return when all bytes that wait have a connection, or after ten seconds: an answer on a young one goes before
        the news, on an older one, that this member has left.
        """
        end = time.monotonic() + _SETTLING
        for stream in list(self._streams.values()):
            if not stream.idle:
                stream.settled.wait(max(end - time.monotonic(), 0.0))

    def tell(self, why: int) -> None:
        """Tell the other machines that this member comes to no more."""
        for stream in list(self._streams.values()):
            self._send(stream, _LEFT, (), why)

    def leave(self) -> None:
        """The member has destroyed the group: return when all that it wrote is on its way."""
        self._traffic.remove(self)

    # Receiving: in the thread of the streams.

    def receive(self, identity: str, frame: tuple[Any, ...]) -> Places:
        """The places for the bytes that follow a frame of a process; then the frame takes effect."""
        _, kind, member, count, *numbers = frame
        if member >= len(self._peers) or self._peers[member].identity != identity:
            raise StreamError("sends what is another member's")
        low, high = self._room(kind, member)
        ranges = bytearray(count * _RANGE.size)
        if count:
            yield memoryview(ranges)
        for begin, end in list(_RANGE.iter_unpack(ranges)):
            if not low <= begin < end <= high:
                raise StreamError("sends bytes to a place that is not its own")
            yield self.segment.view[begin:end]
        self._take(kind, member, *numbers)

    def _room(self, kind: int, member: int) -> Range:
        """Where a member may write."""
        layout = self.segment.layout
        if kind == _ROUND:
            return layout.digests, layout.roads
        if kind == _MAIL:
            return layout.road(member, self._me), layout.road(member, self._me + 1)
        return 0, 0

    def _take(self, kind: int, member: int, first: int, *more: int) -> None:
        segment, layout = self.segment, self.segment.layout
        if kind == _ROUND:
            segment.come(member, first)
        elif kind == _MAIL:
            there, back = layout.road(member, self._me), layout.road(self._me, member)
            for at, value in zip(
                (there, there + 128, back + 64, back + 192), (first, *more), strict=True
            ):
                segment.count(at).value = value
            futex.add_and_wake(segment.address + layout.bells + self._me * 64)
        elif kind == _LEFT:
            self._gone[member] = first
            if member in self._charges:
                segment.mark(member, first)

    def on_end(self, identity: str) -> None:
        """The stream of a process has ended: those of its members that came by it come to no more."""
        for member in self._charges:
            if self._peers and self._peers[member].identity == identity:
                self.segment.mark(member, ENDED)

    # Messages ask.

    def gone(self, member: int) -> str:
        """Why no message of a member of another machine comes any more; empty if one may."""
        streams, identity = self._traffic.streams, self._peers[member].identity
        marked = self.segment.gone(member)
        if streams.coming[identity]:
            return self.segment.why(member, self._gone[member]) if member in self._gone else ""
        if marked:
            return marked
        if identity in streams.ended or self._stream(member).reason:
            return self.segment.why(member, ENDED)
        return ""


class _Traffic:
    """The couriers of this process by their group, and the streams that serve all of them."""

    _this: _Traffic | None = None
    _ends_with_process = False
    _lock = threading.Lock()

    def __init__(self, address: str) -> None:
        self.couriers: dict[bytes, Courier] = {}
        self.users = 0
        self.streams = Streams(address, self._receive, self._on_end)

    @classmethod
    def join(cls, segment: SharedSegment) -> _Traffic:
        """Return the one of this process, for one more group. The first group makes it."""
        with cls._lock:
            if cls._this is None:
                cls._this = cls(own_address(segment.store))
                if not cls._ends_with_process:
                    cls._ends_with_process = True
                    ending.at_last(_at_exit)
                    if multiprocessing.parent_process() is not None:  # it calls no exit handlers
                        multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
            cls._this.users += 1
            return cls._this

    def remove(self, courier: Courier) -> None:
        """Leave a group; the last one closes the streams."""
        self.couriers.pop(courier.key, None)
        with self._lock:
            self.users -= 1
            last = not self.users
            if last:
                _Traffic._this = None
        if last:
            self.streams.close()

    def _receive(self, identity: str) -> Places:
        head = bytearray(_FRAME.size)
        while True:
            yield memoryview(head)
            frame = _FRAME.unpack(head)
            courier = self.couriers.get(frame[0])
            if courier is not None:
                yield from courier.receive(identity, frame)
            else:
                yield from _skip(frame[3])

    def _on_end(self, identity: str) -> None:
        for courier in list(self.couriers.values()):
            courier.on_end(identity)


def _skip(count: int) -> Places:
    """The bytes of a group that this process has left."""
    ranges = bytearray(count * _RANGE.size)
    if count:
        yield memoryview(ranges)
    for begin, end in list(_RANGE.iter_unpack(ranges)):
        yield memoryview(bytearray(end - begin))


def own_address(store: Any) -> str:
    """The address of this machine on its way to the store's host: MASTER_ADDR's, where a store has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    told = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "") or socket.gethostname()
    try:
        for family, kind, _, _, there in socket.getaddrinfo(told, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing
                return str(probe.getsockname()[0])
    except OSError:
        pass
    raise BackendError(
        f"ranks of several machines connect to the address by which each reaches {told}, and there is no way to it. "
        "Set MASTER_ADDR to an address of rank 0's machine that all reach"
    )


def _after_fork() -> None:
    traffic, _Traffic._this, _Traffic._lock = _Traffic._this, None, threading.Lock()
    _Traffic._ends_with_process = (
        False  # a process of multiprocessing forgets the exit handlers of its parent
    )
    if traffic is not None:
        traffic.streams.abandon()


def _at_exit() -> None:
    if _Traffic._this is not None:
        _Traffic._this.streams.close()


os.register_at_fork(after_in_child=_after_fork)
