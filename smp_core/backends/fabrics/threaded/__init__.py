"""The fabric of `torch:threaded`: torch's own process group on threads, a third party.

torch keeps it for its own tests (``torch.testing._internal.distributed.multi_threaded_pg``). It has
no messages, so that objects go a way of their own.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from smp_core.backends import torch_parts
from smp_core.backends.base import Group, ObjectTransport
from smp_core.backends.fabrics.sim import torch_private
from smp_core.backends.fabrics.threaded.objects import Exchange, ThreadObjects
from smp_core.backends.fabrics.threaded.waiting import RoomStore, WaitingRoom
from smp_core.backends.hosts.free_threads import FreeThreadHost
from smp_core.backends.hosts.isolation import prepare_thread
from smp_core.errors import NotInitializedError

_WORLD = "WORLD"
_reset: Any = ProcessLocalGroup.reset
_wake: Any = ProcessLocalGroup.exception_handle
_LIMIT = datetime.timedelta(days=1)  # torch's own on forming a group; --smp-timeout comes first


class _Router(torch_private._Router):
    """As sim's; torch's group keeps a weak reference to it."""

    __slots__ = ("__weakref__",)


class _RankWorlds(torch_private.rank_worlds):
    """As sim's, with a router that torch's group can refer to."""

    def enter(self) -> None:
        super().enter()
        c10d._world = _Router(self._world)  # type: ignore[assignment]
        # A thread that waits in C++ holds nobody up here.
        c10d._new_process_group_helper = torch_private.make_group


class ThreadedFabric:
    """One rank's side of the fabric. See free_threads.RankFabric."""

    def __init__(self, world: ThreadedWorldFabric, rank: int) -> None:
        self.rank, self.size = rank, world.size
        self.local_rank, self.local_size = rank, world.size
        self.objects: ObjectTransport = ThreadObjects(world.exchange, rank)
        self._store = RoomStore(world.room, rank, world.values)
        self._torch_world = torch_private.RankWorld()
        self._handles: dict[Group, Any] = {}

    def torch_world(self) -> torch_private.RankWorld:
        """This rank's torch.distributed state: what the router asks for."""
        return self._torch_world

    def enter(self) -> None:
        """See RankFabric."""
        prepare_thread()
        dist.init_process_group(
            "threaded", store=self._store, rank=self.rank, world_size=self.size, timeout=_LIMIT
        )

    def leave(self) -> list[str]:
        """See RankFabric."""
        world = self._torch_world
        ours = {world.default_pg, *self._handles.values()}
        left = [
            f"process group {name} of ranks {sorted(world.pg_group_ranks[group])} was never destroyed"
            for group, name in world.pg_names.items()
            if group not in ours
        ]
        torch_private.unregister_all_process_groups()
        prepare_thread()
        return left

    def process_group(self, group: Group) -> Any:
        """See base.Fabric. Members alone make it, in any order against other groups."""
        if group.name == _WORLD:
            if self._torch_world.default_pg is None:
                raise NotInitializedError("the default process group has been destroyed")
            return self._torch_world.default_pg
        handle = self._handles.get(group)
        if handle is None or handle not in self._torch_world.pg_map:
            handle = self._handles[group] = dist.new_group(
                list(group.ranks),
                timeout=_LIMIT,
                use_local_synchronization=True,
                sort_ranks=False,
                group_desc=group.name,
            )
        return handle


class ThreadedWorldFabric:
    """What the ranks of one run share. See free_threads.WorldFabric."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.room = WaitingRoom()
        self.exchange = Exchange(self.room)
        self.values: dict[str, bytes] = {}  # of the store
        _reset()  # its calls under way are found by the group's name, process-wide
        self._worlds = _RankWorlds()
        self._worlds.enter()

    def rank_fabric(self, rank: int) -> ThreadedFabric:
        """The side of one rank."""
        return ThreadedFabric(self, rank)

    def waits(self, rank: int) -> str:
        """See WorldFabric."""
        return self.room.waits.get(rank, "")

    def cancel(self) -> None:
        """See WorldFabric."""
        self.room.end()
        with contextlib.suppress(RuntimeError):  # it walks a dictionary that ranks change
            _wake(None)

    def close(self) -> None:
        """Give torch.distributed back."""
        self._worlds.leave()


def open_host() -> FreeThreadHost:
    """The host of `torch:threaded`, ready to open worlds."""
    torch_parts.require("the sim backend")
    return FreeThreadHost(ThreadedWorldFabric)
