"""What became of one property, and how a property is named in texts that outlive the session."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from conformance.session.verdicts import PropertyOutcome

#: The package of the properties, as ``pytest --pyargs`` is told, and its folder.
ADDRESS = "conformance.suite"
HERE = Path(__file__).parents[1] / "suite"

_RANK = list(PropertyOutcome)


@dataclasses.dataclass(slots=True)
class PropertyResult:
    """What became of one property.

    Attributes:
        requirement: the id of the requirement that it tests.
        outcome: the worst of all its phases and repetitions.
        duration: seconds, set-up and tear-down included.
        error: type and message of the exception, or None.
        notes: the notes of that exception; the falsifying example is among them.
        smp: how its ranks ended, for a test that is marked ``smp``.
    """

    requirement: str
    outcome: PropertyOutcome = PropertyOutcome.NOT_RUN
    duration: float = 0.0
    error: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    smp: dict[str, Any] | None = None

    def add(self, outcome: PropertyOutcome) -> bool:
        """Take one more outcome into account; whether it is the worst so far."""
        worse = self.outcome is PropertyOutcome.NOT_RUN or _RANK.index(outcome) < _RANK.index(
            self.outcome
        )
        if worse:
            self.outcome = outcome
        return worse


def property_name(nodeid: str) -> str:
    """A property's name, wherever the session was started: ``conformance/suite/test_x.py::test_y[z]``."""
    path, _, rest = nodeid.partition("::")
    return f"{ADDRESS.replace('.', '/')}/{path.rpartition('/')[2]}::{rest}"


def argument(nodeid: str) -> str:
    """A property as an argument of ``pytest --pyargs``, from any folder, in any shell:
    ``'conformance.suite.test_x::test_y[z]'``.
    """
    path, _, rest = nodeid.partition("::")
    module = path.rpartition("/")[2].removesuffix(".py")
    return shlex.quote(f"{ADDRESS}.{module}::{rest}")
