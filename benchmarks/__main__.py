"""Run the benchmarks and print one table: ``python -m benchmarks [name ...] [--json FILE]``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import signal
import sys
from pathlib import Path

from benchmarks.figures import Figure

NAMES = (
    "allgather",
    "peers",
    "deadlock",
    "large_world",
    "diagnostics",
    "real_ranks",
    "pipeline",
    "sharding",
    "overlap",
    "tensor",
    "tensorflow",
    "memory",
    "files",
    "collectives",
)


def main() -> None:
    """Measure what was asked for, in order, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help=f"of {', '.join(NAMES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    # A benchmark that is ended removes its machines and ends its ranks.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    figures: list[Figure] = []
    for name in options.names or NAMES:
        figures += importlib.import_module(f"benchmarks.{name}").measure()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for line in table(figures):
        print(line)
    if options.json is not None:
        options.json.write_text(
            json.dumps([dataclasses.asdict(each) for each in figures], indent=1)
        )


def number(value: float) -> str:
    """Three digits, no powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(figures: list[Figure]) -> list[str]:
    """One line per figure: the median, the extremes, the ratio, and the budget."""
    rows = [("what", "median", "min to max", "ratio", "budget")]
    for figure in figures:
        spread = "" if figure.spread is None else " to ".join(map(number, figure.spread))
        value = f"{number(figure.value)} {figure.unit}"
        rows.append((figure.name, value, spread, figure.ratio, figure.budget))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    main()
