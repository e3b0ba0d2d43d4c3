"""Where rank threads wait for each other, so that a run that has ended can wake them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from smp_core.errors import Cancelled


class WaitingRoom:
    """One lock for all that the ranks of a run share, and one condition for all that they wait for.

    ``waits`` says by rank in which call it waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = False
        self.waits: dict[int, str] = {}

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._changed.release()

    def changed(self) -> None:
        """Let all that wait look again. Called inside."""
        self._changed.notify_all()

    def wait(self, rank: int, call: str, over: Callable[[], Any]) -> None:
        """Wait until ``over()``. Called inside. Raises Cancelled once the run has ended."""
        self.waits[rank] = call
        try:
            self._changed.wait_for(lambda: self._ended or over())
            if self._ended:
                raise Cancelled("the run has ended")
        finally:
            del self.waits[rank]

    def end(self) -> None:
        """The run has ended: every wait, now and later, raises Cancelled."""
        with self:
            self._ended = True
            self.changed()


class RoomStore(Store):
    """torch's key-value store for one rank, with waits in the room. Time limits are not used."""

    def __init__(self, room: WaitingRoom, rank: int, values: dict[str, bytes]) -> None:
        super().__init__()
        self._room, self._rank, self._values = room, rank, values

    def _await(self, keys: Sequence[str]) -> None:
        lacking = ", ".join(repr(key) for key in keys if key not in self._values)
        self._room.wait(
            self._rank,
            f"store.wait for {lacking}",
            lambda: all(key in self._values for key in keys),
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set."""
        with self._room:
            self._await(keys)

    def set(self, key: str, value: str | bytes) -> None:
        with self._room:
            self._values[key] = _bytes(value)
            self._room.changed()

    def get(self, key: str) -> bytes:
        """The value, once it is set."""
        with self._room:
            self._await([key])
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; returns the new value."""
        with self._room:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._room.changed()
            return total

    def append(self, key: str, value: str | bytes) -> None:
        with self._room:
            self._values[key] = self._values.get(key, b"") + _bytes(value)
            self._room.changed()

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``, or is not set and ``expected`` is
        empty.
        """
        with self._room:
            value = self._values.get(key)
            if value == _bytes(expected) or (value is None and not expected):
                self._values[key] = _bytes(desired)
                self._room.changed()
                return self._values[key]
            return _bytes(expected) if value is None else value

    def check(self, keys: Sequence[str]) -> bool:
        with self._room:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._room:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        with self._room:
            return len(self._values)

    # By these names C++ calls them, behind a prefix.
    getNumKeys = num_keys
    deleteKey = delete_key

    def clone(self) -> RoomStore:
        """Another handle on the same values."""
        return RoomStore(self._room, self._rank, self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._room:
            self._await(keys)
            return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
