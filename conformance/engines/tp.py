"""The engine ``tp``: torch's ``parallelize_module``, on a mesh of replicas and of ranks that split layers."""

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
class TpEngine:
    """An engine whose tp ranks compute with slices of one batch; replicas average their gradients."""

    name: str = "tp"
    api: str = ""
    capabilities: frozenset[EngineCapability] = frozenset(
        {EngineCapability.TRAINING, EngineCapability.TENSOR}
    )
    conventions: Conventions = CONVENTIONS
    uses: Mapping[EngineCapability, frozenset[Capability]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    protocol: int = ENGINE_VERSION

    def replica(self, case: Training) -> int:
        """The number of this rank's replica: tp ranks are neighbours, and train on the same data."""
        import torch.distributed as dist

        import smp_core.torch as smp

        smp.rank()  # initialises, as the first call of the API on a rank does
        return dist.get_rank() // case.copies

    def build(self, case: Training, *, salt: str = "") -> Session:
        """Make this rank's session, with the case's layers split over neighbouring ranks."""
        import smp_core.torch as smp
        from conformance.engines.tp_session import TpSession

        smp.rank()
        return TpSession(case, salt)


ENGINE = TpEngine()
