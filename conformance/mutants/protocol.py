"""The type of a mutant: one planted bug, and the requirement that must catch it.

A mutant is planted in every process that holds ranks, before the ranks run and until they end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

#: Exceptions that show a wrong value: a failed assertion, or a pytest.raises in which nothing was raised.
ASSERTION: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


class MutantError(Exception):
    """Raised when mutants cannot be used.

    The causes are two mutants of one name, an unknown requirement, an object that is no mutant, and a
    module or attribute that does not exist.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug. Raises ValueError for an empty field or a name of a wrong form.

    Attributes:
        name: a unique name of lower-case words joined by "-".
        kind: the class of bugs in the score, such as ``order`` or ``root``.
        sentence: the bug in words.
        requirement: the id of the requirement that must catch the bug.
        plant: makes the context manager that plants the bug.
        by: the exceptions by which a property catches the bug. An error of another type is no kill, because
            the mutant itself may be broken.
        but: those exceptions of ``by`` that only this project's harness raises. They are no kill, because
            the bug would survive on another backend.
        origin: the place where the bug happened, as an id of a catalogue or a link; empty for an invented
            bug.
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

    The function gets a ``pytest.MonkeyPatch`` that is undone at the end of the trial. The function's name
    and the first line of its docstring become the mutant's name and sentence. A function that is entered
    for a second requirement is a second mutant, whose name ends in that requirement's id.
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
        """Enter a bug that ``requirement`` must catch, by an assertion or by the exceptions in ``by``."""

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
