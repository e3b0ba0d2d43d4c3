"""The type of a requirement: one promise of the API, with its id, sentence, source, level and needs.

The requirements themselves are data, in the other modules of :mod:`conformance.requirements`.
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
    """Raised when requirements or properties are declared wrongly.

    The causes are an id that is declared twice or of a wrong form, an empty field, and a property of an
    unknown requirement.
    """


class Level(enum.IntEnum):
    """A grade of a backend or engine. Grades are cumulative: L1 includes the requirements of L0."""

    sentence: str

    def __new__(cls, number: int, sentence: str) -> Level:
        """Make a level that is the number and carries the sentence."""
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
    source: (
        str  #: the document that makes the promise; INF and a reason for a decision of this project
    )
    level: Level
    needs: frozenset[
        Need
    ]  #: capabilities; the requirement is not tested without claims to all of them

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
        """The needs of this requirement that are not claimed: the backend's first, in declared order.

        ``more`` are further needs, of the engine that the requirement is tested on.
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
        """The requirement of this id. Raises RequirementError if there is none, with the nearest id."""
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
