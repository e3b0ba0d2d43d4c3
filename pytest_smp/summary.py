"""The end of pytest's output: for each failed test on ranks, what failed, where, and the example.

Captured output of many ranks can push all of that off the screen; this stands below it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

_MOST_TESTS = 10
_MOST_LINES = 12  # of one error's message


def write(reporter: pytest.TerminalReporter) -> None:
    """Write the section, if a test on ranks has failed."""
    failures = []
    for report in reporter.getreports("failed"):
        text = dict(getattr(report, "user_properties", ())).get("smp")
        if report.when == "call" and text:
            failures.append((report.nodeid, json.loads(text)))
    if not failures:
        return
    reporter.section("failures on ranks")
    for nodeid, failure in failures[:_MOST_TESTS]:
        reporter.write_line(nodeid, bold=True)
        for line in _lines(failure):
            reporter.write_line(f"  {line}")
    if len(failures) > _MOST_TESTS:
        reporter.write_line(f"and {len(failures) - _MOST_TESTS} more")


def _lines(failure: dict[str, Any]) -> list[str]:
    lines: list[str] = failure.get("error", "").splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more lines above"]
    if failure.get("line"):
        lines.append(failure["line"])
    for note in failure.get("notes", ()):
        lines += note.splitlines()
    return lines
