"""Verdicts from outcomes, the table of them, and the level that they certify."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from conformance.requirements.catalogue import REQUIREMENTS
from conformance.requirements.registry import Capability, Level, Registry, Requirement
from conformance.session.certification import certification, reached
from conformance.session.results import argument, property_name
from conformance.session.verdicts import (
    PropertyOutcome,
    Verdict,
    counted,
    judge,
    judge_all,
    lacking,
    table,
)

PASSED, FAILED, ERROR, SKIPPED = (
    PropertyOutcome.PASSED,
    PropertyOutcome.FAILED,
    PropertyOutcome.ERROR,
    PropertyOutcome.SKIPPED,
)
WAIVED, NOT_SUPPORTED = PropertyOutcome.WAIVED, PropertyOutcome.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("outcomes", "verdict", "if_expected"),
    [
        ([], Verdict.SKIPPED, Verdict.SKIPPED),
        ([PASSED], Verdict.PASS, Verdict.STALE_WAIVER),
        ([PASSED, PASSED], Verdict.PASS, Verdict.STALE_WAIVER),
        ([PASSED, FAILED], Verdict.FAIL, Verdict.FAIL),
        # An error is no expected failure: the property could not be tested.
        ([PASSED, ERROR], Verdict.FAIL, Verdict.FAIL),
        ([WAIVED, ERROR], Verdict.FAIL, Verdict.FAIL),
        ([ERROR, SKIPPED], Verdict.FAIL, Verdict.FAIL),
        ([WAIVED, PASSED], Verdict.WAIVED, Verdict.WAIVED),
        ([WAIVED, SKIPPED], Verdict.WAIVED, Verdict.WAIVED),
        # A requirement with a property that did not run is no pass, and no waiver of it is stale.
        ([SKIPPED], Verdict.SKIPPED, Verdict.SKIPPED),
        ([PASSED, SKIPPED], Verdict.SKIPPED, Verdict.SKIPPED),
        ([PASSED, PropertyOutcome.DESELECTED], Verdict.SKIPPED, Verdict.SKIPPED),
        ([PASSED, PropertyOutcome.NOT_RUN], Verdict.SKIPPED, Verdict.SKIPPED),
        ([PASSED, NOT_SUPPORTED], Verdict.PASS, Verdict.STALE_WAIVER),
        ([NOT_SUPPORTED], Verdict.NOT_SUPPORTED, Verdict.NOT_SUPPORTED),
        ([NOT_SUPPORTED, SKIPPED], Verdict.SKIPPED, Verdict.SKIPPED),
    ],
)
def test_verdict_on_one_requirement(
    outcomes: list[PropertyOutcome], verdict: Verdict, if_expected: Verdict
) -> None:
    assert judge(outcomes) is verdict
    assert judge(outcomes, expected=True) is if_expected
    if_intermittent = Verdict.WAIVED if if_expected is Verdict.STALE_WAIVER else if_expected
    assert judge(outcomes, expected=True, intermittent=True) is if_intermittent
    assert judge(outcomes, claimed=False) is Verdict.NOT_SUPPORTED


def small() -> Registry:
    levels = {"A-A": Level.L0, "B-B": Level.L2, "C-C": Level.L0, "D-D": Level.L2}
    return Registry(
        *(
            Requirement(i, "S.", "AWS Common API", lv, frozenset({Capability.RANKS}))
            for i, lv in levels.items()
        )
    )


def test_every_requirement_gets_a_verdict() -> None:
    verdicts = judge_all(small(), {"B-B": [FAILED], "C-C": [PASSED]}, unclaimed={"D-D"})
    assert verdicts == {
        "A-A": Verdict.SKIPPED,
        "B-B": Verdict.FAIL,
        "C-C": Verdict.PASS,
        "D-D": Verdict.NOT_SUPPORTED,
    }
    assert counted(verdicts.values()) == "1 FAIL, 1 SKIPPED, 1 NOT SUPPORTED, 1 PASS"


def test_the_table_goes_by_level_and_the_worst_come_first() -> None:
    verdicts = judge_all(small(), {"D-D": [FAILED], "C-C": [PASSED], "B-B": [PASSED]})
    assert list(table(small(), verdicts, 80)) == [
        "L0 Lifecycle, configuration and groups. 1 SKIPPED, 1 PASS",
        "   SKIPPED A-A",
        "   PASS    C-C",
        "L2 Error behaviour. 1 FAIL, 1 PASS",
        "   FAIL    D-D",
        "   PASS    B-B",
    ]


def test_the_table_makes_room_for_long_verdicts() -> None:
    outcomes = {id: [PASSED] for id in small()}
    verdicts = judge_all(small(), outcomes, expected={"A-A"}, unclaimed={"C-C"})
    assert list(table(small(), verdicts, 80))[:3] == [
        "L0 Lifecycle, configuration and groups. 1 STALE WAIVER, 1 NOT SUPPORTED",
        "   STALE WAIVER  A-A",
        "   NOT SUPPORTED C-C",
    ]


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_whole_table_is_complete(width: int) -> None:
    lines = list(table(REQUIREMENTS, judge_all(REQUIREMENTS, {}), width, whole=True))
    assert max(map(len, lines)) <= max(width, 60)
    text = " ".join(lines).replace(",", " ").split()
    assert all(text.count(id) == 1 for id in REQUIREMENTS)


def test_the_table_is_short_and_names_what_needs_a_look() -> None:
    ids = [f"AREA-{number:03}" for number in range(300)]
    many = Registry(
        *(Requirement(i, "S.", "s", Level.L1, frozenset({Capability.RANKS})) for i in ids)
    )
    bad = ids[100:200]
    verdicts = judge_all(many, {id: [FAILED if id in bad else PASSED] for id in ids})
    lines = list(table(many, verdicts, 80))
    text = " ".join(lines).replace(",", " ").split()
    assert all(text.count(id) == 1 for id in bad)
    assert (
        lines[-1].strip()
        == f"and {200 - len(set(text) & set(ids) - set(bad))} more (-v names them)"
    )
    passed = lines[next(n for n, line in enumerate(lines) if "   PASS" in line) :]
    assert len(passed) == 4


def test_what_is_not_claimed_is_told_with_what_needs_it() -> None:
    lacks = {"A-A": [Capability.RANKS], "B-B": [Capability.RANKS, Capability.OBJECTS]}
    assert list(lacking(lacks, 80)) == [
        f"not claimed: {Capability.RANKS}, needed by A-A, B-B",
        f"not claimed: {Capability.OBJECTS}, needed by B-B",
    ]
    (line,) = lacking({f"AREA-{number:03}": [Capability.RANKS] for number in range(30)}, 80)
    assert line.endswith(", ...")
    assert list(lacking({"A-A": []}, 80)) == []


def test_a_property_has_one_name_from_any_folder() -> None:
    nodeid = "../a/b/conformance/suite/test_x.py::test_y[z::1]"
    assert property_name(nodeid) == "conformance/suite/test_x.py::test_y[z::1]"
    assert argument(nodeid) == "'conformance.suite.test_x::test_y[z::1]'"


# ---- The level that is certified -----------------------------------------------------------------

P, W, N, F, S = (
    Verdict.PASS,
    Verdict.WAIVED,
    Verdict.NOT_SUPPORTED,
    Verdict.FAIL,
    Verdict.STALE_WAIVER,
)


def verdicts(a: Verdict, b: Verdict, c: Verdict, d: Verdict) -> Mapping[str, Verdict]:
    return dict(zip(small(), (a, b, c, d), strict=True))


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (verdicts(a=P, c=P, b=P, d=P), Level.L2),
        (verdicts(a=P, c=W, b=N, d=P), Level.L2),
        (verdicts(a=P, c=P, b=F, d=P), Level.L0),
        (verdicts(a=P, c=P, b=S, d=P), Level.L0),
        (verdicts(a=P, c=P, b=Verdict.SKIPPED, d=P), Level.L0),
        # Levels are cumulative.
        (verdicts(a=P, c=F, b=P, d=P), None),
        # Where nothing is claimed, or all is waived, nothing is proved.
        (verdicts(a=P, c=P, b=N, d=N), Level.L0),
        (verdicts(a=P, c=P, b=W, d=W), Level.L0),
        (verdicts(a=N, c=N, b=P, d=P), Level.L2),
        (verdicts(a=N, c=N, b=N, d=N), None),
    ],
)
def test_the_level_reached(found: Mapping[str, Verdict], level: Level | None) -> None:
    assert reached(small(), found) is level


def test_a_level_may_have_all_good_verdicts() -> None:
    ids = {"A-A": P, "B-B": W, "C-C": N}
    level = Registry(
        *(Requirement(i, "S.", "s", Level.L0, frozenset({Capability.RANKS})) for i in ids)
    )
    assert reached(level, ids) is Level.L0


def test_a_certificate_counts_the_waivers_up_to_its_level() -> None:
    found = certification(small(), verdicts(a=P, c=W, b=W, d=P), {}, whole=True)
    assert found.certified
    assert str(found) == "L2: 2 of 4 pass, 2 waived"
    found = certification(small(), verdicts(a=P, c=W, b=W, d=W), {}, whole=True)
    assert found.certified
    assert str(found) == "L0: 1 of 2 pass, 1 waived"
    found = certification(small(), verdicts(a=P, c=P, b=P, d=P), {}, whole=True)
    assert str(found) == "L2: 4 of 4 pass"
    found = certification(small(), verdicts(a=P, c=W, b=N, d=P), {}, whole=True)
    assert str(found) == "L2: 2 of 4 pass, 1 not supported, 1 waived"


def test_what_stands_against_a_certificate() -> None:
    found = certification(small(), verdicts(a=P, c=P, b=F, d=S), {"1 deselected": ["x"]}, True)
    assert not found.certified
    assert found.obstacles == ("1 deselected: x", "FAIL: B-B", "STALE WAIVER: D-D")
    assert str(found) == "L0: 2 of 2 pass"


def test_a_part_and_nothing_certify_nothing() -> None:
    good = verdicts(a=P, c=P, b=P, d=P)
    part = certification(small(), good, {"a part": []}, whole=False)
    assert (part.level, part.certified, str(part)) == (None, False, "no level")
    nothing = certification(small(), verdicts(a=N, c=N, b=N, d=N), {}, whole=True)
    assert (nothing.certified, nothing.obstacles) == (False, ("nothing passed",))
