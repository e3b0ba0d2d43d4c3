"""The object transport between rank threads: frozen objects handed over in the waiting room."""

from __future__ import annotations

import dataclasses
from typing import Any

from smp_core.backends.base import Group
from smp_core.backends.fabrics.threaded.waiting import WaitingRoom
from smp_core.backends.payload import Payload


@dataclasses.dataclass(slots=True, eq=False)
class _Message:
    """A sent or broadcast object, on its way to the ranks in ``outstanding``."""

    payload: Payload
    outstanding: set[int]


class Exchange:
    """What the object transports of a run's ranks share; all of it is changed in the room alone."""

    def __init__(self, room: WaitingRoom) -> None:
        self.room = room
        # One for each pair: who has sent waits until it is taken.
        self.messages: dict[tuple[int, int], _Message] = {}
        self.meetings: dict[tuple[str, Group], dict[int, Payload | None]] = {}


class ThreadObjects:
    """One rank's object transport. See base.ObjectTransport."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._room, self._rank = exchange, exchange.room, rank

    def send(self, obj: object, dest: int) -> None:
        """See ObjectTransport."""
        call = f"smp.send(world rank {dest})"
        self._deliver(call, Payload(obj, call), {dest})

    def broadcast(self, obj: object, group: Group) -> None:
        """See ObjectTransport."""
        call = f"smp.broadcast(group {group.name})"
        self._deliver(call, Payload(obj, call), set(group.ranks) - {self._rank})

    def _deliver(self, call: str, payload: Payload, dests: set[int]) -> None:
        message = _Message(payload, dests)
        with self._room:
            for dest in dests:
                self._exchange.messages[self._rank, dest] = message
            self._room.changed()
            self._room.wait(self._rank, call, lambda: not message.outstanding)

    def recv_from(self, src: int) -> Any:
        """See ObjectTransport."""
        messages, key = self._exchange.messages, (src, self._rank)
        with self._room:
            self._room.wait(self._rank, f"smp.recv_from(world rank {src})", lambda: key in messages)
            message = messages.pop(key)
            message.outstanding.discard(self._rank)
            self._room.changed()
        return message.payload.thaw()

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """See ObjectTransport."""
        payloads = self._meet("smp.allgather", group, Payload(obj, "smp.allgather"))
        return [payload.thaw() for payload in payloads if payload is not None]

    def barrier(self, group: Group) -> None:
        """See ObjectTransport."""
        self._meet("smp.barrier", group, None)

    def _meet(self, call: str, group: Group, payload: Payload | None) -> list[Payload | None]:
        """Every member's payload, in the order of the group, once all have come."""
        key = call, group
        with self._room:
            parts = self._exchange.meetings.setdefault(key, {})
            parts[self._rank] = payload
            if len(parts) == len(group.ranks):
                del self._exchange.meetings[key]  # the next call meets anew
                self._room.changed()
            else:
                text = f"{call}(group {group.name})"
                self._room.wait(self._rank, text, lambda: len(parts) == len(group.ranks))
        return [parts[rank] for rank in group.ranks]
