"""``--smp-report`` in a session of the user's own tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

SOURCE = """
    @pytest.mark.smp(ranks=[2, 9])
    def test_good(smp):
        assert smp.size() == 2

    @pytest.mark.smp(ranks=3)
    def test_stuck(smp):
        if smp.rank():
            smp.barrier()

    @pytest.mark.smp(ranks=2)
    @pytest.mark.xfail
    def test_wrong(smp):
        assert smp.rank() == 0

    def test_with_world(smp_world):
        smp_world.run(api.rank, ranks=2)

    def test_without_ranks():
        pass
"""


def told(session: Session) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((session.pytester.path / "r.json").read_text())
    return report


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "workers"])
def test_it_tells_of_the_tests_on_ranks(session: Session, workers: list[str]) -> None:
    ended = session.apart(SOURCE, "--smp-report=r.json", *workers)
    assert ended.counts == {"passed": 3, "failed": 1, "skipped": 1, "xfailed": 1}
    ended.hides("requirements:")
    report = told(session)
    assert (report["schema"], report["schema_version"]) == ("smp-test-report", 1)
    assert (report["complete"], report["exit_status"]) == (True, 1)
    found = {
        each["name"].partition("::")[2]: (each["ranks"], each["outcome"], each["verdict"])
        for each in report["tests"]
    }
    assert found == {
        "test_good[ranks=2]": (2, "passed", "passed"),
        "test_good[ranks=9]": (9, "skipped", None),
        "test_stuck": (3, "failed", "deadlock"),
        "test_wrong": (2, "xfailed", "failed"),
        "test_with_world": (None, "passed", None),
    }
    reasons = {each["name"].partition("::")[2]: each["reason"] for each in report["tests"]}
    assert "needs 9 ranks, and 4 are there" in reasons["test_good[ranks=9]"]
    assert "2 of 3 ranks wait" in reasons["test_stuck"]
    assert report["outcomes"] == {
        "passed": 2,
        "failed": 1,
        "error": 0,
        "skipped": 1,
        "xfailed": 1,
        "xpassed": 0,
    }
    assert report["options"]["ranks"] == 4


def test_a_session_that_is_killed_keeps_what_it_has_found(session: Session) -> None:
    source = SOURCE + "\n    def test_die(smp_world):\n        os._exit(9)\n"
    ended = session.apart(source, "--smp-report=r.json")
    assert ended.code == 9
    report = told(session)
    assert (report["complete"], report["exit_status"]) == (False, None)
    assert len(report["tests"]) == 5


def test_a_file_that_cannot_be_written_ends_the_session_first(session: Session) -> None:
    session.pytester.mkdir("r.json")
    ended = session.apart(SOURCE, "--smp-report=r.json")
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    ended.shows("--smp-report=r.json: Is a directory")
