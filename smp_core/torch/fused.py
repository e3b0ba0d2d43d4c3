"""CUDA kernels that fuse several operations, by their plain equivalents: one warning for each name."""

from __future__ import annotations

import threading
import warnings

_lock = threading.Lock()  # of ranks that are threads
_told: set[str] = set()


class PlainEquivalentWarning(UserWarning):
    """Issued once in a process for a fused class of SMP's, which here computes the same in several operations."""


def warn_plain(name: str, plain: str, above: int = 0) -> None:
    """Say once in this process that ``name`` is computed as ``plain``. The ``__init__`` that a script calls calls this,
    with ``above`` calls of others between.
    """
    with _lock:
        if name in _told:
            return
        warnings.warn(
            f"{name}: nothing is fused here, it is {plain}. Values are the same up to rounding",
            PlainEquivalentWarning,
            stacklevel=3 + above,  # the script, above __init__
        )
        _told.add(name)  # after it: where warnings are errors, each use is one
