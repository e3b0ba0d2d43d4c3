"""The worth of our verdicts: programs with one planted fault, and the verdicts on them."""

from __future__ import annotations

from benchmarks.figures import Figure
from pytest_smp.ranks.backends import find_backend, open_backend
from tools.profiles.programs import run_invalid, run_valid

INVALID = 1000
VALID = 500


def measure() -> list[Figure]:
    """The share of invalid programs whose verdict has the right class, rank and line; false alarms."""
    capabilities = find_backend("sim").capabilities
    executor = open_backend("sim")
    try:
        scores = run_invalid(executor, capabilities, range(INVALID))
        coverage = run_valid(executor, capabilities, range(VALID))
    finally:
        executor.close()
    told = f"sim: {INVALID} invalid programs:"
    rows: tuple[tuple[str, str, str], ...] = (
        ("verdict", "verdict of the right class", "100 %"),
        ("rank", "rank at fault named", "at least 95 %"),
        ("lines", "user's lines shown", "100 %"),
    )
    figures = [
        Figure(f"{told} {text}", 100 * scores.share(what), "%", budget=budget)
        for what, text, budget in rows
    ]
    figures.append(Figure(f"{told} no other rank or line", 100 * scores.quiet, "%"))
    alarms, rate = len(coverage.alarms), VALID / coverage.seconds
    figures.append(Figure(f"sim: {VALID} valid programs: false alarms", alarms, "", budget="none"))
    figures.append(Figure("sim: valid programs, drawn, run and checked", rate, "programs/s"))
    return figures
