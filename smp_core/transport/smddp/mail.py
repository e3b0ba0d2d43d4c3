"""Messages of one group: from each member to each other, a ring of packets and two pieces of bulk.

A sender writes a SEND packet, with the payload if that is short. The receiver takes packets off the ring as they come,
matches them with its receives, in the order of sending and of posting, and answers with a TAKE packet. A long
payload is written only then, piece by piece. A send is done when a receive has taken it.
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
from smp_core.transport.smddp.courier import Courier
from smp_core.transport.smddp.flat import Target, read
from smp_core.transport.smddp.progress import ALL
from smp_core.transport.smddp.segment import BULK, CELL, CELLS, FAILED, PIECES, SharedSegment
from smp_core.transport.unseen import unseen

_PACKET = struct.Struct("<BBqQQ")  # kind, bytes of the note, tag, number, bytes of the payload
_SEND, _TAKE = range(2)
_NOTE = 95  # bytes: the packet's head ends at 128
_HEAD = 128
INLINE = CELL - _HEAD  # bytes of a payload that travels with its packet


def _note(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')}"


class OutboundMessage:
    """A message of this member."""

    def __init__(self, peer: int, tag: int, tensor: torch.Tensor) -> None:
        self.peer, self.tag, self.note = peer, tag, _note(tensor)
        self.payload = read([tensor])
        self.written = 0
        self.done = False
        self.error: Exception | None = None


class InboundMessage:
    """A posted receive. ``source``: the member whose message it took, once known."""

    def __init__(self, peer: Source, tag: int, tensor: torch.Tensor) -> None:
        self.peer, self.tag, self.note = peer, tag, _note(tensor)
        self.target = Target([tensor])
        self.came = 0
        self.source = -1
        self.long = False
        self.done = False
        self.error: Exception | None = None

    def fits(self, packet: _Packet) -> bool:
        """Return whether the receive may take this message."""
        return self.peer in (ANY, packet.source) and self.tag == packet.tag


class _Packet:
    """A message that has come and that no receive has taken."""

    def __init__(
        self, source: int, tag: int, number: int, count: int, note: str, data: Any
    ) -> None:
        self.source, self.tag, self.number, self.count = source, tag, number, count
        self.note, self.data = note, data


class _Road:
    """The ring and the bulk from one member to another, seen from either end."""

    def __init__(self, segment: SharedSegment, source: int, dest: int) -> None:
        at = segment.layout.road(source, dest)
        self.wrote, self.taken, self.bulk_wrote, self.bulk_taken = (
            segment.count(at + line * 64) for line in range(4)
        )
        at += 256
        self.first_cell = at
        cells = segment.bytes[at : at + CELLS * CELL]
        self.cells = list(cells.reshape(CELLS, CELL))
        at += CELLS * CELL
        self.first_piece = at
        self.pieces = list(segment.bytes[at : at + PIECES * BULK].reshape(PIECES, BULK))


class Mail:
    """The messages of one group, on one member."""

    def __init__(
        self,
        segment: SharedSegment,
        name: str,
        ranks: Sequence[int],
        courier: Courier | None,
    ) -> None:
        self.segment, self._name, self._ranks = segment, name, ranks
        self._courier = courier
        # Cells and pieces for members on other machines that the courier does not know of.
        self._written: dict[int, list[tuple[int, int]]] = {member: [] for member in segment.far}
        me, members = segment.me, range(segment.size)
        self._to = [_Road(segment, me, member) for member in members]
        self._from = [_Road(segment, member, me) for member in members]
        self._bell = segment.word(segment.layout.bells + me * 64)
        self._bells = [segment.address + segment.layout.bells + member * 64 for member in members]
        self._me = me
        self._packets: list[deque[tuple[Any, ...]]] = [deque() for _ in members]  # to be written
        self._sends: dict[int, OutboundMessage] = {}  # by number: not taken yet
        self._granted: list[deque[OutboundMessage]] = [
            deque() for _ in members
        ]  # to be written, long
        self._posted: list[InboundMessage] = []
        self._arrived: list[_Packet] = []
        self._coming: list[deque[InboundMessage]] = [deque() for _ in members]  # to be read, long
        self._numbers = itertools.count()
        self._touched: set[int] = set()

    def send(self, send: OutboundMessage) -> None:
        """Issue a send."""
        if self._refuses(send):
            return
        number = next(self._numbers)
        self._sends[number] = send
        data = send.payload if send.payload.size <= INLINE else None
        self._packets[send.peer].append(
            (_SEND, send.tag, number, send.payload.size, send.note, data, None)
        )

    def receive(self, receive: InboundMessage) -> None:
        """Post a receive."""
        if self._refuses(receive):
            return
        packet = next((each for each in self._arrived if receive.fits(each)), None)
        if packet is None:
            self._posted.append(receive)
        else:
            self._arrived.remove(packet)
            self._match(receive, packet)

    def _refuses(self, operation: OutboundMessage | InboundMessage) -> bool:
        if self.segment.broken:
            operation.error = dist.DistBackendError(self.segment.broken)
            operation.done = True
        return operation.done

    # Progress.

    @unseen
    def move(self, steps: int = ALL) -> list[futex.Word] | None:
        """See ProgressChannel. A step looks at each member once."""
        try:
            return self._take_steps(steps)
        except BaseException as error:
            self._break(self.segment.fail(error, self._name))
            if self._courier is not None:
                self._courier.tell(FAILED)
            if not isinstance(error, Exception):
                raise
            return []

    def _take_steps(self, steps: int) -> list[futex.Word] | None:
        for _ in range(steps):
            seen = self._bell.value
            moved = False
            for member in range(self.segment.size):
                moved |= self._move(member)
            for member in self._touched:
                self._tell(member)
            self._touched.clear()
            if not moved:
                return [(self._bells[self._me], seen)] if self._pending() else []
        return None

    def _tell(self, member: int) -> None:
        """Something was written for a member, or taken from it."""
        if self._courier is None or member not in self._written:
            futex.add_and_wake(self._bells[member])
            return
        out, road, written = self._to[member], self._from[member], self._written[member]
        counts = (out.wrote, out.bulk_wrote, road.taken, road.bulk_taken)
        self._courier.ship_mail(member, written, [count.value for count in counts])
        written.clear()

    def _pending(self) -> bool:
        return bool(
            self._sends
            or self._posted
            or any(self._packets)
            or any(self._granted)
            or any(self._coming)
        )

    def _move(self, member: int) -> bool:
        moved, out, road = False, self._to[member], self._from[member]
        while self._packets[member] and out.wrote.value - out.taken.value < CELLS:
            *packet, receive = self._packets[member].popleft()
            self._write(member, out, *packet)
            if receive is not None:
                self._answered(receive)
            moved = True
        while road.taken.value < road.wrote.value:
            self._take(member, road)
            moved = True
        granted = self._granted[member]
        while granted and out.bulk_wrote.value - out.bulk_taken.value < PIECES:
            send = granted[0]
            piece = send.payload[send.written : send.written + BULK]
            number = out.bulk_wrote.value % PIECES
            out.pieces[number][: piece.size] = piece
            self._note_written(member, out.first_piece + number * BULK, piece.size)
            out.bulk_wrote.value += 1
            send.written += piece.size
            if send.written == send.payload.size:
                granted.popleft().done = True
            moved = True
        coming = self._coming[member]
        while coming and road.bulk_taken.value < road.bulk_wrote.value:
            receive = coming[0]
            place = receive.target.bytes[receive.came : receive.came + BULK]
            place[:] = road.pieces[road.bulk_taken.value % PIECES][: place.size]
            road.bulk_taken.value += 1
            receive.came += place.size
            if receive.came == receive.target.bytes.size:
                coming.popleft()
                self._finish(receive)
                receive.done = True
            moved = True
        if moved:
            self._touched.add(member)
        return moved

    def _note_written(self, member: int, at: int, count: int) -> None:
        if member in self._written:
            self._written[member].append((at, at + count))

    def _write(
        self,
        member: int,
        road: _Road,
        kind: int,
        tag: int,
        number: int,
        count: int,
        note: str,
        data: Any,
    ) -> None:
        index = road.wrote.value % CELLS
        cell, text = road.cells[index], note.encode()[:_NOTE]
        _PACKET.pack_into(cell, 0, kind, len(text), tag, number, count)
        cell[_PACKET.size : _PACKET.size + len(text)] = np.frombuffer(text, np.uint8)
        if data is not None:
            cell[_HEAD : _HEAD + count] = data
        used = _HEAD if data is None else _HEAD + count
        self._note_written(member, road.first_cell + index * CELL, used)
        road.wrote.value += 1

    def _take(self, member: int, road: _Road) -> None:
        cell = road.cells[road.taken.value % CELLS]
        kind, noted, tag, number, count = _PACKET.unpack_from(cell)
        note = cell[_PACKET.size : _PACKET.size + noted].tobytes().decode()
        data = cell[_HEAD : _HEAD + count].copy() if kind == _SEND and count <= INLINE else None
        road.taken.value += 1
        if kind == _TAKE:
            send = self._sends.pop(number, None)
            if (
                send is not None
            ):  # else it has its error: the receiver had left the group, or was taken for gone
                self._taken(member, send, note)
            return
        packet = _Packet(member, tag, number, count, note, data)
        receive = next((each for each in self._posted if each.fits(packet)), None)
        if receive is None:
            self._arrived.append(packet)
        else:
            self._posted.remove(receive)
            self._match(receive, packet)

    @staticmethod
    def _answered(receive: InboundMessage) -> None:
        """The sender is told, so it needs nothing more of this rank, which may turn to other things."""
        if not receive.long:  # a long one ends with its last piece, or has ended with its sender
            receive.done = True

    def _taken(self, member: int, send: OutboundMessage, note: str) -> None:
        """A receive has taken this member's message."""
        if note != send.note:
            send.error = self._mismatch(self._me, send.note, member, note)
        elif send.payload.size > INLINE:
            self._granted[member].append(send)
            return
        send.done = True

    def _match(self, receive: InboundMessage, packet: _Packet) -> None:
        receive.source = packet.source
        self._packets[packet.source].append(
            (_TAKE, packet.tag, packet.number, 0, receive.note, None, receive)
        )
        if receive.note != packet.note:
            receive.error = self._mismatch(packet.source, packet.note, self._me, receive.note)
        elif packet.data is None:
            self._coming[packet.source].append(receive)
            receive.long = True
        else:
            receive.target.bytes[:] = packet.data
            self._finish(receive)

    @staticmethod
    def _finish(receive: InboundMessage) -> None:
        """All bytes have come: an error of the output is the receive's alone."""
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

    def _gone(self, member: int) -> str:
        if self._courier is None or member not in self._written:
            return self.segment.gone(member)
        return self._courier.gone(member) if self._awaits(member) else ""

    def _awaits(self, member: int) -> bool:
        """Return whether an operation may wait for this member."""
        return (
            any(send.peer == member for send in self._sends.values())
            or any(receive.peer in (ANY, member) for receive in self._posted)
            or bool(self._granted[member] or self._coming[member] or self._packets[member])
        )

    def check(self) -> None:
        """See ProgressChannel."""
        if self.segment.broken:
            self._break(dist.DistBackendError(self.segment.broken))
            return
        size = self.segment.size
        gone = {member: why for member in range(size) if (why := self._gone(member))}
        if not gone:
            return
        self.move()  # a member may have sent before it ended
        others = set(range(size)) - {self._me}
        waiting: list[tuple[OutboundMessage | InboundMessage, set[int]]] = [
            (send, {send.peer})
            for send in [*self._sends.values(), *itertools.chain(*self._granted)]
        ]
        for receive in [*self._posted, *itertools.chain(*self._coming)]:
            peer = receive.peer if receive.source < 0 else receive.source
            waiting.append((receive, others if peer is ANY else {peer}))
        for operation, peers in waiting:
            if peers and peers <= gone.keys():
                verb = "send to" if isinstance(operation, OutboundMessage) else "recv from"
                who = "; ".join(
                    f"rank {self._ranks[member]}: {gone[member]}" for member in sorted(peers)
                )
                operation.error = dist.DistBackendError(
                    f"{verb} a member of group {self._name} cannot end: {who}"
                )
                operation.done = True
        self._sends = {number: each for number, each in self._sends.items() if not each.done}
        self._posted = [each for each in self._posted if not each.done]
        self._granted = [deque(each for each in queue if not each.done) for queue in self._granted]
        self._coming = [deque(each for each in queue if not each.done) for queue in self._coming]
        for member in gone:
            for *_, answered in self._packets[member]:
                if answered is not None:
                    self._answered(answered)
            self._packets[member].clear()

    def _break(self, error: Exception) -> None:
        """No message of this member can end any more."""
        operations = [*self._sends.values(), *itertools.chain(*self._granted), *self._posted]
        answered = [packet[-1] for packet in itertools.chain(*self._packets) if packet[-1]]
        for operation in [*operations, *itertools.chain(*self._coming), *answered]:
            operation.error, operation.done = operation.error or error, True
        self._sends.clear()
        self._posted.clear()
        for member in range(self.segment.size):
            self._granted[member].clear()
            self._packets[member].clear()
            self._coming[member].clear()
