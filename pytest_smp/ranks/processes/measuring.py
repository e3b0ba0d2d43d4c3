"""What is measured while a rank process runs bodies: nothing, unless a prelude installs something.

What was measured travels with each run's result, and not in files at the process's end: a rank may be
killed at any time after.
"""

from __future__ import annotations

from typing import Protocol


class Measurement(Protocol):
    """Called by the rank process that runs the body, in the thread that runs it."""

    def begin(self) -> None:
        """Before each run."""

    def end(self) -> bytes:
        """After each run, however it ended: what the controller is to be told of it."""


_installed: Measurement | None = None


def install(measurement: Measurement | None) -> None:
    """Measure every run from now on, in this process and in those that it forks."""
    global _installed
    _installed = measurement


def begin() -> None:
    """A run begins."""
    if _installed is not None:
        _installed.begin()


def end() -> bytes:
    """A run has ended: what was measured."""
    return b"" if _installed is None else _installed.end()
