"""Coverage of lines that run on rank processes, for pytest-cov and for `coverage run`.

The controller's own measurement sees its own process alone. So each rank process measures with the
same settings and sends the executed lines with the result of each run. The controller adds them to
its own data before anybody reports or saves them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from pytest_smp.ranks.protocols import Outcome

#: The settings that say what is measured, by their names in coverage's configuration.
_OPTIONS = (
    *("branch", "concurrency", "core", "cover_pylib", "include", "omit", "plugins"),
    *("relative_files", "source", "source_dirs", "source_pkgs", "timid"),
)
#: Coverage's warnings that rank processes suppress: the controller's own measurement gives each once,
#: and in a project that turns warnings into errors a rank's copy would fail the body.
_SILENT = (
    *("already-imported", "dynamic-conflict", "include-ignored", "module-not-imported"),
    *("module-not-measured", "module-not-python", "no-ctracer", "no-data-collected", "no-sysmon"),
    *("no-sysmon-context", "trace-changed"),
)


@dataclasses.dataclass
class LinesOfRanks:
    """Measures on a rank process as the controller does. See pytest_smp.ranks.processes.measuring."""

    file: str | None  # of the configuration, where plugins of coverage find settings
    options: dict[str, Any]
    directory: str
    _coverage: Any = dataclasses.field(default=None, init=False, repr=False)
    _data: Any = dataclasses.field(default=None, init=False, repr=False)

    def prepare(self) -> None:
        """Import and set up, where ranks are forked from."""
        import coverage

        with _folder(self.directory):  # relative names start there
            self._coverage = coverage.Coverage(data_file=None, config_file=self.file or False)
            for name, value in self.options.items():
                self._coverage.set_option(f"run:{name}", value)
            self._coverage.set_option("run:disable_warnings", list(_SILENT))
            self._data = self._coverage.get_data()

    def begin(self) -> None:
        """See Measurement."""
        self._coverage.start()

    def end(self) -> bytes:
        """See Measurement."""
        self._coverage.switch_context("")  # moves what was seen into the data
        self._coverage.stop()
        data = self._data
        files = sorted(data.measured_files())
        arcs = {file: data.arcs(file) for file in files} if data.has_arcs() else None
        lines = {file: data.lines(file) for file in files} if arcs is None else None
        tracers = {file: tracer for file in files if (tracer := data.file_tracer(file))}
        data.erase()
        return pickle.dumps((lines, arcs, tracers)) if files else b""


class Coverage:
    """The controller's side.

    ``ranks`` is what measures on rank processes; None where this session measures nothing.
    """

    def __init__(self, directory: str) -> None:
        module: Any = sys.modules.get("coverage")
        self._coverage = None if module is None else module.Coverage.current()
        self.ranks: LinesOfRanks | None = None
        if self._coverage is not None:
            file = getattr(self._coverage.config, "config_file", None)
            options = {name: self._coverage.get_option(f"run:{name}") for name in _OPTIONS}
            self.ranks = LinesOfRanks(file, {k: v for k, v in options.items() if v}, directory)
        self._seen: set[bytes] = set()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Keep what ranks have measured in a run."""
        self._seen.update(outcome.measured for outcome in outcomes if outcome.measured)

    def merge(self) -> None:
        """Add all of it to the controller's data; called once no test runs any more."""
        seen, self._seen = self._seen, set()
        if self._coverage is None or not seen:
            return
        data = self._coverage.get_data()
        for packed in seen:
            lines, arcs, tracers = pickle.loads(packed)
            if arcs is not None:
                data.add_arcs(arcs)
            else:
                data.add_lines(lines)
            data.add_file_tracers(tracers)


@contextlib.contextmanager
def _folder(directory: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
