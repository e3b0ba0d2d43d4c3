"""The end of pytest's output: for each failed test on ranks, what failed, where, and the example.

Captured output of many ranks can push all of that off the screen; this stands below it.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from pytest_smp import launch

RANKS = "smp_ranks"  #: the property of a report: how many ranks the marked test is for; 0 with smp_world
_MOST_TESTS = 10
_MOST_LINES = 12  # of one error's message


def write(reporter: pytest.TerminalReporter) -> None:
    """Write the section, if a test on ranks has failed."""
    failures = []
    for report in [*reporter.getreports("failed"), *reporter.getreports("error")]:
        text = dict(getattr(report, "user_properties", ())).get("smp")
        told = json.loads(text) if text else {}
        if "error" in told:
            failures.append((pasteable(reporter.config, report), told))
    failures = [each for at, each in enumerate(failures) if each not in failures[:at]]
    if not failures:
        return
    reporter.section("failures on ranks")
    for nodeid, failure in failures[:_MOST_TESTS]:
        reporter.write_line(nodeid, bold=True)
        for each in [failure, *failure.get("failures", ())]:
            for line in _lines(each):
                reporter.write_line(f"  {line}")
    if len(failures) > _MOST_TESTS:
        reporter.write_line(f"and {len(failures) - _MOST_TESTS} more")


def write_idle(reporter: pytest.TerminalReporter, there: int) -> None:
    """Say it where no test has run at all, and tests on ranks would have: the exit status is 0."""
    stats = {name: reports for name, reports in reporter.stats.items() if reports}
    ran = ("passed", "failed", "error", "xfailed", "xpassed")
    skipped = stats.get("skipped", [])
    properties = [dict(getattr(each, "user_properties", ())) for each in skipped]
    if any(name in stats for name in ran) or not any(RANKS in each for each in properties):
        return
    counts = [each[RANKS] for each in properties if each.get(RANKS, 0) > there]
    text = f"smp: NOTHING RAN: every test was skipped ({len(skipped)})"
    if counts:
        text += f", {len(counts)} for want of ranks: a test {launch.shortage(max(counts), there)}"
    reporter.write_line(text, red=True, bold=True)


def pasteable(config: pytest.Config, report: pytest.TestReport) -> str:
    """A test's id as an argument of the next command line, from the same folder, in any shell.

    pytest leaves the folder, or the whole path, out of the id of a test outside of its root folder.
    """
    path, separator, name = report.nodeid.partition("::")
    if not (config.rootpath / path).is_file():
        path = report.location[0]
    file = os.path.relpath(config.rootpath / path, config.invocation_params.dir)
    return shlex.quote(f"{Path(file).as_posix()}{separator}{name}")


def _lines(failure: dict[str, Any]) -> list[str]:
    lines: list[str] = failure.get("error", "").splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more lines above"]
    if failure.get("line"):
        lines.append(failure["line"])
    for note in failure.get("notes", ()):
        lines += note.splitlines()
    return lines
