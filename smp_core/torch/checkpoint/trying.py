"""Parts of a checkpoint that all ranks write or read, or none: one value each, or an error everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from smp_core.errors import SmpError
from smp_core.runtime import Runtime
from smp_core.torch.exceptions import CheckpointError
from smp_core.torch.execution.collective_try import collective_try

T = TypeVar("T")


def on_first(runtime: Runtime, action: Callable[[], T]) -> Callable[[], T | None]:
    """The action on world rank 0, and nothing on the others."""
    return action if runtime.rank == 0 else lambda: None


def checkpoint_try(runtime: Runtime, call: str, action: Callable[[], T]) -> list[T]:
    """``collective_try`` of a part of ``call``: the values of all ranks, or the same error on all. An error that is
    none of ours becomes a CheckpointError.
    """

    def checked() -> T:
        try:
            return action()
        except SmpError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{call}: on world rank {runtime.rank}: {type(error).__name__}: {error}"
            ) from error

    return collective_try(runtime, checked, f"in {call}", same=True)


def same(call: str, what: str, values: Sequence[object]) -> None:
    """Raise CheckpointError unless all ranks, of which these are the values, say the same."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CheckpointError(
                f"{call}: the ranks do not call it alike ({what}): world rank 0 says {values[0]!r}, world "
                f"rank {rank} says {value!r}. Pass the same on all ranks"
            )
