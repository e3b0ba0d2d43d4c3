"""What all ranks do together: one value or one error, the same on every rank.

A rank that failed says so where the others wait for it, so that none waits for what does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from smp_core.errors import SmpError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import CheckpointError

T = TypeVar("T")


def on_first(runtime: Runtime, action: Callable[[], T]) -> Callable[[], T | None]:
    """The action on world rank 0, and nothing on the others."""
    return action if runtime.rank == 0 else lambda: None


def together(runtime: Runtime, call: str, action: Callable[[], T]) -> list[T]:
    """Do something on every rank; the values of all, or the error of the first that failed on all."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:
        failure = error
    said = None if failure is None else _message(runtime, call, failure)
    told = runtime.fabric.objects.allgather((said, value), runtime.group(GroupKind.WORLD))
    for message, _ in told:
        if message is not None:
            _raise(message, failure if message == said else None)
    return [each for _, each in told]


def _message(runtime: Runtime, call: str, error: Exception) -> tuple[type[SmpError], str]:
    if isinstance(error, SmpError):
        return type(error), str(error)
    return CheckpointError, f"{call}: on world rank {runtime.rank}: {type(error).__name__}: {error}"


def _raise(message: tuple[type[SmpError], str], cause: Exception | None) -> NoReturn:
    kind, text = message
    raise kind(text) from cause


def same(call: str, what: str, values: Sequence[object]) -> None:
    """Raise CheckpointError unless all ranks, of which these are the values, say the same."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CheckpointError(
                f"{call}: the ranks do not call it alike ({what}): world rank 0 says {values[0]!r}, world "
                f"rank {rank} says {value!r}. Pass the same on all ranks"
            )
