"""An object transport over point-to-point messages of any torch process group.

A message is its length and then its bytes; its receiver answers with an acknowledgement, which is
what makes a send synchronous. Messages, acknowledgements, and the two halves of a collective have
tags of their own, so that no two of them can be taken for each other. A collective goes through the
first member of its group: 2 (n - 1) messages instead of the 2 (n - 1)^2 of torch's rings.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch

from smp_core.backends.base import Group, Seat
from smp_core.backends.payload import Payload

_MESSAGE, _TAKEN, _GATHER, _SHARE = range(4)  # tags
_FIRST = 512  # bytes that travel with the length: most objects need no second message


class GroupObjects:
    """See base.ObjectTransport. ``group`` is private to it and holds all ranks of the world."""

    def __init__(self, seat: Seat, group: Any) -> None:
        self._rank, self._board, self._group = seat.rank, seat.board, group
        self._taken = torch.zeros(1, dtype=torch.uint8)

    # One message: a first part of fixed size, and what is longer in a second one.

    def _post(self, data: bytes, dest: int, tag: int) -> list[Any]:
        head = len(data).to_bytes(8, "little") + data[:_FIRST]
        parts = [head.ljust(8 + _FIRST, b"\0")]
        if len(data) > _FIRST:
            parts.append(data[_FIRST:])
        works = []
        for part in parts:
            tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            works.append((self._group.send([tensor], dest, tag), tensor))
        return works

    def _take(self, source: int, tag: int) -> bytes:
        head = torch.empty(8 + _FIRST, dtype=torch.uint8)
        self._group.recv([head], source, tag).wait()
        first = head.numpy().tobytes()
        length = int.from_bytes(first[:8], "little")
        if length <= _FIRST:
            return first[8 : 8 + length]
        rest = torch.empty(length - _FIRST, dtype=torch.uint8)
        self._group.recv([rest], source, tag).wait()
        return first[8:] + rest.numpy().tobytes()

    @staticmethod
    def _finish(works: Iterable[tuple[Any, torch.Tensor]]) -> None:
        for work, _ in works:
            work.wait()

    # Point to point.

    def send(self, obj: object, dest: int) -> None:
        """See ObjectTransport."""
        call = f"smp.send(world rank {dest})"
        data = _frozen(obj, call)
        with self._board.call("smp.send", _pair(self._rank, dest), to=(dest,)):
            self._deliver(data, [dest])

    def broadcast(self, obj: object, group: Group) -> None:
        """See ObjectTransport."""
        data = _frozen(obj, f"smp.broadcast(group {group.name})")
        others = [rank for rank in group.ranks if rank != self._rank]
        with self._board.call("smp.broadcast", group, to=others):
            self._deliver(data, others)

    def _deliver(self, data: bytes, dests: list[int]) -> None:
        works = [work for dest in dests for work in self._post(data, dest, _MESSAGE)]
        answers = [(torch.empty_like(self._taken), dest) for dest in dests]
        taken = [(self._group.recv([answer], dest, _TAKEN), answer) for answer, dest in answers]
        self._finish(works)
        self._finish(taken)

    def recv_from(self, src: int) -> Any:
        """See ObjectTransport."""
        with self._board.call("smp.recv_from", _pair(self._rank, src), source=src):
            data = self._take(src, _MESSAGE)
            self._group.send([self._taken], src, _TAKEN).wait()
        payload: Payload = pickle.loads(data)
        return payload.thaw()

    # Collective.

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """See ObjectTransport."""
        data = _frozen(obj, "smp.allgather")
        with self._board.call("smp.allgather", group):
            gathered: list[bytes] = pickle.loads(self._exchange(data, group))
        payloads: list[Payload] = [pickle.loads(each) for each in gathered]
        return [payload.thaw() for payload in payloads]

    def barrier(self, group: Group) -> None:
        """See ObjectTransport."""
        with self._board.call("smp.barrier", group):
            self._exchange(b"", group)

    def _exchange(self, data: bytes, group: Group) -> bytes:
        """Every member's data, as one pickled list in the order of the group."""
        first = group.ranks[0]
        if self._rank != first:
            self._finish(self._post(data, first, _GATHER))
            return self._take(first, _SHARE)
        parts = [data if rank == first else self._take(rank, _GATHER) for rank in group.ranks]
        shared = pickle.dumps(parts)
        works = [work for rank in group.ranks[1:] for work in self._post(shared, rank, _SHARE)]
        self._finish(works)
        return shared


def _frozen(obj: object, call: str) -> bytes:
    return pickle.dumps(Payload(obj, call), pickle.HIGHEST_PROTOCOL)


def _pair(rank: int, partner: int) -> Group:
    return Group("WORLD", (rank, partner))
