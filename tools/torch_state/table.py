"""The table of torch.distributed's state, and the part of docs/sim.md that is made from it."""

from __future__ import annotations

import tomllib
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tools.torch_state.scan import written_state

BEGIN, END = (f"<!-- {word} of what tools.torch_state writes -->" for word in ("begin", "end"))

#: The kinds of which the page gives each name.
NAMED = {
    "own": "each rank's own",
    "refused": "refused",
    "shared": "shared",
}


class Row(NamedTuple):
    """One name, and why it misleads no rank."""

    name: str
    kind: str
    reason: str


class Table(NamedTuple):
    """The rows, the release of torch that they are of, and the modules that they leave out."""

    release: str
    left_out: dict[str, str]
    rows: tuple[Row, ...]


def read() -> Table:
    """Read the table from the file beside this module."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    rows = (
        Row(name, group["kind"], group["reason"])
        for group in data["state"]
        for name in group["names"]
    )
    return Table(data["release"], data["left_out"], tuple(rows))


def compare(table: Table) -> tuple[list[str], list[str]]:
    """Return the names that the installed torch.distributed writes and the table lacks, and the reverse."""
    written = written_state("torch.distributed", tuple(table.left_out))
    names = {row.name for row in table.rows}
    return sorted(written - names), sorted(names - written)


def page(table: Table) -> str:
    """The part of the page, in Markdown."""
    lines = [
        BEGIN,
        f"Functions of `torch.distributed` {table.release} write {len(table.rows)} names of the process's state:",
        "",
        "| state | names |",
        "|---|---|",
    ]
    for (kind, reason), rows in groupby(table.rows, key=lambda row: row[1:]):
        names = [row.name for row in rows]
        text = f"{NAMED[kind]}: " if kind in NAMED else f"{kind}: "
        short = ", ".join(f"`{'.'.join(_short(name))}`" for name in names)
        lines.append(f"| {text}{reason} | {short if kind in NAMED else len(names)} |")
    return "\n".join([*lines, END])


def _short(name: str) -> list[str]:
    """The name from its class or variable on, with the last part of its module."""
    return name.split(".")[-2:]


def replaced(text: str, part: str) -> str:
    """The page's text with this part in the place of the former one."""
    before, _, rest = text.partition(BEGIN)
    return before + part + rest.partition(END)[2]
