"""Collective operations of one group, as rounds: in a round each member writes, then all read.

Note [One wait in a round]: the members write into the round's slot and count themselves in one word; the last one
wakes the others. Reads are not announced. Instead a member takes part in round k only when it has read round
k - AHEAD. So if all have arrived at round k, all have read round k - AHEAD, whose slot is written again in round
k + AHEAD, by members that have read round k.

Note [Ahead]: a member that waits for others has written up to AHEAD rounds, so that one that wakes reads several. But
an operation arrives at its second round only when the first was read: the first round shows whether the calls differ,
and calls that differ may have different numbers of rounds.
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
from smp_core.transport.smddp.inter_machine import InterMachineTransport
from smp_core.transport.smddp.progress import ALL
from smp_core.transport.smddp.segment import (
    DIGEST_BYTES,
    FAILED,
    ROUND_SLOTS,
    SharedSegment,
)
from smp_core.transport.unseen import unseen

AHEAD = ROUND_SLOTS // 2
_LENGTH = struct.Struct("<I")


Ranges = Callable[[int, Sequence[int]], Iterable[tuple[int, int]]]


class Transfer:
    """The bytes that one member writes and reads in the rounds of an operation.

    Attributes:
        rounds: their number; at least one.
        known: true if the number stands; otherwise ``read`` of the first round sets it.
        write: called with the number of a round of the operation, and the bytes that this member writes.
        read: called with the number of a round that is complete, and the bytes of all members, a row for each.
            ``write`` of a round comes before ``read`` of it, and after ``read`` of that AHEAD before.
        ranges: called with the number of a round that was written, and the members of another machine: the ranges
            of the slot that they read, as begins and ends.
        finish: called after the last round.
        ahead: rounds that may be written and not read, if fewer than AHEAD.
    """

    __slots__ = ("ahead", "finish", "known", "ranges", "read", "rounds", "write")

    def __init__(
        self,
        write: Callable[[int, Any], None],
        read: Callable[[int, Any], None],
        rounds: int = 1,
        *,
        ranges: Ranges,
        known: bool = True,
    ) -> None:
        self.write, self.read, self.rounds, self.known = write, read, rounds, known
        self.ranges = ranges
        self.finish: Callable[[], None] | None = None
        self.ahead = AHEAD


@functools.lru_cache(maxsize=4096)
def _encode(operation: str, fields: Fields, sizes: Any) -> tuple[bytes, bytes]:
    """A digest of the part of a call that is alike on all members, and one of its sizes; and both as text."""
    call = json.dumps([operation, fields]).encode()
    lengths = b"" if sizes is None else json.dumps(sizes).encode()
    digest = b"".join(
        hashlib.blake2b(each, digest_size=DIGEST_BYTES // 2).digest() for each in (call, lengths)
    )
    return digest, call + b"\n" + lengths


class RoundsOperation:
    """One member's part in a collective call.

    ``sizes`` go to the other members, which find them in ``Rounds.gathered_sizes``: any JSON.
    """

    __slots__ = (
        "description",
        "digest",
        "done",
        "error",
        "name",
        "rounds_read",
        "rounds_written",
        "sizes",
        "transfer",
    )

    def __init__(
        self, operation: str, fields: Fields, transfer: Transfer, sizes: Any = None
    ) -> None:
        self.name, self.sizes = operation, sizes
        self.digest, self.description = _encode(operation, fields, sizes)
        self.transfer: Transfer | None = transfer
        self.rounds_written = self.rounds_read = 0  # by this member
        self.done = False
        self.error: Exception | None = None

    def fail(self, error: Exception | None) -> None:
        """End the operation: its tensors are not held any longer."""
        self.error, self.done, self.transfer = error, True, None


class Rounds:
    """The collective calls of one group, on one member."""

    def __init__(
        self,
        segment: SharedSegment,
        name: str,
        ranks: Sequence[int],
        inter_machine: InterMachineTransport | None,
    ) -> None:
        layout, me, size = segment.layout, segment.me, segment.size
        self.segment, self._name, self.ranks = segment, name, ranks
        self._inter_machine = inter_machine
        self.me, self.size, self.row_bytes = me, size, layout.row_bytes
        self._view = segment.view
        data = segment.bytes[layout.slot(0) : layout.slot(ROUND_SLOTS)]
        self._slots = list(data.reshape(ROUND_SLOTS, size, self.row_bytes))
        self._written = self._read = 0
        self._slot_digests = [b""] * ROUND_SLOTS  # of this member
        self._in_flight: deque[RoundsOperation] = deque()  # have a round that they have not read
        self._queue: deque[RoundsOperation] = deque()  # have not begun
        self._calls = 0
        self.sizes_equal = (
            False  # True if all members have the same sizes in the call of this round
        )
        self._broken = ""  # the reason why no call can end any more

    # For the transfers.

    def gathered_sizes(self) -> list[Any]:
        """The ``sizes`` of all members; while an operation's first round is read.

        Raises UnsupportedError, on all members alike, if they differ and one has no room for its own.
        """
        operation = self._in_flight[0]
        if self.sizes_equal:
            return [operation.sizes] * self.size
        gathered = []
        for member in range(self.size):
            try:
                gathered.append(json.loads(self._description_of(member).partition("\n")[2]))
            except ValueError:
                raise UnsupportedError(
                    f"{operation.name} on group {self._name}: the sizes that rank {self.ranks[member]} gives are too "
                    f"long for the {self.segment.layout.description_bytes} bytes of a member. Gather fewer tensors in "
                    "one call"
                ) from None
        return gathered

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
    def progress(self, steps: int = ALL) -> list[futex.Word] | None:
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
                self._write_round(operation)
            elif not self._in_flight:
                return []
            else:
                slot = self._read % ROUND_SLOTS
                address, arrived = self.segment.arrived[slot]
                seen = arrived.value
                if seen != self.segment.full_count(self._read):
                    return [(address, seen)]
                self._read_round(self._in_flight[0])
        return None

    def _next(self) -> RoundsOperation | None:
        """The operation whose next round this member may write, if any."""
        ahead = self._written - self._read
        if ahead >= AHEAD:
            return None
        if self._in_flight:
            last = self._in_flight[-1]
            transfer = last.transfer
            assert transfer is not None
            if last.rounds_written < transfer.rounds:
                return last if last.rounds_read and ahead < transfer.ahead else None
            if not transfer.known:
                return None
        if not self._queue:
            return None
        operation = self._queue.popleft()
        self._describe(operation)
        self._in_flight.append(operation)
        return operation

    def _describe(self, operation: RoundsOperation) -> None:
        layout, slot = self.segment.layout, self._written % ROUND_SLOTS
        if (
            self._slot_digests[slot] is operation.digest
        ):  # as four rounds before: a loop repeats its calls
            return
        self._slot_digests[slot] = operation.digest
        at = layout.digest(slot, self.me)
        self._view[at : at + DIGEST_BYTES] = operation.digest
        at = layout.description(slot, self.me)
        text = operation.description[: layout.description_bytes - _LENGTH.size]
        _LENGTH.pack_into(self._view, at, len(text))
        self._view[at + _LENGTH.size : at + _LENGTH.size + len(text)] = text

    def _description_of(self, member: int) -> str:
        at = self.segment.layout.description(self._read % ROUND_SLOTS, member)
        (count,) = _LENGTH.unpack_from(self._view, at)
        return bytes(self._view[at + _LENGTH.size : at + _LENGTH.size + count]).decode(
            errors="replace"
        )

    def _write_round(self, operation: RoundsOperation) -> None:
        """Write an operation's next round, and count this member in."""
        transfer, slot = operation.transfer, self._written % ROUND_SLOTS
        assert transfer is not None
        transfer.write(operation.rounds_written, self._slots[slot])
        self.segment.arrive(self.me, self._written)
        if self._inter_machine is not None:
            self._send_remote(self._inter_machine, operation)
        operation.rounds_written += 1
        self._written += 1

    def _send_remote(
        self, inter_machine: InterMachineTransport, operation: RoundsOperation
    ) -> None:
        """Send the round that was written to the other machines."""
        transfer, number = operation.transfer, operation.rounds_written
        assert transfer is not None
        room = self.segment.layout.description_bytes
        length = 0 if number else min(_LENGTH.size + len(operation.description), room)
        inter_machine.send_round(self._written, length, functools.partial(transfer.ranges, number))

    def _read_round(self, operation: RoundsOperation) -> None:
        """Read the oldest round, at which all members have arrived."""
        transfer = operation.transfer
        assert transfer is not None
        try:
            if not operation.rounds_read:
                self._check_call(operation)
            transfer.read(operation.rounds_read, self._slots[self._read % ROUND_SLOTS])
            operation.rounds_read += 1
            self._read += 1
            if operation.rounds_read < transfer.rounds:
                return
            if transfer.finish is not None:
                transfer.finish()
            operation.fail(None)
        except (CollectiveMismatchError, UnsupportedError) as error:
            # Of the first round, and on all members alike: the group serves on.
            self._read += 1
            operation.fail(error)
        self._in_flight.popleft()

    def _check_call(self, operation: RoundsOperation) -> None:
        self._calls += 1
        if self._calls == 1:
            self.segment.release()  # all are here, so all have mapped the memory
        error = self._mismatch(operation)
        if error is not None:
            raise error

    def _mismatch(self, operation: RoundsOperation) -> CollectiveMismatchError | None:
        at = self.segment.layout.digest(self._read % ROUND_SLOTS, 0)
        digests = self._view[at : at + self.size * DIGEST_BYTES].tobytes()
        self.sizes_equal = digests == operation.digest * self.size
        if self.sizes_equal:
            return None
        calls = {
            digests[at : at + DIGEST_BYTES // 2] for at in range(0, len(digests), DIGEST_BYTES)
        }
        if len(calls) == 1:
            return None
        texts = [self._description_of(member).partition("\n")[0] for member in range(self.size)]
        try:
            descriptions = [json.loads(text) for text in texts]
            what = messages.differing(
                [(name, tuple(map(tuple, fields))) for name, fields in descriptions]
            )
            texts = [
                f"{name}({', '.join(f'{field}={value}' for field, value in fields)})"
                for name, fields in descriptions
            ]
        except ValueError:  # a description that was cut
            what = "arguments"
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
        elif self._in_flight and not self._is_complete():
            error = self._departure_error(self._read)
            if (
                error is not None and not self._is_complete()
            ):  # the departed member may have arrived before
                self._break(error)

    def _is_complete(self) -> bool:
        """Return whether all members have arrived at the oldest round."""
        _, arrived = self.segment.arrived[self._read % ROUND_SLOTS]
        return bool(arrived.value == self.segment.full_count(self._read))

    def _departure_error(self, rounds: int) -> Exception | None:
        """The error of the oldest operation if a member that has arrived at so many rounds arrives at no more."""
        departures = self.segment.blocking_departures(rounds)
        if not departures:
            return None
        who = "; ".join(f"rank {self.ranks[member]}: {why}" for member, why in departures.items())
        call = self._calls + (not self._in_flight[0].rounds_read)
        return dist.DistBackendError(f"call {call} on group {self._name} cannot end: {who}")

    def _fail(self, error: BaseException) -> None:
        """End all calls, because an operation has failed on this rank alone: no further round will be complete."""
        self._break(self.segment.fail(error, self._name))
        if self._inter_machine is not None:
            self._inter_machine.announce(FAILED)

    def _break(self, error: Exception) -> None:
        """End all calls with an error: none on the group can end any more."""
        self._broken = self.segment.broken or str(error)
        for operation in [*self._in_flight, *self._queue]:
            operation.fail(error)
        self._in_flight.clear()
        self._queue.clear()
