"""From what became of the properties to a verdict for each requirement, and the table of verdicts."""

from __future__ import annotations

import enum
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NoReturn

import pytest

from conformance.requirements.registry import NEEDS, Level, Need, Registry


class PropertyOutcome(enum.StrEnum):
    """What became of one property, the worst first."""

    ERROR = "error"  #: it could not be tested: set-up, tear-down, a time limit, a crash
    FAILED = "failed"
    WAIVED = "waived"  #: it failed, and its requirement is an expected failure
    SKIPPED = "skipped"  #: it says that it does not apply to this session
    NOT_RUN = "not run"  #: the session ended before
    DESELECTED = "deselected"
    NOT_SUPPORTED = "not supported"  #: it needs what the backend does not claim
    PASSED = "passed"


class Verdict(enum.StrEnum):
    """What a run says of a requirement, the worst first."""

    FAIL = "FAIL"  #: a property failed, or could not be tested
    STALE_WAIVER = "STALE WAIVER"  #: listed as an expected failure, and every property passed
    SKIPPED = "SKIPPED"  #: a property was left out, by choice or because it asks for more ranks
    WAIVED = "WAIVED"  #: listed as an expected failure, and failed
    NOT_SUPPORTED = "NOT SUPPORTED"  #: the backend does not claim what it needs
    PASS = "PASS"  #: every property passed


class NotSupported(pytest.skip.Exception):  # type: ignore[name-defined,misc]  # set by a decorator
    """Raised in a property that cannot apply to what the backend claims (a dtype, a reduction)."""


def not_supported(reason: str) -> NoReturn:
    """End this property: the backend does not claim what it needs.

    What a requirement needs altogether is declared with it, and seen to before its properties run;
    this is for one of several properties, and for dtypes and reductions.
    """
    __tracebackhide__ = True
    raise NotSupported(reason)


_LEFT_OUT = {PropertyOutcome.SKIPPED, PropertyOutcome.NOT_RUN, PropertyOutcome.DESELECTED}


def judge(
    outcomes: Collection[PropertyOutcome], *, claimed: bool = True, expected: bool = False
) -> Verdict:
    """The verdict on a requirement.

    Args:
        outcomes: of all its properties; none at all means that none was looked at.
        claimed: whether the backend claims all that it needs.
        expected: whether it is listed as an expected failure.
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
    return Verdict.STALE_WAIVER if expected else Verdict.PASS


def judge_all(
    registry: Registry,
    outcomes: Mapping[str, Collection[PropertyOutcome]],
    *,
    unclaimed: Collection[str] = (),
    expected: Collection[str] = (),
) -> dict[str, Verdict]:
    """The verdict on every requirement, by its id, as ``judge`` gives it.

    Args:
        registry: the requirements.
        outcomes: of their properties, by the requirement's id.
        unclaimed: ids of those that need what the backend does not claim.
        expected: ids of those that are listed as expected failures.
    """
    return {
        id: judge(outcomes.get(id, ()), claimed=id not in unclaimed, expected=id in expected)
        for id in registry
    }


def counted(verdicts: Collection[Verdict]) -> str:
    """How many of each: ``1 FAIL, 20 PASS``."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


#: Verdicts that may be given to hundreds, of which nobody needs to look at each.
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

    Long lists of requirements that need no look are cut, unless ``whole``.
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
    """For each capability that is not claimed, a line: which requirements need it.

    Args:
        lacks: by the id of a requirement, what it needs and the backend or engine does not claim.
        width: characters that a line may have; a long list is cut.
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
