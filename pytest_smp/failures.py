"""A failed run marks the exception that it raises with verdict, rank and world.

Hypothesis raises an exception again, or several in a group, long after the run's report is gone; the
mark stays on the exception.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_smp.ranks.protocols import Outcome

_NAME = "_smp_failure"


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The end of the run that raised an exception.

    Attributes:
        verdict: the value of the run's VerdictKind.
        root: the rank that raised, None where the verdict is on the world.
        ranks: the size of the world.
        backend: the name of the backend.
        config: what the run gave smp.init, if anything.
        further: the ends of ranks that have raised an exception of another type, on their own account.
    """

    verdict: str
    root: int | None
    ranks: int
    backend: str
    config: Mapping[str, Any] | None
    further: tuple[Outcome, ...] = ()

    def __str__(self) -> str:
        who = "the world" if self.root is None else f"rank {self.root}"
        return f"{who} of {self.ranks} ({self.backend})"


def mark(error: BaseException, failure: Failure) -> None:
    """Say of which run an exception comes."""
    with contextlib.suppress(AttributeError, TypeError):  # a class may refuse: no more is lost
        object.__setattr__(error, _NAME, failure)


def of(error: BaseException) -> Failure | None:
    """The failed run that raised this exception, or None."""
    failure = getattr(error, _NAME, None)
    return failure if isinstance(failure, Failure) else None


def parts(error: BaseException) -> Iterator[tuple[BaseException, Failure]]:
    """The exceptions of runs: ``error`` itself, or those that it groups."""
    failure = of(error)
    if failure is not None:
        yield error, failure
    elif isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from parts(each)
