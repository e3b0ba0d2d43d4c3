"""Messages between the ranks of a world, over one MPI communicator.

Note [Matching here, not in MPI]: MPI would match by communicator, source and tag. Every message
carries its own address instead (channel, number) and is sorted on arrival, in Python, because

- a group then needs no communicator: making one is no collective call that blocks in C, where a run
  cannot be ended, and there may be any number (MPICH ends at about 2,000);
- what a run that was ended has left behind is known by its epoch and dropped;
- tags may be any integer, and a receive knows how long its message is before it takes it;
- it is not slower: 8 ranks on 2 cores exchange a small object in 75 to 95 us, in 126 us by mpi4py's
  own allgather, whose wait inside MPI yields less often.

Note [Progress]: nothing moves but inside calls of this class. Each wait moves everything, not just
what it waits for, so operations may be waited for in any order. An operation that has been issued
needs its rank again only if it is long (more than ``INLINE`` bytes).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview

INLINE = 16 * 1024  # bytes of a message that travels in one piece, its address included
LARGEST = 2**30  # bytes of one piece: MPI counts in 32 bits
LONGEST_NOTE = 1024  # bytes

# Rests between two looks at MPI, by how many came before it in vain. `sched_yield` lets ranks that
# share a core take turns: without it a round of 8 ranks on 2 cores took 16 ms, with it 0.08. A rank that
# waits for long leaves the core to those that compute.
_YIELDS = 400
_NAP = 200e-6  # seconds
_LOOKS = 32  # between two questions whether the run was ended
_TAKEN = 64  # messages in one turn, however many come

# epoch, channel, number, token, bytes, bytes of the note, kind
_HEAD = struct.Struct("<QQqQQHB")
_PLAIN, _ACKNOWLEDGED, _RECEIPT = range(3)
_HEAD_TAG, _DATA_TAG = 1, 2


def channel_key(name: str) -> int:
    """A number for the name of a channel: the same on every rank, and another for every name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def note_bytes(text: str) -> bytes:
    """A note as it travels: of a long one the beginning, and a digest of all."""
    note = text.encode()
    if len(note) <= LONGEST_NOTE:
        return note
    digest = hashlib.blake2b(note, digest_size=8).hexdigest()
    return note[: LONGEST_NOTE // 2] + f"... #{digest}".encode()


class Message:
    """One message that has come, or is coming: its address is known, its payload may be on its
    way.
    """

    __slots__ = ("note", "number", "payload", "requests", "source", "token")

    def __init__(
        self, source: int, number: int, note: bytes, payload: Buffer, token: int | None
    ) -> None:
        self.source, self.number, self.note, self.payload = source, number, note, payload
        self.token = token  # the sender waits for a receipt of this number
        self.requests: list[Any] = []

    @property
    def ready(self) -> bool:
        """True if the payload is whole."""
        return not self.requests


class Outgoing:
    """One message that was sent.

    Done when MPI has taken it and, where a receipt was asked for, when that has come.
    """

    __slots__ = ("awaited", "requests")

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.awaited = False

    @property
    def done(self) -> bool:
        return not self.awaited and not self.requests


class Receiver(Protocol):
    """One rank's end of a channel."""

    def deliver(self, message: Message) -> None:
        """A message has come. Those of one source come in the order of sending."""


class Messenger:
    """One rank's side of the communicator.

    ``check`` is asked in every wait, and ends it by raising.
    """

    def __init__(self, MPI: Any, comm: Any) -> None:
        self.rank, self.size = int(comm.rank), int(comm.size)
        self.check: Callable[[], None] = lambda: None
        # Hooks of autograd and the body's own threads may call. A thread that sends, moves or
        # sorts messages holds it, so that MPI is asked by one thread at a time; never while waiting.
        self.lock = threading.RLock()
        self._MPI, self._comm = MPI, comm
        self._epoch = 0
        self._receivers: dict[int, Receiver] = {}
        self._unclaimed: dict[tuple[int, int], list[Message]] = {}
        self._sending: dict[Outgoing, Any] = {}  # with the memory that MPI reads
        self._coming: list[Message] = []
        self._awaited: dict[int, Outgoing] = {}
        self._tokens = itertools.count(1)
        self._steps: dict[Any, Callable[[], bool]] = {}
        self._status = MPI.Status()
        self._buffer = bytearray(INLINE)
        self._inbox = comm.Recv_init([self._buffer, MPI.BYTE], MPI.ANY_SOURCE, _HEAD_TAG)
        self._inbox.Start()

    # Runs.

    def enter(self, epoch: int) -> None:
        """A run begins. Epochs ascend, and are the same on all ranks.

        Messages of former runs are dropped; messages that faster ranks have sent already for this run are kept.
        """
        with self.lock:
            self._epoch = epoch
            self._receivers.clear()
            self._awaited.clear()
            self._steps.clear()
            self._unclaimed = {
                key: messages for key, messages in self._unclaimed.items() if key[0] >= epoch
            }

    def stop(self) -> None:
        """The process ends: no message is received any more."""
        self._inbox.Cancel()
        self._inbox.Wait()

    def open(self, channel: int, receiver: Receiver) -> None:
        """Deliver the channel's messages to the receiver from now on, those first that have come
        already.
        """
        with self.lock:
            self._receivers[channel] = receiver
            for message in self._unclaimed.pop((self._epoch, channel), ()):
                receiver.deliver(message)

    # Sending.

    def send(
        self,
        dest: int,
        channel: int,
        number: int,
        payload: Buffer = b"",
        note: str = "",
        *,
        receipt: bool = False,
    ) -> Outgoing:
        """Send bytes to a rank, which may be this one. The payload is not read after this call if
        it is short, and must stay as it is until the message is done otherwise.

        Args:
            dest: world rank.
            channel: see ``channel_key``.
            number: any integer, whose meaning is the receiver's affair.
            payload: contiguous.
            note: a short text beside it, for the receiver to compare.
            receipt: whether the message is done only when ``acknowledge`` was called on it.
        """
        with self.lock:
            outgoing, token = Outgoing(), None
            if receipt:
                token = next(self._tokens)
                self._awaited[token], outgoing.awaited = outgoing, True
            if dest == self.rank:
                copy = bytearray(payload)
                self._sort(
                    self._epoch, channel, Message(dest, number, note_bytes(note), copy, token)
                )
            else:
                kind = _ACKNOWLEDGED if receipt else _PLAIN
                self._post(
                    outgoing, dest, channel, number, payload, note_bytes(note), kind, token or 0
                )
            return outgoing

    def _post(
        self,
        outgoing: Outgoing,
        dest: int,
        channel: int,
        number: int,
        payload: Buffer,
        note: bytes,
        kind: int,
        token: int,
    ) -> None:
        view = memoryview(payload)
        head = _HEAD.pack(self._epoch, channel, number, token, view.nbytes, len(note), kind) + note
        pieces = []
        if len(head) + view.nbytes <= INLINE:
            head = b"".join((head, view))
        else:
            pieces = [view[at : at + LARGEST] for at in range(0, view.nbytes, LARGEST)]
        BYTE = self._MPI.BYTE
        request = self._comm.Isend([head, BYTE], dest, _HEAD_TAG)
        if pieces or not request.Test():
            outgoing.requests = [
                request,
                *(self._comm.Isend([piece, BYTE], dest, _DATA_TAG) for piece in pieces),
            ]
            self._sending[outgoing] = (head, payload)

    def acknowledge(self, message: Message) -> None:
        """The message has been taken: its sender may go on."""
        if message.token is None:
            return
        if message.source == self.rank:
            self._acknowledged(message.token)
        else:
            self._post(Outgoing(), message.source, 0, 0, b"", b"", _RECEIPT, message.token)

    def _acknowledged(self, token: int) -> None:
        outgoing = self._awaited.pop(token, None)
        if outgoing is not None:
            outgoing.awaited = False

    # Progress.

    def step(self, owner: object, step: Callable[[], bool] | None) -> None:
        """Call ``step`` whenever something has moved, until it says True; None: no longer."""
        with self.lock:
            if step is None:
                self._steps.pop(owner, None)
            else:
                self._steps[owner] = step

    def progress(self) -> bool:
        """Move all messages that can be moved without waiting; return whether there were any."""
        with self.lock:
            moved = False
            for _ in range(_TAKEN):
                if not self._inbox.Test(self._status):
                    break
                try:
                    self._take(self._status.Get_source())
                finally:  # a handler of a signal may raise: the next message is received all the same
                    self._inbox.Start()
                moved = True
            if self._coming:
                before = len(self._coming)
                self._coming = [each for each in self._coming if not self._finished(each)]
                moved = moved or len(self._coming) < before
            if self._sending:
                gone = [each for each in self._sending if self._finished(each)]
                for outgoing in gone:
                    del self._sending[outgoing]
                moved = moved or bool(gone)
            if moved and self._steps:
                for owner, step in list(self._steps.items()):
                    if step():
                        self._steps.pop(owner, None)
            return moved

    def _finished(self, transfer: Message | Outgoing) -> bool:
        if not self._MPI.Request.Testall(transfer.requests):
            return False
        transfer.requests = []
        return True

    def _take(self, source: int) -> None:
        buffer = self._buffer
        epoch, channel, number, token, count, noted, kind = _HEAD.unpack_from(buffer)
        if kind == _RECEIPT:
            if epoch == self._epoch:
                self._acknowledged(token)
            return
        at = _HEAD.size + noted
        note = bytes(buffer[_HEAD.size : at])
        asked = token if kind == _ACKNOWLEDGED else None
        if at + count <= INLINE:
            message = Message(source, number, note, buffer[at : at + count], asked)
        else:  # taken at once, even if it is dropped below: the sender must come to an end
            message = Message(source, number, note, np.empty(count, np.uint8).data, asked)
            view = memoryview(message.payload)
            message.requests = [
                self._comm.Irecv([view[start : start + LARGEST], self._MPI.BYTE], source, _DATA_TAG)
                for start in range(0, count, LARGEST)
            ]
            self._coming.append(message)
        if epoch >= self._epoch:
            self._sort(epoch, channel, message)

    def _sort(self, epoch: int, channel: int, message: Message) -> None:
        receiver = self._receivers.get(channel) if epoch == self._epoch else None
        if receiver is None:
            self._unclaimed.setdefault((epoch, channel), []).append(message)
        else:
            receiver.deliver(message)

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Move everything until ``done`` says so. False if that took longer than ``seconds``.

        Raises what ``check`` raises.
        """
        end = None if seconds is None else time.monotonic() + seconds
        idle = turn = 0
        while not done():
            moved = self.progress()
            idle = 0 if moved else idle + 1
            turn += 1
            # Asked also while messages keep coming: the one that is waited for may not be among them.
            if idle == 1 or turn % _LOOKS == 0 or idle > _YIELDS:
                self.check()
                if end is not None and time.monotonic() > end:
                    return False
            if moved:
                continue
            if idle > _YIELDS:
                time.sleep(_NAP)
            else:
                os.sched_yield()
        return True

    def look(self) -> None:
        """Take one turn of a wait, for a caller that asks again and again."""
        if not self.progress():
            self.check()
            os.sched_yield()

    def drain(self, seconds: float) -> bool:
        """Let sent messages get on their way, and long operations come to their end, before this rank
        turns to other things. False if that took too long.
        """
        return self.wait(lambda: not self._sending and not self._steps, seconds)
