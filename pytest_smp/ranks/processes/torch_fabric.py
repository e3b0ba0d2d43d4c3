"""The fabric of any backend that torch knows by name: Gloo first of all.

The default process group is that backend's own, made over a file store; objects go through a second
group of it that no user's call touches, or through the store if it has no messages.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pytest_smp.ranks.processes.lasting_groups import LastingGroups, lasts
from smp_core.errors import NotInitializedError
from smp_core.transport.protocols import FABRIC_VERSION, Group, RankEnvironment, RankFabric
from smp_core.transport.torch_objects import choose
from smp_core.transport.torch_world import TorchWorld

_WORLD = "WORLD"
# torch's own limit on a wait. Ours are the board and --smp-timeout; this one only has to be longer.
_LIMIT = datetime.timedelta(days=1)


class TorchFabric(RankFabric):
    """A process group of torch as the fabric of rank processes: see RankFabric."""

    protocol = FABRIC_VERSION
    cooperative = False  # a wait inside a torch backend ends when it ends

    def __init__(self, environment: RankEnvironment, backend: str) -> None:
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self._handles: dict[Group, Any] = {}
        self._lasting = LastingGroups(environment.board, _LIMIT)
        self._world = TorchWorld()
        self._world.enter()
        try:
            store = _store(environment)
            dist.init_process_group(
                backend,
                store=store,
                rank=environment.rank,
                world_size=environment.size,
                timeout=_LIMIT,
            )
            private = dist.new_group(backend=backend, timeout=_LIMIT, group_desc="smp objects")
            self._world.rename(private, "smp objects")
            self._world.keep()
        finally:
            self._world.leave()
        self.objects = choose(environment, private, dist.PrefixStore("smp objects", store))  # type: ignore[attr-defined]

    def enter(self) -> None:
        """See RankFabric."""
        # For the groups that the body makes; the executor undoes it. Without the barrier, one that a member
        # has used and destroyed may be gone while another member still connects to it, whose
        # new_group then raises "Connection closed by peer".
        os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
        if self.local_size == self.size:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._world.enter()

    def leave(self) -> list[str]:
        """See RankFabric."""
        self._lasting.leave()
        left = self._world.leave(self._handles.values())
        self._handles.clear()
        if not self._world.whole:
            raise RuntimeError("the body made another default process group")
        return left

    @property
    def holds(self) -> bool:
        """See RankFabric."""
        return self._world.holds

    def opened(self) -> set[str]:
        """See RankFabric."""
        opened, self._lasting.descriptors = self._lasting.descriptors, set()
        return opened

    def process_group(self, group: Group) -> Any:
        """See Fabric. Members alone make it, in any order against other groups."""
        if group.name == _WORLD:
            default = dist.group.WORLD
            if default is None:
                raise NotInitializedError("the default process group has been destroyed")
            return default
        if lasts(group):
            return self._lasting.get(group)
        handle = self._handles.get(group)
        if handle is None or handle not in c10d._world.pg_map:
            handle = self._handles[group] = dist.new_group(
                list(group.ranks),
                timeout=_LIMIT,
                use_local_synchronization=True,
                sort_ranks=False,
                group_desc=group.name,
            )
        return handle

    def close(self) -> None:
        """See RankFabric."""
        self._lasting.close()
        self._world.close()


def _store(environment: RankEnvironment) -> Any:
    if environment.store == "file":
        return dist.FileStore(str(environment.folder / "store"), environment.size)  # type: ignore[attr-defined]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"smp-{environment.size}-{environment.forming}", store)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _loopback(environment: RankEnvironment) -> Iterator[None]:
    """Keep Gloo, and what is built on it, on the loopback device unless the world spans machines."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    if environment.local_size == environment.size:
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def open_torch(environment: RankEnvironment, backend: str, module: str = "") -> TorchFabric:
    """The fabric of ``torch:backend``; ``module`` registers the backend, if torch does not know it.

    The module is imported here, on a rank that has been forked: threads and connections that it starts
    would not outlive the fork of the fork server.
    """
    if module:
        importlib.import_module(module)
    with _loopback(environment):
        return TorchFabric(environment, backend)


def open_gloo(environment: RankEnvironment) -> TorchFabric:
    """The fabric of `gloo`."""
    return open_torch(environment, "gloo")
