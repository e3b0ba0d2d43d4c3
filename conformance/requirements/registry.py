"""What a requirement is: one promise of the API, with its id, sentence, source, level and what it needs.

The requirements themselves are data and stand in :mod:`conformance.requirements`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Collection, Iterator, Mapping

from conformance.engines.capabilities import NEEDS, EngineCapability, Need
from pytest_smp.ranks.capabilities import Capability

__all__ = [
    "NEEDS",
    "Capability",
    "EngineCapability",
    "Level",
    "Need",
    "Registry",
    "Requirement",
    "RequirementError",
]


class RequirementError(Exception):
    """Raised when requirements and properties do not fit together: an id that is declared twice, an
    empty field, a property of an unknown requirement, a requirement without a property.
    """


class Level(enum.IntEnum):
    """How far a backend or engine goes. Levels are cumulative: L1 is claimed together with L0."""

    sentence: str

    def __new__(cls, number: int, sentence: str) -> Level:
        """A level is its number, and carries its sentence."""
        level = int.__new__(cls, number)
        level._value_ = number
        level.sentence = sentence
        return level

    L0 = 0, "Lifecycle, configuration and groups."
    L1 = 1, "Values and order of communication."
    L2 = 2, "Error behaviour."
    L3 = 3, "Steps and microbatches, pipelines."
    L4 = 4, "Tensor parallelism."
    L5 = 5, "Sharded data parallelism."
    L6 = 6, "16-bit paths."
    L7 = 7, "Checkpoints."


_ID = re.compile(r"[A-Z0-9]+(-[A-Z0-9]+)+")


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """One promise of the API.

    Raises RequirementError if a field is empty or the id is not of the form ``AREA-WHAT``.
    """

    id: str  #: ``COMM-ALLGATHER-ORDER``: the area first
    sentence: str  #: the promise, in one sentence
    source: str  #: where it is made; what is our decision says INF, with the reason
    level: Level
    needs: frozenset[Need]  #: a backend, or an engine, that does not claim them is not tested

    def __post_init__(self) -> None:
        if not self.needs:
            raise RequirementError(f"requirement {self.id!r}: its needs are empty")
        for name in ("id", "sentence", "source"):
            if not getattr(self, name).strip():
                raise RequirementError(f"requirement {self.id!r}: its {name} is empty")
        if not _ID.fullmatch(self.id):
            raise RequirementError(
                f"requirement {self.id!r}: an id is capital words joined by '-', the area first"
            )

    def __str__(self) -> str:
        return f"{self.id}: {self.sentence} [{self.source}]"

    def lacks(self, claims: Collection[Need], more: Collection[Need] = ()) -> list[Need]:
        """What it needs beside these claims, of the backend first, in the order of declaration.

        ``more``: what it needs beside its own needs, because the engine uses it.
        """
        needs = {*self.needs, *more}
        return [each for each in NEEDS if each in needs and each not in claims]


class Registry(Mapping[str, Requirement]):
    """Requirements by id, in the order of their declaration.

    Raises RequirementError if an id is declared twice, or is asked for and was never declared.
    """

    def __init__(self, *requirements: Requirement) -> None:
        self._by_id: dict[str, Requirement] = {}
        for each in requirements:
            if each.id in self._by_id:
                raise RequirementError(f"requirement {each.id} is declared twice")
            self._by_id[each.id] = each

    def named(self, id: str) -> Requirement:
        """The requirement of this id."""
        found = self._by_id.get(id)
        if found is None:
            near = difflib.get_close_matches(id, self._by_id, n=1)
            hint = f"did you mean {near[0]}?" if near else "declare it in conformance/requirements/"
            raise RequirementError(f"unknown requirement {id!r}: {hint}")
        return found

    def __getitem__(self, id: str) -> Requirement:
        return self._by_id[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)
