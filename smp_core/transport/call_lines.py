"""The lines from which ranks communicate: where they parted, and which of them came more often.

Most ranks that end in a mismatch or a deadlock parted earlier: one took another branch, or a loop has a turn
more. Calls that agree in operation and shape hide that. A counter for each rank and line, and one note for
each group, show it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping

from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.stack_frames import Place, relative

#: File and number.
Line = tuple[str, int]

#: Operations that the root makes from a line of its own, in much correct code.
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


def line_of(place: Place | None) -> Line | None:
    """The line of a place."""
    return (place.filename, place.lineno) if place is not None and place.filename else None


class CallLines:
    """The lines of all ranks in one run."""

    def __init__(self, size: int) -> None:
        self._counts: list[dict[Line, int]] = [{} for _ in range(size)]
        self._parted: dict[Hashable, tuple[str, int, Mapping[int, Line]]] = {}

    def called(self, rank: int, line: Line | None) -> None:
        """Count a call that a rank makes."""
        if line is not None:
            counts = self._counts[rank]
            counts[line] = counts.get(line, 0) + 1

    def met(
        self,
        group: Hashable,
        shown: str,
        number: int,
        operation: str,
        lines: Mapping[int, Line | None],
    ) -> None:
        """Note a group's first call that not all members made from the same line; ``lines`` are theirs, by rank."""
        if group in self._parted or operation in _ROOTED or len(set(lines.values())) < 2:
            return
        known = {rank: line for rank, line in lines.items() if line is not None}
        if len(known) == len(lines):
            self._parted[group] = shown, number, known

    def tell(self, lines: Iterable[Line | None], groups: Collection[Hashable] = ()) -> list[str]:
        """The remarks on ranks that are at ``lines`` now, in calls of ``groups``."""
        told = [_parted(*self._parted[group]) for group in groups if group in self._parted]
        uneven = [self._uneven(line) for line in dict.fromkeys(lines) if line is not None]
        return list(dict.fromkeys([*told, *(text for text in uneven if text)]))

    def _uneven(self, line: Line) -> str:
        """The numbers of calls from a line that all ranks have called from, if they differ."""
        ranks: dict[int, list[int]] = {}
        for rank, counts in enumerate(self._counts):
            ranks.setdefault(counts.get(line, 0), []).append(rank)
        if len(ranks) < 2 or 0 in ranks:
            return ""
        texts = [
            f"{'once' if count == 1 else f'{count} times'} on {ranks_text(ranks[count])}"
            for count in sorted(ranks)
        ]
        return f"{_shown(line)} communicated {', '.join(texts[:-1])} and {texts[-1]}"


def _parted(group: str, number: int, lines: Mapping[int, Line]) -> str:
    ranks: dict[Line, list[int]] = {}
    for rank, line in lines.items():
        ranks.setdefault(line, []).append(rank)
    at = ", ".join(
        f"{ranks_text(members)} {'was' if len(members) == 1 else 'were'} at {_shown(line)}"
        for line, members in ranks.items()
    )
    before = ""
    if number > 1:
        calls = "call 1" if number == 2 else f"calls 1 to {number - 1}"
        before = f"{calls} matched from the same lines; "
    return f"on group {group} {before}at call {number} {at}"


def _shown(line: Line) -> str:
    return f"{relative(line[0])}:{line[1]}"


def add_lines(error: Exception, lines: list[str]) -> None:
    """Add lines to the text of an error."""
    if lines:
        error.args = ("\n".join([str(error.args[0]), *lines]), *error.args[1:])
