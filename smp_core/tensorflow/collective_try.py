"""The agreement of all ranks on a failure, which travels as text and names the rank that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smp_core import collective_try as tries
from smp_core.errors import SmpError
from smp_core.runtime import Runtime

T = TypeVar("T")


def error_text(error: BaseException) -> str:
    """The text by which other ranks name an error: its class and its message."""
    return f"{type(error).__name__}: {tries.text_of(error)}"


def collective_try(
    runtime: Runtime, call: str, action: Callable[[], T], kind: type[SmpError]
) -> list[T]:
    """Run ``action`` on this rank, and return the values of all ranks. Every rank of the world calls it.

    A rank on which it failed raises its own error; the others raise ``kind``, which names ``call``, the lowest such
    rank and its error.
    """
    return tries.collective_try(
        runtime,
        action,
        lambda error: f"{call}: failed on rank {runtime.rank}: {error_text(error)}",
        kind,
    )
