"""The verdicts as JSON: what it says, that it is as the schema says, and that it is never half."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from conformance.requirements.registry import Level
from conformance.session import report
from conformance.session.results import PropertyResult
from conformance.session.verdicts import PropertyOutcome, Verdict
from pytest_smp import written
from pytest_smp.ranks.capabilities import Capability

SCHEMA = json.loads(report.SCHEMA.read_text())
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def problems(value: Any, schema: dict[str, Any], place: str = "$") -> Iterator[str]:
    """Where a value is not as a schema says: as much of JSON Schema as ours uses."""
    unknown = set(schema) - {
        *("$schema", "$id", "$defs", "$ref", "title", "description", "anyOf"),
        *("type", "enum", "const", "properties", "required", "additionalProperties", "items"),
    }
    assert not unknown, f"the schema uses {unknown}, which this does not check"
    if "$ref" in schema:
        yield from problems(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], place)
    if "anyOf" in schema and all(list(problems(value, each, place)) for each in schema["anyOf"]):
        yield f"{place}: {value!r} is none of those allowed"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        for kind in kinds
    ):
        yield f"{place}: {value!r} is no {kinds}"
        return
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{place}: {value!r} is not allowed"
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (
            f"{place}.{name}: missing" for name in schema.get("required", []) if name not in value
        )
        for name, each in value.items():
            if name not in known and more is False:
                yield f"{place}.{name}: unknown"
            inner = known.get(name, more if isinstance(more, dict) else {})
            yield from problems(each, inner, f"{place}.{name}")
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from problems(each, schema.get("items", {}), f"{place}[{number}]")


def loaded(path: Path) -> dict[str, Any]:
    """The report; it is as the schema says."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert list(problems(found, SCHEMA)) == []
    return found


def by_id(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its requirements."""
    return {each["id"]: each for each in found["requirements"]}


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    """The outcomes of a report's properties, by the name of the test."""
    properties = [each for r in found["requirements"] for each in r["properties"]]
    return {each["name"].partition("::")[2]: each["outcome"] for each in properties}


def test_the_schema_knows_our_words() -> None:
    words = {
        "verdict": [str(each) for each in Verdict],
        "outcome": [str(each) for each in PropertyOutcome],
        "level": [each.name for each in Level],
        "capability": [str(each) for each in Capability],
    }
    assert {name: SCHEMA["$defs"][name]["enum"] for name in words} == words
    assert SCHEMA["properties"]["schema_version"]["const"] == report.SCHEMA_VERSION


def test_the_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "report.md").read_text()

    def names(schema: dict[str, Any]) -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            yield name
            yield from names(inner)

    every = {name for each in [SCHEMA, *SCHEMA["$defs"].values()] for name in names(each)}
    assert {name for name in every if f"`{name}`" not in text} == set()


