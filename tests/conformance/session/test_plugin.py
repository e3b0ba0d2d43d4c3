"""A session of the suite: gates, waivers, the file of expected failures, certification, trouble.

The sessions run a small suite of five requirements (see conftest.py) that fails where it is told to.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import conformance
from conformance.session.expectations import ExpectationError, read
from conformance.session.waivers import main, rewrite_from_report
from pytest_smp.suite import REWRITTEN

WAIVERS = """version = 1
[[expected]]
id = "COMM-ORDER"
reason = "It is known."
link = "https://example.com/1"
"""


def verdict_lines(output: str) -> dict[str, list[str]]:
    """The ids of the table by verdict."""
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        match = re.match(r"   ([A-Z]+( [A-Z]+)?) +([A-Z]+-[A-Z]+.*)$", line)
        if match:
            found.setdefault(match[1], []).extend(match[3].split(", "))
    return found


def exit_code(output: str) -> int:
    """The session's."""
    return int(output.split("=== exit")[1])


# ---- Verdicts ------------------------------------------------------------------------------------


def test_it_shows_a_verdict_on_every_requirement(small: Any) -> None:
    good, bad, part = small(
        ["small"], ["small", "FAIL=COMM-ORDER-AGAIN"], ["small", "-k", "not test_order_again"]
    )
    every = ["LIFE-START", "COMM-ORDER", "COMM-REDUCE", "COMM-DTYPES", "ERROR-RANK"]
    assert verdict_lines(good) == {"PASS": every}
    assert "conformance: sim claims everything\n" in good
    assert exit_code(good) == 0
    assert "= requirements: 1 FAIL, 4 PASS (sim, --smp-ranks=8) =" in bad
    assert verdict_lines(bad)["FAIL"] == ["COMM-ORDER"]
    assert exit_code(bad) == 1
    # One of its two properties was not looked at.
    assert verdict_lines(part)["SKIPPED"] == ["COMM-ORDER"]
    assert exit_code(part) == 0


def test_workers_of_xdist_give_the_same_verdicts(small: Any) -> None:
    (output,) = small(["small", "-n2", "FAIL=LIFE-START", "-k", "not test_order_again"])
    assert verdict_lines(output) == {
        "FAIL": ["LIFE-START"],
        "SKIPPED": ["COMM-ORDER"],
        "PASS": ["COMM-REDUCE", "COMM-DTYPES", "ERROR-RANK"],
    }
    assert exit_code(output) == 1


def test_a_worker_that_crashes_is_a_failure(small: Any) -> None:
    (output,) = small(["small", "-n1", "STOP=crash", "-k", "rank"])
    assert verdict_lines(output)["FAIL"] == ["ERROR-RANK"]
    assert exit_code(output) == 1


def test_what_cannot_be_set_up_is_a_failure(small: Any) -> None:
    (output,) = small(["small", "STOP=setup"])
    assert verdict_lines(output)["FAIL"] == ["ERROR-RANK"]
    assert "- requirement -" in output


def test_a_property_of_which_no_part_applies_is_not_supported(small: Any) -> None:
    (output,) = small(["small", "FAIL=COMM-DTYPES"])
    assert verdict_lines(output)["NOT SUPPORTED"] == ["COMM-DTYPES"]
    assert exit_code(output) == 0


BACKENDS = """
from pytest_smp.ranks.backends import BACKENDS
from pytest_smp.ranks.protocols import Backend
from pytest_smp.ranks.capabilities import FLOAT8, DTYPES, Capabilities, Capability

def backend(**claims):
    return Backend("mine", "mine", BACKENDS["sim"].open_executor, Capabilities(**claims))

less = backend(claims=frozenset(Capability) - {Capability.ALL_REDUCE, Capability.COALESCING})
nothing = backend(claims=frozenset())
few = backend(claims=frozenset({Capability.RANKS}))
dtypes = backend(dtypes=DTYPES - {"bool"}, reductions={"SUM": DTYPES, "MAX": frozenset({"int8"})})
"""


