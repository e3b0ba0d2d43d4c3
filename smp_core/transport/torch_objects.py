"""An object transport over any torch backend: over messages of a process group where it has them,
and over the store otherwise.

Each message is answered by an acknowledgement on either way, which makes a send
synchronous.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import torch

from smp_core.errors import CollectiveMismatchError
from smp_core.transport.messages import group_text
from smp_core.transport.payload import Payload
from smp_core.transport.protocols import Group, RankEnvironment


class _Objects(ABC):
    """The base of the object transports; a subclass carries the bytes. See ObjectTransport."""

    def __init__(self, environment: RankEnvironment) -> None:
        self._rank, self._board = environment.rank, environment.board
        self._numbers: Counter[Any] = Counter()

    def _number(self, *what: Any) -> int:
        self._numbers[what] += 1
        return self._numbers[what]

    @abstractmethod
    def _deliver(self, data: bytes, dests: list[int]) -> None:
        """Return after all of ``dests`` have taken the data."""

    @abstractmethod
    def _receive(self, source: int) -> bytes:
        """The next data that ``source`` delivers to this rank."""

    @abstractmethod
    def _exchange(self, data: bytes, group: Group) -> list[bytes]:
        """Every member's data, in the order of the group."""

    def send(self, obj: object, dest: int) -> None:
        """See ObjectTransport."""
        data = _frozen(obj, f"smp.send(world rank {dest})")
        with self._board.call("smp.send", _pair(self._rank, dest), to=(dest,)):
            self._deliver(data, [dest])

    def broadcast(self, obj: object, group: Group) -> None:
        """See ObjectTransport."""
        data = _frozen(obj, f"smp.broadcast(group {group.name})")
        others = [rank for rank in group.ranks if rank != self._rank]
        with self._board.call("smp.broadcast", group, to=others):
            self._deliver(data, others)

    def recv_from(self, src: int) -> Any:
        """See ObjectTransport."""
        with self._board.call("smp.recv_from", _pair(self._rank, src), source=src):
            data = self._receive(src)
        payload: Payload = pickle.loads(data)
        return payload.thaw()

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """See ObjectTransport."""
        gathered = self._meet("smp.allgather", _frozen(obj, "smp.allgather"), group)
        payloads: list[Payload] = [pickle.loads(each) for each in gathered]
        return [payload.thaw() for payload in payloads]

    def barrier(self, group: Group) -> None:
        """See ObjectTransport."""
        self._meet("smp.barrier", b"", group)

    def _meet(self, call: str, data: bytes, group: Group) -> list[memoryview]:
        """Every member's data. Raises CollectiveMismatchError if a member makes another call; all of them find it."""
        mark = _MARKS[call]
        with self._board.call(call, group):
            gathered = self._exchange(mark + data, group)
        for rank, each in zip(group.ranks, gathered, strict=True):
            if each[:1] != mark:
                theirs = next(name for name, other in _MARKS.items() if other == each[:1])
                raise CollectiveMismatchError(
                    f"mismatch: a call on group {group_text(group.name, group.ranks)} differs in operation\n"
                    f"  rank {self._rank}: {call}\n"
                    f"  rank {rank}: {theirs}"
                )
        return [memoryview(each)[1:] for each in gathered]


#: The first byte of a member's data: the call that it makes.
_MARKS = {"smp.allgather": b"g", "smp.barrier": b"b"}
_MESSAGE, _TAKEN, _GATHER, _SHARE = range(4)  # tags
#: Group digest and number of a collective (both 0 for a send), and the number of bytes of data.
_HEAD = struct.Struct("<QQQ")
_FIRST = 512  # bytes that travel with the head: most objects need no second message
_Key = tuple[int, int]  # a group's digest, and the number of a call on it
_SENT = (0, 0)  # of objects that are sent or broadcast: `smp.recv_from` takes either, of any group


