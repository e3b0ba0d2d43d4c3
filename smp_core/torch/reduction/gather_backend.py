"""The backend of a gather of sharded parameters: SMDDP's, or the one that everything else goes through.

AWS Sharded Data Parallelism (Supported configurations) takes SMDDP's gather where ``ddp_dist_backend`` is ``auto``, the
sharded degree is above 1 and the instances are of the right type, and another backend for a gather that one of two
buffers is too small for. On CPU ranks the right type is a machine on which `smddp` runs (``Fabric.smddp_group``). The
buffers take no memory here: their sizes decide, as they do there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from smp_core.errors import ConfigError
from smp_core.gather_buffers import GatherBuffers
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.transport.protocols import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GatherBackend:
    """The choice for the gathers of one group. All members make it at the same point: they compare their buffers.

    Raises ConfigError for a size of a buffer that is no positive multiple of 8192, or that differs between the ranks.

    Attributes:
        group: the process group of `smddp`, if there is one.
    """

    def __init__(self, runtime: Runtime, kind: GroupKind) -> None:
        self.group: ProcessGroup | None = None
        self._why, self._buffers = "", GatherBuffers(0, 0)
        ranks = runtime.group(kind).ranks
        self._degree = len(ranks)
        if kind is not GroupKind.SHARDING or self._degree == 1:
            self._why = "the sharded degree is 1"
        elif runtime.config.ddp_dist_backend != "auto":
            self._why = f"ddp_dist_backend is {runtime.config.ddp_dist_backend!r}"
        if self._why:
            self._buffers = GatherBuffers.of(os.environ)
        else:
            self._join(runtime, Group(f"smp {kind.value} smddp", ranks))

    def _join(self, runtime: Runtime, group: Group) -> None:
        local: GatherBuffers | str
        try:
            local = self._buffers = GatherBuffers.of(os.environ)
        except ConfigError as error:
            local = str(error)  # raised once the others know: they would wait for this rank
        sizes = None if isinstance(local, str) else tuple(local)
        gathered = runtime.fabric.objects.allgather((sizes, str(local)), group)
        for rank, (found, text) in zip(group.ranks, gathered, strict=True):
            if found is None:
                raise ConfigError(text if text == local else f"rank {rank}: {text}")
        process_group = runtime.fabric.smddp_group(group)
        if isinstance(process_group, str):
            self._why = process_group
            return
        for rank, (found, _) in zip(group.ranks, gathered, strict=True):
            if found != gathered[0][0]:  # one would gather by smddp, and the other elsewhere
                raise ConfigError(
                    "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES and SMDDP_AG_SORT_BUFFER_SIZE_BYTES are "
                    f"{gathered[0][0]} on rank {group.ranks[0]}, and {found} on rank {rank}: set them alike on all"
                )
        self.group = process_group

    def reason_against(self, count: int) -> str:
        """The reason why a gather of ``count`` bytes of each rank does not go by `smddp`; empty if it does."""
        return self._why or self._buffers.refusal(count, self._degree)
