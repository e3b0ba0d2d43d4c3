"""Scripts on simulated ranks (``smp-run --backend sim``): each rank thread runs the script with names of its own.

Modules that the script imports are shared by all ranks, as everything else that a process has once.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job, Report, VerdictKind
from pytest_smp.results import conclude
from smp_core.launch import script
from smp_core.launch.job import ScriptJob
from smp_core.launch.output import RankOutput
from smp_core.transport import current_rank
from smp_core.transport.launchers import remove_variables


class ScriptExit(Exception):
    """Raised on a rank whose script has called ``sys.exit`` with something else than 0."""

    def __init__(self, said: object) -> None:
        super().__init__(said)
        self.code = said if isinstance(said, int) else 1

    def __str__(self) -> str:
        said = self.args[0]
        return f"exit code {said}" if isinstance(said, int) else str(said)


def run(job: ScriptJob, output: RankOutput) -> int:
    """Run a script on simulated ranks; return the exit code of the first rank that failed, or 0.

    A deadlock, a mismatch, a leak and a race are failures, whose verdict is shown.
    """
    code = job.code()
    ranks = [script.namespace_of(job.script) for _ in range(job.ranks)]
    executor = open_backend("sim")
    body = Job(
        body=lambda rank: _run(code, ranks[rank], rank, output),
        arguments=lambda rank: ((rank,), {}),
        automatic_init=False,
    )
    try:
        with (
            mock.patch.dict(os.environ, job.variables()),
            _modules(job, _Main(ranks)),
            script.prepare(job, job.ranks),
        ):
            report = executor.open(job.ranks).run(body)
    except KeyboardInterrupt:
        output.end()
        output.say("smp-run: interrupted")
        return 128 + signal.SIGINT
    finally:
        executor.close()
    output.end()
    if report.error is None:
        return 0
    output.say(_told(report, code))
    return report.error.code if isinstance(report.error, ScriptExit) else 1


@contextlib.contextmanager
def _modules(job: ScriptJob, main: ModuleType) -> Iterator[None]:
    """While entered, ``main`` is the module ``__main__``. Afterwards modules that the script has imported from its own
    folders are gone: another script may have other ones by these names. Libraries stay, many cannot be imported twice.
    """
    before = dict(sys.modules)
    folders = {Path(job.script).resolve().parent}
    if job.folder:
        folders.add(Path(job.folder).resolve())
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.modules["__main__"] = before["__main__"]
        new = {name: module for name, module in sys.modules.items() if name not in before}
        own = {name for name, module in new.items() if _folder_of(module) in folders}
        for name in new:
            if name.partition(".")[0] in own:
                del sys.modules[name]


def _folder_of(module: ModuleType) -> Path | None:
    """The folder in which a module, or a package, was found."""
    path = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    return Path(path).resolve().parent if isinstance(path, str) else None


def _run(code: CodeType, names: dict[str, Any], rank: int, output: RankOutput) -> None:
    """The body of one rank."""
    remove_variables(os.environ)
    sys.stdout, sys.stderr = (_Stream(output, rank, name) for name in ("stdout", "stderr"))
    try:
        exec(code, names)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ScriptExit(error.code).with_traceback(error.__traceback__) from None


def _told(report: Report, code: CodeType) -> str:
    """The failure as it is shown: who failed, the script's part of the traceback, and what became of the others."""
    error = report.error
    assert error is not None
    with contextlib.suppress(BaseException):
        conclude(report, "sim")  # notes on the other ranks
    if report.verdict is VerdictKind.FAILED:
        head = f"smp-run: rank {report.root} failed"
        if isinstance(error, ScriptExit):
            return "\n".join([f"{head}: {error}", *error.__notes__])
    else:
        head = f"smp-run: {report.verdict}"
    trace = script.below(error.__traceback__, code)
    return "".join([head, "\n", *traceback.format_exception(type(error), error, trace)]).rstrip()


class _Main(ModuleType):
    """Stands in for the module ``__main__``, where pickles look for the script's classes: those of this rank."""

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        super().__init__("__main__")
        self.__dict__["_ranks"] = ranks

    def __getattr__(self, name: str) -> Any:
        context = current_rank.current()
        rank = current_rank.parent_rank() if context is None else context.rank
        try:
            return self._ranks[rank or 0][name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None


class _Stream(io.TextIOBase):
    """The standard output or error of one rank."""

    def __init__(self, output: RankOutput, rank: int, name: str) -> None:
        self._output, self._rank, self._name = output, rank, name

    def write(self, text: str) -> int:
        """Hand text to the output."""
        self._output.take(self._rank, self._name, text.encode(errors="replace"))
        return len(text)

    def writable(self) -> bool:
        """True."""
        return True
