"""A torch.distributed of its own for each world that a rank process is part of.

torch keeps one default group, its sub-groups and their numbering per process. Worlds of several
sizes live side by side in one rank process, so each keeps that state for itself and is put in the
place of the process's own while a body runs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection
from typing import Any

from torch.distributed import distributed_c10d as c10d

from smp_core.transport import messages
from smp_core.transport.stack_frames import Place, caller_place

_unregister_all: Any = c10d._unregister_all_process_groups  # type: ignore[attr-defined]
_register: Any = c10d._register_process_group  # type: ignore[attr-defined]


class _Names(dict[Any, Any]):
    """The names of groups, and the user's lines that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()

    def __setitem__(self, group: Any, name: Any) -> None:
        super().__setitem__(group, name)
        self.places[group] = caller_place()


class RankWorld(c10d._World):
    """torch.distributed's state, for one rank: ``_World`` keeps it in module globals, this class in the
    instance.
    """

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    group_count: Any = 0
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names = {}, {}
        self.pg_group_ranks, self.pg_backend_config = {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


#: The worlds that hold groups of their last run.
_HOLDING: list[TorchWorld] = []


class TorchWorld:
    """The state of one world, on one rank process. One is entered at a time."""

    def __init__(self) -> None:
        self._state = RankWorld()
        self._state.pg_names = _Names()
        self._own: set[Any] = set()  # the groups that stay from run to run
        self._default: Any = None
        self._store: Any = None
        self._backend = ""
        self._count = 0
        self._runs = 0
        self._held: list[Any] = []  # groups that the last run left
        self._outside: Any = None
        self._excepthook: Any = None

    def enter(self) -> None:
        """Make torch.distributed speak of this world.

        The world's groups are made over a prefix of the store that is this run's alone: torch numbers
        groups anew after they were destroyed, and would find the addresses of the old ones.
        """
        while _HOLDING:
            _HOLDING[0].release()
        self._put_in()
        self._runs += 1
        if self._default is not None:
            store = c10d.PrefixStore(f"run-{self._runs}", self._store)
            self._state.pg_map[self._default] = (self._backend, store)

    def rename(self, group: Any, name: str) -> None:
        """Give a group of the world's own a name that torch gives to none: it counts for nothing in
        ``get_pg_count``, and in the numbers of the groups that a body makes.
        """
        group._set_group_name(c10d.GroupName(name))
        self._state.pg_names[group] = c10d.GroupName(name)
        self._state.group_count -= 1

    def keep(self) -> None:
        """The groups that exist now are the world's own: ``leave`` lets them be."""
        self._own = set(self._state.pg_map)
        self._default = self._state.default_pg
        self._backend, self._store = self._state.pg_map[self._default]
        self._count = self._state.group_count

    @property
    def whole(self) -> bool:
        """True if the world's own groups are all still there: a body may have destroyed them."""
        return self._own <= set(self._state.pg_map) and self._state.default_pg is self._default

    def leave(self, ours: Collection[Any] = ()) -> list[str]:
        """Back to the process's own state. The groups that the body left, in words.

        ``ours`` are left without a word. They are destroyed when a world is entered again, which is
        after all ranks have left: Gloo's connections to a member that destroys a group break the
        making of that group on another, later, member.
        """
        left = []
        self._held = [each for each in self._state.pg_map if each not in self._own]
        for group in self._held:
            if group not in ours:
                positions = self._state.pg_group_ranks.get(group, {})
                ranks = sorted(positions, key=positions.__getitem__)
                name = str(self._state.pg_names.get(group, "?"))
                left.append(
                    messages.never_destroyed(name, ranks, self._state.pg_names.places.get(group))
                )
        self._state.pg_coalesce_state.clear()
        self._state.group_count = self._count
        self._put_back()
        if self._held:
            _HOLDING.append(self)
        return left

    @property
    def holds(self) -> bool:
        """True if groups of the last run still exist."""
        return bool(self._held)

    def release(self) -> None:
        """Destroy the groups of the last run."""
        if self in _HOLDING:
            _HOLDING.remove(self)
        self._put_in()
        try:
            for group in self._held:
                c10d.destroy_process_group(group)
        finally:
            self._held = []
            self._put_back()

    def close(self) -> None:
        """Destroy every group of the world."""
        self.enter()
        try:
            if self._state.default_pg is not None:
                c10d.destroy_process_group()
        finally:
            self._put_back()

    def _put_in(self) -> None:
        self._outside, self._excepthook = c10d._world, sys.excepthook
        c10d._world = self._state
        _unregister_all()
        for group, name in self._state.pg_names.items():
            _register(name, group)

    def _put_back(self) -> None:
        _unregister_all()
        c10d._world = self._outside
        sys.excepthook = self._excepthook  # init_process_group wraps it at every call
