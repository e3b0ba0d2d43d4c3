"""Measurements while a rank process runs bodies: none, unless a prelude installs one.

The data travels with each run's result, and not in files at the process's end, since a rank may be
killed at any time after the run.
"""

from __future__ import annotations

from typing import Protocol


class Measurement(Protocol):
    """Called by the rank process that runs the body, in the thread that runs it."""

    def begin(self) -> None:
        """Called before each run."""

    def end(self) -> bytes:
        """Called after each run, however it ended; the returned data goes to the controller."""


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
    """A run has ended; return the measured data."""
    return b"" if _installed is None else _installed.end()
