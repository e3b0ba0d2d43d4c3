"""Verdicts on requirements, derived from the outcomes of properties, and the table of verdicts."""

from __future__ import annotations

import enum
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NoReturn

import pytest

from conformance.requirements.registry import NEEDS, Level, Need, Registry


class PropertyOutcome(enum.StrEnum):
    """The outcome of one property, the worst first."""

    ERROR = "error"  #: the property could not be tested: set-up, tear-down, a time limit, a crash
    FAILED = "failed"
    WAIVED = "waived"  #: the property failed, and its requirement is an expected failure
    SKIPPED = "skipped"  #: the property does not apply to this session, by its own word
    NOT_RUN = "not run"  #: the session ended before the property ran
    DESELECTED = "deselected"
    NOT_SUPPORTED = "not supported"  #: the backend lacks a claim that the property needs
    PASSED = "passed"


class Verdict(enum.StrEnum):
    """The verdict of a run on a requirement, the worst first."""

    FAIL = "FAIL"  #: a property failed, or could not be tested
    STALE_WAIVER = "STALE WAIVER"  #: an expected failure whose properties all passed
    SKIPPED = "SKIPPED"  #: a property was left out, by choice or for lack of ranks
    WAIVED = "WAIVED"  #: an expected failure that failed, or that is intermittent
    NOT_SUPPORTED = "NOT SUPPORTED"  #: the backend or the engine lacks a claim that is needed
    PASS = "PASS"  #: every property passed


class NotSupported(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # set by a decorator
    """Raised in a property for which the backend's claims lack a dtype or a reduction, for example."""


def not_supported(reason: str) -> NoReturn:
    """End the running property, because the backend lacks a claim that it needs. Raises NotSupported.

    The needs of a whole requirement are declared with it and checked before its properties run. This
    function is for the needs of one property among several, and for dtypes and reductions.
    """
    __tracebackhide__ = True
    raise NotSupported(reason)


_LEFT_OUT = {PropertyOutcome.SKIPPED, PropertyOutcome.NOT_RUN, PropertyOutcome.DESELECTED}


def judge(
    outcomes: Collection[PropertyOutcome],
    *,
    claimed: bool = True,
    expected: bool = False,
    intermittent: bool = False,
) -> Verdict:
    """The verdict on one requirement.

    Args:
        outcomes: the outcomes of all its properties; empty if none was run.
        claimed: whether the backend and the engine claim all its needs.
        expected: whether the requirement is an expected failure.
        intermittent: whether that failure is expected in some runs only.
    """
    if not claimed:
        return Verdict.NOT_SUPPORTED
    found = set(outcomes)
    if found & {PropertyOutcome.FAILED, PropertyOutcome.ERROR}:
        return Verdict.FAIL
    if PropertyOutcome.WAIVED in found:
        return Verdict.WAIVED
    if not found or found & _LEFT_OUT:
        return Verdict.SKIPPED
    if found == {PropertyOutcome.NOT_SUPPORTED}:
        return Verdict.NOT_SUPPORTED
    if expected:
        return Verdict.WAIVED if intermittent else Verdict.STALE_WAIVER
    return Verdict.PASS


def judge_all(
    registry: Registry,
    outcomes: Mapping[str, Collection[PropertyOutcome]],
    *,
    unclaimed: Collection[str] = (),
    expected: Collection[str] = (),
    intermittent: Collection[str] = (),
) -> dict[str, Verdict]:
    """The verdict on every requirement, by id; see :func:`judge`.

    Args:
        registry: the requirements.
        outcomes: the outcomes of properties, by the requirement's id.
        unclaimed: the ids of requirements that need something the backend or the engine does not claim.
        expected: the ids of requirements that are expected failures.
        intermittent: those of them that fail in some runs only.
    """
    return {
        id: judge(
            outcomes.get(id, ()),
            claimed=id not in unclaimed,
            expected=id in expected,
            intermittent=id in intermittent,
        )
        for id in registry
    }


def counted(verdicts: Collection[Verdict]) -> str:
    """The number of each verdict in words: ``1 FAIL, 20 PASS``."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


#: Verdicts that hundreds of requirements may get, without a need to read each.
_MANY = {Verdict.SKIPPED, Verdict.NOT_SUPPORTED, Verdict.PASS}
_MOST_LINES = 4


def table(
    registry: Registry,
    verdicts: Mapping[str, Verdict],
    width: int,
    *,
    whole: bool = False,
) -> Iterator[str]:
    """The verdicts in lines of at most ``width`` characters: by level, the worst first.

    Long lists of requirements that passed, were skipped or are not supported are cut, unless ``whole``.
    """
    column = max(map(len, [Verdict.SKIPPED, *verdicts.values()])) + 1
    for level in Level:
        ids = [id for id in registry if registry[id].level is level]
        if not ids:
            continue
        yield f"{level.name} {level.sentence} {counted([verdicts[id] for id in ids])}"
        for verdict in Verdict:
            names = [id for id in ids if verdicts[id] is verdict]
            if not names:
                continue
            lines = _wrapped(f"   {verdict:<{column}}", names, width)
            if len(lines) > _MOST_LINES and verdict in _MANY and not whole:
                del lines[_MOST_LINES - 1 :]
                left = len(names) - sum(line.count(",") for line in lines)
                lines.append(f"{'':{3 + column}}and {left} more (-v names them)")
            yield from lines


def lacking(lacks: Mapping[str, Iterable[Need]], width: int) -> Iterator[str]:
    """Yield a line for each capability that is not claimed, with the requirements that need it.

    Args:
        lacks: the capabilities that are needed and not claimed, by the id of the requirement.
        width: the most characters of a line; a longer list is cut.
    """
    by_capability: dict[Need, list[str]] = {each: [] for each in NEEDS}
    for id, lacked in lacks.items():
        for each in lacked:
            by_capability[each].append(id)
    for capability, ids in by_capability.items():
        if ids:
            start = f"not claimed: {capability}, needed by "
            first, *rest = _wrapped(start, ids, width)
            yield first.removesuffix(",") + (", ..." if rest else "")


def _wrapped(start: str, names: list[str], width: int) -> list[str]:
    return textwrap.wrap(
        ", ".join(names),
        max(width, 60),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
