"""The level that a run certifies, and the obstacles to certification."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from conformance.requirements.registry import Level, Registry
from conformance.session.verdicts import Verdict

_GOOD = {Verdict.PASS, Verdict.WAIVED, Verdict.NOT_SUPPORTED}


@dataclasses.dataclass(frozen=True, slots=True)
class Certification:
    """The judgement of a run about the backend as a whole.

    Attributes:
        level: the highest level reached, or None.
        obstacles: descriptions of everything that --smp-certify does not allow; empty if there is nothing.
        counts: the number of requirements up to that level by verdict; empty without a level.
    """

    level: Level | None
    obstacles: tuple[str, ...]
    counts: Mapping[Verdict, int]

    @property
    def certified(self) -> bool:
        """True if a level is reached and there is no obstacle."""
        return self.level is not None and not self.obstacles

    def __str__(self) -> str:
        if self.level is None:
            return "no level"
        shares = [f"{self.counts[Verdict.PASS]} of {sum(self.counts.values())} pass"]
        for verdict in (Verdict.NOT_SUPPORTED, Verdict.WAIVED):
            if self.counts.get(verdict):
                shares.append(f"{self.counts[verdict]} {verdict.lower()}")
        return f"{self.level.name}: {', '.join(shares)}"


def reached(registry: Registry, verdicts: Mapping[str, Verdict]) -> Level | None:
    """The highest level up to which every requirement is PASS, WAIVED or NOT SUPPORTED.

    A level in which no requirement is PASS is not reached by itself, because a backend that claims nothing
    has proved nothing.
    """
    found = None
    for level in Level:
        told = {verdicts[id] for id in registry if registry[id].level is level}
        if not told <= _GOOD:
            break
        if Verdict.PASS in told:
            found = level
    return found


def certification(
    registry: Registry,
    verdicts: Mapping[str, Verdict],
    obstacles: Mapping[str, list[str]],
    whole: bool,
) -> Certification:
    """Certify a run.

    Args:
        registry: the requirements.
        verdicts: the verdict on each requirement, by id.
        obstacles: descriptions of everything that the session left out, each with names of what it concerns.
        whole: whether the session asked for every property; a part of them certifies no level.
    """
    found = dict(obstacles)
    for verdict in Verdict:
        ids = [id for id in registry if verdicts[id] is verdict]
        if ids and verdict not in _GOOD:
            found[str(verdict)] = ids
    level = reached(registry, verdicts) if whole else None
    if level is None and not found:
        found["nothing passed"] = []
    counts = Counter(
        verdicts[id] for id in registry if level is not None and registry[id].level <= level
    )
    return Certification(
        level,
        tuple(f"{what}: {', '.join(names)}" if names else what for what, names in found.items()),
        counts,
    )
