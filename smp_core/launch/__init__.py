"""Launching: a script starts on as many ranks as it asks for, on this machine (``smp-run``, ``LocalEstimator``).

``command`` is the command line, ``estimator`` the training job of SageMaker's estimators; both make a ``job``. An
estimator has its ``arguments``, its ``distribution``, ``instances`` with GPUs and ``local_paths``; ``toolkit`` makes
the script's arguments and environment of them.
``backends`` has the ways to start one. ``processes`` starts rank processes and follows them, ``rank`` is the program of
each, ``script`` runs the script itself with its ``children``, and ``output`` says which rank has written a line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.launch.estimator import LocalEstimator

__all__ = ["LocalEstimator"]


def __getattr__(name: str) -> Any:
    """LocalEstimator, once it is asked for: a rank imports this package too, and does without."""
    if name == "LocalEstimator":
        return importlib.import_module("smp_core.launch.estimator").LocalEstimator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