WAIVERS = """version = 1
[[expected]]
id = "COMM-O*"
reason = "It is known."
link = "https://example.com/1"
"""
MINE = """
from pytest_smp.ranks.backends import BACKENDS
from pytest_smp.ranks.protocols import Backend
from pytest_smp.ranks.capabilities import Capabilities, Capability
less = Backend("mine", "mine, and less", BACKENDS["sim"].open_executor, Capabilities(
    claims=frozenset(Capability) - {Capability.ALL_REDUCE}, dtypes=frozenset({"int8"})))
"""


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_it_says_what_the_session_said(small: Any, tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "e.toml").write_text(WAIVERS)
    (tmp_path / "mine.py").write_text(MINE)
    arguments = ["--smp-expectations=e.toml", "--smp-backend=mine:less", "--smp-ranks=4"]
    small(
        [
            *("small", "--smp-report=new/r.json", *arguments, *workers),
            *("FAIL=COMM-ORDER LIFE-START", "-k", "not again"),
        ]
    )
    found = loaded(tmp_path / "new" / "r.json")
    assert (found["complete"], found["interrupted"], found["exit_status"]) == (True, None, 1)
    assert found["suite"] == {"name": "pytest-smp", "version": version("pytest-smp")}
    assert found["versions"]["torch"] == version("torch")
    backend = found["backend"]
    assert (backend["name"], backend["option"]) == ("mine", "mine:less")
    assert backend["not_claimed"] == ["all_reduce"]
    assert backend["dtypes"] == backend["reductions"]["SUM"] == ["int8"]
    assert found["options"]["ranks"] == 4
    assert found["options"]["expectations"] == "e.toml"
    assert found["certification"]["level"] is None
    assert {name: count for name, count in found["verdicts"].items() if count} == {
        "FAIL": 1,
        "SKIPPED": 1,
        "WAIVED": 1,
        "NOT SUPPORTED": 1,
        "PASS": 1,
    }
    assert [each["level"] for each in found["levels"]] == ["L0", "L1", "L2"]
    assert found["levels"][0]["verdicts"]["FAIL"] == 1

    requirements = by_id(found)
    assert requirements["COMM-REDUCE"]["needs"] == ["process groups", "all_reduce"]
    assert requirements["COMM-REDUCE"]["lacks"] == ["all_reduce"]
    assert requirements["LIFE-START"]["lacks"] == []
    assert {id: each["verdict"] for id, each in requirements.items()} == {
        "LIFE-START": "FAIL",
        "COMM-ORDER": "WAIVED",
        "COMM-REDUCE": "NOT SUPPORTED",
        "COMM-DTYPES": "PASS",
        "ERROR-RANK": "SKIPPED",
    }
    assert outcomes(found) == {
        "test_start": "failed",
        "test_order": "waived",
        "test_order_again": "deselected",
        "test_reduce": "not supported",
        "test_dtypes[bool]": "not supported",
        "test_dtypes[float32]": "passed",
        "test_rank": "passed",
        "test_rank_again": "deselected",
    }
    order = requirements["COMM-ORDER"]
    assert order["waiver"] == {
        "id": "COMM-O*",
        "reason": "It is known.",
        "link": "https://example.com/1",
        "intermittent": False,
    }
    assert requirements["LIFE-START"]["waiver"] is None
    assert order["properties"][0]["error"].startswith("AssertionError: assert not (True")
    assert "number=" in order["properties"][0]["example"]
    start = requirements["LIFE-START"]["properties"][0]
    assert start["name"] == "small/test_small.py::test_start"
    assert start["error"].startswith("AssertionError: no start")
    assert start["example"] is None


def test_it_says_what_is_certified(small: Any, tmp_path: Path) -> None:
    certify = ["small", "--smp-certify"]
    small([*certify, "--smp-report=good.json"], [*certify, "--smp-report=bad.json", "STOP=skip"])
    found = loaded(tmp_path / "good.json")["certification"]
    assert found == {"asked": True, "certified": True, "level": "L2", "obstacles": []}
    found = loaded(tmp_path / "bad.json")
    assert found["exit_status"] == 1  # --smp-certify's own doing
    assert (found["certification"]["certified"], found["certification"]["level"]) == (False, "L1")
    assert "SKIPPED: ERROR-RANK" in found["certification"]["obstacles"]


#: How a session ends early: what makes it, its exit status, and what the report says.
ENDS = {
    "interrupt.json": (["STOP=interrupt"], 2, "KeyboardInterrupt"),
    "signal.json": (["STOP=signal"], 2, "KeyboardInterrupt"),
    "exit.json": (["STOP=exit"], 2, "enough"),
    "first.json": (["FAIL=ERROR-RANK", "-x"], 1, "stopping after 1 failures"),
}


def test_an_interrupted_session_says_so(small: Any, tmp_path: Path) -> None:
    sessions = small(*(["small", f"--smp-report={name}", *ENDS[name][0]] for name in ENDS))
    for output, (name, (_, exit_status, why)) in zip(sessions, ENDS.items(), strict=True):
        found = loaded(tmp_path / name)
        assert (found["complete"], found["interrupted"]) == (False, why)
        assert found["exit_status"] == exit_status == int(output.split("=== exit")[1])
        assert by_id(found)["LIFE-START"]["verdict"] == "PASS"
        assert outcomes(found)["test_rank_again"] == "not run"
        # A requirement with a property that did not run is never PASS.
        assert by_id(found)["ERROR-RANK"]["verdict"] in ("SKIPPED", "FAIL")


INTERRUPTED = """
import os

def pytest_runtest_logreport(report):
    main = "PYTEST_XDIST_WORKER" not in os.environ
    if main and report.when == "call" and report.nodeid.endswith("::test_rank"):
        raise KeyboardInterrupt
"""


