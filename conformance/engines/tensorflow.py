"""The engine ``tensorflow``: an implementation of the SMP API for Keras models; by default ``smp_core.tensorflow``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from conformance.engines.capabilities import EngineCapability
from conformance.engines.protocol import ENGINE_VERSION, Conventions, EngineError, Session
from pytest_smp.ranks.capabilities import Capability

if TYPE_CHECKING:
    from pytest_smp.strategies.training import Training

CONVENTIONS = Conventions()

#: The capabilities of a backend that ``smp_core.tensorflow`` depends on: messages have tags, by which those of
#: several microbatches are told apart, and ranks gather the fingerprints of what they traced.
USES: Mapping[EngineCapability, frozenset[Capability]] = MappingProxyType(
    {
        EngineCapability.TENSORFLOW: frozenset(
            {
                Capability.OBJECTS,
                Capability.POINT_TO_POINT,
                Capability.TAGS,
                Capability.ALL_GATHER_SINGLE,
            }
        )
    }
)


@dataclasses.dataclass(frozen=True)
class TensorFlowEngine:
    """A namespace of the SMP API for TensorFlow as an engine. Its requirements draw Keras models, and call ``api``."""

    name: str = "tensorflow"
    api: str = "smp_core.tensorflow"
    capabilities: frozenset[EngineCapability] = frozenset({EngineCapability.TENSORFLOW})
    conventions: Conventions = CONVENTIONS
    uses: Mapping[EngineCapability, frozenset[Capability]] = dataclasses.field(
        default_factory=lambda: USES, hash=False
    )
    protocol: int = ENGINE_VERSION

    def replica(self, case: Training) -> int:
        """Raise EngineError: the cases of the protocol are models of PyTorch."""
        raise EngineError(f"engine {self.name!r} trains Keras models, and no case of PyTorch")

    def build(self, case: Training, *, salt: str = "") -> Session:
        """Raise EngineError: the cases of the protocol are models of PyTorch."""
        raise EngineError(f"engine {self.name!r} trains Keras models, and no case of PyTorch")


ENGINE = TensorFlowEngine()
