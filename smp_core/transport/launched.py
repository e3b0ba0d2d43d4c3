"""The fabric of a plain script: a process that a launcher started as one of several ranks, or alone.

The ranks exchange data through the launcher's own means (transport/launchers.py), or through the process group that
the script has made itself. The first ``smp.init`` forms the fabric, which stays until the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smp_core.errors import BackendError, NotInitializedError
from smp_core.transport import ending
from smp_core.transport.launchers import Launch, half_set, launch_of_process
from smp_core.transport.protocols import Fabric, Group, ObjectTransport, RankEnvironment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WORLD = "WORLD"


class Rendezvous(Protocol):
    """The way in which this process meets the other ranks of a world of ``size``, which ``join`` forms."""

    size: int

    def join(self, collectives: str) -> Fabric:
        """Meet the other ranks. ``collectives`` is the configuration's ``ddp_dist_backend``.

        Raises BackendError if they cannot be met.
        """


def find_rendezvous() -> Rendezvous:
    """The rendezvous of this process; no other rank is contacted yet.

    Raises BackendError if the launcher's environment is half set, or gives the ranks no way to
    meet.
    """
    if _joined.fabric is not None and _joined.holds():
        return _joined
    launch = launch_of_process()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if size > 1:
            return _Torch(rank, size, launch, ours=False)
        if launch is not None and launch.size > 1:
            raise BackendError(
                f"smp.init: {launch.launcher.name} has started {launch.size} ranks, and the script "
                "has initialised torch.distributed for one: leave that to smp.init, or give it all"
            )
        return _Alone()
    if launch is None:
        trouble = half_set(os.environ)
        if trouble:
            raise BackendError(f"smp.init: {trouble}")
        return _Alone()
    if launch.size == 1 and not launch.rendezvous:
        return _Alone()  # srun's own shell is such a process
    trouble = launch.refusal(launch.fabric)
    if trouble:
        raise BackendError(f"smp.init: rank {launch.rank} of {launch.size}: {trouble}")
    if launch.fabric == "mpi":
        return _Mpi(launch)
    return _Torch(launch.rank, launch.size, launch, ours=True)


class _Joined:
    """The world that this process is in already."""

    fabric: Any = None
    size = 0

    def holds(self) -> bool:
        """Return whether the world is still there: the script may have destroyed its process group."""
        return bool(self.fabric.holds())

    def join(self, collectives: str) -> Fabric:
        """See Rendezvous."""
        fabric: Fabric = self.fabric
        return fabric

    def keep(self, fabric: Fabric) -> None:
        """This is the one from now on."""
        self.fabric, self.size = fabric, fabric.size


_joined = _Joined()


class _Alone:
    """See Rendezvous."""

    size = 1

    def join(self, collectives: str) -> Fabric:
        """See Rendezvous."""
        from smp_core.transport.solo import SoloFabric

        return SoloFabric()


class _NoBoard:
    """A CallRecorder for ranks that no controller watches."""

    def call(
        self, call: str, group: Group, *, to: Sequence[int] = (), source: int | None = None
    ) -> AbstractContextManager[None]:
        """See CallRecorder."""
        return contextlib.nullcontext()


def _environment(
    rank: int, size: int, folder: Path, local: tuple[int, int] = (0, 0)
) -> RankEnvironment:
    return RankEnvironment(rank, size, *local, folder, 0, _nothing, _NoBoard())


def _nothing() -> None:
    """A wait of a plain script ends when it ends."""


def _local(rank: int, size: int, objects: ObjectTransport) -> tuple[int, int]:
    """The rank among those of its machine, and how many they are. Once it returns, all have met."""
    hosts = objects.allgather(socket.gethostname(), Group(_WORLD, tuple(range(size))))
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


# Over a process group of torch.

#: The launcher's, and one below it for each process group that was made.
_stores: list[Any] = []


class _Torch:
    """Joins by torch's rendezvous, or in the script's own process group. See Rendezvous."""

    def __init__(self, rank: int, size: int, launch: Launch | None, *, ours: bool) -> None:
        self.rank, self.size, self._launch, self._ours = rank, size, launch, ours

    def join(self, collectives: str) -> Fabric:
        """See Rendezvous."""
        import torch.distributed as dist

        if not dist.is_gloo_available():
            raise BackendError("smp.init: this torch was built without Gloo, which carries objects")
        ending.watch()
        if self._ours:
            self._meet(_names(collectives))
        fabric = _TorchFabric(self.rank, self.size)
        _joined.keep(fabric)
        ending.at_last(functools.partial(_leave_torch, os.getpid(), fabric))
        return fabric

    def _meet(self, names: str) -> None:
        import torch.distributed as dist

        launch = self._launch
        assert launch is not None
        if launch.one_machine:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            if not _stores:
                _stores.append(open_store(launch.meeting, self.rank, self.size))
            # torch numbers groups anew after they were destroyed, and would find their addresses.
            _stores.append(dist.PrefixStore(f"smp-{len(_stores)}", _stores[0]))  # type: ignore[attr-defined]
            dist.init_process_group(names, store=_stores[-1], rank=self.rank, world_size=self.size)
        except (RuntimeError, ValueError) as error:  # torch's own lists every frame of C++
            raise BackendError(
                f"smp.init: rank {self.rank} of {self.size} has not met the others at "
                f"{_place(launch.meeting)}: {str(error).partition(chr(10))[0]}"
            ) from None


def open_store(
    meeting: str, rank: int, size: int, timeout: datetime.timedelta | None = None
) -> Any:
    """The store at an address: a file, or that of torch's own variables. ``timeout``: torch's own if it is None."""
    import torch.distributed as dist

    path = meeting.removeprefix("file://")
    if (
        path != meeting
    ):  # torch would take the path for a URL, in which some characters mean something
        store = dist.FileStore(path, size)  # type: ignore[attr-defined]
        if timeout is not None:
            store.set_timeout(timeout)
        return store
    limit = {} if timeout is None else {"timeout": timeout}
    met = dist.rendezvous(meeting, rank, size, **limit)  # type: ignore[attr-defined]
    return next(met)[0]


def _place(meeting: str) -> str:
    if meeting != "env://":
        return meeting
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"


def _names(collectives: str) -> str:
    """The backends by torch's names: Gloo for tensors of the CPU, NCCL for those of GPUs if there
    are any. ``nccl`` insists on it where there are.
    """
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return "gloo"
    if dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    if collectives == "nccl":
        raise BackendError("ddp_dist_backend='nccl': this torch was built without NCCL")
    return "gloo"


class _TorchFabric(Fabric):
    """A fabric on torch's default process group, which is there already. See Fabric."""

    def __init__(self, rank: int, size: int) -> None:
        import torch.distributed as dist

        from smp_core.transport.torch_objects import GroupObjects

        self.rank, self.size = rank, size
        self._default: Any = dist.group.WORLD
        self._handles: dict[Group, Any] = {}
        private = dist.new_group(backend="gloo", group_desc="smp objects")
        self.objects: ObjectTransport = GroupObjects(_environment(rank, size, Path()), private)
        self.local_rank, self.local_size = _local(rank, size, self.objects)

    def forget(self) -> None:
        """Let go of all groups, which ends Gloo's threads."""
        self._handles.clear()
        self._default = None
        self.__dict__.pop("objects", None)

    def holds(self) -> bool:
        """Return whether the default process group is the one of the beginning."""
        import torch.distributed as dist

        return dist.group.WORLD is self._default

    def process_group(self, group: Group) -> ProcessGroup:
        """See Fabric."""
        if group.name == _WORLD and self.holds():
            default: ProcessGroup = self._default
            return default
        return self._made(group, None)

    def smddp_group(self, group: Group) -> ProcessGroup | str:
        """See Fabric. Tensors of GPUs are NCCL's."""
        import torch

        from smp_core.transport import smddp

        mine = "its parameters may be on GPUs" if torch.cuda.is_available() else smddp.trouble()
        for rank, trouble in zip(group.ranks, self.objects.allgather(mine, group), strict=True):
            if trouble:
                return f"rank {rank}: {trouble}"
        return self._made(group, smddp.BACKEND)

    def _made(self, group: Group, backend: str | None) -> ProcessGroup:
        """The process group of a backend, that of the default group if it is None."""
        import torch.distributed as dist

        if not self.holds():
            raise NotInitializedError("the default process group has been destroyed")
        if group not in self._handles:
            with _together():
                self._handles[group] = dist.new_group(
                    list(group.ranks),
                    backend=backend,
                    use_local_synchronization=True,
                    sort_ranks=False,
                    group_desc=group.name,
                )
        made: ProcessGroup = self._handles[group]
        return made


