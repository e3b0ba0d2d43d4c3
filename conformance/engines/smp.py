"""The engine ``smp``: any implementation of the SMP API; by default ``smp_core.torch``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from conformance.engines.capabilities import EngineCapability
from conformance.engines.protocol import ENGINE_VERSION, Conventions, Session
from pytest_smp.ranks.capabilities import Capability

if TYPE_CHECKING:
    from pytest_smp.strategies.training import Training

CONVENTIONS = Conventions()

#: The capabilities of a backend that ``smp_core.torch`` depends on. Reductions are exchanges followed by
#: a fold, so no reducing collective is needed. A pp rank receives from any source.
USES: Mapping[EngineCapability, frozenset[Capability]] = MappingProxyType(
    {
        EngineCapability.TRAINING: frozenset(
            {
                Capability.OBJECTS,
                Capability.BROADCAST,
                Capability.ALL_GATHER_SINGLE,
                Capability.ALL_TO_ALL_SINGLE,
            }
        ),
        EngineCapability.PIPELINE: frozenset({Capability.POINT_TO_POINT, Capability.ANY_SOURCE}),
    }
)


@dataclasses.dataclass(frozen=True)
class SmpEngine:
    """A namespace of the SMP API as an engine.

    A third party writes::

        ENGINE = SmpEngine("theirs", "their.module.torch", SmpEngine.capabilities - {...})
    """

    name: str = "smp"
    api: str = "smp_core.torch"
    capabilities: frozenset[EngineCapability] = frozenset(EngineCapability) - {
        EngineCapability.TENSORFLOW
    }
    conventions: Conventions = CONVENTIONS
    uses: Mapping[EngineCapability, frozenset[Capability]] = dataclasses.field(
        default_factory=lambda: USES, hash=False
    )
    protocol: int = ENGINE_VERSION

    def namespace(self) -> Any:
        """Import the module that ``api`` names, and return it."""
        return importlib.import_module(self.api)

    def replica(self, case: Training) -> int:
        """The number of this rank's replica, by which data are divided (API 4.4)."""
        from pytest_smp.strategies.training_script import replica_of

        return replica_of(self.namespace(), case)

    def build(self, case: Training, *, salt: str = "") -> Session:
        """Make this rank's session, with the calls that a user's script makes."""
        from conformance.engines.smp_session import SmpSession

        return SmpSession(self.namespace(), case, salt=salt)


ENGINE = SmpEngine()
