"""The former address of smp_core/torch/memory/activations.py, which pickles of whole modules name."""

from __future__ import annotations

import warnings

from smp_core.torch.memory import activations

_RENAMED = {"Policy": "CheckpointPolicy"}


def __getattr__(name: str) -> object:
    found = getattr(activations, _RENAMED.get(name, name))
    warnings.warn(
        f"{__name__} has moved: use {activations.__name__}. If a pickled module names it, save the module again",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
