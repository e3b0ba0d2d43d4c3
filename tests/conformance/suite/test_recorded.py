"""The whole suite on `sim`, recorded: what requirements use is what they name, and every property draws."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.cases.tensors import COLLECTIVES
from conformance.session.amounts import LEAST_DRAWS

# The session takes a minute on a quiet machine, and took a quarter of an hour on a busy one.
pytestmark = pytest.mark.timeout(3600)

#: Properties that have fewer examples on four ranks than every property gets, and why.
SMALL = {
    "PG-WORLD": "the number of ranks is all that is drawn",
    "GROUP-LOCAL": "the number of ranks is all that is drawn",
    "SHARD-SAME-MODEL": "which of four ranks has another model is all that is drawn",
}

Runs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every run of every property, as the plugin ``recording`` wrote it."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "pytest.ini").write_text("[pytest]\n")
    outside = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
    paths = os.pathsep.join([str(Path(__file__).parent), outside.get("PYTHONPATH", "")])
    written = folder / "recorded.jsonl"
    command = "-m pytest -p recording -p no:cacheprovider --pyargs conformance --smp-ranks=4 -q"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        env={**outside, "PYTHONPATH": paths, "RECORDED": str(written)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3500,
    )
    # The plugin keeps failures from the report, which the session's own verdicts show (status 1).
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed, \d+ skipped, \d+ deselected in .*", last), done.stdout
    return [json.loads(line) for line in written.read_text().splitlines()]


def test_properties_draw(runs: Runs) -> None:
    passed = [each for each in runs if each["draws"] and each["outcome"] == "passed"]
    few = {
        f"{each['requirement']}: {each['property']}": each["drawn"]
        for each in passed
        if each["drawn"] < each["least"] and each["requirement"] not in SMALL
    }
    assert len(passed) > 400
    assert not few
    # One of each property at least draws as often as a property does on any backend.
    properties = {(each["requirement"], each["property"]) for each in passed}
    whole = {
        (each["requirement"], each["property"]) for each in passed if each["least"] == LEAST_DRAWS
    }
    assert properties == whole


def test_requirements_name_what_they_use(runs: Runs) -> None:
    """Each ran on a backend that claims its needs, those of the engine, and one more where that left
    nothing to draw.
    """
    beside: dict[str, set[str]] = {}
    for each in runs:
        unnamed = set(each["used"]) - set(each["claims"])
        if each["outcome"] == "passed" and unnamed:
            beside.setdefault(each["requirement"], set()).update(unnamed)
    assert not beside


#: Requirements of every collective; in an example of each all are called that the backend claims.
EVERY = ("ORDER", "SORTED", "WITHOUT-0", "ALONE", "OVERLAP")
EVERY_ID = {
    *(f"COLL-GROUP-{each}" for each in EVERY),
    *(f"COLL-{each}" for each in ("OFFSET", "INPUTS", "REPEATED", "MANY", "LARGE", "SIZES")),
}


def test_every_collective_is_called(runs: Runs) -> None:
    called: dict[str, set[str]] = {id: set() for id in EVERY_ID}
    for each in runs:
        if each["requirement"] in EVERY_ID and each["outcome"] == "passed":
            called[each["requirement"]].update(each["used"])
    missing = {id: names for id, used in called.items() if (names := set(COLLECTIVES) - used)}
    assert not missing
