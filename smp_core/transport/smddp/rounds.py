"""Collective operations of one group, as rounds: in a round each member writes, then all read.

Note [One wait in a round]: the members write into the round's slot and count themselves in one word; the last one
wakes the others. Nobody says that it has read. Instead a member takes part in round k only when
it has read round k - AHEAD. So if all have come to round k, all have read round k - AHEAD, whose slot is
written again in round k + AHEAD, by members that have read round k.

Note [Ahead]: a member that waits for others has written up to AHEAD rounds, so that one that wakes reads several. But
an operation comes to its second round only when the first was read, because calls that differ, which that shows, may
have different numbers of rounds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import distributed as dist

from smp_core.errors import CollectiveMismatchError, UnsupportedError
from smp_core.transport import messages
from smp_core.transport.checked_group import Fields
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.smddp import futex
from smp_core.transport.smddp.courier import Courier
from smp_core.transport.smddp.progress import ALL
from smp_core.transport.smddp.segment import DIGEST, FAILED, LARGEST, SLOTS, SharedSegment
from smp_core.transport.unseen import unseen

AHEAD = SLOTS // 2
_LENGTH = struct.Struct("<I")


Parts = Callable[[int, Sequence[int]], Iterable[tuple[int, int]]]


class Transfer:
    """The bytes that one member writes and reads in the rounds of an operation.

    Attributes:
        rounds: their number; at least one.
        known: whether the number stands; otherwise ``read`` of the first round sets it.
        write: called with the number of a round of the operation, and the bytes that this member writes.
        read: called with the number of a round that is complete, and the bytes of all members, a row for each.
            ``write`` of a round comes before ``read`` of it, and after ``read`` of that AHEAD before.
        parts: called with the number of a round that was written, and the members of another machine: where in the slot
            the bytes are that they read, as begins and ends.
        finish: called after the last round.
        ahead: rounds that may be written and not read, if fewer than AHEAD.
    """

    __slots__ = ("ahead", "finish", "known", "parts", "read", "rounds", "write")

    def __init__(
        self,
        write: Callable[[int, Any], None],
        read: Callable[[int, Any], None],
        rounds: int = 1,
        *,
        parts: Parts,
        known: bool = True,
    ) -> None:
        self.write, self.read, self.rounds, self.known = write, read, rounds, known
        self.parts = parts
        self.finish: Callable[[], None] | None = None
        self.ahead = AHEAD


@functools.lru_cache(maxsize=4096)
def _described(operation: str, fields: Fields, sizes: Any) -> tuple[bytes, bytes]:
    """A digest of the part of a call that all members make alike, and one of its sizes; and both as text."""
    call = json.dumps([operation, fields]).encode()
    told = b"" if sizes is None else json.dumps(sizes).encode()
    digest = b"".join(
        hashlib.blake2b(each, digest_size=DIGEST // 2).digest() for each in (call, told)
    )
    return digest, call + b"\n" + told


class RoundsOperation:
    """One member's part in a collective call.

    ``sizes`` are told to the other members, which find them in ``Rounds.told``: any JSON.
    """

    __slots__ = ("came", "digest", "done", "error", "head", "name", "sizes", "transfer", "written")

    def __init__(
        self, operation: str, fields: Fields, transfer: Transfer, sizes: Any = None
    ) -> None:
        self.name, self.sizes = operation, sizes
        self.digest, self.head = _described(operation, fields, sizes)
        self.transfer: Transfer | None = transfer
        self.written = self.came = 0  # its rounds that this member has come to, and has read
        self.done = False
        self.error: Exception | None = None

    def fail(self, error: Exception | None) -> None:
        """The operation ends here: its tensors are not held any longer."""
        self.error, self.done, self.transfer = error, True, None


class Rounds:
    """The collective calls of one group, on one member."""

    def __init__(
        self,
        segment: SharedSegment,
        name: str,
        ranks: Sequence[int],
        courier: Courier | None,
    ) -> None:
        layout, me, size = segment.layout, segment.me, segment.size
        self.segment, self._name, self.ranks = segment, name, ranks
        self._courier = courier
        self.me, self.size = me, size
        self._view = segment.view
        data = segment.bytes[layout.data : layout.data + SLOTS * size * LARGEST]
        self._slots = list(data.reshape(SLOTS, size, LARGEST))
        self._posted = self._read = 0
        self._described = [b""] * SLOTS  # the digest that this member has in each slot
        self._flight: deque[RoundsOperation] = deque()  # have a round that they have not read
        self._queue: deque[RoundsOperation] = deque()  # have not begun
        self._calls = 0
        self.alike = False  # whether all members have told the same sizes of the call in this round
        self._broken = ""  # why no call can end any more

    # For the transfers.

    def told(self) -> list[Any]:
        """The ``sizes`` of all members; while an operation's first round is read.

        Raises UnsupportedError, on all members alike, if they differ and one has no room for its own.
        """
        operation = self._flight[0]
        if self.alike:
            return [operation.sizes] * self.size
        told = []
        for member in range(self.size):
            try:
                told.append(json.loads(self._head(member).partition("\n")[2]))
            except ValueError:
                raise UnsupportedError(
                    f"{operation.name} on group {self._name}: the sizes that rank {self.ranks[member]} tells are too "
                    f"long for the {self.segment.layout.head} bytes of a member. Gather fewer tensors in one call"
                ) from None
        return told

    # Progress.

    def begin(self, operation: RoundsOperation) -> None:
        """Issue an operation."""
        if broken := self._broken or self.segment.broken:
            operation.fail(
                dist.DistBackendError(broken)
            )  # each has its own, with its own traceback
            return
        self._queue.append(operation)

    @unseen
    def move(self, steps: int = ALL) -> list[futex.Word] | None:
        """See ProgressChannel. A step writes a round, or reads one."""
        try:
            return self._take_steps(steps)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return []

    def _take_steps(self, steps: int) -> list[futex.Word] | None:
        for _ in range(steps):
            operation = self._next()
            if operation is not None:
                self._come(operation)
            elif not self._flight:
                return []
            else:
                slot = self._read % SLOTS
                address, arrived = self.segment.arrived[slot]
                seen = arrived.value
                if seen != self.segment.target(self._read):
                    return [(address, seen)]
                self._complete(self._flight[0])
        return None

    def _next(self) -> RoundsOperation | None:
        """The operation whose next round this member may come to, if any."""
        ahead = self._posted - self._read
        if ahead >= AHEAD:
            return None
        if self._flight:
            last = self._flight[-1]
            transfer = last.transfer
            assert transfer is not None
            if last.written < transfer.rounds:
                return last if last.came and ahead < transfer.ahead else None
            if not transfer.known:
                return None
        if not self._queue:
            return None
        operation = self._queue.popleft()
        self._describe(operation)
        self._flight.append(operation)
        return operation

    def _describe(self, operation: RoundsOperation) -> None:
        layout, slot = self.segment.layout, self._posted % SLOTS
        if (
            self._described[slot] is operation.digest
        ):  # as four rounds before: a loop repeats its calls
            return
        self._described[slot] = operation.digest
        place = slot * self.size + self.me
        at = layout.digests + place * DIGEST
        self._view[at : at + DIGEST] = operation.digest
        at, head = layout.heads + place * layout.head, operation.head[: layout.head - _LENGTH.size]
        _LENGTH.pack_into(self._view, at, len(head))
        self._view[at + _LENGTH.size : at + _LENGTH.size + len(head)] = head

    def _head(self, member: int) -> str:
        layout = self.segment.layout
        at = layout.heads + (self._read % SLOTS * self.size + member) * layout.head
        (count,) = _LENGTH.unpack_from(self._view, at)
        return bytes(self._view[at + _LENGTH.size : at + _LENGTH.size + count]).decode(
            errors="replace"
        )

    def _come(self, operation: RoundsOperation) -> None:
        """Write an operation's next round, and count this member in."""
        transfer, slot = operation.transfer, self._posted % SLOTS
        assert transfer is not None
        transfer.write(operation.written, self._slots[slot])
        self.segment.come(self.me, self._posted)
        if self._courier is not None:
            self._ship(self._courier, operation)
        operation.written += 1
        self._posted += 1

    def _ship(self, courier: Courier, operation: RoundsOperation) -> None:
        """Have the round that was written sent to the other machines."""
        transfer, number = operation.transfer, operation.written
        assert transfer is not None
        room = self.segment.layout.head
        described = 0 if number else min(_LENGTH.size + len(operation.head), room)
        courier.ship_round(self._posted, described, functools.partial(transfer.parts, number))

    def _complete(self, operation: RoundsOperation) -> None:
        """All members have come to the oldest round: read it."""
        transfer = operation.transfer
        assert transfer is not None
        try:
            if not operation.came:
                self._check_alike(operation)
            transfer.read(operation.came, self._slots[self._read % SLOTS])
            operation.came += 1
            self._read += 1
            if operation.came < transfer.rounds:
                return
            if transfer.finish is not None:
                transfer.finish()
            operation.fail(None)
        except (CollectiveMismatchError, UnsupportedError) as error:
            # Of the first round, and on all members alike: the group serves on.
            self._read += 1
            operation.fail(error)
        self._flight.popleft()

    def _check_alike(self, operation: RoundsOperation) -> None:
        self._calls += 1
        if self._calls == 1:
            self.segment.release()  # all are here, so all have mapped the memory
        error = self._mismatch(operation)
        if error is not None:
            raise error

    def _mismatch(self, operation: RoundsOperation) -> CollectiveMismatchError | None:
        at = self.segment.layout.digests + self._read % SLOTS * self.size * DIGEST
        digests = self._view[at : at + self.size * DIGEST].tobytes()
        self.alike = digests == operation.digest * self.size
        if self.alike:
            return None
        calls = {digests[at : at + DIGEST // 2] for at in range(0, len(digests), DIGEST)}
        if len(calls) == 1:
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
        made = [(rank, text, None) for rank, text in zip(self.ranks, texts, strict=True)]
        return messages.mismatch(self._calls, self._name, what, made)

    def missing(self) -> str:
        """The members that the oldest operation waits for, in words."""
        absent = [self.ranks[member] for member in self.segment.absent(self._read)]
        return f"{ranks_text(absent)} did not come to it" if absent else ""

    def check(self) -> None:
        """See ProgressChannel."""
        if self.segment.broken:
            self._break(dist.DistBackendError(self.segment.broken))
        elif self._flight and not self._is_complete():
            error = self._ended(self._read)
            if error is not None and not self._is_complete():  # the ended one may have come before
                self._break(error)

    def _is_complete(self) -> bool:
        """True if all members have come to the oldest round."""
        _, arrived = self.segment.arrived[self._read % SLOTS]
        return bool(arrived.value == self.segment.target(self._read))

    def _ended(self, rounds: int) -> Exception | None:
        """The error of the oldest operation if a member that has come to so many rounds comes to no more."""
        gone = self.segment.lost(rounds)
        if not gone:
            return None
        who = "; ".join(f"rank {self.ranks[member]}: {why}" for member, why in gone.items())
        call = self._calls + (not self._flight[0].came)
        return dist.DistBackendError(f"call {call} on group {self._name} cannot end: {who}")

    def _fail(self, error: BaseException) -> None:
        """An operation has failed here alone: the others wait for a round that will not come."""
        self._break(self.segment.fail(error, self._name))
        if self._courier is not None:
            self._courier.tell(FAILED)

    def _break(self, error: Exception) -> None:
        """No call on the group can end any more."""
        self._broken = self.segment.broken or str(error)
        for operation in [*self._flight, *self._queue]:
            operation.fail(error)
        self._flight.clear()
        self._queue.clear()
