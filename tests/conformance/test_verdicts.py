"""Verdicts from outcomes, and the table of them."""

from __future__ import annotations

import pytest

from conformance.registry import Capability, Level, Registry, Requirement
from conformance.requirements import REQUIREMENTS
from conformance.verdicts import Verdict, counted, judge, judge_all, table


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], Verdict.SKIPPED),
        (["passed"], Verdict.PASS),
        (["passed", "passed"], Verdict.PASS),
        (["passed", "failed"], Verdict.FAIL),
        (["passed", "error"], Verdict.FAIL),
        (["error", "skipped"], Verdict.FAIL),
        (["skipped"], Verdict.SKIPPED),
        # What was not looked at whole is not a pass.
        (["passed", "skipped"], Verdict.SKIPPED),
        (["passed", "xfailed"], Verdict.SKIPPED),
        (["passed", "xpassed"], Verdict.SKIPPED),
    ],
)
def test_verdict_on_one_requirement(outcomes: list[str], verdict: Verdict) -> None:
    assert judge(outcomes) is verdict


def small() -> Registry:
    levels = {"A-A": Level.L0, "B-B": Level.L2, "C-C": Level.L0, "D-D": Level.L2}
    return Registry(
        *(Requirement(i, "S.", "seed 000", lv, Capability.RANKS) for i, lv in levels.items())
    )


def test_every_requirement_gets_a_verdict() -> None:
    verdicts = judge_all(small(), {"B-B": ["failed"], "C-C": ["passed"]})
    assert verdicts == {
        "A-A": Verdict.SKIPPED,
        "B-B": Verdict.FAIL,
        "C-C": Verdict.PASS,
        "D-D": Verdict.SKIPPED,
    }
    assert counted(verdicts.values()) == "1 FAIL, 2 SKIPPED, 1 PASS"


def test_the_table_goes_by_level_and_the_worst_come_first() -> None:
    verdicts = judge_all(small(), {"D-D": ["failed"], "C-C": ["passed"], "B-B": ["passed"]})
    assert list(table(small(), verdicts, 80)) == [
        "L0 Lifecycle, configuration and groups. 1 SKIPPED, 1 PASS",
        "   SKIPPED A-A",
        "   PASS    C-C",
        "L2 Error behaviour. 1 FAIL, 1 PASS",
        "   FAIL    D-D",
        "   PASS    B-B",
    ]


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_table_is_short_and_complete(width: int) -> None:
    lines = list(table(REQUIREMENTS, judge_all(REQUIREMENTS, {}), width))
    assert len(lines) <= 40
    assert max(map(len, lines)) <= max(width, 60)
    text = " ".join(lines).replace(",", " ").split()
    assert all(text.count(id) == 1 for id in REQUIREMENTS)
