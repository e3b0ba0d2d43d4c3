"""The output of ranks: each line says which rank has written it, or each rank's lines stand together."""

from __future__ import annotations

import enum
import sys
from typing import TextIO


class OutputStyle(enum.StrEnum):
    """The ways to show what ranks write."""

    PREFIX = "prefix"
    """Each line as soon as it is complete, behind the rank that wrote it."""

    GROUP = "group"
    """Rank by rank, when the script has ended."""

    PLAIN = "plain"
    """Each line as soon as it is complete, as it is."""


class RankOutput:
    """Writes what ranks write to this process's standard output and error.

    A line ends by a line feed or a carriage return; the last one of a stream may have no end.
    """

    def __init__(self, style: OutputStyle, ranks: int) -> None:
        self.style = style
        # Those of now: simulated ranks, which are threads of this process, have others.
        self._files: dict[str, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._width = len(str(ranks - 1))
        self._rests: dict[tuple[int, str], bytes] = {}
        self._held: dict[int, list[tuple[str, str]]] = {}

    def take(self, rank: int, stream: str, data: bytes) -> None:
        """Bytes that a rank has written to ``stdout`` or ``stderr``."""
        *lines, rest = (
            (self._rests.pop((rank, stream), b"") + data)
            .replace(b"\r\n", b"\n")
            .replace(b"\r", b"\n")
            .split(b"\n")
        )
        self._rests[rank, stream] = rest
        for line in lines:
            self._show(rank, stream, line.decode(errors="replace"))

    def end(self) -> None:
        """All ranks have ended: show what was held back."""
        for (rank, stream), rest in sorted(self._rests.items()):
            if rest:
                self._show(rank, stream, rest.decode(errors="replace"))
        self._rests.clear()
        for rank, lines in sorted(self._held.items()):
            print(f"---- rank {rank} ----", file=self._files["stdout"], flush=True)
            for stream, line in lines:
                print(line, file=self._files[stream], flush=True)
        self._held.clear()

    def say(self, text: str) -> None:
        """A message of the launcher's own."""
        print(text, file=self._files["stderr"], flush=True)

    def _show(self, rank: int, stream: str, line: str) -> None:
        if self.style is OutputStyle.GROUP:
            self._held.setdefault(rank, []).append((stream, line))
            return
        if self.style is OutputStyle.PREFIX:
            line = f"[rank {rank:>{self._width}}] {line}"
        print(line, file=self._files[stream], flush=True)
