"""A communication program: a value that knows its ranks, its code, and how to run it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from hypothesis.vendor.pretty import RepresentationPrinter

from pytest_smp.strategies.communication import code
from pytest_smp.strategies.communication.steps import Plans, Step, planned


class Runnable:
    """The common base of programs: their code, and running it."""

    ranks: int

    @property
    def _printed(self) -> code.Printed:
        raise NotImplementedError

    def code(self) -> str:
        """The program as a test file that runs alone: ``pytest FILE``."""
        return self._printed.text

    def run(self) -> None:
        """Run this rank's part: to be called on each of ``ranks`` ranks."""
        code.run(self.code())

    def __getstate__(self) -> dict[str, Any]:
        _ = self._printed  # once, not on every rank
        return self.__dict__

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        # No indentation, so that the text can be pasted into a file.
        printer.text("# a test file that runs alone\n\n" + self.code())


@dataclasses.dataclass(frozen=True)
class Program(Runnable):
    """A valid program: see :func:`pytest_smp.strategies.communication.programs`.

    Attributes:
        ranks: in its world.
        steps: its communications, in one order for all ranks.
        groups: what ``dist.new_group`` makes: members, in their order, by variable.
        degrees: of the pipeline and of tensor parallelism, for the groups of the API.
    """

    ranks: int
    steps: tuple[Step, ...]
    groups: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, hash=False)
    degrees: tuple[int, int] = (1, 1)

    @functools.cached_property
    def plans(self) -> Plans:
        """The actions of each rank, in order."""
        return planned(self.steps, self.ranks)

    @functools.cached_property
    def _printed(self) -> code.Printed:
        sentence = "A valid program: every value is as the model says."
        return code.printed(self.ranks, self.groups, self.degrees, self.plans, sentence, True)
