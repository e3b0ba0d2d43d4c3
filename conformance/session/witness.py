"""Failures that the suite saw, in a file that forked processes share.

A plugin may run a failed property again and log the last try alone, in this process or in a forked one. The file
keeps the failure of the first try.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class SeenFailure(NamedTuple):
    """One phase of a property that did not pass, as the innermost hook saw it."""

    nodeid: str
    requirement: str
    told: dict[str, Any]  # outcome, error and notes


class Witness:
    """The failures that this process and its forked children have seen."""

    def __init__(self) -> None:
        name = f"smp-witness-{os.getpid()}-{secrets.token_hex(8)}"
        self._path = Path(tempfile.gettempdir(), name)  # made with the first failure
        self._process = os.getpid()

    def add(self, failure: SeenFailure) -> None:
        """Append a failure."""
        with open(self._path, "a", opener=_private) as file:
            file.write(json.dumps(failure) + "\n")

    def failures(self) -> list[SeenFailure]:
        """All failures so far, in the order in which they were seen."""
        with contextlib.suppress(FileNotFoundError):
            return [SeenFailure(*json.loads(line)) for line in self._path.read_text().splitlines()]
        return []

    def close(self) -> None:
        """Remove the file, in the process that made it."""
        if os.getpid() == self._process:
            self._path.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
