"""Messages between the ranks of one pipeline, over a process group that nobody else uses.

A message begins in an *envelope* of fixed size, which can be received from any member without knowing
what comes; what does not fit follows in a second tensor of exact size. So most messages are one.

Note [Nothing is left in flight]

A microbatch is in one place at a time. When a message of a microbatch comes in, whatever this rank has
sent on its behalf has been taken: waiting for those sends then does not block. The last sends of a
step are waited for when the step ends, when every member has taken them. A receive is posted only
while a message is sure to come.

Note [What has come can be seen]

A receive of Gloo's says that it is complete only once it has been waited for. Its bytes are written in
order, by a thread of Gloo's own, straight into the envelope: when the last of them have changed, the
message is there.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.execution.remote import packets
from smp_core.torch.execution.remote.packets import Frozen, Parcel
from smp_core.transport.protocols import Group

ENVELOPE = 4096  # bytes
_ENVELOPES, _RESTS = 0, 1  # tags
_WRITE_IN_PLACE = ("gloo",)  # see Note [What has come can be seen]
_STRIDE = 0x9E3779B97F4A7C15  # odd: values recur after 2**64 envelopes
_TAIL = struct.Struct("=Q")  # the last bytes of an envelope


class Transport:
    """One rank's side. Ranks are pp ranks."""

    def __init__(self, runtime: Runtime) -> None:
        ranks = runtime.group(GroupKind.PP).ranks
        self.rank, self.size = ranks.index(runtime.rank), len(ranks)
        self._group: Any = runtime.fabric.process_group(Group("smp pipeline", ranks))
        self._sent: dict[int | None, list[tuple[Any, Any]]] = {}
        self._posted: tuple[Any, torch.Tensor] | None = None
        self._sees = self._group.name() in _WRITE_IN_PLACE
        self._unlikely = 0  # what the last bytes of the posted envelope are before it comes
        self.messages = self.bytes = 0  # sent so far

    def send(self, to: int, message: Any, frozen: Frozen, microbatch: int | None) -> None:
        """Send; returns at once."""
        buffer = packets.encode(self.rank, message, frozen, ENVELOPE)
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
        """A message is sure to come: be ready for it."""
        if self._posted is None:
            envelope = torch.empty(ENVELOPE, dtype=torch.uint8)
            if self._sees:
                self._unlikely = (self._unlikely + _STRIDE) % 2**64
                _TAIL.pack_into(_memory(envelope), ENVELOPE - _TAIL.size, self._unlikely)
            work = self._group.recv_anysource([envelope], _ENVELOPES)
            self._posted = work, envelope

    def arrived(self) -> bool:
        """Whether ``receive`` would not block. May say no wrongly."""
        if self._posted is None:
            return False
        work, envelope = self._posted
        if self._sees:
            (tail,) = _TAIL.unpack_from(_memory(envelope), ENVELOPE - _TAIL.size)
            return bool(tail != self._unlikely)
        return bool(work.is_completed())

    def receive(self) -> tuple[int, Any, Parcel]:
        """The next message: who sent it, the message, and what came with it."""
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
        message, parcel = packets.decode(buffer)
        return sender, message, parcel

    def taken(self, microbatch: int | None) -> None:
        """What was sent on behalf of a microbatch has been taken; see Note [Nothing is left in
        flight].
        """
        for work, _ in self._sent.pop(microbatch, ()):
            work.wait()

    def settle(self) -> None:
        """At the end of a step: every send has been taken, or is about to be."""
        for microbatch in list(self._sent):
            self.taken(microbatch)


def _memory(envelope: torch.Tensor) -> memoryview:
    array: Any = envelope.numpy()
    return memoryview(array)
