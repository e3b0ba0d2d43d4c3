"""A torch.distributed of its own for each world that a rank process is part of.

torch keeps one default group, its sub-groups and their numbering per process. Worlds of several
sizes live side by side in one rank process, so each keeps that state for itself and is put in the
place of the process's own while a body runs.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from smp_core.errors import RankError
from smp_core.transport import messages
from smp_core.transport.stack_frames import Place, caller_place
from smp_core.transport.torch_imports import install_import_defaults

_unregister_all: Any = c10d._unregister_all_process_groups  # type: ignore[attr-defined]
_register: Any = c10d._register_process_group  # type: ignore[attr-defined]


class _Names(dict[Any, Any]):
    """The names of groups, and the user's lines that made them.

    Attributes:
        kept: groups that ``destroy_process_group()`` does not end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()
        self.kept: set[Any] = set()

    def __iter__(self) -> Iterator[Any]:
        # destroy_process_group() shuts down the groups over which it iterates, and nothing else does so.
        return iter([group for group in dict.__iter__(self) if group not in self.kept])

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
    #: A body has called init_process_group: the next call is a second one, which torch refuses.
    joined = False

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names = {}, {}
        self.pg_group_ranks, self.pg_backend_config = {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}

    def place(self) -> tuple[int, int] | None:
        """Return the rank and the size of the world; None while it is formed."""
        raise NotImplementedError

    def rejoin(self, make: Callable[..., None]) -> None:
        """Make the default group that of the ranks again, after ``destroy_process_group()``. ``make`` is torch's
        ``init_process_group``.
        """
        raise NotImplementedError

    def limit_waits(self, timeout: timedelta | None) -> None:
        """Have waits of the default group end after ``timeout``, which a body has given to ``init_process_group``;
        None is the limit of the ranks' group.
        """
        raise NotImplementedError

    def join(self, rank: int, size: int, make: Callable[..., None]) -> bool:
        """Join the ranks that are there, for ``init_process_group``. Return False where torch is to make a group: for a
        second call, and for one of another rank or size after the ranks' group was destroyed.

        ``rank`` and ``size`` are -1 if the environment has them. Raises RankError for another rank or size.
        """
        here = self.place()
        if here is None or (self.default_pg is not None and self.joined):
            return False
        if rank not in (-1, here[0]) or size not in (-1, here[1]):
            if self.default_pg is None:
                return False
            raise RankError(
                f"init_process_group: rank={rank}, world_size={size}, but this is rank {here[0]} of {here[1]}, which "
                "are there before the body starts. Leave rank and world_size out, or start as many ranks"
            )
        if self.default_pg is None:
            self.rejoin(make)
        return True


_init: Any = c10d.init_process_group
#: Where torch's decorator of ``init_process_group`` holds the function: scripts have imported the decorated one.
_cell: Any = next(cell for cell in _init.__closure__ if cell.cell_contents is _init.__wrapped__)


