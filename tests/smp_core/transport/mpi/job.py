"""Run by mpiexec on every rank: the checks of the modules named on the command line, one run each.

Each rank writes into its own file what went wrong in which check. A rank that fails ends the run of
the others by a file that ``RankEnvironment.check`` looks for, as a controller would; then the world forms anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

from smp_core.errors import Cancelled
from smp_core.transport.mpi import open_fabric
from smp_core.transport.protocols import Group, RankEnvironment

FOLDER = Path(os.environ["SMP_TEST_FOLDER"])


class Board:
    """Writes down the calls of the object transport."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @contextlib.contextmanager
    def call(
        self, call: str, group: Group, *, to: Sequence[int] = (), source: int | None = None
    ) -> Iterator[None]:
        self.calls.append((call, group.name, tuple(to), source))
        yield


class World:
    """The argument of a check: this rank's fabric, and whatever else a check may need."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.group = Group("WORLD", tuple(range(self.size)))
        self.board = Board()
        self.asked = 0  # how often a wait asked whether the run has ended
        self.stop_after: int | None = None  # of these questions the run has ended
        self._stop = FOLDER / "no such run"
        self._formings = 0
        self.fabric: Any = None

    def environment(self, size: int) -> RankEnvironment:
        """The environment of the next forming; every rank of the job counts."""
        self._formings += 1
        folder = FOLDER / f"world-{self._formings}"
        folder.mkdir(exist_ok=True)
        place = {"rank": self.rank, "local_rank": self.rank, "size": size, "local_size": size}
        return RankEnvironment(
            **place, folder=folder, forming=self._formings, check=self.check, board=self.board
        )

    def form(self, size: int) -> Any:
        """A fabric over the first ranks; None on the others. Every rank of the job calls."""
        environment = self.environment(size)
        return open_fabric(environment) if self.rank < size else None

    def check(self) -> None:
        """See RankEnvironment."""
        self.asked += 1
        if self.stop_after is not None and self.asked >= self.stop_after:
            raise Cancelled("the test has ended the run")
        if self._stop.exists():
            raise Cancelled("another rank has failed")

    def run(self, name: str, check: Callable[[World], None]) -> str:
        """One check in a run of its own: what went wrong, or nothing."""
        self._stop, self.asked, self.stop_after = FOLDER / f"stop-{name}", 0, None
        self.board.calls.clear()
        if self.fabric is None:
            self.fabric = self.form(self.size)
        problem = ""
        try:
            self.fabric.enter()
            check(self)
        except (Exception, Cancelled):
            problem = traceback.format_exc()
            self._stop.touch()
        left = self.fabric.leave()
        if left and not problem:
            problem = f"left: {left}"
            self._stop.touch()
        self.comm.Barrier()
        if self._stop.exists():
            self.fabric.close()
            self.fabric = None
        return problem


def main() -> None:
    world, problems = World(), {}
    file_of_rank = FOLDER / f"rank-{world.rank}.json"
    for file in sys.argv[1:]:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, check in list(vars(module).items()):  # a check may add to them
            if name.startswith("check_"):
                problems[name] = "did not end"
                file_of_rank.write_text(json.dumps(problems))
                problems[name] = world.run(name, check)
                file_of_rank.write_text(json.dumps(problems))


if __name__ == "__main__":
    main()
