"""The former address of smp_core/torch/execution/timeline.py."""

from __future__ import annotations

import warnings

from smp_core.torch.execution import timeline


def __getattr__(name: str) -> object:
    found = getattr(timeline, name)
    warnings.warn(
        f"{__name__} has moved: use {timeline.__name__}", DeprecationWarning, stacklevel=2
    )
    return found