def test_an_interrupted_session_with_workers_says_so(small: Any, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(INTERRUPTED)
    small(["small", "-n1", "--smp-report=r.json"])
    found = loaded(tmp_path / "r.json")
    assert (found["complete"], found["interrupted"]) == (False, "KeyboardInterrupt")
    assert by_id(found)["LIFE-START"]["verdict"] == "PASS"
    # ERROR-RANK has another property, of which no worker has told yet.
    assert outcomes(found)["test_rank"] == "passed"
    assert "test_rank_again" not in outcomes(found)
    assert by_id(found)["ERROR-RANK"]["verdict"] == "SKIPPED"


def test_of_repeated_runs_the_worst_counts() -> None:
    result = PropertyResult("COMM-ORDER")
    assert result.outcome is PropertyOutcome.NOT_RUN
    told = [
        PropertyOutcome.PASSED,
        PropertyOutcome.SKIPPED,
        PropertyOutcome.FAILED,
        PropertyOutcome.PASSED,
    ]
    assert [result.add(each) for each in told] == [True, True, True, False]
    assert result.outcome is PropertyOutcome.FAILED


def test_a_killed_session_leaves_no_report_of_an_earlier_one(small: Any, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"complete": true}')
    small(["small", "--smp-report=r.json", "STOP=die"], code=9)
    found = loaded(tmp_path / "r.json")
    assert (found["complete"], found["exit_status"]) == (False, None)
    assert found["interrupted"] == "the session has not ended, or its process was killed"
    assert not list(tmp_path.glob(".r.json*"))


def test_a_file_that_cannot_be_written_ends_the_session_before_it_runs(
    small: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder, below, expected = small(
        ["small", "--smp-report=small"],
        ["small", "--smp-report=file/r.json"],
        ["small", "--smp-write-expectations=new/../file/e.toml"],
    )
    assert "ERROR: --smp-report=small: Is a directory\n" in folder
    assert "ERROR: --smp-report=r.json: " in below
    assert "ERROR: --smp-write-expectations=e.toml: " in expected
    for output in (folder, below, expected):
        assert "=== exit 4" in output
        assert "passed" not in output


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    path.write_text("before")
    path.chmod(0o640)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(written.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            report.write(path, {"a": 1})
    assert path.read_text() == "before"
    report.write(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    for name in ("far/there", "far/new"):
        link = tmp_path / f"to-{Path(name).name}"
        link.symlink_to(name)
        if name.endswith("there"):
            (tmp_path / name).write_text("before")
        written.check_writable(link)
        written.write_text(link, "after")
        assert link.is_symlink()
        assert (tmp_path / name).read_text() == "after"
    assert len(list((tmp_path / "far").iterdir())) == 2
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        written.check_writable(tmp_path / "round")


def test_what_is_no_file_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    written.check_writable(pipe)
    written.write_text(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
    (tmp_path / "null").symlink_to("/dev/null")
    written.check_writable(tmp_path / "null")
    written.write_text(tmp_path / "null", "text")
    assert not Path("/dev/null").is_file()


OUTPUT = """
import os, pathlib, sys
from pytest_smp import written
print("before")
written.check_writable(pathlib.Path("/proc/self/fd/1"))
written.write_text(pathlib.Path("/proc/self/fd/1"), "text\\n")
print("after")
"""


def test_the_standard_output_is_written_into_wherever_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "output"
    with path.open("w") as file:
        subprocess.run([sys.executable, "-c", OUTPUT], stdout=file, check=True, timeout=6000)
    assert path.read_text() == "before\ntext\nafter\n"
    pipe = subprocess.run(
        [sys.executable, "-c", OUTPUT], stdout=subprocess.PIPE, check=True, timeout=600
    )
    assert pipe.stdout == b"before\ntext\nafter\n"


def test_a_pipe_gets_one_document(small: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)  # so that the writer waits for nobody
    os.set_blocking(reader, False)
    (output,) = small(["small/test_small.py", "-k", "start", "--smp-report=pipe"])
    assert "=== exit 0" in output
    text = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            text += os.read(reader, 1 << 20)
    os.close(reader)
    assert json.loads(text)["exit_status"] == 0


def test_long_texts_are_cut() -> None:
    assert report.shortened("x" * 4000) == "x" * 4000
    assert report.shortened("x" * 4001) == "x" * 4000 + "... (1 more characters)"
    error = AssertionError("x" * 10**6)
    assert report.error_text(error).endswith(" more characters)")


def test_an_error_without_a_text_still_has_its_type() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert report.error_text(Broken()) == "Broken: <its text cannot be made: ValueError>"
    assert report.error_text(KeyError()) == "KeyError"
