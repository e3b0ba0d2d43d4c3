"""Hooks for the properties of this package: each points to a requirement, and the run ends with a
verdict on every one.

They act on this package alone, so that a session may hold other tests, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from conformance.registry import RequirementError
from conformance.requirements import REQUIREMENTS
from conformance.verdicts import counted, judge_all, table
from pytest_smp import settings

_HERE = Path(__file__).parent
_PROPERTY = "requirement"  # of a test's report: xdist and JUnit carry it along


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "requirement(id): the requirement that a property of `conformance` tests"
    )


# Collection.


@pytest.hookimpl(tryfirst=True)  # before anything is deselected
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    tested = {_requirement_of(item) for item in items if item.path.is_relative_to(_HERE)}
    untested = [id for id in REQUIREMENTS if id not in tested]
    if untested and _whole(session):
        raise pytest.UsageError(f"requirements without a property: {', '.join(untested)}")


def _requirement_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("requirement")
    if marker is None:
        raise pytest.UsageError(f"{item.nodeid}: no requirement: say @requirement(id)")
    try:
        id = REQUIREMENTS.named(*marker.args, **marker.kwargs).id
    except (RequirementError, TypeError) as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from None
    item.user_properties.append((_PROPERTY, id))
    return id


def _whole(session: pytest.Session) -> bool:
    """Whether every property must be there: the package was asked for, without exceptions."""
    option = session.config.option
    asked = any(session.isinitpath(path) for path in (_HERE, *_HERE.parents))
    return asked and not (session.testsfailed or option.ignore or option.ignore_glob)


# Reports.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    id = _tests(report)
    if id is not None and report.failed:
        report.sections.append(("requirement", str(REQUIREMENTS[id])))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes: dict[str, list[str]] = defaultdict(list)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            id = _tests(report)
            if id is not None and outcome:  # none for a set-up or tear-down that went well
                outcomes[id].append(outcome)
    if not outcomes:
        return
    verdicts = judge_all(REQUIREMENTS, outcomes)
    chosen = settings.read(config)
    terminalreporter.section(
        f"requirements: {counted(verdicts.values())} ({chosen.backend}, --smp-ranks={chosen.ranks})"
    )
    for line in table(REQUIREMENTS, verdicts, terminalreporter._tw.fullwidth):
        terminalreporter.write_line(line)


def _tests(report: Any) -> str | None:
    """The id of the requirement that the test of this report points to."""
    properties = getattr(report, "user_properties", ())
    return next((value for name, value in properties if name == _PROPERTY), None)
