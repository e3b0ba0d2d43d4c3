"""The suite as a third party runs it: from another folder, in sessions of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import conftest
from conformance.requirements import REQUIREMENTS

#: Runs one session after the other in one process (torch is imported once), and tells them apart.
DRIVER = """
import pytest, sys
for arguments in {sessions!r}:
    print("=== session", *arguments, flush=True)
    print("=== exit", int(pytest.main(["-p", "no:cacheprovider", *arguments])), flush=True)
"""


@pytest.fixture
def sessions(tmp_path: Path) -> Any:
    """Run pytest in a folder that knows nothing of this project; return each session's output."""

    def run(*sessions: list[str], plugin: str = "") -> list[str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "planted.py").write_text(plugin)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                DRIVER.format(sessions=[["-p", "planted", *s] for s in sessions]),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return [part + done.stderr for part in done.stdout.split("=== session")[1:]]

    return run


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_it_runs_from_elsewhere_in_every_import_mode(sessions: Any, mode: str) -> None:
    (output,) = sessions(
        ["--pyargs", "conformance", "--smp-ranks=2", f"--import-mode={mode}", "-k", "before_init"]
    )
    assert "1 passed" in output
    count = len(REQUIREMENTS) - 1
    assert f"requirements: {count} SKIPPED, 1 PASS (sim, --smp-ranks=2)" in output
    assert "   PASS    LIFE-FIRST-CALL\n" in output
    assert "=== exit 0" in output


NEW = """
from conformance.registry import Capability, Level, Requirement
from conformance.requirements import REQUIREMENTS
new = Requirement("COMM-NEW", "It is new.", "seed 000", Level.L1, Capability.OBJECTS)
REQUIREMENTS._by_id[new.id] = new
"""


def test_a_requirement_without_a_property_is_a_collection_error(sessions: Any) -> None:
    whole, narrowed, part, without = sessions(
        ["--pyargs", "conformance", "-q", "--collect-only"],
        ["--pyargs", "conformance", "-q", "--collect-only", "-k", "before_init"],
        ["--pyargs", "conformance.test_lifecycle", "-q", "--collect-only"],
        ["--pyargs", "conformance", "-q", "--collect-only", "--ignore-glob=*/test_lifecycle.py"],
        plugin=NEW,
    )
    for output in (whole, narrowed):
        assert "requirements without a property: COMM-NEW\n" in output
        assert "=== exit 4" in output
    for output in (part, without):  # what was not asked for cannot be missed
        assert "=== exit 0" in output


FORGOTTEN = """
from conformance.requirements import REQUIREMENTS
del REQUIREMENTS._by_id["COMM-BARRIER-DEFAULT"]
"""


def test_a_property_of_an_unknown_requirement_is_a_collection_error(sessions: Any) -> None:
    (output,) = sessions(["--pyargs", "conformance", "--collect-only"], plugin=FORGOTTEN)
    assert "ERROR collecting" in output
    assert '@requirement("COMM-BARRIER-DEFAULT")' in output  # the line that names it
    assert "unknown requirement 'COMM-BARRIER-DEFAULT': did you mean" in output
    assert "=== exit 2" in output


def item(*marks: pytest.Mark) -> Any:
    """As much of a test item as is asked."""
    found = {mark.name: mark for mark in marks}
    return SimpleNamespace(
        nodeid="test_x.py::test_y", get_closest_marker=found.get, user_properties=[]
    )


def test_an_item_carries_its_requirement() -> None:
    property = item(pytest.Mark("requirement", ("COMM-SEND-SYNC",), {}, _ispytest=True))
    assert conftest._requirement_of(property) == "COMM-SEND-SYNC"
    assert property.user_properties == [("requirement", "COMM-SEND-SYNC")]


def test_a_property_without_a_requirement_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_x\.py::test_y: no requirement: say"):
        conftest._requirement_of(item())


@pytest.mark.parametrize("arguments", [("COMM-NO-SUCH",), (), ("COMM-SEND-SYNC", "COMM-SEND-COPY")])
def test_a_marker_that_names_no_requirement_is_an_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(pytest.UsageError, match=r"test_x\.py::test_y: "):
        conftest._requirement_of(item(pytest.Mark("requirement", arguments, {}, _ispytest=True)))


BUG = """
import smp_core.torch as smp
smp.barrier = lambda group=smp.WORLD: None
"""


def test_a_failure_shows_the_requirement(sessions: Any) -> None:
    (output,) = sessions(["--pyargs", "conformance.test_barriers"], plugin=BUG)
    requirement = REQUIREMENTS["COMM-BARRIER-ALL"]
    assert "- requirement -" in output
    assert f"{requirement.id}: {requirement.sentence} [{requirement.source}]" in output
    end = output[output.index("= requirements: ") :]
    assert "   FAIL    COMM-BARRIER-ALL, COMM-BARRIER-DEFAULT, COMM-BARRIER-MP-DP\n" in end
    assert "   PASS    COMM-BARRIER-GROUP\n" in end  # it waits for nobody, the others neither
    assert len(end.splitlines()) <= 40
    assert "=== exit 1" in output
