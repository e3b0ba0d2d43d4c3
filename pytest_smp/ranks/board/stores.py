"""Waits for keys of the world's store, and the keys that ranks set.

A wait can be told from the records because every key that a rank sets is recorded before it is set, in whichever
store: "a/b" and "b" may be one key, behind the prefix "a". Child processes of ranks record nothing: they keep the
verdict away (child_processes). A wait counts if its
keys are not there yet, if the store is the world's own, which no other process knows, and if the caller has not
shortened torch's time limit, so that no error is expected of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from pytest_smp.ranks.board.recorder import BoardRecorder

Method = Callable[..., Any]

_SETS = ("set", "add", "append", "compare_set", "multi_set", "queue_push")
_WAITS = ("get", "wait", "multi_get")
_TIMEOUT = timedelta(minutes=5)  # torch's default


class Stores:
    """Wrappers for the methods of stores."""

    def __init__(self, recorder: BoardRecorder) -> None:
        self._recorder = recorder

    def method(self, name: str, original: Method) -> Method | None:
        """A wrapper for this method of a class of stores, if it needs one."""
        if name in _SETS:
            return self._setting(original)
        return self._waiting(original) if name in _WAITS else None

    def _setting(self, original: Method) -> Method:
        recorder = self._recorder

        @functools.wraps(original)
        def set_keys(store: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active:
                return original(store, *args, **kwargs)
            recorder.sets_keys(_keys(args, kwargs))
            with recorder.quiet():
                return original(store, *args, **kwargs)

        return set_keys

    def _waiting(self, original: Method) -> Method:
        recorder = self._recorder

        @functools.wraps(original)
        def wait(store: Any, *args: Any, **kwargs: Any) -> Any:
            keys = _keys(args, kwargs) if recorder.active and len(args) + len(kwargs) == 1 else []
            if (
                not keys
                or not _is_of_the_world(store)
                or store.timeout < _TIMEOUT
                or store.check(keys)
            ):
                return original(store, *args, **kwargs)
            with recorder.waiting_for_keys(keys):
                return original(store, *args, **kwargs)

        return wait


def _keys(args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The first argument, a key or a list of keys; none if it is neither, which the store will refuse."""
    first = args[0] if args else kwargs.get("key", kwargs.get("keys", ()))
    keys = [first] if isinstance(first, str) else first
    listed = [*keys] if isinstance(keys, (list, tuple)) else []
    return listed if all(isinstance(key, str) for key in listed) else []


def _is_of_the_world(store: Any) -> bool:
    world: Any = c10d._world
    entry = world.pg_map.get(world.default_pg)
    return entry is not None and _base(store) is _base(entry[1])


def _base(store: Any) -> Any:
    return getattr(store, "_underlying_non_prefix_store", store)
