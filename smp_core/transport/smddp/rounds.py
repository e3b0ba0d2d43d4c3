"""Collective operations of one group, as rounds: in a round each member writes, then all read.

Note [One wait in a round]: the members write into the round's slot and count themselves in one word; the last one
wakes the others. Nobody says that it has read. Instead a member takes part in round k only when
it has read round k - SLOTS / 2. So if all have come to round k, all have read round k - SLOTS / 2, whose slot is
written again in round k + SLOTS / 2, by members that have read round k.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from torch import distributed as dist

from smp_core.errors import CollectiveMismatchError, UnsupportedError
from smp_core.transport import messages
from smp_core.transport.checked_group import Fields
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.smddp import futex
from smp_core.transport.smddp.segment import DIGEST, HEAD, LARGEST, SLOTS, Segment
from smp_core.transport.unseen import unseen

_AHEAD = SLOTS // 2
_LENGTH = struct.Struct("<I")
_WRAP = 2**32

# The steps of an operation: each part up to a ``yield`` writes one round, and what follows reads it. The value
# says whether this is surely the operation's last round.
Steps = Generator[bool, None, None]


@functools.lru_cache(maxsize=4096)
def _described(operation: str, fields: Fields, sizes: Any) -> tuple[bytes, bytes]:
    """A digest of the part of a call that all members make alike, and one of its sizes; and both as text."""
    call = json.dumps([operation, fields]).encode()
    told = b"" if sizes is None else json.dumps(sizes).encode()
    digest = b"".join(
        hashlib.blake2b(each, digest_size=DIGEST // 2).digest() for each in (call, told)
    )
    head = call + b"\n" + told
    if sizes is not None and len(head) > HEAD - _LENGTH.size:
        raise UnsupportedError(
            f"{operation}: the sizes of its tensors take {len(head)} bytes to write down, and there are "
            f"{HEAD - _LENGTH.size}. Gather fewer tensors in one call"
        )
    return digest, head[: HEAD - _LENGTH.size]


class RoundsOperation:
    """One member's part in a collective call.

    ``sizes`` are told to the other members, which find them in ``Rounds.told``: any JSON.
    """

    __slots__ = ("digest", "done", "error", "final", "first", "head", "steps")

    def __init__(self, operation: str, fields: Fields, steps: Steps, sizes: Any = None) -> None:
        self.digest, self.head = _described(operation, fields, sizes)
        self.steps = steps
        self.done, self.final, self.first = False, False, True
        self.error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """The operation ends here."""
        self.steps.close()
        self.error, self.done = error, True


class Rounds:
    """The collective calls of one group, on one member."""

    def __init__(self, segment: Segment, name: str, ranks: Sequence[int]) -> None:
        layout, me, size = segment.layout, segment.me, segment.size
        self.segment, self._name, self._ranks = segment, name, ranks
        self.me, self.size = me, size
        self._view = segment.view
        self._arrived = [segment.word(layout.arrived + slot * 64) for slot in range(SLOTS)]
        self._addresses = [segment.address + layout.arrived + slot * 64 for slot in range(SLOTS)]
        self._idle = segment.address + layout.idle
        self._count = segment.rounds()
        data = segment.bytes[layout.data : layout.data + SLOTS * size * LARGEST]
        self._slots = list(data.reshape(SLOTS, size, LARGEST))
        self._own = [slot[me] for slot in self._slots]
        self._posted = self._read = 0
        self._flight: deque[RoundsOperation] = deque()  # have a round that they have not read
        self._queue: deque[RoundsOperation] = deque()  # have not begun
        self._calls = 0
        self.alike = False  # whether all members have told the same sizes of the call in this round
        self._broken: Exception | None = None

    # For the steps of operations.

    def own(self) -> Any:
        """The bytes that this member writes in the round that begins."""
        return self._own[self._posted % SLOTS]

    def slot(self) -> Any:
        """All bytes of the round that begins, for an operation in which one member writes for all."""
        return self._slots[self._posted % SLOTS]

    def came(self) -> Any:
        """The bytes of all members, a row for each, of the round that is complete."""
        return self._slots[self._read % SLOTS]

    def told(self) -> list[Any]:
        """The ``sizes`` of all members; in the step that reads an operation's first round."""
        heads = [self._head(member).partition("\n")[2] for member in range(self.size)]
        return [json.loads(head) for head in heads]

    # Progress.

    def begin(self, operation: RoundsOperation) -> None:
        """Issue an operation."""
        if self._broken is not None:
            operation.fail(self._broken)
            return
        self._queue.append(operation)

    @unseen
    def move(self) -> list[futex.Word]:
        """See ProgressChannel."""
        while True:
            if self._flight:
                slot = self._read % SLOTS
                target = self.size * (self._read // SLOTS + 1) % _WRAP
                seen = self._arrived[slot].value
                if seen == target:
                    self._complete(self._flight[0])
                    continue
            if (
                self._queue
                and (not self._flight or self._flight[-1].final)
                and self._posted - self._read < _AHEAD
            ):
                operation = self._queue.popleft()
                self._describe(operation)
                if self._step(operation):
                    self._flight.append(operation)
                continue
            return [(self._addresses[slot], seen)] if self._flight else []

    def _describe(self, operation: RoundsOperation) -> None:
        layout, slot = self.segment.layout, self._posted % SLOTS
        place = slot * self.size + self.me
        at = layout.digests + place * DIGEST
        self._view[at : at + DIGEST] = operation.digest
        at, head = layout.heads + place * HEAD, operation.head
        _LENGTH.pack_into(self._view, at, len(head))
        self._view[at + _LENGTH.size : at + _LENGTH.size + len(head)] = head

    def _head(self, member: int) -> str:
        at = self.segment.layout.heads + (self._read % SLOTS * self.size + member) * HEAD
        (count,) = _LENGTH.unpack_from(self._view, at)
        return bytes(self._view[at + _LENGTH.size : at + _LENGTH.size + count]).decode(
            errors="replace"
        )

    def _step(self, operation: RoundsOperation) -> bool:
        """Run the operation up to its next round, and take part in that. False if there is none."""
        try:
            operation.final = next(operation.steps)
        except StopIteration:
            operation.done = True
            return False
        except CollectiveMismatchError as error:
            operation.fail(error)
            return False
        slot = self._posted % SLOTS
        self._posted += 1
        self._count.value = self._posted
        futex.add_one(self._addresses[slot], self._idle)
        if self._arrived[slot].value == self.size * ((self._posted - 1) // SLOTS + 1) % _WRAP:
            futex.wake(self._addresses[slot])
        return True

    def _complete(self, operation: RoundsOperation) -> None:
        """All members have come to the oldest round: read it."""
        goes_on = False
        if operation.first:
            operation.first = False
            self._calls += 1
            if self._calls == 1:
                self.segment.release()  # all are here, so all have mapped the memory
            error = self._mismatch(operation)
            if error is not None:
                operation.fail(error)
        if not operation.done:
            goes_on = self._step(operation)
        self._read += 1
        if not goes_on:
            self._flight.popleft()

    def _mismatch(self, operation: RoundsOperation) -> CollectiveMismatchError | None:
        at = self.segment.layout.digests + self._read % SLOTS * self.size * DIGEST
        digests = self._view[at : at + self.size * DIGEST].tobytes()
        self.alike = digests == operation.digest * self.size
        calls = {digests[at : at + DIGEST // 2] for at in range(0, len(digests), DIGEST)}
        if self.alike or len(calls) == 1:
            return None
        heads = [self._head(member).partition("\n")[0] for member in range(self.size)]
        made = []
        try:
            descriptions = [json.loads(head) for head in heads]
            what = messages.differing(
                [(name, tuple(map(tuple, fields))) for name, fields in descriptions]
            )
            texts = [
                f"{name}({', '.join(f'{field}={value}' for field, value in fields)})"
                for name, fields in descriptions
            ]
        except ValueError:  # a description that was cut
            what, texts = "arguments", heads
        made = [(rank, text, None) for rank, text in zip(self._ranks, texts, strict=True)]
        return messages.mismatch(self._calls, self._name, what, made)

    def missing(self) -> str:
        """The members that the oldest operation waits for, in words."""
        absent = [self._ranks[member] for member in self.segment.absent(self._read)]
        return f"{ranks_text(absent)} did not come to it" if absent else ""

    def check(self) -> None:
        """See ProgressChannel."""
        if not self._flight:
            return
        absent = self.segment.absent(self._read)
        gone = {member: why for member, why in absent.items() if why}
        if not gone:
            return
        who = "; ".join(f"rank {self._ranks[member]}: {why}" for member, why in gone.items())
        error = dist.DistBackendError(
            f"call {self._calls + 1} on group {self._name} cannot end: {who}"
        )
        self._broken = error
        for operation in [*self._flight, *self._queue]:
            operation.fail(error)
        self._flight.clear()
        self._queue.clear()
