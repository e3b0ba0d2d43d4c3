"""The results of cells as a table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tools.models.compare import Cell

BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def lines(cells: Sequence[Cell], families: Mapping[str, str]) -> Iterable[str]:
    """The table, with a note for each cell that is refused or FAILED; ``families`` are those of the architectures."""
    columns = list(dict.fromkeys(cell.layout for cell in cells))
    rows = list(dict.fromkeys(cell.architecture for cell in cells))
    found = {(cell.architecture, cell.layout): cell for cell in cells}
    notes: list[str] = []
    yield f"| architecture | family | {' | '.join(columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    for row in rows:
        shown = (_shown(found.get((row, column)), notes) for column in columns)
        yield f"| {row} | {families[row]} | {' | '.join(shown)} |"
    yield ""
    for number, note in enumerate(notes, 1):
        yield f"{number}. {note}"


def _shown(cell: Cell | None, notes: list[str]) -> str:
    if cell is None:
        return ""
    if cell.result in ("bits", "bound"):
        whole = "tp" in cell.layout and not cell.distributed
        return f"{cell.result}, whole" if whole else cell.result
    note = f"`{cell.detail.splitlines()[0].replace('`', '')}`" if cell.detail else "no message"
    if note not in notes:
        notes.append(note)
    return f"{cell.result} [{notes.index(note) + 1}]"


def put(page: str, table: Iterable[str]) -> str:
    """The page with this table in the place of the one between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(table) + "\n" + END + after
