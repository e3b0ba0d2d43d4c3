"""Fault injection in tests: the fixture ``smp_faults``, the marker of the same name, and the faults.

A fault applies to the runs of one test. In a test that runs functions by ``smp_world``::

    def test_a_lost_rank_is_named(smp_world, smp_faults):
        smp_faults.kill(rank=3, at="allgather", nth=2)
        report = smp_world.report(step)
        assert report.root == 3

and, since the body of a marked test runs on the ranks, by a marker::

    @pytest.mark.smp(ranks=4)
    @pytest.mark.smp_faults(faults.Raise(rank=3, at="end", error=OSError("gone")))

A drawn fault (``strategies.faults``) that is an argument of a marked property applies to that
example.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from pytest_smp.ranks.faults import (
    Corrupt,
    Drop,
    Exit,
    Fault,
    FullDisk,
    Garbled,
    Kill,
    Raise,
    Stall,
    Unpicklable,
)
from smp_core.errors import ArgumentTypeError

if TYPE_CHECKING:
    import pytest

__all__ = [
    "Corrupt",
    "Drop",
    "Exit",
    "Fault",
    "FullDisk",
    "Garbled",
    "Kill",
    "Raise",
    "SmpFaults",
    "Stall",
    "Unpicklable",
]


class Declaring(Protocol):
    """The holder of the running test's faults: the controller (running.py)."""

    faults: tuple[Fault, ...]


class Declared:
    """Faults that are in force, until ``withdraw``, the end of a ``with`` block, or of the test."""

    def __init__(self, controller: Declaring, faults: tuple[Fault, ...]) -> None:
        self._controller, self.faults = controller, faults
        controller.faults += faults

    def withdraw(self) -> None:
        """Take these faults out of force for the next runs; a second call changes nothing."""
        mine = {id(fault) for fault in self.faults}
        self._controller.faults = tuple(
            fault for fault in self._controller.faults if id(fault) not in mine
        )

    def __enter__(self) -> Declared:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.withdraw()

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.faults))


class SmpFaults:
    """Injects faults into the runs of this test, each on a named rank.

    Every method puts one fault in force for the test's next runs and returns a context manager, whose
    ``with`` block ends the fault earlier, as a property needs whose examples share one test. A fault
    strikes once in a run, at the call that ``at``, ``nth`` and ``when`` name (see faults.Fault and
    docs/faults.md).

    The methods raise ArgumentError or ArgumentTypeError for a bad value. The start of a run raises
    RankError for a rank that the run does not have, and UnsupportedError for a fault that the backend
    cannot inject. A run that ended well raises FaultNotReachedError for a fault that did not strike,
    unless ``required`` is false.
    """

    def __init__(self, controller: Declaring) -> None:
        self._controller = controller

    def add(self, *faults: Fault) -> Declared:
        """Put these faults in force."""
        return Declared(self._controller, checked(faults, "smp_faults.add"))

    def clear(self) -> None:
        """Take all faults out of force, those of markers included."""
        self._controller.faults = ()

    def kill(
        self,
        rank: int,
        at: str = "start",
        nth: int = 1,
        when: str = "before",
        *,
        signal: int = signals.SIGKILL,
        required: bool = True,
    ) -> Declared:
        """The rank dies of a signal."""
        return self.add(
            Kill(rank=rank, at=at, nth=nth, when=when, signal=signal, required=required)
        )

    def exit(
        self,
        rank: int,
        at: str = "start",
        nth: int = 1,
        when: str = "before",
        *,
        code: int = 1,
        required: bool = True,
    ) -> Declared:
        """The rank's process ends as by ``os._exit(code)``."""
        return self.add(Exit(rank=rank, at=at, nth=nth, when=when, code=code, required=required))

    def stall(
        self,
        rank: int,
        at: str = "start",
        nth: int = 1,
        when: str = "before",
        *,
        seconds: float | None = None,
        required: bool = True,
    ) -> Declared:
        """The rank stands still: for ever, if ``seconds`` is None."""
        return self.add(
            Stall(rank=rank, at=at, nth=nth, when=when, seconds=seconds, required=required)
        )

    def delay(
        self,
        rank: int,
        at: str = "start",
        nth: int = 1,
        when: str = "before",
        *,
        seconds: float = 0.1,
        required: bool = True,
    ) -> Declared:
        """The rank comes late: by so many seconds; on `sim`, when no other rank can go on."""
        return self.stall(rank, at, nth, when, seconds=seconds, required=required)

    def raise_(
        self,
        rank: int,
        at: str = "start",
        nth: int = 1,
        when: str = "before",
        *,
        error: BaseException | type[BaseException] | None = None,
        required: bool = True,
    ) -> Declared:
        """The rank raises ``error``, or an InjectedError."""
        return self.add(Raise(rank=rank, at=at, nth=nth, when=when, error=error, required=required))

    def drop(self, rank: int, at: str = "send", nth: int = 1, *, required: bool = True) -> Declared:
        """A message that the rank sends is lost, and the rank goes on."""
        return self.add(Drop(rank=rank, at=at, nth=nth, required=required))

    def corrupt(
        self,
        rank: int,
        at: str = "send",
        nth: int = 1,
        *,
        how: Callable[[Any], Any] | None = None,
        required: bool = True,
    ) -> Declared:
        """A message that the rank sends arrives damaged: as ``how`` makes it."""
        return self.add(Corrupt(rank=rank, at=at, nth=nth, how=how, required=required))

    def unpicklable(self, rank: int, *, required: bool = True) -> Declared:
        """The rank's body returns a value that cannot be pickled."""
        return self.add(Unpicklable(rank=rank, required=required))

    def full_disk(self, rank: int, below: str | os.PathLike[str], after: int = 0) -> Declared:
        """The rank's files below a folder find room for ``after`` more bytes."""
        return self.add(FullDisk(rank=rank, below=below, after=after))

    def __repr__(self) -> str:
        return "smp_faults"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "smp_faults belongs to the controller, and cannot be used on a rank: declare the faults "
            "before the run, by the marker smp_faults or in a fixture"
        )


def checked(values: Iterable[object], where: str) -> tuple[Fault, ...]:
    """The values, all of them faults. Raises ArgumentTypeError for another."""
    faults = []
    for value in values:
        if not isinstance(value, Fault):
            raise ArgumentTypeError(f"{where}: {value!r} is no fault; pytest_smp.faults has them")
        faults.append(value)
    return tuple(faults)


def of_markers(item: pytest.Item) -> tuple[Fault, ...]:
    """The faults that the item's markers declare, those of the nearest marker last.

    Raises ArgumentTypeError for a value that is no fault.
    """
    found: list[Fault] = []
    for marker in reversed(list(item.iter_markers("smp_faults"))):
        where = f"{item.nodeid}: marker smp_faults"
        if marker.kwargs:
            raise ArgumentTypeError(f"{where}: takes faults, and no keyword arguments")
        found += checked(marker.args, where)
    return tuple(found)


def among(arguments: Mapping[str, Any]) -> tuple[Fault, ...]:
    """The faults that are arguments of a test, or stand in lists and tuples that are."""
    found: list[Fault] = []
    for value in arguments.values():
        if isinstance(value, Fault):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, Fault)]
    return tuple(found)
