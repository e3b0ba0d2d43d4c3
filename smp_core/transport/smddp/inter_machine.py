"""The transport between machines: the bytes that a member writes into its machine's memory go to the other machines'.

Each machine has a segment of the group, with room for all members, so that bytes are copied to the same offset. The row
of a round goes once to each other machine, to one member there, its relay, and only the bytes that the members there
read. Packets and pieces of messages go to their receiver, and the counts of the consumed ones come back.

Note [In flight]: the bytes are sent from the shared memory, and those of at most ROUND_SLOTS rounds are on their way to
a machine: a member that arrives at round k has read round k - AHEAD, so all have arrived at that, and have read, so
received, round k - ROUND_SLOTS, whose slot round k takes. The place of a packet or piece is written again when its
receiver has counted it as consumed.

Note [Ends]: the end of the stream that brings a member's rows means that the member arrives at no further round: all
bytes are read before. Messages may come by another stream, whose end means the same for them.
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
from smp_core.transport.smddp.segment import DIGEST_BYTES, DISCONNECTED, ROUND_SLOTS, SharedSegment
from smp_core.transport.smddp.streams import Buffers, Outbound, Peer, StreamError, Streams

_GROUP = 8  # bytes of a group's name on the wire
#: The group, the kind, the member that sends, the number of ranges of its segment that follow, four numbers.
_FRAME = struct.Struct(f"<{_GROUP}sBII4Q")
_RANGE = struct.Struct("<QQ")  # its begin and its end
_ROUND, _LINK, _DEPARTURE = range(3)
_CONNECT_WAIT = 10.0  # seconds in which the connections of a member that leaves must be there

Range = tuple[int, int]


def relay_of(machines: Sequence[str], sender: int, machine: str) -> int:
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


class InterMachineTransport:
    """The connections of one group between machines, on one member."""

    def __init__(
        self, segment: SharedSegment, machines: Sequence[str], timeout: datetime.timedelta
    ) -> None:
        """Return when the members of all machines are connected.

        Raises BackendError if they are not after ``timeout``.
        """
        self.segment, self._me = segment, segment.me
        here = machines[segment.me]
        self._machines = machines
        self._remote = {member for member, each in enumerate(machines) if each != here}
        relays = {member: relay_of(machines, member, here) for member in self._remote}
        segment.relays = relays
        #: The members whose rows come to this member.
        self._relayed = {member for member, relay in relays.items() if relay == self._me}
        self._peers: list[Peer] = []
        self._streams: dict[int, Outbound] = {}  # by member
        self._routes: list[tuple[Outbound, list[int]]] = []  # to each machine, with its members
        # The departures that members have announced on their own streams.
        self._departures: dict[int, int] = {}
        self.key = b""
        shared = None
        try:
            shared = self._shared = _SharedStreams.join(segment)
            self._connect(timeout)
        except BaseException as error:
            # First: the others must not take the end of the streams for the reason.
            segment.refuse(error)
            if shared is not None:
                shared.remove(self)
            raise

    def _connect(self, timeout: datetime.timedelta) -> None:
        segment, shared = self.segment, self._shared
        group = secrets.token_hex(_GROUP) if self._me == 0 else ""
        self.key = bytes.fromhex(segment.exchange("group", group, timeout)[0])
        shared.transports[self.key] = self
        peers = segment.exchange("stream", json.dumps(shared.streams.peer()), timeout)
        self._peers = [Peer(*json.loads(each)) for each in peers]
        for machine in dict.fromkeys(self._machines[each] for each in sorted(self._remote)):
            member = relay_of(self._machines, self._me, machine)
            there = [each for each, name in enumerate(self._machines) if name == machine]
            self._routes.append((self._stream(member), there))
        for stream, (member, *_) in self._routes:
            if not stream.settled.wait(timeout.total_seconds()) or stream.reason:
                segment.exchanged("stream")
                raise BackendError(
                    f"group {segment.name}: member {self._me} cannot reach machine {segment.remote[member]} at "
                    f"{stream.peer.address}, port {stream.peer.port}: {stream.reason or 'no answer'}. A rank listens "
                    "at the address by which it reaches MASTER_ADDR: the other machines must reach that, too"
                )
        segment.exchange("ready", "", timeout)
        for member in self._relayed:  # may have ended before its name was known here
            if self._peers[member].identity in shared.streams.ended:
                segment.mark_departed(member, DISCONNECTED)

    def _stream(self, member: int) -> Outbound:
        stream = self._streams.get(member)
        if stream is None:
            stream = self._streams[member] = self._shared.streams.stream_to(self._peers[member])
        return stream

    # Sending: in the threads of the rank.

    def send_round(self, number: int, description_length: int, ranges: Any) -> None:
        """Send this member's part of a round: ``description_length`` bytes of its call, and of the slot the
        ``ranges(members)`` that the members of a machine read.
        """
        layout, slot = self.segment.layout, number % ROUND_SLOTS
        head = []
        if description_length:
            digest, text = layout.digest(slot, self._me), layout.description(slot, self._me)
            head = [(digest, digest + DIGEST_BYTES), (text, text + description_length)]
        data = layout.slot(slot)
        for stream, members in self._routes:
            body = [(data + begin, data + end) for begin, end in ranges(members)]
            self._send(stream, _ROUND, [*head, *body], number)

    def send_link(self, member: int, written: Sequence[Range], counts: Sequence[int]) -> None:
        """Send packets and pieces to a member, and the counts of those written to it and consumed from it."""
        self._send(self._stream(member), _LINK, written, *counts)

    def _send(self, stream: Outbound, kind: int, ranges: Sequence[Range], *numbers: int) -> None:
        ranges = list(_merged(ranges))
        counts = [*numbers, 0, 0, 0, 0][:4]
        head = _FRAME.pack(self.key, kind, self._me, len(ranges), *counts)
        head += b"".join(_RANGE.pack(*each) for each in ranges)
        view = self.segment.view
        stream.send([memoryview(head), *(view[begin:end] for begin, end in ranges)])

    def wait_connected(self) -> None:
        """Return when all bytes that wait have a connection, or after ten seconds: an answer on a new one goes before
        the announcement, on an older one, that this member has left.
        """
        end = time.monotonic() + _CONNECT_WAIT
        for stream in list(self._streams.values()):
            if not stream.idle:
                stream.settled.wait(max(end - time.monotonic(), 0.0))

    def announce(self, reason: int) -> None:
        """Announce to the other machines that this member arrives at no more."""
        for stream in list(self._streams.values()):
            self._send(stream, _DEPARTURE, (), reason)

    def leave(self) -> None:
        """Leave the group, which the member has destroyed. Return when all bytes are on their way."""
        self._shared.remove(self)

    # Receiving: in the thread of the streams.

    def receive(self, identity: str, frame: tuple[Any, ...]) -> Buffers:
        """The memory for the bytes that follow a frame of a process; then the frame takes effect."""
        _, kind, member, count, *numbers = frame
        if member >= len(self._peers) or self._peers[member].identity != identity:
            raise StreamError("sends bytes that are another member's")
        low, high = self._writable(kind, member)
        ranges = bytearray(count * _RANGE.size)
        if count:
            yield memoryview(ranges)
        for begin, end in list(_RANGE.iter_unpack(ranges)):
            if not low <= begin < end <= high:
                raise StreamError("sends bytes to a place that is not its own")
            yield self.segment.view[begin:end]
        self._apply(kind, member, *numbers)

    def _writable(self, kind: int, member: int) -> Range:
        """The range in which a member may write."""
        layout = self.segment.layout
        if kind == _ROUND:
            return layout.digests, layout.links
        if kind == _LINK:
            return layout.link_begin(member, self._me), layout.link_begin(member, self._me + 1)
        return 0, 0

    def _apply(self, kind: int, member: int, first: int, *more: int) -> None:
        segment, layout = self.segment, self.segment.layout
        if kind == _ROUND:
            segment.arrive(member, first)
        elif kind == _LINK:
            there, back = layout.link(member, self._me), layout.link(self._me, member)
            counters = (there.written, there.bulk_written, back.consumed, back.bulk_consumed)
            for at, value in zip(counters, (first, *more), strict=True):
                segment.count(at).value = value
            futex.add_and_wake(segment.address + layout.doorbell(self._me))
        elif kind == _DEPARTURE:
            self._departures[member] = first
            if member in self._relayed:
                segment.mark_departed(member, first)

    def on_end(self, identity: str) -> None:
        """Mark the members whose rows came by the stream of a process, which has ended, as departed."""
        for member in self._relayed:
            if self._peers and self._peers[member].identity == identity:
                self.segment.mark_departed(member, DISCONNECTED)

    # For messages.

    def departure(self, member: int) -> str:
        """The reason why no message of a member of another machine comes any more; empty if one may."""
        streams, identity = self._shared.streams, self._peers[member].identity
        marked = self.segment.departure(member)
        if streams.connections[identity]:
            announced = self._departures.get(member, 0)
            return self.segment.departure_text(member, announced)
        if marked:
            return marked
        if identity in streams.ended or self._stream(member).reason:
            return self.segment.departure_text(member, DISCONNECTED)
        return ""


class _SharedStreams:
    """The transports of this process by their group, and the streams that serve all of them."""

    _instance: _SharedStreams | None = None
    _ends_with_process = False
    _lock = threading.Lock()

    def __init__(self, address: str) -> None:
        self.transports: dict[bytes, InterMachineTransport] = {}
        self.users = 0
        self.streams = Streams(address, self._receive, self._on_end)

    @classmethod
    def join(cls, segment: SharedSegment) -> _SharedStreams:
        """Return the one of this process, for one more group. The first group makes it."""
        with cls._lock:
            if cls._instance is None:
                cls._instance = cls(own_address(segment.store))
                if not cls._ends_with_process:
                    cls._ends_with_process = True
                    ending.at_last(_at_exit)
                    if multiprocessing.parent_process() is not None:  # it calls no exit handlers
                        multiprocessing.util.Finalize(None, _at_exit, exitpriority=0)
            cls._instance.users += 1
            return cls._instance

    def remove(self, transport: InterMachineTransport) -> None:
        """Leave a group; the last one closes the streams."""
        self.transports.pop(transport.key, None)
        with self._lock:
            self.users -= 1
            last = not self.users
            if last:
                _SharedStreams._instance = None
        if last:
            self.streams.close()

    def _receive(self, identity: str) -> Buffers:
        head = bytearray(_FRAME.size)
        while True:
            yield memoryview(head)
            frame = _FRAME.unpack(head)
            transport = self.transports.get(frame[0])
            if transport is not None:
                yield from transport.receive(identity, frame)
            else:
                yield from _skip(frame[3])

    def _on_end(self, identity: str) -> None:
        for transport in list(self.transports.values()):
            transport.on_end(identity)


def _skip(count: int) -> Buffers:
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
    target = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "") or socket.gethostname()
    try:
        for family, kind, _, _, there in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing
                return str(probe.getsockname()[0])
    except OSError:
        pass
    raise BackendError(
        f"ranks of several machines connect to the address by which each reaches {target}, and there is no way to it. "
        "Set MASTER_ADDR to an address of rank 0's machine that all reach"
    )


def _after_fork() -> None:
    shared, _SharedStreams._instance, _SharedStreams._lock = (
        _SharedStreams._instance,
        None,
        threading.Lock(),
    )
    _SharedStreams._ends_with_process = (
        False  # a process of multiprocessing forgets the exit handlers of its parent
    )
    if shared is not None:
        shared.streams.close_after_fork()


def _at_exit() -> None:
    if _SharedStreams._instance is not None:
        _SharedStreams._instance.streams.close()


os.register_at_fork(after_in_child=_after_fork)