class GroupObjects(_Objects):
    """Over point-to-point messages of a group that is private to it and holds all ranks of the world.

    A message is a head and then its bytes. Messages, acknowledgements, and the two halves of a
    collective have tags of their own, and the head of each half names the group and the number of the
    call, so that no two of them can be taken for each other. A collective goes through the first member
    of its group: 2 (n - 1) messages instead of the 2 (n - 1)^2 of torch's rings.
    """

    def __init__(self, environment: RankEnvironment, group: Any) -> None:
        super().__init__(environment)
        self._group = group
        self._taken = torch.zeros(1, dtype=torch.uint8)
        self._digests: dict[Group, int] = {}
        # Messages received while waiting for one of another key, and the sources and tags on which a
        # thread receives now: threads that call on different groups get each other's messages.
        # A key has an entry only while a message waits: the number of calls of a run has no bound.
        self._arrived: dict[tuple[int, int, _Key], deque[bytes]] = {}
        self._receiving: set[tuple[int, int]] = set()
        self._turn = threading.Condition()

    # One message: a first part of fixed size, and the rest of a longer one in a second part.

    def _post(self, data: bytes, dest: int, tag: int, key: _Key) -> list[Any]:
        head = _HEAD.pack(*key, len(data)) + data[:_FIRST]
        parts = [head.ljust(_HEAD.size + _FIRST, b"\0")]
        if len(data) > _FIRST:
            parts.append(data[_FIRST:])
        works = []
        for part in parts:
            tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            works.append((self._group.send([tensor], dest, tag), tensor))
        return works

    def _take(self, source: int, tag: int, key: _Key) -> bytes:
        line, wanted = (source, tag), (source, tag, key)
        while True:
            with self._turn:
                self._turn.wait_for(lambda: wanted in self._arrived or line not in self._receiving)
                if wanted in self._arrived:
                    messages = self._arrived[wanted]
                    data = messages.popleft()
                    if not messages:
                        del self._arrived[wanted]
                    return data
                self._receiving.add(line)
            received_key = None
            try:
                received_key, data = self._next(source, tag)
            finally:
                with self._turn:
                    self._receiving.remove(line)
                    if received_key is not None and received_key != key:
                        self._arrived.setdefault((*line, received_key), deque()).append(data)
                    self._turn.notify_all()
            if received_key == key:
                return data

    def _next(self, source: int, tag: int) -> tuple[_Key, bytes]:
        """The next message of this source and tag, with its key."""
        head = torch.empty(_HEAD.size + _FIRST, dtype=torch.uint8)
        self._group.recv([head], source, tag).wait()
        first = head.numpy().tobytes()
        group, number, length = _HEAD.unpack_from(first)
        first = first[_HEAD.size :]
        if length <= _FIRST:
            return (group, number), first[:length]
        rest = torch.empty(length - _FIRST, dtype=torch.uint8)
        self._group.recv([rest], source, tag).wait()
        return (group, number), first + rest.numpy().tobytes()

    @staticmethod
    def _finish(works: Iterable[tuple[Any, torch.Tensor]]) -> None:
        for work, _ in works:
            work.wait()

    def _deliver(self, data: bytes, dests: list[int]) -> None:
        works = [work for dest in dests for work in self._post(data, dest, _MESSAGE, _SENT)]
        answers = [(torch.empty_like(self._taken), dest) for dest in dests]
        taken = [(self._group.recv([answer], dest, _TAKEN), answer) for answer, dest in answers]
        self._finish(works)
        self._finish(taken)

    def _receive(self, source: int) -> bytes:
        data = self._take(source, _MESSAGE, _SENT)
        self._group.send([self._taken], source, _TAKEN).wait()
        return data

    def _exchange(self, data: bytes, group: Group) -> list[bytes]:
        first, key = group.ranks[0], (self._digest(group), self._number(group))
        if self._rank != first:
            self._finish(self._post(data, first, _GATHER, key))
            shared = self._take(first, _SHARE, key)
            gathered: list[bytes] = pickle.loads(shared)
            return gathered
        parts = [data if rank == first else self._take(rank, _GATHER, key) for rank in group.ranks]
        shared = pickle.dumps(parts)
        works = [work for rank in group.ranks[1:] for work in self._post(shared, rank, _SHARE, key)]
        self._finish(works)
        return parts

    def _digest(self, group: Group) -> int:
        digest = self._digests.get(group)
        if digest is None:
            name = f"{group.name} {group.ranks}".encode()
            digest = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
            self._digests[group] = digest
        return digest


