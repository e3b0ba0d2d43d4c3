"""The engine ``ddp``: torch's DistributedDataParallel; all microbatches but the last use ``no_sync``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from conformance.engines.capabilities import EngineCapability
from conformance.engines.protocol import ENGINE_VERSION, Conventions, Session
from pytest_smp.ranks.capabilities import Capability

if TYPE_CHECKING:
    from pytest_smp.strategies.training import Training

CONVENTIONS = Conventions(dp="mean", microbatch="sum")


@dataclasses.dataclass(frozen=True)
class DdpEngine:
    """An engine whose ranks all hold the whole model; the pipeline degree is 1."""

    name: str = "ddp"
    api: str = ""
    capabilities: frozenset[EngineCapability] = frozenset(
        {EngineCapability.TRAINING, EngineCapability.UNUSED, EngineCapability.ANY_PARAMETER}
    )
    conventions: Conventions = CONVENTIONS
    uses: Mapping[EngineCapability, frozenset[Capability]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    protocol: int = ENGINE_VERSION

    def replica(self, case: Training) -> int:
        """The number of this rank's replica, which is the rank itself."""
        import torch.distributed as dist

        import smp_core.torch as smp

        smp.rank()  # initialises, as the first call of the API on a rank does
        return dist.get_rank()

    def build(self, case: Training, *, salt: str = "") -> Session:
        """Make this rank's session, with DistributedDataParallel over the whole world."""
        import smp_core.torch as smp
        from conformance.engines.ddp_session import DdpSession

        smp.rank()
        return DdpSession(case, salt)


ENGINE = DdpEngine()
