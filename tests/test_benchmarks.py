"""The benchmarks run: on so little that their figures mean nothing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of what is installed."""
    monkeypatch.syspath_prepend(ROOT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)


def test_the_figures_of_the_readme_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__, allgather, deadlock, diagnostics

    monkeypatch.setattr(allgather, "EXAMPLES", 5)
    few = hypothesis.settings(max_examples=5, deadline=None, database=None, derandomize=True)
    monkeypatch.setattr(allgather, "SETTINGS", few)
    monkeypatch.setattr(allgather, "REPEATS", 1)
    monkeypatch.setattr(deadlock, "REPEATS", 2)
    monkeypatch.setattr(diagnostics, "INVALID", 5)
    monkeypatch.setattr(diagnostics, "VALID", 5)
    figures = [each for module in (allgather, deadlock, diagnostics) for each in module.measure()]
    rows = __main__.table(figures)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for figure in figures:
        assert any(row.startswith(figure.name) for row in rows)
        assert dataclasses.asdict(figure)["value"] >= 0
    assert all(each.name in readme for each in figures if "programs" not in each.name)


def test_activations_in_flight_are_counted() -> None:
    """What GPipe and 1F1B do on a rank, written out: forwards and backwards of microbatches."""
    from benchmarks import pipeline

    gpipe = [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2)]
    alternating = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    in_pieces = [("F", 0), ("F", 0), ("F", 1), ("B", 0), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert [pipeline.peak(each) for each in (gpipe, alternating, in_pieces, [])] == [3, 2, 2, 0]