def test_what_is_not_claimed_is_not_run(small: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BACKENDS)
    less, chosen, few, dtypes = small(
        ["small", "--smp-backend=mine:less", "FAIL=COMM-REDUCE", "-rs"],
        ["small", "--smp-backend=mine:less", "FAIL=COMM-REDUCE", "-k", "start"],
        ["small", "--smp-backend=mine:few", "-rs"],
        ["small", "--smp-backend=mine:dtypes"],
    )
    assert "not supported: mine does not claim process groups, all_reduce" in few
    assert "conformance: mine claims all but coalescing, all_reduce\n" in less
    assert "not supported: mine does not claim all_reduce" in less
    assert "\nnot claimed: all_reduce, needed by COMM-REDUCE\n" in less
    assert "not claimed: coalescing" not in less  # nobody needs it there
    for output in (less, chosen):
        assert verdict_lines(output)["NOT SUPPORTED"] == ["COMM-REDUCE"]
        assert exit_code(output) == 0
    header = next(line for line in dtypes.splitlines() if line.startswith("conformance: "))
    assert header.startswith(
        "conformance: mine claims all but bool, PRODUCT, AVG, MIN, MAX of bfloat16, float16, "
    )
    assert header.endswith("uint64, uint8, BAND, BOR, BXOR")


# ---- Expected failures ---------------------------------------------------------------------------


OWN = """
from pathlib import Path
from types import SimpleNamespace
from conformance.session import session
from pytest_smp.ranks.backends import BACKENDS
from pytest_smp.ranks.protocols import Backend

def backend(expectations):
    return Backend("mine", "mine", BACKENDS["sim"].open_executor, expectations=expectations)

own = backend(Path(__file__).with_name("own.toml"))
relative = backend("own.toml")
wrong = backend(7)

def replaces_ranks(self, items):
    executor = SimpleNamespace(steady=False)
    self._controller = SimpleNamespace(open=lambda: executor, close=lambda: None)

def __getattr__(name):
    if name != "processes":
        raise AttributeError(name)
    session.SuiteSession.open_backend = replaces_ranks
    return own
"""


