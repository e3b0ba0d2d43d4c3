"""Calls that all ranks make together: either all go on, or all raise, naming the rank that failed and its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smp_core.errors import SmpError, VerdictError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind

T = TypeVar("T")


def told(error: BaseException) -> str:
    """An error as other ranks tell of it: its class and its text."""
    return f"{type(error).__name__}: {error}"


def collective_try(
    runtime: Runtime, call: str, action: Callable[[], T], kind: type[SmpError]
) -> list[T]:
    """Run ``action`` on this rank, and return the values of all ranks. Every rank of the world calls it.

    A rank on which it failed raises its own error; the others raise ``kind``, which names ``call``, the lowest such
    rank and its error.
    """
    value: T | None = None
    raised: Exception | None = None
    try:
        value = action()
    except VerdictError:
        raise  # the world has ended: nobody is left to agree with
    except Exception as error:
        raised = error
    mine = None if raised is None else told(raised)
    world = runtime.group(GroupKind.WORLD)
    gathered = runtime.fabric.objects.allgather((mine, value), world)
    failed = [
        (rank, text)
        for rank, (text, _) in zip(world.ranks, gathered, strict=True)
        if text is not None
    ]
    if raised is not None:
        raise raised
    if failed:
        rank, text = failed[0]
        raise kind(f"{call}: failed on rank {rank}: {text}")
    return [each for _, each in gathered]
