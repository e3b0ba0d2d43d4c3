"""The property of the README in pytest sessions, as users run it: 8 ranks, one allgather of 8 drawn integers.
Beside it, in the same session, a property with no ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.figures import Figure, median

RANKS = 8
EXAMPLES = 1000
REPEATS = 5
BUDGETS = {
    "sim": "at least 0.35 of bare",
    "gloo": "",
    "mpi": "200/s",
}

#: The two take turns; what happens once in a session happens in the first turn, which is not counted.
_SESSION = """
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.parametrize("turn", range({turns}), scope="module")
how_often = settings(max_examples={examples}, deadline=None, database=None, derandomize=True)
lists = given(objects=st.lists(st.integers(), min_size={ranks}, max_size={ranks}))


@how_often
@lists
def test_bare(turn, objects):
    assert [each for each in objects] == objects  # something to execute


@pytest.mark.smp(ranks={ranks})
@how_often
@lists
def test_order(turn, smp, objects):
    assert smp.allgather(objects[smp.rank()], smp.WORLD) == objects
"""


def measure() -> list[Figure]:
    """Examples per second; the ratio is the middle one of those of neighbours in a session."""
    bare: list[float] = []
    rows = []
    for backend, budget in BUDGETS.items():
        rates = _rates(backend)
        bare += rates["test_bare"]
        own = rates["test_order"]
        ratio = median([one / alone for one, alone in zip(own, rates["test_bare"], strict=True)])
        title = f"{backend}: allgather on {RANKS} ranks"
        rows.append(_row(title, own, f"{ratio:.2f} of bare", budget))
    return [_row("bare Hypothesis, no ranks", bare), *rows]


def _row(title: str, rates: list[float], ratio: str = "", budget: str = "") -> Figure:
    return Figure(title, median(rates), "examples/s", (min(rates), max(rates)), ratio, budget)


def _rates(backend: str) -> dict[str, list[float]]:
    """The rates of each test, in the order of its turns."""
    rates: dict[str, list[float]] = {"test_bare": [], "test_order": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _SESSION.format(turns=REPEATS + 1, examples=EXAMPLES, ranks=RANKS)
        (folder / "test_it.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
        command += [f"--smp-ranks={RANKS}", f"--smp-backend={backend}", "--junitxml=times.xml"]
        command += ["-o", "junit_duration_report=call"]
        environment = {**os.environ, "PYTEST_ADDOPTS": ""}
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"{backend}: the session failed\n{ended.stdout}{ended.stderr}")
        for case in ElementTree.parse(folder / "times.xml").iter("testcase"):
            test, _, turn = case.attrib["name"].partition("[")
            if turn != "0]":
                rates[test].append(EXAMPLES / float(case.attrib["time"]))
    return rates
