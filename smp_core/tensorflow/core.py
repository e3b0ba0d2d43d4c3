"""``smp.core`` as scripts read it: ``core.initialized`` and ``core.barrier`` (API 7)."""

from __future__ import annotations

from smp_core import runtime
from smp_core.comm import barrier as barrier


def __getattr__(name: str) -> bool:
    if name == "initialized":
        return runtime.is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
