"""The former address of smp_core/torch/execution/calls.py, which pickles of whole modules name."""

from __future__ import annotations

import warnings

from smp_core.torch.execution import calls


def __getattr__(name: str) -> object:
    found = getattr(calls, name)
    warnings.warn(
        f"{__name__} has moved: use {calls.__name__}. If a pickled module names it, save the module again",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
