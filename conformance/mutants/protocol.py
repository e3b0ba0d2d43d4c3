"""What a mutant is: one planted bug, and the requirement that must catch it.

A mutant is planted in every process that holds ranks, before they run and for as long as they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

#: How a wrong value shows: an assertion of the property, or pytest.raises that saw nothing raised.
ASSERTION: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


class MutantError(Exception):
    """Raised when mutants cannot be used: two of one name, an unknown requirement, what is no mutant,
    or a module or attribute that is not there.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: unique, words joined by "-".
        kind: the class of bugs that it stands for, as the score counts them: ``order``, ``root``.
        sentence: the bug in words.
        requirement: the id of the requirement that must catch it.
        plant: gives the context manager that plants it.
        by: the exceptions by which a property catches it. An error of another type is no kill: it
            may come from a mutant that is broken itself.
        but: of these, the exceptions that only our harness raises. They kill nothing: on another
            backend the bug would live.
        origin: where the bug happened: an id of a catalogue, a link; empty for one that we thought of.
    """

    name: str
    kind: str
    sentence: str
    requirement: str
    plant: Callable[[], AbstractContextManager[object]]
    by: tuple[type[BaseException], ...] = ASSERTION
    but: tuple[type[BaseException], ...] = ()
    origin: str = ""

    def __post_init__(self) -> None:
        for field in ("kind", "sentence", "requirement"):
            if not getattr(self, field).strip():
                raise ValueError(f"mutant {self.name!r}: its {field} is empty")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"mutant {self.name!r}: a name is lower-case words joined by '-'")


class Bugs(list[Mutant]):
    """The mutants of one area, entered by a decorator::

        BUGS = Bugs("order")

        @BUGS.enter("COMM-ALLGATHER-ORDER", origin="B037")
        def reversed_result(patch):
            \"\"\"allgather gives the objects in reverse order\"\"\"
            ...

    The function gets a ``pytest.MonkeyPatch`` that is undone when the mutant leaves; its name and
    the first line of its docstring become the mutant's. Entered for a second requirement, it is a
    second mutant, whose name ends in that requirement's id.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._entered: list[Plant] = []

    def enter(
        self,
        requirement: str,
        *by: type[BaseException],
        kind: str = "",
        origin: str = "",
    ) -> Callable[[Plant], Plant]:
        """Enter a bug: ``requirement`` must catch it, by an assertion or by what ``by`` names."""

        def entered(plant: Plant) -> Plant:
            words = plant.__name__.strip("_").split("_")
            if plant in self._entered:
                words.append(requirement.lower())
            self._entered.append(plant)
            self.append(
                Mutant(
                    name="-".join(words),
                    kind=kind or self.kind,
                    sentence=str(plant.__doc__).partition("\n")[0].strip(),
                    requirement=requirement,
                    plant=lambda: _patched(plant),
                    by=by or ASSERTION,
                    origin=origin,
                )
            )
            return plant

        return entered


@contextlib.contextmanager
def _patched(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield
