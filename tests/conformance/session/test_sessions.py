"""The suite itself as a third party runs it: from another folder, on backends of their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.engines.capabilities import FRONT_ENDS
from conformance.requirements.catalogue import REQUIREMENTS
from conformance.requirements.registry import Level
from conformance.session.results import HERE, argument, property_name
from conformance.session.session import basic_first, claims_text, requirement_of
from pytest_smp.ranks.capabilities import DTYPES, EVERYTHING, Capabilities, Capability


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_it_runs_from_elsewhere_in_every_import_mode(sessions: Any, mode: str) -> None:
    arguments = [
        "--pyargs",
        "conformance.suite.test_lifecycle",
        f"--import-mode={mode}",
        "--smp-ranks=2",
    ]
    alone, *workers = sessions(
        [*arguments, "-k", "before_init"],
        *([[*arguments, "-k", "before_init", "-n1"]] if mode == "importlib" else []),
    )
    count = sum(not FRONT_ENDS & set(each.needs) for each in REQUIREMENTS.values()) - 1
    for output in (alone, *workers):
        assert "1 passed" in output
        assert f"requirements: {count} SKIPPED, 1 PASS (sim, --smp-ranks=2)" in output
        assert "   PASS    LIFE-FIRST-CALL\n" in output
        assert "=== exit 0" in output


NEW = """
from conformance.requirements.registry import Capability, Level, Requirement
from conformance.requirements.catalogue import REQUIREMENTS
new = Requirement("COMM-NEW", "It is new.", "AWS Common API", Level.L1, frozenset({Capability.OBJECTS}))
REQUIREMENTS._by_id[new.id] = new
"""


def test_a_requirement_without_a_property_is_a_collection_error(sessions: Any) -> None:
    narrowed, part, without = sessions(
        ["--pyargs", "conformance", "-q", "--collect-only", "-k", "before_init"],
        ["--pyargs", "conformance.suite.test_lifecycle", "-q", "--collect-only"],
        ["--pyargs", "conformance", "-q", "--collect-only", "--ignore-glob=/*/test_lifecycle.py"],
        plugin=NEW,
    )
    assert "ERROR: requirements without a property: COMM-NEW\n" in narrowed
    assert "=== exit 4" in narrowed
    for output in (part, without):  # what was not asked for cannot be missed
        assert "=== exit 0" in output


FORGOTTEN = """
from conformance.requirements.catalogue import REQUIREMENTS
del REQUIREMENTS._by_id["COMM-BARRIER-DEFAULT"]
"""


def test_a_property_of_an_unknown_requirement_is_a_collection_error(sessions: Any) -> None:
    (output,) = sessions(
        ["--pyargs", "conformance.suite.test_barriers", "--collect-only"], plugin=FORGOTTEN
    )
    assert "ERROR collecting" in output
    assert '@requirement("COMM-BARRIER-DEFAULT")' in output  # the line that names it
    assert "unknown requirement 'COMM-BARRIER-DEFAULT': did you mean" in output
    assert "=== exit 2" in output


def item(*marks: pytest.Mark) -> Any:
    """As much of a test item as is asked."""
    found = {mark.name: mark for mark in marks}
    return SimpleNamespace(nodeid="test_x.py::test_y", get_closest_marker=found.get)


def test_an_item_has_a_requirement() -> None:
    property = item(pytest.Mark("requirement", ("COMM-SEND-SYNC",), {}, _ispytest=True))
    assert requirement_of(property, REQUIREMENTS) == "COMM-SEND-SYNC"


def test_a_property_without_a_requirement_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_x\.py::test_y: no requirement: say"):
        requirement_of(item(), REQUIREMENTS)


@pytest.mark.parametrize("arguments", [("COMM-NO-SUCH",), (), ("COMM-SEND-SYNC", "COMM-SEND-COPY")])
def test_a_marker_that_names_no_requirement_is_an_error(arguments: tuple[str, ...]) -> None:
    mark = pytest.Mark("requirement", arguments, {}, _ispytest=True)
    with pytest.raises(pytest.UsageError, match=r"test_x\.py::test_y: "):
        requirement_of(item(mark), REQUIREMENTS)


@pytest.mark.parametrize(
    "nodeid", ["test_x.py::test_y[a/b::c]", "../lib/conformance/suite/test_x.py::test_y[a/b::c]"]
)
def test_the_name_of_a_property_does_not_depend_on_the_folder(nodeid: str) -> None:
    assert property_name(nodeid) == "conformance/suite/test_x.py::test_y[a/b::c]"


def test_what_is_claimed_in_words() -> None:
    assert claims_text(EVERYTHING) == "everything"
    assert (
        claims_text(Capabilities(claims=frozenset(Capability) - {Capability.GATHER}))
        == "all but gather"
    )
    gather = {Capability.GATHER: DTYPES - {"complex64", "bool"}}
    assert claims_text(Capabilities(narrower=gather)) == "all but gather of bool, complex64"
    # A reduction of a dtype that is not claimed at all is not told again.
    assert claims_text(Capabilities(dtypes=DTYPES - {"int8"})) == "all but int8"


BUG = """
import smp_core.torch as smp
smp.barrier = lambda group=smp.WORLD: None
"""


@pytest.mark.parametrize(
    ("nodeid", "pasted"),
    [
        ("test_x.py::test_y", "conformance.suite.test_x::test_y"),
        (
            "../lib/conformance/suite/test_x.py::test_y[a b]",
            "'conformance.suite.test_x::test_y[a b]'",
        ),
    ],
)
def test_a_property_as_an_argument(nodeid: str, pasted: str) -> None:
    assert argument(nodeid) == pasted


def test_ids_name_the_whole_path_and_can_be_asked_for(sessions: Any, tmp_path: Path) -> None:
    """The suite lies outside of the root folder, as where it is installed."""
    collect = ["--rootdir", str(tmp_path), "--collect-only", "-q"]
    by_name, by_package = sessions(
        ["--pyargs", "conformance.suite.test_barriers", *collect],
        ["--pyargs", "conformance", *collect],
    )
    ids = [line for line in by_name.splitlines() if "::" in line]
    assert len(ids) > 3
    for each in ids:
        assert each in by_package.splitlines()
        path, _, _ = each.partition("::")
        assert (tmp_path / path).resolve() == HERE / "test_barriers.py"


def test_a_file_is_found_at_its_former_address_with_a_warning(sessions: Any) -> None:
    pasted = "conformance.test_lifecycle::test_init_needs_no_argument"
    now = "conformance.suite.test_lifecycle::test_init_needs_no_argument"
    alone, workers, current = sessions(
        ["--pyargs", pasted, "--smp-ranks=2"],
        ["--pyargs", pasted, "--smp-ranks=2", "-n1"],
        ["--pyargs", now, "--smp-ranks=2"],
    )
    for output in (alone, workers):
        assert "1 passed, 1 warning in" in output
        assert f"DeprecationWarning: --pyargs {pasted} has moved: use {now}\n" in output
        assert "=== exit 0" in output
    assert "1 passed in" in current


def test_a_path_that_has_moved_is_followed_or_told(sessions: Any) -> None:
    test = "test_lifecycle.py::test_init_needs_no_argument"
    pasted, now = str(HERE.parent / test), str(HERE / test)
    followed, told = sessions(
        [pasted, "--smp-ranks=2"],
        [pasted, "--smp-ranks=2", "-Werror"],  # as in a clone of this project
    )
    assert "1 passed, 1 warning in" in followed
    assert f"DeprecationWarning: {pasted} has moved: use {now}\n" in followed
    assert f"ERROR: {pasted} has moved: use {now}\n" in told
    assert "=== exit 4" in told


def test_the_plugin_is_found_at_its_former_address_with_a_warning(sessions: Any) -> None:
    (output,) = sessions(
        [
            "-p",
            "conformance.plugin",
            "--pyargs",
            "conformance",
            "--collect-only",
            "-k",
            "before_init",
        ],
        plugin="import warnings; warnings.simplefilter('always')",
    )
    assert (
        "DeprecationWarning: conformance.plugin has moved: use conformance.session.plugin\n"
        in output
    )
    assert output.count("conformance: sim claims everything") == 1
    assert "=== exit 0" in output


def test_a_failure_shows_the_requirement(sessions: Any) -> None:
    (output,) = sessions(["--pyargs", "conformance.suite.test_barriers"], plugin=BUG)
    requirement = REQUIREMENTS["COMM-BARRIER-ALL"]
    assert "- requirement -" in output
    assert f"{requirement.id}: {requirement.sentence} [{requirement.source}]" in output
    end = output[output.index("= requirements: ") :]
    assert "   FAIL    COMM-BARRIER-ALL, COMM-BARRIER-DEFAULT, COMM-BARRIER-MP-DP\n" in end
    assert "   PASS    COMM-BARRIER-GROUP\n" in end  # it waits for nobody, the others neither
    # One screen: four lines at most for each level, what failed, and the error that the three share.
    assert len(end.splitlines()) <= 4 * len(Level) + 17
    assert "=== exit 1" in output


BACKENDS = """
from pytest_smp.ranks.backends import BACKENDS
from pytest_smp.ranks.protocols import Backend
from pytest_smp.ranks.capabilities import EVERYTHING, Capabilities, Capability
from smp_core.errors import UnsupportedError

def refuse(self, *arguments):
    raise UnsupportedError("scatter: not here")

def open_executor():
    from pytest_smp.ranks.sim.process_group import SimProcessGroup
    SimProcessGroup.scatter = refuse
    return BACKENDS["sim"].open_executor()

less = Capabilities(claims=frozenset(Capability) - {Capability.SCATTER})
boasting = Backend("boasting", "claims what it lacks", open_executor, EVERYTHING)
honest = Backend("honest", "claims what it has", open_executor, less)
"""


def test_a_claim_that_fails_is_a_failure_and_what_is_not_claimed_is_not_run(
    sessions: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(BACKENDS)
    what = ["--pyargs", "conformance.suite.test_tensor_roots", "--smp-ranks=4", "-q"]
    needs = [id for id, each in REQUIREMENTS.items() if Capability.SCATTER in each.needs]
    boasting, honest = sessions(
        [*what, "--smp-backend=mine:boasting", "--smp-report=boasting.json"],
        [*what, "--smp-backend=mine:honest"],
    )
    assert "UnsupportedError: scatter: not here" in boasting
    assert "   FAIL    COLL-SCATTER-ROOT\n" in boasting
    assert "=== exit 1" in boasting
    assert "UnsupportedError" not in honest
    assert f", {len(needs)} NOT SUPPORTED, " in next(
        line for line in honest.splitlines() if line.startswith("= requirements: ")
    )
    assert "=== exit 0" in honest


def test_properties_run_in_the_order_in_which_requirements_are_declared() -> None:
    """Basic values come first, whatever their files are called; what is not the suite's stays."""
    a, b, c, theirs = (cast(pytest.Item, SimpleNamespace(name=name)) for name in "abct")
    items = [b, theirs, c, a]
    basic_first(items, {"SECOND": [b], "THIRD": [c], "FIRST": [a]}, ("FIRST", "SECOND", "THIRD"))
    assert [item.name for item in items] == ["a", "t", "b", "c"]
