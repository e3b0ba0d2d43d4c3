"""The process in which cells run, so that no cell can hang or crash the run."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import time
from multiprocessing.connection import Connection

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions
from tools.models import architectures, compare, layouts
from tools.models.compare import Cell

#: Seconds that a process has beyond a cell's limit: to begin, to train the references, and to tell.
_MORE = 120.0


def serve(connection: Connection, limit: float) -> None:
    """Run the cells that come by name, until None comes."""
    executor = open_backend("sim", ExecutorOptions(ranks=layouts.RANKS))
    try:
        while (names := connection.recv()) is not None:
            architecture, layout = names
            begun = time.monotonic()
            made = compare.cell(
                executor, architectures.BY_NAME[architecture], layouts.BY_NAME[layout], limit
            )
            connection.send(dataclasses.replace(made, seconds=time.monotonic() - begun))
    finally:
        executor.close()


class Cells:
    """A process that runs cells, and is replaced if one of them crashes it or takes too long."""

    def __init__(self, limit: float, more: float = _MORE) -> None:
        self._limit, self._more = limit, more
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, self._limit), daemon=True)
        self._process.start()
        other.close()

    def run(self, architecture: str, layout: str) -> Cell:
        """The result of one cell."""
        limit = self._limit + self._more
        try:
            self._connection.send((architecture, layout))
            if self._connection.poll(limit):
                made: Cell = self._connection.recv()
                return made
            told = f"no result after {limit:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            told = f"the process ended with exit code {self._process.exitcode}"
        self._end()
        self._begin()
        return Cell(architecture, layout, "FAILED", told)

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # the process is gone already
            self._connection.send(None)
            self._process.join(self._more)
        self._end()