def test_a_backend_names_its_own_file(small: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(WAIVERS)
    (tmp_path / "e.toml").write_text("version = 1\n")
    mine = "--smp-backend=mine:own"
    own, other, relative, wrong = small(
        ["small", mine, "FAIL=COMM-ORDER", f"--smp-report={tmp_path / 'r.json'}"],
        ["small", mine, "FAIL=COMM-ORDER", "--smp-expectations=e.toml"],
        ["small", "--smp-backend=mine:relative"],
        ["small", "--smp-backend=mine:wrong"],
    )
    assert "; expected failures: own.toml, 1 entry\n" in own
    assert verdict_lines(own)["WAIVED"] == ["COMM-ORDER"]
    assert json.loads((tmp_path / "r.json").read_text())["options"]["expectations"] == "own.toml"
    assert "; expected failures: e.toml, 0 entries\n" in other
    assert verdict_lines(other)["FAIL"] == ["COMM-ORDER"]
    assert "ERROR: backend mine: its expectations are 'own.toml': write Path(__file__)" in relative
    assert exit_code(relative) == 4
    assert "the expectations of mine:wrong is not a path, a text or None, but of the type" in wrong


def test_a_hang_is_waived_where_ranks_are_replaced(small: Any, tmp_path: Path) -> None:
    """On threads it is not: what computes for ever there goes on."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(WAIVERS.replace("COMM-ORDER", "ERROR-RANK"))
    threads, processes = small(
        ["small", "--smp-backend=mine:own", "STOP=timeout"],
        ["small", "--smp-backend=mine:processes", "STOP=timeout"],
    )
    assert verdict_lines(threads)["FAIL"] == ["ERROR-RANK"]
    assert verdict_lines(processes)["WAIVED"] == ["ERROR-RANK"]
    assert exit_code(processes) == 0


def test_an_expected_failure_is_waived(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nsmp_expectations = e.toml\n")
    expect = "--smp-expectations=e.toml"
    waived, stale, by_ini = small(
        ["small", expect, "FAIL=COMM-ORDER", "-rx"],
        ["small", expect],
        ["small", "FAIL=COMM-ORDER"],
    )
    for output in (waived, by_ini):
        assert verdict_lines(output)["WAIVED"] == ["COMM-ORDER"]
        assert "\nwaived: COMM-ORDER: It is known. (https://example.com/1)\n" in output
        assert "AssertionError" not in output  # no traceback
        assert exit_code(output) == 0
    assert "; expected failures: e.toml, 1 entry\n" in waived
    assert re.search(r"XFAIL small/test_small.py::test_order - It is known", waived)
    assert verdict_lines(stale)["STALE WAIVER"] == ["COMM-ORDER"]
    assert "\nstale: e.toml:2: entry 1 (COMM-ORDER): passes: COMM-ORDER\n" in stale
    assert exit_code(stale) == 0


def test_an_expected_failure_does_not_shrink(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS)
    ways = {
        "plain": [],
        "waived": ["--smp-expectations=e.toml"],
        "new": ["--smp-write-expectations=w"],
    }
    small(
        *(
            ["small", "FAIL=COMM-ORDER", "--hypothesis-seed=1", f"NUMBERS={name}", *arguments]
            for name, arguments in reversed(ways.items())
        )
    )
    smallest = [
        min(number for number in map(int, (tmp_path / name).read_text().split()) if number > 1000)
        for name in ways
    ]
    shrunk, *rest = smallest
    assert shrunk == 1001  # in the same process, after the others: all is as it was
    assert min(rest) > 1001


def test_an_expected_failure_is_not_remembered_as_shrunk(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS)
    _, after = small(  # with Hypothesis's database of examples
        ["small", "FAIL=COMM-ORDER", "--smp-expectations=e.toml"], ["small", "FAIL=COMM-ORDER"]
    )
    assert "number=1001" in after


def test_what_could_not_be_tested_is_not_waived(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS.replace("COMM-ORDER", "ERROR-RANK"))
    expect = "--smp-expectations=e.toml"
    for output in small(["small", expect, "STOP=setup"], ["small", expect, "STOP=timeout"]):
        assert verdict_lines(output)["FAIL"] == ["ERROR-RANK"]
        assert exit_code(output) == 1


def test_expected_failures_are_written_from_a_report(small: Any, tmp_path: Path) -> None:
    """As the session that fails would write them itself."""
    failing = ["small", "FAIL=COMM-ORDER-AGAIN COMM-REDUCE"]
    for name in ("own.toml", "new.toml"):
        (tmp_path / name).write_text(WAIVERS.replace("COMM-ORDER", "LIFE-START"))
    small(
        [*failing, "--smp-report=r.json"],
        [*failing, "--smp-write-expectations=own.toml"],
        ["small", "--smp-smoke", "--smp-report=smoke.json"],
    )
    text = rewrite_from_report(tmp_path / "new.toml", tmp_path / "r.json")
    assert text == (
        "new.toml: 2 expected failures written; 2 need a reason and a link before the file can be used"
    )
    assert (tmp_path / "new.toml").read_text() == (tmp_path / "own.toml").read_text()
    report = json.loads((tmp_path / "r.json").read_text())
    for name, content, message in [
        ("no.json", "{", "Expecting property name"),
        ("other.json", "{}", "no report of the suite"),
        ("old.json", json.dumps(report | {"schema_version": 1}), "schema version 1; this"),
        ("cut.json", json.dumps(report | {"interrupted": "enough"}), "interrupted: enough"),
        ("smoke.json", (tmp_path / "smoke.json").read_text(), "--smp-smoke: what was not run"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(ExpectationError, match=f"^{name}: .*{message}"):
            rewrite_from_report(tmp_path / "new.toml", tmp_path / name)
    assert main([str(tmp_path / "missing.json"), str(tmp_path / "new.toml")]) == 1
    assert main([str(tmp_path / "r.json"), str(tmp_path / "first.toml")]) == 0
    assert [entry.id for entry in read(tmp_path / "first.toml")] == ["COMM-ORDER", "COMM-REDUCE"]


#: The content of a bad file of expectations, and the message about it.
BAD_FILES = {
    "id": (WAIVERS.replace("ORDER", "ODER"), "2: entry 1 (COMM-ODER): matches no requirement; "),
    "key": (WAIVERS.replace("reason", "reson"), "2: entry 1 (COMM-ORDER): unknown key 'reson'"),
    "reason": (WAIVERS.replace("reason", "#"), "2: entry 1 (COMM-ORDER): no reason"),
    "link": (WAIVERS.replace("link", "#"), "2: entry 1 (COMM-ORDER): no link"),
    "toml": ("what?", " not TOML: "),
    "missing": (None, " cannot be read: No such file or directory"),
}


def test_a_bad_file_ends_the_session_before_it_runs(small: Any, tmp_path: Path) -> None:
    for name, (text, _) in BAD_FILES.items():
        if text is not None:
            (tmp_path / f"{name}.toml").write_text(text)
    found = small(*(["small", f"--smp-expectations={name}.toml"] for name in BAD_FILES))
    for output, (name, (_, message)) in zip(found, BAD_FILES.items(), strict=True):
        assert f"ERROR: expected failures: {name}.toml:{message}" in output
        assert "Traceback" not in output
        assert "passed" not in output
        assert exit_code(output) == 4


def test_the_file_is_written_from_what_failed(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        WAIVERS
        + WAIVERS.replace("version = 1", "").replace("COMM-ORDER", "LIFE-*")
        + WAIVERS.replace("version = 1", "").replace("COMM-ORDER", "GONE-AWAY")
    )
    write = "--smp-write-expectations=e.toml"
    first, again, used = small(
        ["small", write, "FAIL=COMM-ORDER ERROR-RANK"],
        ["small", write, "FAIL=COMM-ORDER ERROR-RANK"],
        ["small", "--smp-expectations=e.toml"],
    )
    for output in (first, again):
        assert verdict_lines(output)["WAIVED"] == ["COMM-ORDER"]
        assert verdict_lines(output)["FAIL"] == ["ERROR-RANK"]
        assert "\ne.toml: 2 expected failures written; 1 need" in output
        assert exit_code(output) == 1
    assert (tmp_path / "e.toml").read_text().partition("version")[2] == (
        " = 1\n"
        '\n[[expected]]\nid = "COMM-ORDER"\nreason = "It is known."\n'
        'link = "https://example.com/1"\n'
        '\n[[expected]]\n# AssertionError: assert not True\nid = "ERROR-RANK"\n'
        'reason = "TODO: why this is expected"\nlink = "TODO: where it is tracked"\n'
    )
    assert "entry 2 (ERROR-RANK): it still says TODO" in used
    assert exit_code(used) == 4


def test_a_backend_may_name_the_file_before_it_is_written(small: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    mine = ("small", "--smp-backend=mine:own", "FAIL=COMM-ORDER")
    missing, written = small([*mine], [*mine, "--smp-write-expectations=own.toml"])
    assert exit_code(missing) == 4
    assert "own.toml: 1 expected failures written" in written
    assert 'id = "COMM-ORDER"' in (tmp_path / "own.toml").read_text()


def test_the_file_is_not_written_from_half_a_session(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS)
    half, hopeless = small(
        ["small", "--smp-write-expectations=e.toml", "STOP=interrupt"],
        ["small", "--smp-write-expectations=new.toml", "STOP=setup"],
    )
    assert "e.toml: not written, the session was interrupted" in half
    assert (tmp_path / "e.toml").read_text() == WAIVERS
    assert "cannot be waived, for they could not be tested: ERROR-RANK\n" in hopeless
    assert "ERROR-RANK" not in (tmp_path / "new.toml").read_text()


def test_an_intermittent_failure_is_never_stale(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS + "intermittent = true\n")
    certify = ["small", "--smp-certify", "--smp-expectations=e.toml", "--smp-report=r.json"]
    passed, failed = small([*certify, "FAIL="], [*certify, "FAIL=COMM-ORDER"])
    for output in (passed, failed):
        assert verdict_lines(output)["WAIVED"] == ["COMM-ORDER"]
        assert "\ncertified: L2: 4 of 5 pass, 1 waived\n" in output
        assert exit_code(output) == 0
    small(["small", "--smp-write-expectations=e.toml"])
    assert (tmp_path / "e.toml").read_text().endswith("intermittent = true\n")


def test_examples_that_failed_are_kept_beside_the_file_and_come_first(
    small: Any, tmp_path: Path
) -> None:
    expect = "--smp-expectations=e.toml"
    write, ci, other = (
        ["small", "FAIL=COMM-ORDER", *more, f"NUMBERS={name}"]
        for name, more in (
            ("write", ["--smp-write-expectations=e.toml"]),
            ("ci", [expect, "CI=true", "--hypothesis-profile=ci"]),
            ("other", [expect]),
        )
    )
    small(write)
    kept = (tmp_path / "write").read_text().split()[-1]  # the first one that failed is the last one
    assert list((tmp_path / "e.toml.examples").rglob("*"))
    text = (tmp_path / "e.toml").read_text()
    text = text.replace("TODO: where it is tracked", "https://example.com/1")
    (tmp_path / "e.toml").write_text(text.replace("TODO: ", ""))
    shutil.rmtree(tmp_path / ".hypothesis", ignore_errors=True)
    for output in small(ci, other):
        assert verdict_lines(output)["WAIVED"] == ["COMM-ORDER"]
    for name in ("ci", "other"):
        assert set((tmp_path / name).read_text().split()) == {kept}


def test_profiles_have_their_examples(small: Any, tmp_path: Path) -> None:
    def numbers(profile: str, name: str) -> list[str]:
        small(["small", f"--hypothesis-profile={profile}", f"NUMBERS={name}"])
        return (tmp_path / name).read_text().split()

    quick, again = numbers("smp-quick", "quick"), numbers("smp-quick", "again")
    assert len(quick) == 20
    assert quick == again
    assert len(numbers("smp-certify", "certify")) == 400


# ---- Certification -------------------------------------------------------------------------------


def test_a_whole_session_without_failure_is_certified(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS)
    (tmp_path / "mine.py").write_text(BACKENDS)
    good, waived = small(
        ["small", "--smp-certify", "--smp-backend=mine:less"],
        ["small", "--smp-certify", "--smp-expectations=e.toml", "FAIL=COMM-ORDER", "-n1"],
    )
    assert "\ncertified: L2: 4 of 5 pass, 1 not supported\n" in good
    assert "\ncertified: L2: 4 of 5 pass, 1 waived\n" in waived
    assert exit_code(good) == exit_code(waived) == 0


def test_a_certificate_allows_nothing_left_out(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS)
    (tmp_path / "mine.py").write_text(BACKENDS)
    certify = ["small", "--smp-certify"]
    stale, deselected, workers, skipped, part, failed, stopped, nothing = small(
        [*certify, "--smp-expectations=e.toml"],
        [*certify, "-k", "not test_rank_again"],
        [*certify, "-k", "not test_rank_again", "-n1"],
        [*certify, "STOP=skip"],
        ["small/test_small.py", "--smp-certify"],
        [*certify, "FAIL=ERROR-RANK"],
        [*certify, "FAIL=COMM-REDUCE", "-x"],
        [*certify, "--smp-backend=mine:nothing"],
    )
    assert "reached: L0: " in stale
    assert "   STALE WAIVER: COMM-ORDER\n" in stale
    for output in (deselected, workers):
        assert "reached: L1: " in output
        assert "   1 property deselected: small.test_small::test_rank_again\n" in output
        assert "   SKIPPED: ERROR-RANK\n" in output
    assert "   1 property skipped: small.test_small::test_rank\n" in skipped
    assert "reached: no level. What stands" in part
    assert "   the session did not ask for the whole suite (--pyargs conformance)\n" in part
    assert "reached: L1: " in failed
    assert "   FAIL: ERROR-RANK\n" in failed
    assert "   the session was interrupted (stopping after 1 failures)\n" in stopped
    assert "reached: no level. What stands against it:\n   nothing passed\n" in nothing
    for output in (stale, deselected, workers, skipped, part, failed, stopped, nothing):
        assert "\nnot certified; " in output
        assert exit_code(output) == 1


def test_a_waiver_of_what_is_not_supported_is_no_waiver(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS.replace("COMM-ORDER", "COMM-REDUCE"))
    (tmp_path / "mine.py").write_text(BACKENDS)
    (output,) = small(
        ["small", "--smp-certify", "--smp-expectations=e.toml", "--smp-backend=mine:less"]
    )
    assert "   waivers of what is not supported: COMM-REDUCE\n" in output
    assert exit_code(output) == 1


def test_certifying_other_tests_certifies_nothing(small: Any, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    (output,) = small(["test_other.py", "--smp-certify"])
    assert "1 passed" in output
    assert "   the session did not ask for the whole suite (--pyargs conformance)\n" in output
    assert exit_code(output) == 1


def test_options_that_contradict_each_other_are_refused(small: Any) -> None:
    others = ("--smp-certify", "--smp-smoke", "--smp-level=L1")
    outputs = small(*(["small", other, "--smp-write-expectations=e.toml"] for other in others))
    for output, other in zip(outputs, others, strict=True):
        assert f"ERROR: {other.partition('=')[0]} and --smp-write-expectations: " in output
        assert exit_code(output) == 4


def test_a_session_that_is_killed_keeps_what_it_has_found(small: Any, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    small(["small", "STOP=die", f"--smp-report={target}"], code=9)
    report = json.loads(target.read_text())
    assert not report["complete"]
    assert report["exit_status"] is None
    assert "killed" in report["interrupted"]
    verdicts = {each["id"]: each["verdict"] for each in report["requirements"]}
    assert verdicts == {
        **dict.fromkeys(("LIFE-START", "COMM-ORDER", "COMM-REDUCE", "COMM-DTYPES"), "PASS"),
        "ERROR-RANK": "SKIPPED",
    }
    assert list(tmp_path.glob(".report.json*")) == []


def test_a_level_leaves_out_what_is_above(small: Any, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS.replace("COMM-ORDER", "ERROR-RANK"))
    low, failed, workers, unknown = small(
        ["small", "--smp-level=L1", "--smp-certify", "--smp-expectations=e.toml", "STOP=setup"],
        ["small", "--smp-level=L1", "--smp-certify", "FAIL=LIFE-START"],
        ["small", "--smp-level=L0", "--smp-certify", "-n1"],
        ["small", "--smp-level=L9"],
    )
    assert "\ncertified: L1: 4 of 4 pass\n" in low
    assert "2 deselected" in low
    assert verdict_lines(low) == {
        "PASS": ["LIFE-START", "COMM-ORDER", "COMM-REDUCE", "COMM-DTYPES"]
    }
    assert "reached: no level" in failed
    assert "\ncertified: L0: 1 of 1 pass\n" in workers
    assert [exit_code(each) for each in (low, failed, workers, unknown)] == [0, 1, 0, 4]
    assert "ERROR: --smp-level=L9: one of L0, L1, L2" in unknown


def test_a_rehearsal_is_short_and_certifies_nothing(small: Any, tmp_path: Path) -> None:
    (output,) = small(["small", "--smp-smoke", "--smp-certify"])
    assert 1 <= len((tmp_path / "numbers.txt").read_text().split()) <= 3
    assert "   a rehearsal, with few examples (--smp-smoke)\n" in output
    assert "\nnot certified; " in output
    assert exit_code(output) == 1


# ---- Trouble -------------------------------------------------------------------------------------

BROKEN = """
from pytest_smp.ranks.protocols import Backend
from conformance.session import session
session.SuiteSession.open_backend = __import__("planted").OPEN

def fail():
    raise OSError("no such device")

broken = Backend("broken", "it cannot be opened", fail)
empty = Backend("empty", "it opens nothing", lambda: None)
"""


def test_a_backend_that_cannot_be_opened_ends_the_session(small: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    alone, workers, empty, listed = small(
        ["small", "--smp-backend=mine:broken"],
        ["small", "--smp-backend=mine:broken", "-n1"],
        ["small", "--smp-backend=mine:empty"],
        ["small", "--smp-backend=mine:broken", "--collect-only", "-q"],
    )
    for output in (alone, workers):
        message = "ERROR: backend 'mine:broken' cannot be opened: OSError: no such device\n"
        assert output.count(message) == 1
    assert (
        "ERROR: backend 'mine:empty': what it opens is no executor: it names no protocol" in empty
    )
    for output in (alone, workers, empty):
        assert exit_code(output) == 4
        assert "Traceback" not in output
        assert "INTERNALERROR" not in output
        assert "requirements: " not in output
    assert exit_code(listed) == 0


UNCLOSABLE = """
import planted
from conformance.session import session
from pytest_smp.ranks.protocols import PROTOCOL_VERSION, Backend, Executor

session.SuiteSession.open_backend = planted.OPEN

class Unclosable(Executor):
    protocol = PROTOCOL_VERSION
    open = print

    def close(self):
        raise OSError("device busy")

unclosable = Backend("unclosable", "it cannot be closed", Unclosable)
"""


def test_a_backend_that_cannot_be_closed_fails_the_session(small: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(UNCLOSABLE)
    what = ["small", "--smp-backend=mine:unclosable", "--smp-certify"]
    outputs = small([*what, "--smp-report=alone.json"], [*what, "--smp-report=xdist.json", "-n1"])
    for output, name in zip(outputs, ("alone.json", "xdist.json"), strict=True):
        assert "\nthe backend could not be closed: OSError: device busy\n" in output
        assert "\nnot certified; " in output
        assert exit_code(output) == 1
        found = json.loads((tmp_path / name).read_text())
        assert (found["complete"], found["exit_status"]) == (False, 1)
        assert found["interrupted"] == "the backend could not be closed: OSError: device busy"


def test_a_module_that_leaves_is_no_backend(small: Any, tmp_path: Path) -> None:
    (tmp_path / "skips.py").write_text("import pytest\npytest.skip('no', allow_module_level=True)")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)")
    for output in small(["small", "--smp-backend=skips:x"], ["small", "--smp-backend=exits:x"]):
        assert re.search(
            "ERROR: .*'(skips|exits)' cannot be imported: (Skipped|SystemExit)", output
        )
        assert "INTERNALERROR" not in output
        assert exit_code(output) == 4


FORGIVING = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        report.outcome = "passed"
    return report
"""


def test_a_verdict_of_fail_fails_the_session(small: Any, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FORGIVING)
    for output in small(["small", "FAIL=ERROR-RANK"], ["small", "FAIL=ERROR-RANK", "-n1"]):
        assert "7 passed" in output
        assert verdict_lines(output)["FAIL"] == ["ERROR-RANK"]
        assert exit_code(output) == 1


HOOKS = """
import os
import pytest

class Idle:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        return True

class Clearing:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        call.excinfo = None
        return (yield)

class Swallowing:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        try:
            return (yield)
        except AssertionError:
            return None

class Dropping:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.name != "test_order"]
        return (yield)

class Unmaking:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name):
        return [] if name == "test_order" else None

class Hasty:
    def pytest_collection_modifyitems(self, items):
        from hypothesis import settings
        for item in items:
            if hasattr(item.obj, "hypothesis"):
                item.obj._hypothesis_internal_use_settings = settings(max_examples=1, database=None)

def pytest_configure(config):
    config.pluginmanager.register(globals()[os.environ["HOOK"]]())
"""


def test_hooks_that_hide_a_failure_do_not_certify(small: Any, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    hooks = {"Idle": "SKIPPED", "Clearing": "FAIL", "Swallowing": "FAIL"}
    hooks |= dict.fromkeys(["Dropping", "Unmaking", "Hasty"], "SKIPPED")
    outputs = small(
        *(["small", "FAIL=COMM-ORDER", "--smp-certify", f"HOOK={hook}"] for hook in hooks)
    )
    for output, verdict in zip(outputs, hooks.values(), strict=True):
        assert "failed" not in output.splitlines()[-2]
        assert "COMM-ORDER" in verdict_lines(output)[verdict]
        assert "\nnot certified; " in output
        assert exit_code(output) == 1


RERUNNING = """
import os
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        os.environ["FAIL"] = ""  # it is a rare defect
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_the_last_try_does_not_certify(small: Any, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(RERUNNING)
    (output,) = small(["small", "FAIL=ERROR-RANK", "--smp-certify"])
    assert "7 passed" in output
    assert verdict_lines(output)["FAIL"] == ["ERROR-RANK"]
    assert "\nnot certified; " in output
    assert exit_code(output) == 1


def test_assertions_that_python_drops_are_refused(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    failing = ["small", "FAIL=COMM-ORDER-AGAIN"]
    plain, workers, rewritten = small(
        [*failing, "--assert=plain", "--smp-certify"],
        [*failing, "--assert=plain", "-n1"],
        failing,
    )
    for output in (plain, workers):
        assert "ERROR: conformance: Python drops every assert (PYTHONOPTIMIZE, -O), and" in output
        assert "passed" not in output
        assert exit_code(output) == 4
    assert verdict_lines(rewritten)["FAIL"] == ["COMM-ORDER"]
    assert exit_code(rewritten) == 1


def test_assertions_beside_the_properties_are_rewritten() -> None:
    makes = {
        f"conformance.cases.{path.stem}"
        for path in (Path(conformance.__file__).parent / "cases").glob("*.py")
        if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert makes == set(REWRITTEN)


def test_a_profile_without_draws_does_not_certify(small: Any, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(
        (tmp_path / "planted.py").read_text()
        + "from hypothesis import settings\nsettings.register_profile('one', max_examples=1)\n"
    )
    certify = ["small", "--hypothesis-profile=one", "FAIL=COMM-ORDER", "--smp-certify"]
    for output in small(certify, [*certify, "-n1"]):
        assert verdict_lines(output)["SKIPPED"] == ["COMM-ORDER"]
        assert "\nnot certified; " in output
        assert exit_code(output) == 1


# ---- Sessions of more than the suite, and of less -------------------------------------------------

OTHER = "def test_other():\n    pass\n"


def test_ini_keys_count_in_sessions_of_the_suite_only(small: Any, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(OTHER)
    keys = "[pytest]\nsmp_certify = true\nsmp_report = r.json\n"
    (tmp_path / "pytest.ini").write_text(keys)
    missing = ["-o", "smp_expectations=missing.toml"]
    for output in small(
        ["test_other.py", *missing], ["test_other.py", *missing, "--smp-report=flag.json"]
    ):
        assert "1 passed" in output
        assert "requirements: " not in output
        assert exit_code(output) == 0
    assert not (tmp_path / "r.json").exists()
    # Of a session of other tests it tells those that use ranks: none.
    other = json.loads((tmp_path / "flag.json").read_text())
    assert (other["schema"], other["tests"]) == ("smp-test-report", [])

    suite, folder, above, workers = small(
        ["small", *missing], [".", *missing], ["."], [".", "-n1", "--smp-ranks=4"]
    )
    for output in (suite, folder):
        assert "ERROR: expected failures: missing.toml: cannot be read" in output
        assert exit_code(output) == 4
    for output in (above, workers):
        assert "\ncertified: L2: 5 of 5 pass\n" in output
        assert exit_code(output) == 0
    assert json.loads((tmp_path / "r.json").read_text())["options"]["ranks"] == 4


def test_of_what_is_not_collected_nothing_is_missed(small: Any, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(OTHER)
    cached = ["small", "-p", "cacheprovider"]
    away, _, again, step, deselected, elsewhere = small(
        [".", "-o", "norecursedirs=small", "--smp-report=r.json"],  # as a virtual environment is
        [*cached, "FAIL=COMM-ORDER-AGAIN"],
        [*cached, "--lf"],
        [*cached, "-p", "stepwise", "--stepwise"],
        ["small", "--deselect=small/test_small.py"],
        ["small", "--ignore=test_other.py", "--smp-certify"],
    )
    for output in (away, again, step, deselected, elsewhere):
        assert "without a property" not in output
    assert exit_code(away) == exit_code(again) == exit_code(step) == exit_code(elsewhere) == 0
    assert "1 passed" in away
    assert "1 passed" in again
    assert exit_code(deselected) == 5
    assert "\ncertified: L2: 5 of 5 pass\n" in elsewhere


TWICE = """
from conformance.requirements import registry
init = registry.Registry.__init__
registry.Registry.__init__ = lambda self, *declared: init(self, *declared, declared[0])
"""


def test_a_requirement_declared_twice_ends_the_session(sessions: Any) -> None:
    alone, workers = sessions(
        ["--pyargs", "conformance"], ["--pyargs", "conformance", "-n1"], plugin=TWICE
    )
    for output in (alone, workers):
        assert "ERROR: conformance: requirement LIFE-INITIALIZED is declared twice\n" in output
        assert exit_code(output) == 4


def test_a_session_of_other_tests_does_not_load_the_suite(sessions: Any, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other(request):\n"
        "    assert not [name for name in sys.modules if name.startswith('conformance')]\n"
        "    called = request.config.hook.pytest_runtest_call.get_hookimpls()\n"
        "    assert not [each for each in called if 'conformance' in each.function.__module__]\n"
    )
    alone, workers = sessions(["test_other.py"], ["test_other.py", "-n1"])
    for output in (alone, workers):
        assert "1 passed" in output
        assert "requirements" not in output
        assert exit_code(output) == 0
