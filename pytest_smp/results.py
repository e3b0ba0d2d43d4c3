"""From a run's report to what pytest shows: one exception with notes, sections per rank, machine-readable outcomes."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest

from smp_core.backends.base import Outcome, OutcomeKind, Report, VerdictKind
from smp_core.backends.hosts.diagnosis import ranks_text
from smp_core.errors import RankDisagreementError


def conclude(report: Report, backend: str) -> None:
    """Raise what a failed or skipped run is to raise; return for a run that passed.

    It is the root-cause rank's own exception object, with the other ranks as notes: Hypothesis tells failures apart
    by the exception, and a group of all ranks' would be as many failures.
    """
    __tracebackhide__ = True
    error = report.error
    if error is not None:
        for note in _notes(report, backend):
            error.add_note(note)
        raise error
    skipped = [outcome for outcome in report.outcomes if outcome.kind is OutcomeKind.SKIPPED]
    if not skipped:
        return
    kinds = {type(outcome.error) for outcome in skipped}
    if len(skipped) == len(report.outcomes) and len(kinds) == 1:
        assert skipped[0].error is not None
        raise skipped[0].error
    lines = ["the ranks do not agree whether the test applies"]
    lines += [f"  {text}" for text in _merged(report.outcomes)]
    raise RankDisagreementError("\n".join(lines))


def _notes(report: Report, backend: str) -> list[str]:
    size = len(report.outcomes)
    others = [outcome for outcome in report.outcomes if outcome.rank != report.root]
    world = f"{size} ranks" if size > 1 else "1 rank"
    if report.verdict is not VerdictKind.FAILED:  # the message tells about every rank already
        return [f"verdict: {report.verdict} ({world}, {backend})"]
    root = next(outcome for outcome in report.outcomes if outcome.rank == report.root)
    same = [outcome.rank for outcome in others if _signature(outcome) == _signature(root)]
    rest = [outcome for outcome in others if outcome.rank not in same]
    lines = [f"raised by rank {report.root} of {world} ({backend})"]
    if same:
        lines.append(f"{ranks_text(same)}: the same")
    return ["; ".join(lines), *(f"  {text}" for text in _merged(rest))]


def _signature(outcome: Outcome) -> tuple[Any, ...]:
    error = outcome.error
    if error is None:
        return (outcome.kind, outcome.rank)
    frames = traceback.extract_tb(error.__traceback__)
    last = (frames[-1].filename, frames[-1].lineno) if frames else None
    return type(error), str(error), last


def _merged(outcomes: list[Outcome]) -> list[str]:
    texts: dict[str, list[int]] = {}
    for outcome in outcomes:
        texts.setdefault(_describe(outcome), []).append(outcome.rank)
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in texts.items()]


def _describe(outcome: Outcome) -> str:
    if outcome.error is not None:
        text = f"{type(outcome.error).__name__}: {outcome.error}".rstrip(": ")
        return f"{outcome.kind}: {text}"
    return outcome.detail or str(outcome.kind)


def add_to_item(item: pytest.Item, report: Report, backend: str) -> None:
    """Put the ranks' output into sections of the item's report, and their outcomes into its properties."""
    for outcome in report.outcomes:
        for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
            if text:
                item.add_report_section("call", f"{name} (rank {outcome.rank})", text)
    ranks = [
        {"rank": outcome.rank, "outcome": str(outcome.kind), "detail": _describe(outcome)}
        for outcome in report.outcomes
    ]
    summary = {
        "backend": backend,
        "verdict": str(report.verdict),
        "root": report.root,
        "ranks": ranks,
    }
    item.user_properties.append(("smp", json.dumps(summary)))
