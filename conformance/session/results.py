"""The result of one property, and names of properties for texts that outlive the session."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.session.verdicts import PropertyOutcome

#: The package of the properties, as an argument of ``pytest --pyargs``, and its folder.
ADDRESS = "conformance.suite"
HERE = Path(__file__).parents[1] / "suite"

_RANK = list(PropertyOutcome)


@dataclasses.dataclass(slots=True)
class PropertyResult:
    """The result of one property.

    Attributes:
        requirement: the id of the requirement that the property tests.
        outcome: the worst outcome of all phases and repetitions.
        duration: seconds, set-up and tear-down included.
        error: the type and message of the exception, or None.
        notes: the notes of that exception, with the falsifying example among them.
        smp: the report of the ranks, for a test that is marked ``smp``.
    """

    requirement: str
    outcome: PropertyOutcome = PropertyOutcome.NOT_RUN
    duration: float = 0.0
    error: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    smp: dict[str, Any] | None = None

    def add(self, outcome: PropertyOutcome) -> bool:
        """Add one more outcome, and return whether it is worse than all before."""
        worse = self.outcome is PropertyOutcome.NOT_RUN or _RANK.index(outcome) < _RANK.index(
            self.outcome
        )
        if worse:
            self.outcome = outcome
        return worse

    def take(self, outcome: PropertyOutcome, told: Mapping[str, Any]) -> None:
        """Add one more outcome, and its error and notes if it is worse than all before."""
        if self.add(outcome) and told:
            self.error, self.notes = told["error"], told["notes"]


def property_name(nodeid: str) -> str:
    """A property's name, the same from any folder: ``conformance/suite/test_x.py::test_y[z]``."""
    path, _, rest = nodeid.partition("::")
    return f"{ADDRESS.replace('.', '/')}/{path.rpartition('/')[2]}::{rest}"


def argument(nodeid: str) -> str:
    """A property as an argument of ``pytest --pyargs``: ``'conformance.suite.test_x::test_y[z]'``.

    The argument is quoted for a shell, and valid from any folder.
    """
    path, _, rest = nodeid.partition("::")
    module = path.rpartition("/")[2].removesuffix(".py")
    return shlex.quote(f"{ADDRESS}.{module}::{rest}")