def _joining(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        world: Any = c10d._world
        join = getattr(world, "join", None)
        if join is None:
            make(backend, init_method, timeout, world_size, rank, *args, **kwargs)
            return
        if not join(rank, world_size, make):
            make(backend, init_method, timeout, world_size, rank, *args, **kwargs)
        world.joined = True
        world.limit_waits(timeout)

    return init_process_group


@functools.cache
def install_joining() -> None:
    """Have ``init_process_group`` on a rank join the ranks that are there, whatever its backend is called.

    The change is for good, and has no effect outside of ranks.
    """
    _cell.cell_contents = _joining(_cell.cell_contents)


class _ProcessWorld(RankWorld):
    """torch.distributed's state of a TorchWorld."""

    def __init__(self, world: TorchWorld) -> None:
        super().__init__()
        self.pg_names = _Names()
        self._world = world

    def place(self) -> tuple[int, int] | None:
        default = self._world.default
        return None if default is None else (default.rank(), default.size())

    def rejoin(self, make: Callable[..., None]) -> None:
        del make  # the group is there: it has outlived destroy_process_group()
        self._world.rejoin()

    def limit_waits(self, timeout: timedelta | None) -> None:
        if timeout is not None and self.default_pg is self._world.default:
            self._world.limit_waits(timeout)


#: The attributes in which torch.distributed keeps what it knows of groups.
_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
#: The worlds that hold groups of their last run.
_HOLDING: list[TorchWorld] = []


class TorchWorld:
    """The state of one world, on one rank process. One is entered at a time."""

    def __init__(self) -> None:
        install_joining()
        install_import_defaults()
        self._state = _ProcessWorld(self)
        self._own: set[Any] = set()  # the groups that stay from run to run
        self._tables: dict[str, dict[Any, Any]] = {}  # what torch.distributed knows of them
        self.default: Any = None
        self._store: Any = None
        self._backend = ""
        self._count = 0
        self._runs = 0
        self._joins = 0  # of this run
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
        self._joins = 0
        self._state.joined = False
        if self.default is not None:
            self._renew_store()

    def _renew_store(self) -> None:
        """Let the groups to come meet where no earlier ones have met, which may have had their names."""
        self._put_store(self._store)

    def _put_store(self, store: Any) -> None:
        store = c10d.PrefixStore(f"run-{self._runs}-{self._joins}", store)
        self._state.pg_map[self.default] = (self._backend, store)

    def limit_waits(self, timeout: timedelta) -> None:
        """Have waits for keys of the store end after ``timeout``, until the store is renewed."""
        store = self._store.clone()  # the fabric's own waits keep theirs
        store.set_timeout(timeout)
        self._put_store(store)

    def rejoin(self) -> None:
        """Put the world's own groups back, of which ``destroy_process_group()`` has left torch.distributed nothing."""
        for name, table in self._tables.items():
            getattr(self._state, name).update(table)
        for tag, groups in self._tables["tags_to_pg"].items():
            self._state.tags_to_pg[tag] = list(groups)
        for group in self._own:
            _register(self._state.pg_names[group], group)
        self._state.group_count = self._count
        self._joins += 1
        self._renew_store()
        c10d._update_default_pg(self.default)

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
        self._state.pg_names.kept |= self._own
        self._tables = {name: dict(getattr(self._state, name)) for name in _TABLES}
        tags = self._tables["tags_to_pg"]
        self._tables["tags_to_pg"] = {tag: tuple(groups) for tag, groups in tags.items()}
        self.default = self._state.default_pg
        self._backend, self._store = self._state.pg_map[self.default]
        self._count = self._state.group_count
        self._state.joined = False  # a fabric has made the groups, no body

    @property
    def whole(self) -> bool:
        """True if the world's own groups are all still there: a body may have made another default group."""
        return self._own <= set(self._state.pg_map) and self._state.default_pg is self.default

    def leave(self, ours: Collection[Any] = ()) -> list[str]:
        """Back to the process's own state. The groups that the body left, in words.

        ``ours`` are left without a word. They are destroyed when a world is entered again, which is
        after all ranks have left: Gloo's connections to a member that destroys a group break the
        making of that group on another, later, member.
        """
        left = []
        self._held = [each for each in self._state.pg_map if each not in self._own]
        for group in self._held:
            place = self._state.pg_names.places.get(group)
            # Groups that torch's own code has made, such as those of a device mesh, no script can destroy.
            if group not in ours and (place is None or place.direct):
                positions = self._state.pg_group_ranks.get(group, {})
                ranks = sorted(positions, key=positions.__getitem__)
                name = str(self._state.pg_names.get(group, "?"))
                left.append(messages.never_destroyed(name, ranks, place))
        self._state.pg_coalesce_state.clear()
        if self._state.default_pg is None and self.default is not None:
            self.rejoin()
        if self.default in self._state.pg_map:
            self._renew_store()  # a limited one may have a connection of its own, which the run opened
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
        self._state.pg_names.kept.clear()
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
