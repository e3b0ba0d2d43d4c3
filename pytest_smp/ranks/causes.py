"""The root cause of a failed run, by one rule for all executors: a cause comes before what follows from it.

An executor collects candidates in the order in which it learnt of them, and takes the one that `root_cause` returns.
An exception that a rank raises after the executor has ended the run is no candidate.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from hypothesis.errors import UnsatisfiedAssumption

from pytest_smp.ranks.protocols import VerdictKind
from smp_core.errors import (
    CollectiveMismatchError,
    CrashError,
    DeadlockError,
    LeakError,
    RaceError,
    SmpError,
)

_VERDICTS: tuple[tuple[type[BaseException], VerdictKind], ...] = (
    (DeadlockError, VerdictKind.DEADLOCK),
    (CollectiveMismatchError, VerdictKind.MISMATCH),
    (LeakError, VerdictKind.LEAK),
    (RaceError, VerdictKind.RACE),
    (CrashError, VerdictKind.CRASHED),
)


def verdict_of(error: BaseException) -> VerdictKind:
    """The verdict on a run that ends with this error."""
    return next((kind for cls, kind in _VERDICTS if isinstance(error, cls)), VerdictKind.FAILED)


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """A candidate for the root cause of a failed run.

    Attributes:
        verdict: the verdict on the run if this is its root cause.
        root: the rank that the error belongs to.
        error: the exception that the run then ends with.
        in_call: a rank has raised it out of a communication call.
        by_records: the records of all ranks prove it; no rank has raised it by itself.
    """

    verdict: VerdictKind
    root: int | None
    error: BaseException
    in_call: bool = False
    by_records: bool = False


class _Order(enum.IntEnum):
    """The kinds of causes, the most original first."""

    MISMATCH = enum.auto()  # backends abort, or raise on other ranks, over calls that differ
    CRASH = enum.auto()  # the peers of a dead rank raise out of their calls, or wait for it
    RAISED = enum.auto()
    TOLD = enum.auto()  # raised for another rank's exception
    REJECTED = enum.auto()  # by `assume`: no reason to discard another rank's failure
    IN_CALL = enum.auto()  # often because a peer has ended
    STANDSTILL = enum.auto()  # ranks that wait: for those that raised, if any has


def _order(cause: Cause) -> _Order:
    if cause.verdict is VerdictKind.MISMATCH:
        return _Order.MISMATCH
    if cause.verdict is VerdictKind.CRASHED:
        return _Order.CRASH
    if cause.by_records or cause.verdict is VerdictKind.DEADLOCK:
        return _Order.STANDSTILL
    if origin_of(cause.error, cause.root) is not None:
        return _Order.TOLD
    if isinstance(cause.error, UnsatisfiedAssumption):
        return _Order.REJECTED
    return _Order.IN_CALL if cause.in_call else _Order.RAISED


def origin_of(error: BaseException, rank: int | None) -> int | None:
    """Return the rank for whose exception ``rank`` raises ``error``, or None if the error is its own."""
    origin = error.raised_by if isinstance(error, SmpError) else None
    return None if origin == rank else origin


def root_cause(causes: Iterable[Cause]) -> Cause | None:
    """The most original of these causes, of equal ones the first; None if there are none."""
    return min(causes, key=_order, default=None)
