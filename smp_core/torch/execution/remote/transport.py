"""Messages between the ranks of one pipeline, over a process group of their own.

A message begins in an *envelope* of fixed size, so a rank can receive from any member without knowing the size of the
message. A message that does not fit continues in a second tensor of exact size. Most messages are one tensor.

Note [Nothing is left in flight]

A microbatch is in one place at a time. A message that comes in for a microbatch therefore proves that the receivers
have taken all that this rank has sent for it, and waiting for those sends does not block. The last sends of a step
are waited for at the end of the step, when every member has taken them. A receive is posted only while a message is
sure to come.

Note [Arrival is visible in the envelope]

Gloo reports a receive as complete only after a wait. A thread of Gloo's own writes the bytes into the envelope, in
order. Once the last bytes of the envelope have changed, the whole envelope is there.
"""

from __future__ import annotations

import struct

import torch
from torch.distributed import ProcessGroup, Work

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.execution.remote import packets
from smp_core.torch.execution.remote.messages import Message
from smp_core.torch.execution.remote.packets import OutgoingPayload, ReceivedPayload
from smp_core.transport.protocols import Group

ENVELOPE = 4096  # bytes
_ENVELOPES, _RESTS = 0, 1  # tags
_WRITE_IN_PLACE = ("gloo",)  # see Note [Arrival is visible in the envelope]
_STRIDE = 0x9E3779B97F4A7C15  # odd, so marks recur only after 2**64 envelopes
_TAIL = struct.Struct("=Q")  # the last bytes of an envelope


class Transport:
    """One rank's end of the pipeline's messages. Ranks are pp ranks."""

    def __init__(self, runtime: Runtime) -> None:
        ranks = runtime.group(GroupKind.PP).ranks
        self.rank, self.size = ranks.index(runtime.rank), len(ranks)
        self._group: ProcessGroup = runtime.fabric.process_group(Group("smp pipeline", ranks))
        self._sent: dict[int | None, list[tuple[Work, torch.Tensor]]] = {}
        self._posted: tuple[Work, torch.Tensor] | None = None
        self._sees = self._group.name() in _WRITE_IN_PLACE
        self._mark = 0  # the last bytes of the posted envelope until a message overwrites them
        self.messages = self.bytes = 0  # sent so far

    def send(
        self, to: int, message: Message, payload: OutgoingPayload, microbatch: int | None
    ) -> None:
        """Send a message and its payload; returns at once."""
        buffer = packets.encode(self.rank, message, payload, ENVELOPE)
        works = self._sent.setdefault(microbatch, [])
        envelope = buffer[:ENVELOPE]
        works.append((self._group.send([envelope], to, _ENVELOPES), envelope))
        self.messages += 1
        if len(buffer) > ENVELOPE:
            rest = buffer[ENVELOPE:]
            works.append((self._group.send([rest], to, _RESTS), rest))
            self.messages += 1
        self.bytes += len(buffer)

    def expect(self) -> None:
        """Post a receive, if none is posted. Call it only while a message is sure to come."""
        if self._posted is None:
            envelope = torch.empty(ENVELOPE, dtype=torch.uint8)
            if self._sees:
                self._mark = (self._mark + _STRIDE) % 2**64
                _TAIL.pack_into(packets.bytes_of(envelope), ENVELOPE - _TAIL.size, self._mark)
            work = self._group.recv_anysource([envelope], _ENVELOPES)
            self._posted = work, envelope

    def arrived(self) -> bool:
        """Return whether ``receive`` would return at once. May be False although a message has come."""
        if self._posted is None:
            return False
        work, envelope = self._posted
        if self._sees:
            (tail,) = _TAIL.unpack_from(packets.bytes_of(envelope), ENVELOPE - _TAIL.size)
            # A message may end in the mark by chance: it is then received where nothing else is left to do.
            return bool(tail != self._mark)
        return bool(work.is_completed())

    def receive(self) -> tuple[int, Message, ReceivedPayload]:
        """Wait for the next message. Returns its sender, the message, and its payload."""
        self.expect()
        assert self._posted is not None
        work, buffer = self._posted
        work.wait()
        self._posted = None
        total, sender = packets.beginning(buffer)
        if total > ENVELOPE:
            envelope, buffer = buffer, torch.empty(total, dtype=torch.uint8)
            buffer[:ENVELOPE] = envelope
            self._group.recv([buffer[ENVELOPE:]], sender, _RESTS).wait()
        message, received = packets.decode(buffer)
        return sender, message, received

    def taken(self, microbatch: int | None) -> None:
        """Complete the sends of a microbatch, which their receivers have taken.

        See Note [Nothing is left in flight].
        """
        for work, _ in self._sent.pop(microbatch, ()):
            work.wait()

    def settle(self) -> None:
        """Complete all sends at the end of a step, when every receiver has taken them or is about to."""
        for microbatch in list(self._sent):
            self.taken(microbatch)