@contextlib.contextmanager
def _together() -> Any:
    """Members leave ``new_group`` together: a member whose process ends right behind it may otherwise be gone while
    another still connects to it.
    """
    name = "TORCH_DIST_INIT_BARRIER"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _leave_torch(pid: int, fabric: _TorchFabric) -> None:
    """At exit: destroy torch's process groups, if the script has not, whoever has made them.

    A thread of Gloo that still gives up the tensors of the last call when Python ends finds no interpreter, and ends a
    process that has succeeded with SIGABRT. Scripts seldom destroy their groups. After an error, end the process at
    once: destroying Gloo's group waits until its operations in flight are over, which may need ranks that wait for
    this one, and Python's shutdown would destroy the group as well.
    """
    global _leaving
    if os.getpid() != pid or _leaving:
        return
    status = ending.status()
    if status:
        _leaving = True
        ending.end_at_once(status)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    fabric.forget()


_leaving = False


# Over MPI.


class _Mpi:
    """Joins in the job of an mpiexec, or of srun. See Rendezvous."""

    def __init__(self, launch: Launch) -> None:
        self.size, self._launch = launch.size, launch

    def join(self, collectives: str) -> Fabric:
        """See Rendezvous."""
        from smp_core.transport.mpi.job import join

        try:
            world = join(self._launch)
        except BackendError as error:
            raise BackendError(
                f"smp.init: rank {self._launch.rank} of {self.size}: {error}"
            ) from None

        if _MpiFabric.made is None:
            ending.watch()
            atexit.register(_leave_mpi, os.getpid())
            _MpiFabric.made = _MpiFabric(self._launch, world)
        else:
            _MpiFabric.made.renew()
        _joined.keep(_MpiFabric.made)
        return _MpiFabric.made


