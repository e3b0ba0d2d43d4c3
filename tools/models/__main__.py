"""The table of real models::

    python -m tools.models --write docs/models.md --json models.json

Cells run in a process that is ended after a time limit, so a cell that hangs is a result like any other. The exit
status is 1 if a cell FAILED.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from tools.models import architectures, layouts, table
from tools.models.compare import Cell
from tools.models.processes import Cells


def run(rows: Sequence[str], columns: Sequence[str], limit: float) -> Iterator[Cell]:
    """The cells of these architectures and layouts, by name."""
    cells = Cells(limit)
    try:
        for row in rows:
            for column in columns:
                yield cells.run(row, column)
    finally:
        cells.close()


def versions() -> str:
    """The versions that a table was made with."""
    found = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    return ", ".join([f"Python {platform.python_version()}", *found])


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.models", description="real models against plain PyTorch"
    )
    parser.add_argument("--only", default="*", help="architectures, as a pattern of the shell")
    parser.add_argument("--layout", default="*", help="layouts, as a pattern of the shell")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one training")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    given = parser.parse_args(arguments)
    rows = fnmatch.filter(architectures.BY_NAME, given.only)
    columns = fnmatch.filter(layouts.BY_NAME, given.layout)
    if not rows or not columns:
        parser.error("no architecture, or no layout, has such a name")
    begun, found = time.monotonic(), []
    for cell in run(rows, columns, given.limit):
        found.append(cell)
        print(f"{cell.architecture} | {cell.layout} | {cell.result} {cell.detail}", flush=True)
    families = {name: each.family for name, each in architectures.BY_NAME.items()}
    shown = [f"With {versions()}:", "", *table.lines(found, families)]
    if given.write:
        page = given.write.read_text(encoding="utf-8")
        given.write.write_text(table.put(page, shown), encoding="utf-8")
    if given.json:
        cells = [dataclasses.asdict(cell) for cell in found]
        text = json.dumps({"versions": versions(), "cells": cells}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    counts = Counter(cell.result for cell in found)
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{len(found)} cells in {time.monotonic() - begun:.0f} s: {told}")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
