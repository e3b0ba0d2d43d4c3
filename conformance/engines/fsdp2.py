"""The engines ``fsdp2`` and ``hsdp``: torch's ``fully_shard`` on a mesh of one and of two dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from conformance.engines.capabilities import EngineCapability
from conformance.engines.protocol import ENGINE_VERSION, Conventions, Session
from pytest_smp.ranks.capabilities import Capability

if TYPE_CHECKING:
    from pytest_smp.strategies.training import Training

CONVENTIONS = Conventions(dp="mean", microbatch="sum", shards="rows")

_CLAIMS = frozenset(
    {
        EngineCapability.TRAINING,
        EngineCapability.SHARDING,
        EngineCapability.CLIPPING,
        EngineCapability.BF16,
        EngineCapability.TRAFFIC,
    }
)


@dataclasses.dataclass(frozen=True)
class Fsdp2Engine:
    """An engine that shards parameters by rows; each unit's gradients are reduced in one exchange."""

    name: str
    capabilities: frozenset[EngineCapability] = _CLAIMS
    api: str = ""
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
        """Make this rank's session, with the model sharded over the world."""
        import smp_core.torch as smp
        from conformance.engines.fsdp2_session import Fsdp2Session

        smp.rank()
        return Fsdp2Session(case, salt)


FSDP2 = Fsdp2Engine("fsdp2")
HSDP = Fsdp2Engine("hsdp", _CLAIMS | {EngineCapability.BLOCKS})
