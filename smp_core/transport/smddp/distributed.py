"""SMDDP's module of collectives, as scripts import it: that of ``torch.distributed``, on the backend `smddp`.

All names that are not here are those of ``torch.distributed``.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from torch import distributed as dist

from smp_core.errors import BackendError
from smp_core.transport import current_rank
from smp_core.transport.launched import open_store
from smp_core.transport.launchers import Launch, half_set, launch_of_process
from smp_core.transport.smddp.process_group import BACKEND, SmddpProcessGroup

_stores: list[Any] = []  # the launcher's, and one below it for each process group that was made


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(dist, name):
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}, and torch.distributed has none"
        )
    return getattr(dist, name)


def init_process_group(
    backend: str = BACKEND,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    **options: Any,
) -> None:
    """Make the default process group: of the ranks that the launcher has started, or of this process alone.

    On a rank of a test it joins the ranks that are there. All arguments are those of
    ``torch.distributed.init_process_group``; a ``backend`` of torch's own means SMDDP's. With ``store``, ``rank``,
    ``world_size`` or an ``init_method`` other than "env://" the ranks meet as those say.

    Raises BackendError if the launcher gives the ranks no place to meet or is half set, or if the ranks do not meet.
    """
    if current_rank.current() is not None:
        dist.init_process_group(BACKEND, world_size=world_size, rank=rank)
        return
    if backend in ("nccl", "gloo", "mpi"):
        backend = BACKEND  # scripts pass what torch.distributed has
    explicit = init_method not in (None, "env://") or (world_size, rank) != (-1, -1)
    launch = None if explicit or store is not None else _launch()
    if explicit or store is not None or dist.is_initialized():  # torch refuses a second one
        dist.init_process_group(backend, init_method, timeout, world_size, rank, store, **options)
        return
    rank, size = (launch.rank, launch.size) if launch else (0, 1)
    try:
        if not _stores:
            _stores.append(_store(launch, timeout))
        # torch numbers groups anew after they were destroyed, and would find their addresses.
        below = dist.PrefixStore(f"smddp-{len(_stores)}", _stores[0])  # type: ignore[attr-defined]
        dist.init_process_group(
            backend, store=below, rank=rank, world_size=size, timeout=timeout, **options
        )
        _stores.append(below)
    except RuntimeError as error:
        raise BackendError(
            f"init_process_group: rank {rank} of {size} has not met the others: {error}"
        ) from None


def _launch() -> Launch | None:
    """The launch of this process; None for a process that is alone."""
    launch = launch_of_process()
    trouble = half_set(os.environ) if launch is None else ""
    if trouble:
        raise BackendError(f"init_process_group: {trouble}")
    if launch is None or (launch.size == 1 and not launch.rendezvous):
        return None
    if not launch.rendezvous:
        raise BackendError(
            f"init_process_group: rank {launch.rank} of {launch.size}: {launch.launcher.name} gives its ranks no place "
            "to meet. Set MASTER_ADDR and MASTER_PORT for all ranks, or take smp-run --backend gloo or torchrun"
        )
    if launch.one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return launch


def _store(launch: Launch | None, timeout: datetime.timedelta | None) -> Any:
    if launch is None:
        return dist.HashStore()  # type: ignore[attr-defined]
    return open_store(launch.meeting, launch.rank, launch.size, timeout)


def get_local_rank() -> int:
    """The rank on this machine, by the launcher, or by the process group."""
    launch = launch_of_process()
    rank = None if launch is None else launch.local_rank
    return _here().index(dist.get_rank()) if rank is None else rank


def get_local_size() -> int:
    """The number of ranks on this machine, by the launcher, or by the process group."""
    launch = launch_of_process()
    size = None if launch is None else launch.local_size
    return len(_here()) if size is None else size


def _here() -> list[int]:
    """The ranks on this machine: all, where the process group is another backend's."""
    ranks, world = list(range(dist.get_world_size())), dist.group.WORLD
    if not isinstance(world, SmddpProcessGroup):
        return ranks
    return [each for each in ranks if world.machines[each] == world.machines[dist.get_rank()]]