class _MpiFabric(Fabric):
    """The fabric of the `mpi` backend, in a run that lasts until the process ends. See Fabric."""

    made: _MpiFabric | None = None

    def __init__(self, launch: Launch, world: Any) -> None:
        from smp_core.transport.mpi import open_fabric
        from smp_core.transport.mpi.job import Pulse
        from smp_core.transport.private_folder import private_folder

        self.rank, self.size, self._world = world.rank, world.size, world
        hosts = world.allgather(socket.gethostname())
        host = hosts[self.rank]
        self.local_rank, self.local_size = hosts[: self.rank].count(host), hosts.count(host)
        # Of torch's store, which its other backends meet in: on this machine, if the script makes
        # a group of one.
        folders = world.allgather(private_folder() if self.local_rank == 0 else "")
        self._folder = folders[hosts.index(host)]
        local = self.local_rank, self.local_size
        environment = _environment(self.rank, self.size, Path(self._folder), local)
        self._fabric: Any = open_fabric(environment)
        self.objects = self._fabric.objects
        self._enter()
        self._pulse = Pulse.of(launch, world)

    def _enter(self) -> None:
        import torch.distributed as dist

        self._fabric.enter()
        self._default = dist.group.WORLD
        self._world.Barrier()  # a rank that has entered sends, and nobody may still be in the run before

    def renew(self) -> None:
        """Another default process group: the script has destroyed the first."""
        self._fabric.leave()
        self._enter()

    def holds(self) -> bool:
        """Return whether the default process group is the one of the beginning."""
        import torch.distributed as dist

        return dist.group.WORLD is self._default

    def process_group(self, group: Group) -> ProcessGroup:
        """See Fabric."""
        if not self.holds():
            raise NotInitializedError("the default process group has been destroyed")
        made: ProcessGroup = self._fabric.process_group(group)
        return made

    def leave(self) -> None:
        """The end of the script; all ranks come to it together."""
        self._fabric.leave()
        self._fabric.close()
        self._world.Barrier()  # nobody uses the folder any more

    def tidy(self) -> None:
        """Clean up on this rank alone, however the rank ends."""
        if self._pulse is not None:
            self._pulse.stop()
        # Every rank of the machine does this, whichever is the first: an aborted job kills the others.
        shutil.rmtree(self._folder, ignore_errors=True)


def _leave_mpi(pid: int) -> None:
    """At exit. All ranks of an MPI job end together, unless one ends by an error: the others wait
    for it, and it would for them in MPI_Finalize.
    """
    if os.getpid() != pid:  # a fork of the script's
        return
    status = ending.status()
    if status:
        from mpi4py.run import set_abort_status

        set_abort_status(status)
    made = _MpiFabric.made
    if made is not None:
        if not status:
            made.leave()
        made.tidy()
