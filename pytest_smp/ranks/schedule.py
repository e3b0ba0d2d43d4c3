"""The order in which the ranks of a `sim` world take their turns: round-robin, and where a run
deviates from it.

A run makes decisions, numbered from 0: which of the ranks that can run is next, whether a rank goes
on into its communication call or another one goes first, whether an asynchronous operation is seen
to be complete. Choice 0 is what round-robin does; a deviation is another choice at one decision.
So a schedule is a short list of pairs, which shrinks like any other input, and prints as a token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from smp_core.errors import ArgumentError

_TOKEN = re.compile(r"\d{1,9}\.[1-9]\d{0,8}(-\d{1,9}\.[1-9]\d{0,8})*")
_NONE = "round-robin"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """Deviations from round-robin: pairs (decision, choice), by ascending decision.

    A choice counts from 1 and is taken modulo the number of choices that the decision has, so every
    schedule fits every program. Decisions that a run does not come to have no effect.

    Raises:
        ArgumentError: the pairs are no ints, are not ascending, or a choice is below 1.
    """

    deviations: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self._is_good():
            raise ArgumentError(
                f"schedule: {self.deviations!r}: must be a tuple of pairs (decision, choice) of ints, "
                "decisions ascending from 0, choices at least 1"
            )

    def _is_good(self) -> bool:
        before = -1
        for pair in self.deviations if type(self.deviations) is tuple else (None,):
            if type(pair) is not tuple or len(pair) != 2:
                return False
            decision, choice = pair
            if not (type(decision) is type(choice) is int and decision > before and choice >= 1):
                return False
            before = decision
        return True

    @classmethod
    def parse(cls, token: str) -> Schedule:
        """The schedule of a token, as ``str`` prints it: ``3.1-17.2``, or ``round-robin``.

        Raises ArgumentError if it is none.
        """
        if token == _NONE:
            return cls()
        if not _TOKEN.fullmatch(token):
            raise ArgumentError(
                f"schedule {token!r}: a token looks like 3.1-17.2 (decision.choice, joined by '-'), "
                f"or is {_NONE}"
            )
        pairs = [pair.split(".") for pair in token.split("-")]
        return cls(tuple((int(decision), int(choice)) for decision, choice in pairs))

    def __str__(self) -> str:
        return "-".join(f"{decision}.{choice}" for decision, choice in self.deviations) or _NONE

    def __bool__(self) -> bool:
        return bool(self.deviations)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.deviations)

    def __repr__(self) -> str:
        return f"Schedule.parse({str(self)!r})" if self else "Schedule()"


ROUND_ROBIN = Schedule()
