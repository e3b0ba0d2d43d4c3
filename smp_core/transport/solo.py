"""The fabric of a world of one rank: a script run as a plain process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_core.errors import RankError
from smp_core.transport.payload import Payload
from smp_core.transport.protocols import Fabric, Group, ObjectTransport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SoloObjects:
    """An object transport without a partner. See ObjectTransport."""

    def send(self, obj: object, dest: int) -> None:
        raise RankError(f"smp.send: there is no rank {dest} in a world of one rank")

    def broadcast(self, obj: object, group: Group) -> None:
        Payload(obj, "smp.broadcast")  # refuses here the objects that it would refuse with partners

    def recv_from(self, src: int) -> Any:
        raise RankError(
            f"smp.recv_from: there is no rank {src} to receive from in a world of one rank"
        )

    def allgather(self, obj: object, group: Group) -> list[Any]:
        return [Payload(obj, "smp.allgather").thaw()]

    def barrier(self, group: Group) -> None:
        pass


class SoloFabric(Fabric):
    """See Fabric."""

    def __init__(self) -> None:
        self.rank = self.local_rank = 0
        self.size = self.local_size = 1
        self.objects: ObjectTransport = SoloObjects()

    def process_group(self, group: Group) -> ProcessGroup:
        """The default process group, made over an in-process store (no port) if there is none."""
        from torch import distributed as dist

        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        default = dist.group.WORLD
        assert default is not None
        return default
