"""The partition of a model over the ranks of a pipeline: traced, chosen, and carried out."""

from __future__ import annotations

import warnings
from types import ModuleType

_REPLAY = (
    "smp_core.torch.pipeline.replay has moved: use pytest_smp.replay"  # not a part of smp_core
)
_TIMELINE = "smp_core.torch.pipeline.timeline has moved: use smp_core.torch.execution.timeline"


def __getattr__(name: str) -> ModuleType:
    if name == "replay":
        raise ImportError(_REPLAY)
    if name == "timeline":
        from smp_core.torch.execution import timeline

        warnings.warn(_TIMELINE, DeprecationWarning, stacklevel=2)
        return timeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
