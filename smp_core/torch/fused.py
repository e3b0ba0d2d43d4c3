"""CUDA kernels that fuse several operations, by their plain equivalents: one warning for each name and option."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Mapping

_lock = threading.Lock()  # of ranks that are threads
_told: set[str] = set()


class PlainEquivalentWarning(UserWarning):
    """Issued once in a process for a fused class or option of SMP's, which here is the same in several operations."""


#: The options of distributed modules that choose a kernel of CUDA.
OPTIONS = frozenset({"flash_attention", "fused_bias_gelu", "fused_dropout", "fused_softmax"})


def warn_options(options: Mapping[str, object]) -> None:
    """Say once in this process of each option that asks for a kernel of CUDA that plain operations take its place."""
    for name in sorted(OPTIONS & options.keys()):
        if options[name]:
            warn_plain(f"{name}=True", "operations of torch")


def warn_plain(name: str, plain: str) -> None:
    """Say once in this process that ``name`` is computed as ``plain``, at the line of the script that asks for it."""
    with _lock:
        if name in _told:
            return
        warnings.warn(
            f"{name}: nothing is fused here, it is {plain}. Values are the same up to rounding",
            PlainEquivalentWarning,
            stacklevel=_script_level(),
        )
        _told.add(name)  # after it: where warnings are errors, each use is one


def _script_level() -> int:
    """The ``stacklevel`` by which a warning of the caller's names the line of the script, above our own calls."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module == "contextlib" or module.partition(".")[0] == "smp_core"
