"""The state of the process that functions of the installed torch.distributed write, compared with the table::

    python -m tools.torch_state --write docs/sim.md

The exit status is 1 if torch writes a name that the table lacks, or a row's name is written no longer. The table's
head (tools/torch_state/table.toml) says what to do for a new release.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.torch_state import table


def main(arguments: list[str] | None = None) -> int:
    """Print the differences, write the page's part, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.torch_state", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    options = parser.parse_args(arguments)
    rows = table.read()
    come, gone = table.compare(rows)
    for word, names in (("come", come), ("gone", gone)):
        for name in names:
            print(f"{word}: {name}")
    if options.write is not None:
        page: Path = options.write
        page.write_text(table.replaced(page.read_text(), table.page(rows)))
    return int(bool(come or gone))


if __name__ == "__main__":
    raise SystemExit(main())
