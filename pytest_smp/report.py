"""``--smp-report`` in a session of the user's own tests: what became of those that use ranks, as JSON.

The suite writes its own document in its sessions (conformance/session/report.py, docs/report.md).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from pytest_smp import settings, summary, written

SCHEMA, SCHEMA_VERSION = "smp-test-report", 1
_OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
_MOST_CHARACTERS = 4000  # of one text


@dataclasses.dataclass(slots=True)
class _Test:
    """One test with all its phases; ``ranks`` is None where the test itself starts runs (smp_world)."""

    ranks: int | None
    outcome: str = "not run"
    duration: float = 0.0
    reason: str | None = None  # of a skip, or the error
    smp: dict[str, Any] | None = None


class Writer:
    """Hears all reports of the main process, and writes the document after each test.

    ``stands_back`` tells whether the suite writes a document of its own.
    """

    def __init__(self, config: pytest.Config, stands_back: Callable[[], bool]) -> None:
        self._config, self._stands_back = config, stands_back
        self._path = config.invocation_params.dir / str(config.getoption("smp_report"))
        self._tests: dict[str, _Test] = {}
        self._started = time.time()
        self._interrupted: str | None = None

    def pytest_sessionstart(self) -> None:
        if self._stands_back():
            return
        try:
            written.check_writable(self._path)
        except OSError as error:
            raise pytest.UsageError(f"--smp-report={self._path.name}: {error.strerror}") from None
        self._write_so_far()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(getattr(report, "user_properties", ()))
        if summary.RANKS not in properties:
            return
        test = self._tests.setdefault(report.nodeid, _Test(properties[summary.RANKS] or None))
        test.duration += report.duration
        if "smp" in properties:
            test.smp = json.loads(str(properties["smp"]))
        if report.when == "call" or not report.passed:
            test.outcome, test.reason = _outcome(report), _reason(report)
        if report.when == "teardown":
            self._write_so_far()

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._interrupted = str(excinfo.value) or excinfo.typename

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._stands_back():
            return
        stopped = session.shouldstop or session.shouldfail
        self._interrupted = self._interrupted or (str(stopped) if stopped else None)
        self._write(int(session.exitstatus))

    def _write_so_far(self) -> None:
        if not self._stands_back() and not written.is_stream(self._path):
            self._write(None)

    def _write(self, exit_status: int | None) -> None:
        text = json.dumps(self._document(exit_status), indent=2)
        written.write_text(self._path, text + "\n")

    def _document(self, exit_status: int | None) -> dict[str, Any]:
        chosen = settings.read(self._config)
        counts = Counter(test.outcome for test in self._tests.values())
        interrupted = self._interrupted
        if exit_status is None:
            interrupted = "the session has not ended, or its process was killed"
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "version": metadata.version("pytest-smp"),
            "complete": exit_status is not None and interrupted is None,
            "interrupted": interrupted,
            "exit_status": exit_status,
            "started": datetime.datetime.fromtimestamp(self._started, datetime.UTC).isoformat(),
            "options": {
                "backend": chosen.backend,
                "ranks": chosen.ranks,
                "timeout": chosen.timeout,
                "seed": chosen.seed,
                "strict": chosen.strict,
                "schedule": None if chosen.schedule is None else str(chosen.schedule),
            },
            "python": platform.python_version(),
            "outcomes": {name: counts[name] for name in _OUTCOMES},
            "tests": [
                {
                    "name": nodeid,
                    "ranks": test.ranks,
                    "outcome": test.outcome,
                    "verdict": None if test.smp is None else test.smp["verdict"],
                    "duration": round(test.duration, 6),
                    "reason": test.reason,
                    "smp": test.smp,
                }
                for nodeid, test in self._tests.items()
            ],
        }


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    if report.failed:
        return "failed" if report.when == "call" else "error"
    return str(report.outcome)


def _reason(report: pytest.TestReport) -> str | None:
    if report.passed:
        return None
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, text
        text = report.longrepr[2]
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr) if crash is None else crash.message
    return text[:_MOST_CHARACTERS]
