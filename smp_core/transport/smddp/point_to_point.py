"""Messages of one group: each pair of members has a link in each direction, a ring of packets and two pieces of bulk.

A sender writes a SEND packet, with the payload if that is short (eager). The receiver takes packets off the ring as
they come, matches them with its receives, in the order of sending and of posting, and answers with an ACK packet. A
long payload is written only then, piece by piece (rendezvous). A send is done when a receive has matched it.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from smp_core.transport import messages
from smp_core.transport.peers import ANY, Source
from smp_core.transport.smddp import futex
from smp_core.transport.smddp.flat import Target, read
from smp_core.transport.smddp.inter_machine import InterMachineTransport
from smp_core.transport.smddp.progress import ALL
from smp_core.transport.smddp.segment import (
    FAILED,
    PACKET_BYTES,
    PACKET_SLOTS,
    PIECE_BYTES,
    PIECE_SLOTS,
    SharedSegment,
)
from smp_core.transport.unseen import unseen

_PACKET = struct.Struct("<BBqQQ")  # kind, bytes of the signature, tag, number, bytes of the payload
_SEND, _ACK = range(2)
_HEADER_BYTES = 128
_SIGNATURE_BYTES = 95  # at most: the rest of the header
EAGER_BYTES = PACKET_BYTES - _HEADER_BYTES  # of a payload that travels with its packet


def _signature(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')}"


class OutboundMessage:
    """A message of this member."""

    def __init__(self, peer: int, tag: int, tensor: torch.Tensor) -> None:
        self.peer, self.tag, self.signature = peer, tag, _signature(tensor)
        self.payload = read([tensor])
        self.written = 0
        self.done = False
        self.error: Exception | None = None


class InboundMessage:
    """A posted receive. ``source``: the member whose message has matched it, once known."""

    def __init__(self, peer: Source, tag: int, tensor: torch.Tensor) -> None:
        self.peer, self.tag, self.signature = peer, tag, _signature(tensor)
        self.target = Target([tensor])
        self.received = 0
        self.source = -1
        self.long = False
        self.done = False
        self.error: Exception | None = None

    def matches(self, packet: _Packet) -> bool:
        """Return whether the receive may take this message."""
        return self.peer in (ANY, packet.source) and self.tag == packet.tag


class _Packet:
    """The head of a message that has come, with its payload if that is short."""

    def __init__(
        self, source: int, tag: int, number: int, count: int, signature: str, data: Any
    ) -> None:
        self.source, self.tag, self.number, self.count = source, tag, number, count
        self.signature, self.data = signature, data


class _Link:
    """The link from one member to another, as either of them uses it."""

    def __init__(self, segment: SharedSegment, source: int, dest: int) -> None:
        self.layout = segment.layout.link(source, dest)
        self.written = segment.count(self.layout.written)
        self.consumed = segment.count(self.layout.consumed)
        self.bulk_written = segment.count(self.layout.bulk_written)
        self.bulk_consumed = segment.count(self.layout.bulk_consumed)
        self.ring = _split(segment, self.layout.packets, PACKET_SLOTS, PACKET_BYTES)
        self.pieces = _split(segment, self.layout.pieces, PIECE_SLOTS, PIECE_BYTES)


def _split(segment: SharedSegment, begin: int, count: int, size: int) -> list[Any]:
    """So many consecutive arrays of so many bytes."""
    return list(segment.bytes[begin : begin + count * size].reshape(count, size))


class PointToPoint:
    """The messages of one group, on one member."""

    def __init__(
        self,
        segment: SharedSegment,
        name: str,
        ranks: Sequence[int],
        inter_machine: InterMachineTransport | None,
    ) -> None:
        self.segment, self._name, self._ranks = segment, name, ranks
        self._inter_machine = inter_machine
        # The ranges of packets and pieces for members on other machines that are not sent yet.
        self._written: dict[int, list[tuple[int, int]]] = {member: [] for member in segment.remote}
        me, members = segment.me, range(segment.size)
        self._to = [_Link(segment, me, member) for member in members]
        self._from = [_Link(segment, member, me) for member in members]
        doorbells = [segment.layout.doorbell(member) for member in members]
        self._doorbell = segment.word(doorbells[me])
        self._doorbells = [segment.address + each for each in doorbells]
        self._me = me
        self._packets: list[deque[tuple[Any, ...]]] = [deque() for _ in members]  # to be written
        self._sends: dict[int, OutboundMessage] = {}  # by number: not matched yet
        self._granted: list[deque[OutboundMessage]] = [
            deque() for _ in members
        ]  # to be written, long
        self._posted: list[InboundMessage] = []
        self._unexpected: list[_Packet] = []
        self._incoming: list[deque[InboundMessage]] = [deque() for _ in members]  # to be read, long
        self._numbers = itertools.count()
        self._to_notify: set[int] = set()

    def send(self, send: OutboundMessage) -> None:
        """Issue a send."""
        if self._refuses(send):
            return
        number = next(self._numbers)
        self._sends[number] = send
        data = send.payload if send.payload.size <= EAGER_BYTES else None
        self._packets[send.peer].append(
            (_SEND, send.tag, number, send.payload.size, send.signature, data, None)
        )

    def receive(self, receive: InboundMessage) -> None:
        """Post a receive."""
        if self._refuses(receive):
            return
        packet = next((each for each in self._unexpected if receive.matches(each)), None)
        if packet is None:
            self._posted.append(receive)
        else:
            self._unexpected.remove(packet)
            self._match(receive, packet)

    def _refuses(self, operation: OutboundMessage | InboundMessage) -> bool:
        if self.segment.broken:
            operation.error = dist.DistBackendError(self.segment.broken)
            operation.done = True
        return operation.done

    # Progress.

    @unseen
    def progress(self, steps: int = ALL) -> list[futex.Word] | None:
        """See ProgressChannel. A step polls the links of each member once."""
        try:
            return self._take_steps(steps)
        except BaseException as error:
            self._break(self.segment.fail(error, self._name))
            if self._inter_machine is not None:
                self._inter_machine.announce(FAILED)
            if not isinstance(error, Exception):
                raise
            return []

    def _take_steps(self, steps: int) -> list[futex.Word] | None:
        for _ in range(steps):
            seen = self._doorbell.value
            progressed = False
            for member in range(self.segment.size):
                progressed |= self._progress_member(member)
            for member in self._to_notify:
                self._notify(member)
            self._to_notify.clear()
            if not progressed:
                return [(self._doorbells[self._me], seen)] if self._pending() else []
        return None

    def _notify(self, member: int) -> None:
        """Wake a member for which something was written, or from which something was consumed."""
        if self._inter_machine is None or member not in self._written:
            futex.add_and_wake(self._doorbells[member])
            return
        out, link, written = self._to[member], self._from[member], self._written[member]
        counts = (out.written, out.bulk_written, link.consumed, link.bulk_consumed)
        self._inter_machine.send_link(member, written, [count.value for count in counts])
        written.clear()

    def _pending(self) -> bool:
        return bool(
            self._sends
            or self._posted
            or any(self._packets)
            or any(self._granted)
            or any(self._incoming)
        )

    def _progress_member(self, member: int) -> bool:
        progressed, out, link = False, self._to[member], self._from[member]
        while self._packets[member] and out.written.value - out.consumed.value < PACKET_SLOTS:
            *packet, receive = self._packets[member].popleft()
            self._write_packet(member, out, *packet)
            if receive is not None:
                self._on_ack_sent(receive)
            progressed = True
        while link.consumed.value < link.written.value:
            self._read_packet(member, link)
            progressed = True
        granted = self._granted[member]
        while granted and out.bulk_written.value - out.bulk_consumed.value < PIECE_SLOTS:
            send = granted[0]
            piece = send.payload[send.written : send.written + PIECE_BYTES]
            number = out.bulk_written.value % PIECE_SLOTS
            out.pieces[number][: piece.size] = piece
            self._note_for_remote(member, out.layout.pieces + number * PIECE_BYTES, piece.size)
            out.bulk_written.value += 1
            send.written += piece.size
            if send.written == send.payload.size:
                granted.popleft().done = True
            progressed = True
        incoming = self._incoming[member]
        while incoming and link.bulk_consumed.value < link.bulk_written.value:
            receive = incoming[0]
            place = receive.target.bytes[receive.received : receive.received + PIECE_BYTES]
            place[:] = link.pieces[link.bulk_consumed.value % PIECE_SLOTS][: place.size]
            link.bulk_consumed.value += 1
            receive.received += place.size
            if receive.received == receive.target.bytes.size:
                incoming.popleft()
                self._finish(receive)
                receive.done = True
            progressed = True
        if progressed:
            self._to_notify.add(member)
        return progressed

    def _note_for_remote(self, member: int, at: int, count: int) -> None:
        if member in self._written:
            self._written[member].append((at, at + count))

    def _write_packet(
        self,
        member: int,
        link: _Link,
        kind: int,
        tag: int,
        number: int,
        count: int,
        signature: str,
        data: Any,
    ) -> None:
        index = link.written.value % PACKET_SLOTS
        slot, text = link.ring[index], signature.encode()[:_SIGNATURE_BYTES]
        _PACKET.pack_into(slot, 0, kind, len(text), tag, number, count)
        slot[_PACKET.size : _PACKET.size + len(text)] = np.frombuffer(text, np.uint8)
        if data is not None:
            slot[_HEADER_BYTES : _HEADER_BYTES + count] = data
        used = _HEADER_BYTES if data is None else _HEADER_BYTES + count
        self._note_for_remote(member, link.layout.packets + index * PACKET_BYTES, used)
        link.written.value += 1

    def _read_packet(self, member: int, link: _Link) -> None:
        slot = link.ring[link.consumed.value % PACKET_SLOTS]
        kind, length, tag, number, count = _PACKET.unpack_from(slot)
        signature = slot[_PACKET.size : _PACKET.size + length].tobytes().decode()
        data = (
            slot[_HEADER_BYTES : _HEADER_BYTES + count].copy()
            if kind == _SEND and count <= EAGER_BYTES
            else None
        )
        link.consumed.value += 1
        if kind == _ACK:
            send = self._sends.pop(number, None)
            # Without a send: it has its error, because its receiver had left the group, or was taken for departed.
            if send is not None:
                self._on_ack(member, send, signature)
            return
        packet = _Packet(member, tag, number, count, signature, data)
        receive = next((each for each in self._posted if each.matches(packet)), None)
        if receive is None:
            self._unexpected.append(packet)
        else:
            self._posted.remove(receive)
            self._match(receive, packet)

    @staticmethod
    def _on_ack_sent(receive: InboundMessage) -> None:
        """End a receive whose sender has its answer, so that it needs nothing more of this rank."""
        if not receive.long:  # a long one ends with its last piece, or has ended with its sender
            receive.done = True

    def _on_ack(self, member: int, send: OutboundMessage, signature: str) -> None:
        """End a send, or begin with its pieces: a receive has matched it."""
        if signature != send.signature:
            send.error = self._mismatch(self._me, send.signature, member, signature)
        elif send.payload.size > EAGER_BYTES:
            self._granted[member].append(send)
            return
        send.done = True

    def _match(self, receive: InboundMessage, packet: _Packet) -> None:
        receive.source = packet.source
        self._packets[packet.source].append(
            (_ACK, packet.tag, packet.number, 0, receive.signature, None, receive)
        )
        if receive.signature != packet.signature:
            receive.error = self._mismatch(
                packet.source, packet.signature, self._me, receive.signature
            )
        elif packet.data is None:
            self._incoming[packet.source].append(receive)
            receive.long = True
        else:
            receive.target.bytes[:] = packet.data
            self._finish(receive)

    @staticmethod
    def _finish(receive: InboundMessage) -> None:
        """Write the output, all bytes of which have come. An error of the output is the receive's alone."""
        try:
            receive.target.finish()
        except Exception as error:
            receive.error = error

    def _mismatch(self, sender: int, sent: str, receiver: int, expected: str) -> Exception:
        what = "element count" if sent.split()[0] != expected.split()[0] else "dtype"
        return messages.post_mismatch(
            self._name,
            what,
            (self._ranks[sender], f"send of {sent}", None),
            (self._ranks[receiver], f"recv of {expected}", None),
        )

    def _departure(self, member: int) -> str:
        if self._inter_machine is None or member not in self._written:
            return self.segment.departure(member)
        return self._inter_machine.departure(member) if self._awaits(member) else ""

    def _awaits(self, member: int) -> bool:
        """Return whether an operation may wait for this member."""
        return (
            any(send.peer == member for send in self._sends.values())
            or any(receive.peer in (ANY, member) for receive in self._posted)
            or bool(self._granted[member] or self._incoming[member] or self._packets[member])
        )

    def check(self) -> None:
        """See ProgressChannel."""
        if self.segment.broken:
            self._break(dist.DistBackendError(self.segment.broken))
            return
        size = self.segment.size
        departures = {member: why for member in range(size) if (why := self._departure(member))}
        if not departures:
            return
        self.progress()  # a member may have sent before it ended
        others = set(range(size)) - {self._me}
        waiting: list[tuple[OutboundMessage | InboundMessage, set[int]]] = [
            (send, {send.peer})
            for send in [*self._sends.values(), *itertools.chain(*self._granted)]
        ]
        for receive in [*self._posted, *itertools.chain(*self._incoming)]:
            peer = receive.peer if receive.source < 0 else receive.source
            waiting.append((receive, others if peer is ANY else {peer}))
        for operation, peers in waiting:
            if peers and peers <= departures.keys():
                verb = "send to" if isinstance(operation, OutboundMessage) else "recv from"
                who = "; ".join(
                    f"rank {self._ranks[member]}: {departures[member]}" for member in sorted(peers)
                )
                operation.error = dist.DistBackendError(
                    f"{verb} a member of group {self._name} cannot end: {who}"
                )
                operation.done = True
        self._sends = {number: each for number, each in self._sends.items() if not each.done}
        self._posted = [each for each in self._posted if not each.done]
        self._granted = [deque(each for each in queue if not each.done) for queue in self._granted]
        self._incoming = [
            deque(each for each in queue if not each.done) for queue in self._incoming
        ]
        for member in departures:
            for *_, receive in self._packets[member]:
                if receive is not None:
                    self._on_ack_sent(receive)
            self._packets[member].clear()

    def _break(self, error: Exception) -> None:
        """End all messages of this member with an error: none can end any more."""
        operations = [*self._sends.values(), *itertools.chain(*self._granted), *self._posted]
        answered = [packet[-1] for packet in itertools.chain(*self._packets) if packet[-1]]
        for operation in [*operations, *itertools.chain(*self._incoming), *answered]:
            operation.error, operation.done = operation.error or error, True
        self._sends.clear()
        self._posted.clear()
        for member in range(self.segment.size):
            self._granted[member].clear()
            self._packets[member].clear()
            self._incoming[member].clear()
