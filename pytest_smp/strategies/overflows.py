"""Overflow histories: what each rank's gradients are in each step of a run with a loss scale, drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_int

#: The kinds of a rank's gradients, the simplest first. ``large`` gradients are finite, and no longer so
#: once they are scaled; ``absent`` means no gradients.
KINDS = ("finite", "absent", "large", "inf", "nan")


class Overflows:
    """The kind of each rank's gradients, by step: ``Overflows(("finite", "inf"), ("nan", "absent"))``.

    Each step has one of :data:`KINDS` for each rank. Equal, hashable and picklable by value.
    Raises ValueError for another word, or for steps of different numbers of ranks.
    """

    __slots__ = ("steps",)

    def __init__(self, *steps: Sequence[str]) -> None:
        self.steps: tuple[tuple[str, ...], ...] = tuple(tuple(step) for step in steps)
        unknown = sorted({kind for step in self.steps for kind in step} - set(KINDS))
        if unknown:
            raise ValueError(f"Overflows: no {', '.join(unknown)}; there is {', '.join(KINDS)}")
        if len({len(step) for step in self.steps}) > 1:
            raise ValueError("Overflows: each step must say something of each rank")

    @property
    def ranks(self) -> int:
        """The number of ranks; 0 without steps."""
        return len(self.steps[0]) if self.steps else 0

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Overflows) and self.steps == other.steps

    def __hash__(self) -> int:
        return hash(self.steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return Overflows, self.steps

    def __repr__(self) -> str:
        return f"Overflows({', '.join(map(repr, self.steps))})"


def overflows(
    ranks: int,
    *,
    min_steps: int = 1,
    max_steps: int = 8,
    kinds: Sequence[str] = KINDS,
) -> SearchStrategy[Overflows]:
    """Draw overflow histories of so many ranks. In about half of the steps all gradients are finite, else
    those of one or two ranks are not. Shrinks towards few steps with finite gradients everywhere.

    Args:
        ranks: how many ranks.
        min_steps, max_steps: the fewest and the most steps.
        kinds: of :data:`KINDS`; ``finite`` is always one of them.

    Raises:
        InvalidArgument: a number is no int of at least 1 (``min_steps``: 0), ``max_steps`` is below
            ``min_steps``, or ``kinds`` names what there is not.
    """
    check_int("ranks", ranks, at_least=1)
    check_int("min_steps", min_steps, at_least=0)
    check_int("max_steps", max_steps, at_least=max(1, min_steps))
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise InvalidArgument(
            f"kinds={tuple(kinds)!r}: no {', '.join(unknown)}; there is {', '.join(KINDS)}"
        )
    odd = [kind for kind in KINDS if kind in kinds and kind != "finite"]
    return st.lists(_steps(ranks, odd), min_size=min_steps, max_size=max_steps).map(
        lambda steps: Overflows(*steps)
    )


@st.composite
def _steps(draw: DrawFn, ranks: int, odd: list[str]) -> tuple[str, ...]:
    step = ["finite"] * ranks
    for _ in range(draw(st.sampled_from((0, 0, 1, 2))) if odd else 0):
        step[draw(st.integers(0, ranks - 1))] = draw(st.sampled_from(odd))
    return tuple(step)
