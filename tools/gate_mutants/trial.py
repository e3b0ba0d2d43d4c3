"""One mutant in a forked process, and the tests that reach it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.mutants import generated

_FLAGS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow")


@dataclasses.dataclass(frozen=True)
class TestRun:
    """One test on the unchanged module: its seconds, and the statements that it executes."""

    nodeid: str
    seconds: float
    lines: generated.Lines


class _Coverage:
    """A pytest plugin that notes the statements of each test."""

    def __init__(self, lines: set[tuple[str, int]]) -> None:
        self._lines, self.runs = lines, list[TestRun]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._lines.clear()
        start = time.monotonic()
        result = yield
        seconds = time.monotonic() - start
        self.runs.append(TestRun(item.nodeid, seconds, frozenset(self._lines)))
        return result


def reached_lines(module: str, files: Sequence[str]) -> list[TestRun]:
    """Run the tests on the unchanged module. Raises RuntimeError if one fails."""

    def run() -> list[TestRun]:
        with generated.watching([module]) as lines:
            plugin = _Coverage(lines)
            status = pytest.main([*_FLAGS, *files], plugins=[plugin])
        if status:
            raise RuntimeError(f"{module}: its tests fail without a mutant")
        return plugin.runs

    runs: list[TestRun] | None = _forked(run, 1800)
    if runs is None:
        raise RuntimeError(f"{module}: its tests fail without a mutant: {' '.join(files)}")
    return runs


def survives(site: generated.MutationSite, runs: Sequence[TestRun]) -> bool:
    """Return whether every test that reaches the change passes with it; the quickest comes first."""
    reaching = sorted(
        (run for run in runs if site.is_reached_by(run.lines)), key=lambda run: run.seconds
    )
    if not reaching:
        return True

    def run() -> bool:
        with generated.planted(site):
            return not pytest.main([*_FLAGS, *(run.nodeid for run in reaching)])

    # A mutant that does not end, or ends its process, is killed.
    limit = 30 + 20 * sum(run.seconds for run in reaching)
    return bool(_forked(run, limit))


def _forked(function: Callable[[], Any], limit: float) -> Any:
    """The result of the function in a forked process; None if it raises, ends the process or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.setsid()
                null = os.open(os.devnull, os.O_RDWR)
                for descriptor in range(3):
                    os.dup2(null, descriptor)
                sys.stdout = sys.stderr = os.fdopen(null, "w")
                answer.write_bytes(pickle.dumps(function()))
            os._exit(0)
        watched = os.pidfd_open(child)
        ended, *_ = select.select([watched], [], [], limit)
        os.close(watched)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have left behind, too
        os.waitpid(child, 0)
        return pickle.loads(answer.read_bytes()) if ended and answer.exists() else None
