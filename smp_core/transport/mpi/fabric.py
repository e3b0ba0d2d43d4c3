"""The fabric of `mpi`: one rank's side, formed once and entered for every run."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from smp_core.errors import BackendError, Cancelled, NotInitializedError, RankError
from smp_core.transport import native_calls
from smp_core.transport.mpi.library import messenger
from smp_core.transport.mpi.objects import MpiObjects
from smp_core.transport.mpi.process_group import BACKEND, MpiProcessGroup
from smp_core.transport.mpi.work import MpiWork
from smp_core.transport.protocols import (
    FABRIC_VERSION,
    Group,
    ObjectTransport,
    RankEnvironment,
    RankFabric,
)
from smp_core.transport.torch_world import TorchWorld

_DEFAULT = "WORLD"
_LINGER = 2.0  # seconds that a rank which has returned still moves messages that others wait for
_RUNS = 2**32  # more than a world sees


class MpiFabric(RankFabric):
    """The fabric of `mpi`; see RankFabric. Every rank of the world enters every run: counting tells runs apart."""

    protocol = FABRIC_VERSION
    cooperative = True

    def __init__(self, environment: RankEnvironment) -> None:
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self.messenger = messenger(environment)
        self.unwaited: dict[int, MpiWork] = {}
        self._environment = environment
        self._runs = environment.forming * _RUNS
        self._made: collections.Counter[Group] = collections.Counter()
        self._handles: dict[Group, Any] = {}
        self._store = dist.FileStore(str(environment.folder / "store"), environment.size)  # type: ignore[attr-defined]
        self._objects = MpiObjects(environment, self.messenger)
        self.objects: ObjectTransport = self._objects
        self._torch: TorchWorld | None = None

    def channel(self, group: Group) -> str:
        """A name for a group that is being made: the same on all its members, and of this run its
        alone.
        """
        self._made[group] += 1
        return f"{group.name} {group.ranks} {self._made[group]}"

    # Runs.

    def enter(self) -> None:
        """See RankFabric."""
        global _entered
        self._runs += 1
        self._made.clear()
        self._handles.clear()
        messenger(self._environment).enter(
            self._runs
        )  # its waits ask this world's environment from now on
        self._objects.open()
        _entered = self
        if self._torch is not None:
            self._torch.enter()
            if self._torch.whole:
                _default().open()
                return
            self._torch.leave()  # the body has destroyed the default group, or made another
        self._torch = TorchWorld()
        self._torch.enter()
        dist.init_process_group(BACKEND, store=self._store, rank=self.rank, world_size=self.size)
        _default()._set_group_desc("default_pg")
        self._torch.keep()

    def leave(self) -> list[str]:
        """See RankFabric."""
        global _entered
        assert self._torch is not None
        with contextlib.suppress(Cancelled):  # nobody waits any more
            self.messenger.drain(_LINGER)
        for work in list(self.unwaited.values()):
            work.forget()
        self.unwaited.clear()
        for handle in self._handles.values():
            if handle in c10d._world.pg_map:
                dist.destroy_process_group(handle)
        self._handles.clear()
        left = self._torch.leave()
        _entered = None
        return left

    def close(self) -> None:
        """See RankFabric."""
        if self._torch is not None:
            self._torch.close()

    # torch.distributed.

    def process_group(self, group: Group) -> Any:
        """The process group over a group, made without communication. See Fabric."""
        if group.name == _DEFAULT:
            if not dist.is_initialized():
                raise NotInitializedError("the default process group has been destroyed")
            return dist.group.WORLD
        handle = self._handles.get(group)
        if handle is None or handle not in c10d._world.pg_map:
            name = f"smp:{group.name}:{len(self._handles)}"
            handle = self._handles[group] = MpiProcessGroup(self, group, name)
            c10d._register_pg_in_world(
                handle,
                backend_name=BACKEND,
                store=self._store,
                group_name=c10d.GroupName(name),
                backend_config=f"cpu:{BACKEND}",
                rank_mapping={rank: position for position, rank in enumerate(group.ranks)},
            )
        return handle


_entered: MpiFabric | None = None


def _default() -> MpiProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, MpiProcessGroup)
    return group


def _create(options: Any, backend_options: Any) -> MpiProcessGroup:
    """A group, as ``init_process_group("smp_mpi")`` asks for one, and ``new_group`` where the default group is
    of another backend.
    """
    fabric, rank, size = _entered, options.group_rank, options.group_size
    if fabric is None:
        raise BackendError("the smp_mpi process group exists on ranks of the mpi backend, in a run")
    name, ranks = str(options.group_id), tuple(options.global_ranks_in_group)
    if ranks:
        return MpiProcessGroup(fabric, Group(name, ranks), name)
    if (rank, size) != (fabric.rank, fabric.size):
        raise RankError(
            f"init_process_group: rank={rank}, world_size={size}, but this is rank {fabric.rank} "
            f"of {fabric.size}"
        )
    return MpiProcessGroup(fabric, Group(_DEFAULT, tuple(range(size))), name)


def register_backend() -> None:
    """Make ``smp_mpi`` a backend name that torch knows.

    Does not change which backend a device gets by default.
    """
    native_calls.install()
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
