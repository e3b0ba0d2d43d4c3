"""The output of ranks: each line says which rank has written it, or each rank's lines stand together."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import select
import sys
from typing import TextIO

_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_LONGEST = 1 << 20  # bytes of a line that has not ended


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

    A line ends by a line feed or a carriage return; the last one of a stream may have no end. A line of more than a
    mebibyte is shown in parts.
    """

    def __init__(self, style: OutputStyle, ranks: int) -> None:
        self.style = style
        # Simulated ranks are threads of this process, and put others into `sys` while they run.
        self._files: dict[str, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._width = len(str(ranks - 1))
        self._rests: dict[tuple[int, str], list[bytes]] = {}
        self._held: dict[int, list[tuple[str, str]]] = {}

    def take(self, rank: int, stream: str, data: bytes) -> None:
        """Bytes that a rank has written to ``stdout`` or ``stderr``."""
        if not data:
            return
        rest = self._rests.setdefault((rank, stream), [])
        if rest and rest[-1].endswith(b"\r"):  # perhaps half of an end
            data = rest.pop() + data
        *lines, last = _END.split(data)
        for line in lines:
            self._show(rank, stream, b"".join([*rest, line]))
            rest.clear()
        rest.append(last)
        if sum(map(len, rest)) > _LONGEST:
            self._show(rank, stream, b"".join(rest))
            rest.clear()

    def end(self) -> None:
        """All ranks have ended: show what was held back."""
        for (rank, stream), rest in sorted(self._rests.items()):
            line = b"".join(rest).removesuffix(b"\r")
            if line:
                self._show(rank, stream, line)
        self._rests.clear()
        for rank, lines in sorted(self._held.items()):
            self._write("stdout", f"---- rank {rank} ----")
            for stream, text in lines:
                self._write(stream, text)
        self._held.clear()

    def leave_who_does_not_read(self) -> None:
        """Write to nowhere, from now on, where a write would wait: a pipe that is full. One that waits goes on."""
        for file in self._files.values():
            with contextlib.suppress(OSError, ValueError):  # no file of the system's, or closed
                _, ready, _ = select.select([], [file.fileno()], [], 0)
                if not ready:
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, file.fileno())
                    os.close(nowhere)

    def say(self, text: str) -> None:
        """A message of the launcher's own."""
        self._write("stderr", text)

    def _show(self, rank: int, stream: str, data: bytes) -> None:
        line = data.decode(errors="replace")
        if self.style is OutputStyle.GROUP:
            self._held.setdefault(rank, []).append((stream, line))
            return
        if self.style is OutputStyle.PREFIX:
            line = f"[rank {rank:>{self._width}}] {line}"
        self._write(stream, line)

    def _write(self, stream: str, line: str) -> None:
        """Write a line. A reader who has gone, as ``head`` does, ends no training."""
        file = self._files[stream]
        encoding = file.encoding or "utf-8"
        try:
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=file, flush=True)
        except BrokenPipeError:
            self._files[stream] = open(os.devnull, "w")  # noqa: SIM115  to the end
