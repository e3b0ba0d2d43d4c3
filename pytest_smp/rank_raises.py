"""``smp.raises``: a block that named ranks must leave by an exception, and what becomes of the others.

The named ranks go on after the block, as after ``pytest.raises``. Another rank goes on too if it comes to the
block's end, or if the failure reaches it as StepAbortedError. One that waits in the block for a rank that has
raised can never go on: the run ends in a deadlock, which `accept_consequences` takes for the expected end.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from pytest_smp.ranks.protocols import (
    INSIDE,
    Outcome,
    OutcomeKind,
    RaisesBlock,
    RecordingRank,
    Report,
    VerdictKind,
)
from smp_core.errors import (
    ArgumentTypeError,
    Cancelled,
    DeadlockError,
    RankError,
    SmpError,
    StepAbortedError,
    VerdictError,
)
from smp_core.transport.diagnosis import ranks_text

__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)

#: The record of the blocks that the rank left by the expected exception.
RAISED = "raised"


class RankRaises:
    """The context manager that ``smp.raises`` returns; entering it gives a ``pytest.ExceptionInfo``."""

    def __init__(
        self,
        rank: RecordingRank,
        expected: type[BaseException] | tuple[type[BaseException], ...],
        match: str | re.Pattern[str] | None,
        ranks: Sequence[int] | None,
        frame: types.FrameType,
    ) -> None:
        self._rank, self._expected = rank, expected
        everyone = tuple(range(rank.size))
        self._ranks = everyone if ranks is None else _checked(ranks, rank.size)
        self._raises = pytest.raises(expected, match=match)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        counts = rank.records.setdefault("raises", {})
        counts[place] = counts.get(place, 0) + 1
        self._block = RaisesBlock(place, counts[place], self._ranks)

    def __enter__(self) -> pytest.ExceptionInfo[Any]:
        self._outer = self._rank.records.get(INSIDE)
        if self._rank.rank in self._ranks:
            return self._raises.__enter__()
        self._rank.record(INSIDE, self._block)
        return pytest.ExceptionInfo.for_later()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool:
        __tracebackhide__ = True
        if self._rank.rank in self._ranks:
            caught = bool(self._raises.__exit__(kind, error, traceback))
            if caught:
                self._rank.record(RAISED, [*self._rank.records.get(RAISED, ()), self._block])
            return caught
        if isinstance(error, Cancelled | VerdictError):
            return False  # the run has ended: the rank is still in the block
        self._rank.record(INSIDE, self._outer)
        if isinstance(error, self._expected):
            names = ", ".join(cls.__name__ for cls in _classes(self._expected))
            error.add_note(
                f"smp.raises({names}, ranks={[*self._ranks]}): rank {self._rank.rank} raised what "
                f"only {ranks_text(self._ranks)} {'is' if len(self._ranks) == 1 else 'are'} to raise"
            )
            return False
        return isinstance(error, StepAbortedError)


def _classes(expected: Any) -> tuple[type[BaseException], ...]:
    return expected if isinstance(expected, tuple) else (expected,)


def _checked(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks, in order. Raises ArgumentTypeError for what is no list of ranks, RankError for a rank out of range."""
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Sequence):
        raise ArgumentTypeError(
            f"smp.raises: ranks={ranks!r}: must be a list of ranks, as ranks=[0]"
        )
    if not ranks or not all(type(rank) is int and 0 <= rank < size for rank in ranks):
        raise RankError(
            f"smp.raises: ranks={[*ranks]!r}: ranks are 0 to {size - 1}, and at least one must raise"
        )
    return tuple(sorted(set(ranks)))


def accept_consequences(report: Report) -> None:
    """Turn the verdict into a pass if all that waits in the deadlock was held up by ranks that raised as expected.

    Each rank that waits must be in a block of ``smp.raises``, and wait, if only through other ranks, for one
    that has left this block by the expected exception; and all ranks that the block names must have done so.
    """
    error = report.error
    if report.verdict is not VerdictKind.DEADLOCK or not isinstance(error, DeadlockError):
        return
    raised = {outcome.rank: set(outcome.records.get(RAISED, ())) for outcome in report.outcomes}
    stuck = [outcome for outcome in report.outcomes if outcome.kind is not OutcomeKind.RETURNED]
    held_up = [outcome for outcome in stuck if _held_up(outcome, raised, error.waits_for)]
    if len(held_up) < len(stuck):
        return
    report.verdict, report.root, report.error = VerdictKind.PASSED, None, None
    for outcome in stuck:
        block = outcome.records[INSIDE]
        outcome.kind, outcome.error = OutcomeKind.CANCELLED, None
        outcome.detail = f"held up in smp.raises by {ranks_text(block.ranks)} ({block.place})"


def _held_up(
    outcome: Outcome,
    raised: Mapping[int, set[RaisesBlock]],
    waits_for: Mapping[int, tuple[int, ...]],
) -> bool:
    block = outcome.records.get(INSIDE)
    if block is None or not all(block in raised.get(rank, ()) for rank in block.ranks):
        return False
    return not set(_reached(outcome.rank, waits_for)).isdisjoint(block.ranks)


def _reached(rank: int, edges: Mapping[int, tuple[int, ...]]) -> Iterator[int]:
    """The ranks that ``rank`` waits for, directly or through others."""
    known, queue = {rank}, [rank]
    while queue:
        for target in edges.get(queue.pop(), ()):
            if target not in known:
                known.add(target)
                queue.append(target)
                yield target
