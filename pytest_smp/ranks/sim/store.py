"""The store of `sim`: torch's key-value store, with waits that the scheduler sees.

Operations are atomic: the turn may pass when one begins, and no more until it has taken effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from pytest_smp.ranks.sim.rank_context import RankContext
from pytest_smp.ranks.sim.scheduler import WaitExpired


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class StoreData:
    """The data that the ranks' stores share: the values, and the waits for keys."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waits: list[_KeyWait] = []

    def update(self, values: Mapping[str, bytes]) -> None:
        """Set keys, and end the waits whose keys are all set now."""
        self.values.update(values)
        for wait in list(self.waits):
            if all(key in self.values for key in wait.keys):
                wait.done = True
                # Now: when the rank has its turn, another one may have deleted or changed a key.
                wait.values = [self.values[key] for key in wait.keys]
                self.waits.remove(wait)
                wait.context.scheduler.wake(wait.context.rank, wait)


class _KeyWait:
    """A rank that waits for keys. An Operation of the scheduler."""

    def __init__(self, context: RankContext, keys: Sequence[str], data: StoreData) -> None:
        self.context, self.keys, self._data = context, list(keys), data
        self.values: list[bytes] = []  # of the keys, when all were set
        self.done = False

    def describe(self, rank: int) -> str:
        lacking = [key for key in self.keys if key not in self._data.values]
        return f"store.wait for {', '.join(map(repr, lacking))}"

    def missing(self, rank: int) -> Sequence[int]:
        return ()  # any rank may set a key


class SimStore(Store):
    """One rank's view of the world's store.

    The time-outs of ``wait`` fire with --smp-timeouts=simulated: otherwise a wait that cannot end is a verdict.
    """

    def __init__(self, context: RankContext, data: StoreData) -> None:
        super().__init__()
        self._context, self._data = context, data

    def _enter(self) -> dict[str, bytes]:
        """Begin an operation, which may pass the turn; return the values of all ranks."""
        self._context.check("torch.distributed store")
        return self._data.values

    def _await_values(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """The values of all keys at one moment, once all are set. Raises DistStoreError after ``timeout``."""
        values = self._enter()
        if all(key in values for key in keys):
            return [values[key] for key in keys]
        wait = _KeyWait(self._context, keys, self._data)
        self._data.waits.append(wait)
        try:
            self._context.scheduler.wait(self._context.thread_state, wait, timeout)
        except WaitExpired:
            self._data.waits.remove(wait)
            milliseconds = (timeout or timedelta()).total_seconds() * 1000
            names = ", ".join(f"/{key}" for key in keys if key not in self._data.values)
            raise DistStoreError(f"wait timeout after {milliseconds:g}ms, keys: {names}") from None
        return wait.values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set."""
        self._await_values(keys, timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._enter()
        self._data.update({key: _bytes(value)})

    def get(self, key: str) -> bytes:
        """The value, once it is set."""
        (value,) = self._await_values([key])
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; returns the new value."""
        total = int(self._enter().get(key, b"0")) + amount
        self._data.update({key: str(total).encode()})
        return total

    def append(self, key: str, value: str | bytes) -> None:
        self._data.update({key: self._enter().get(key, b"") + _bytes(value)})

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``, or is not set and ``expected`` is
        empty.
        """
        value = self._enter().get(key)
        if value == _bytes(expected) or (value is None and not expected):
            self._data.update({key: _bytes(desired)})
            return _bytes(desired)
        return _bytes(expected) if value is None else value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set. The other ranks run first, since callers poll."""
        values = self._enter()
        self._context.scheduler.give_way(self._context.thread_state)
        return all(key in values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._enter().pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._enter())

    # By these names C++ calls them, behind a prefix.
    getNumKeys = num_keys
    deleteKey = delete_key

    def clone(self) -> SimStore:
        """Another handle on the same values."""
        return SimStore(self._context, self._data)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await_values(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._enter()
        self._data.update({key: _bytes(value) for key, value in zip(keys, values, strict=True)})

    def has_extended_api(self) -> bool:
        return True
