"""From what became of the properties to a verdict for each requirement, and the table of verdicts."""

from __future__ import annotations

import enum
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from conformance.registry import Level, Registry


class Verdict(enum.StrEnum):
    """What a run says of a requirement."""

    FAIL = "FAIL"  #: a property failed, or could not run
    SKIPPED = "SKIPPED"  #: a property was left out, by choice or because it asks for more ranks
    PASS = "PASS"  #: every property passed


def judge(outcomes: Collection[str]) -> Verdict:
    """The verdict on a requirement, given the outcomes of its properties.

    Args:
        outcomes: ``passed``, ``failed`` and so on: pytest's words.
    """
    if not {"failed", "error"}.isdisjoint(outcomes):
        return Verdict.FAIL
    return Verdict.PASS if set(outcomes) == {"passed"} else Verdict.SKIPPED


def judge_all(registry: Registry, outcomes: Mapping[str, Collection[str]]) -> dict[str, Verdict]:
    """The verdict on every requirement, given the outcomes of its properties by its id."""
    return {id: judge(outcomes.get(id, ())) for id in registry}


def counted(verdicts: Collection[Verdict]) -> str:
    """How many of each: ``1 FAIL, 20 PASS``."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def table(registry: Registry, verdicts: Mapping[str, Verdict], width: int) -> Iterator[str]:
    """The verdicts in lines of at most ``width`` characters: by level, the worst first."""
    for level in Level:
        ids = [id for id in registry if registry[id].level is level]
        if not ids:
            continue
        yield f"{level.name} {level.sentence} {counted([verdicts[id] for id in ids])}"
        for verdict in Verdict:
            names = [id for id in ids if verdicts[id] is verdict]
            if names:
                yield from textwrap.wrap(
                    ", ".join(names),
                    max(width, 60),
                    initial_indent=f"   {verdict:<8}",
                    subsequent_indent=" " * 11,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