class StoreObjects(_Objects):
    """Over the keys of a store, which every torch backend has: for those without messages.

    Slow (a file store looks every 10 ms whether a key is there), and right. A message is the key of
    its two ranks and its number; the receiver takes it out and sets the key of its answer, which the
    sender takes out.
    """

    def __init__(self, environment: RankEnvironment, store: Any) -> None:
        super().__init__(environment)
        self._store = store

    def _pop(self, key: str) -> bytes:
        value: bytes = self._store.get(key)  # waits for it
        self._store.delete_key(key)
        return value[1:]

    def _put(self, key: str, data: bytes) -> None:
        self._store.set(key, b"." + data)  # a file store takes an empty value for none

    def _deliver(self, data: bytes, dests: list[int]) -> None:
        keys = [f"{self._rank}-{dest}-{self._number('to', dest)}" for dest in dests]
        for key in keys:
            self._put(key, data)
        for key in keys:
            self._pop(f"{key} taken")

    def _receive(self, source: int) -> bytes:
        key = f"{source}-{self._rank}-{self._number('from', source)}"
        data = self._pop(key)
        self._put(f"{key} taken", b"")
        return data

    def _exchange(self, data: bytes, group: Group) -> list[bytes]:
        number = self._number(group)
        name = f"{group.name} {'-'.join(map(str, group.ranks))}"
        self._put(f"{name} {number} {self._rank}", data)
        values = [self._store.get(f"{name} {number} {rank}")[1:] for rank in group.ranks]
        # All are in this exchange, so that nobody is in the one before.
        self._store.delete_key(f"{name} {number - 1} {self._rank}")
        return values


def _frozen(obj: object, call: str) -> bytes:
    return pickle.dumps(Payload(obj, call), pickle.HIGHEST_PROTOCOL)


def _pair(rank: int, partner: int) -> Group:
    return Group("WORLD", (rank, partner))


def choose(environment: RankEnvironment, group: Any, store: Any) -> _Objects:
    """The transport that this backend can carry: messages of ``group`` if one around a ring arrived
    on every rank, keys of ``store`` otherwise. All ranks choose the same.
    """
    messages = environment.size == 1 or _ring(environment, group)
    store.set(f"ring {environment.rank}", str(int(messages)))
    if all(store.get(f"ring {rank}") == b"1" for rank in range(environment.size)):
        return GroupObjects(environment, group)
    return StoreObjects(environment, store)


def _ring(environment: RankEnvironment, group: Any) -> bool:
    """Return whether a message to the next rank and one from the last arrive as they were sent."""
    ahead, behind = (
        (environment.rank + 1) % environment.size,
        (environment.rank - 1) % environment.size,
    )
    mine = torch.tensor([251, environment.rank % 250], dtype=torch.uint8)
    theirs = torch.zeros(2, dtype=torch.uint8)

    def send() -> Any:
        return group.send([mine], ahead, _TAKEN)

    def receive() -> Any:
        return group.recv([theirs], behind, _TAKEN)

    try:
        # The odd ranks receive first: a send may last until it is received.
        works = [call() for call in ((receive, send) if environment.rank % 2 else (send, receive))]
        for work in works:
            work.wait()
    except Exception:  # it has no messages, and says so by whatever it likes
        return False
    return theirs.tolist() == [251, behind % 250]
