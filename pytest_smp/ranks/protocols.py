"""The protocols between the harness and a backend, and the values that pass between them.

An *executor* opens a *world* of ranks; ``World.run(job)`` runs one body on every rank and returns a
*report*. A rank's fabric is in smp_core/transport/protocols.py. Nothing here imports torch.

The protocols carry a version: a backend states which one it was written for, and another one is
refused.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pytest_smp.ranks.capabilities import EVERYTHING, Capabilities
from pytest_smp.ranks.schedule import ROUND_ROBIN, Schedule
from smp_core.errors import BackendError, UnsupportedError
from smp_core.transport import torch_parts
from smp_core.transport.current_rank import CurrentRank
from smp_core.transport.protocols import FABRIC_VERSION, RankEnvironment, RankFabric

if TYPE_CHECKING:
    from pytest_smp.ranks.faults import Claim, Fault

#: The version of `Executor`, `World`, `Job` and `Report`, raised with each change of one of them. An executor
#: that was written for another version is refused.
PROTOCOL_VERSION = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Factory:
    """Makes a rank's fabric: names a callable ``module:attribute``, imported on the rank alone, that
    takes the RankEnvironment and then ``arguments``.
    """

    reference: str
    arguments: tuple[Any, ...] = ()
    loses_tensors: bool = False  # its messages of tensors can be lost and damaged (faults)

    def __call__(self, environment: RankEnvironment) -> RankFabric:
        torch_parts.require(
            "rank processes", "the board"
        )  # before what looks them up when imported
        module, _, attribute = self.reference.partition(":")
        make = getattr(importlib.import_module(module), attribute)
        fabric: RankFabric = make(environment, *self.arguments)
        version = getattr(fabric, "protocol", None)
        if version != FABRIC_VERSION:
            names = "names no version" if version is None else f"was written for version {version}"
            raise BackendError(
                f"the fabric of {self.reference} {names} of its protocol; this one has "
                f"{FABRIC_VERSION}: inherit from smp_core.transport.protocols.RankFabric (docs/extension_points.md)"
            )
        return fabric


class VerdictKind(enum.StrEnum):
    """The verdict of a run on the world as a whole."""

    PASSED = "passed"
    FAILED = "failed"  # a rank raised
    DEADLOCK = "deadlock"
    MISMATCH = "mismatch"
    LEAK = "leak"
    REPLICAS = "replicas differ"  # ranks that must be equal (--smp-replicas)
    RACE = "race"  # memory of an operation in flight was changed
    CRASHED = "crashed"  # a rank process ended before its body did
    TIMED_OUT = "timed out"


class OutcomeKind(enum.StrEnum):
    """The kinds of ends of one rank's part in a run."""

    RETURNED = "returned"
    RAISED = "raised"
    SKIPPED = "skipped"  # raised what the job's `skips` names
    CANCELLED = "cancelled"  # unwound, because another rank ended the run
    STUCK = "stuck"  # did not come back within the time limit, or waited in a deadlock
    CRASHED = "crashed"


class Incident(Protocol):
    """A warning, or an exception that nobody could catch, on a rank that is a process."""

    def repeat(self, rank: int) -> None:
        """Have it happen in this process, too. Does not raise."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """The end of one rank's part in a run.

    ``error`` is the exception of a rank that raised or skipped. ``detail`` says in words at which line a
    stuck rank was and which ranks it waited for, or which rank's failure cancelled this one.
    """

    rank: int
    kind: OutcomeKind
    value: Any = None
    error: BaseException | None = None
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    struck: tuple[int, ...] = ()  # which of the job's faults have; unknown of a rank that is gone
    incidents: Sequence[Incident] = ()  # in the order of their kinds and times
    measured: bytes = b""  # what a prelude has measured on the rank (ranks/processes/measuring.py)
    records: dict[str, Any] = dataclasses.field(default_factory=dict)  # see RecordingRank


@dataclasses.dataclass(slots=True)
class Report:
    """The report of a run: the world's verdict, the rank and exception that caused it, one outcome per
    rank.
    """

    verdict: VerdictKind
    outcomes: list[Outcome]
    root: int | None = None
    error: BaseException | None = None
    warnings: list[str] = dataclasses.field(default_factory=list)
    schedule: Schedule = ROUND_ROBIN  # the deviations that took effect: it replays the run
    decisions: int = 0  # how many a schedule can deviate at

    @property
    def values(self) -> list[Any]:
        """The ranks' return values, in rank order."""
        return [outcome.value for outcome in self.outcomes]


def no_patience() -> bool:
    """The default of ``Job.patience``: time that is up is up."""
    return False


def no_context() -> AbstractContextManager[Any] | None:
    """The default of ``Job.context``: nothing to enter."""
    return None


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """One body to run on every rank of a world.

    ``arguments(rank)`` gives the positional and keyword arguments of that rank; it is called in the
    rank's own thread or process and must return values that no other rank shares.
    """

    body: Callable[..., Any]
    arguments: Callable[[int], tuple[Sequence[Any], Mapping[str, Any]]]
    parameters: Mapping[str, Any] | None = None  # of smp.init, used when the body does not call it
    automatic_init: bool = True  # the first API call initialises, with `parameters`
    timeout: float | None = None  # seconds for the whole run; None waits for ever
    timeout_origin: str = "--smp-timeout"  # for messages: who has set it
    patience: Callable[[], bool] = (
        no_patience  # asked when time is up: true (a debugger is open) starts it anew
    )
    seed: int = 0  # of every rank's random generators
    strict: bool = False  # a process group that is not destroyed is a leak, too
    capture: bool = False  # keep each rank's stdout and stderr apart
    skips: tuple[
        type[BaseException], ...
    ] = ()  # exceptions by which a body says that it does not apply
    context: Callable[[], AbstractContextManager[Any] | None] = (
        no_context  # entered around each rank's body
    )
    schedule: Schedule = ROUND_ROBIN  # the order of turns, where the backend decides it
    faults: tuple[Fault, ...] = ()  # what is to go wrong; those that Executor.injects allows
    simulated_timeouts: bool = False  # time-outs of waits fire where no rank can go on (sim)
    records_calls: bool = False  # each rank records its communications (ranks/call_records.py)


#: The record of the block of ``smp.raises`` that a rank is in; it arrives also if the rank never comes back.
INSIDE = "inside"


class RaisesBlock(NamedTuple):
    """One execution of a ``with smp.raises(...)`` statement, the same on all ranks that come to it.

    Attributes:
        place: file and line.
        nth: how often the rank has come to this line.
        ranks: the ranks that must raise.
    """

    place: str
    nth: int
    ranks: tuple[int, ...]


class RecordingRank(CurrentRank, Protocol):
    """A rank in a run of the harness, which takes notes for the controller.

    Attributes:
        records: plain values by name; those of a rank that comes back are in its outcome.
    """

    records: dict[str, Any]

    def record(self, name: str, value: Any) -> None:
        """Set a record."""


class World(Protocol):
    """``size`` ranks, ready to run jobs one after the other."""

    size: int

    def run(self, job: Job) -> Report:
        """Run the job on every rank.

        Never raises for what a rank does; KeyboardInterrupt passes through.
        """


class Executor(Protocol):
    """Makes ranks exist. One executor lives as long as a session and opens worlds of any size.

    An executor inherits from this class, states `protocol`, and defines `open` and `close`. The other
    parts are optional: their defaults stand here.

    Attributes:
        protocol: the `PROTOCOL_VERSION` that it was written for.
        injects: the claims of the faults that it can inject (faults.Claim).
        steady: whether a run takes no longer because ranks are started or replaced within it. An
            executor that is not steady gets no deadline on its examples.
        lost: why no further run is possible, in words; empty while runs are possible.
    """

    protocol: int
    injects: Collection[Claim] = ()
    steady: bool = True
    lost: str = ""

    def configure(self, options: ExecutorOptions) -> None:
        """Take the options of the session; called once, before `open`."""
        return None

    def open(self, size: int) -> World:
        """A world of ``size`` ranks, numbered from 0."""

    def renew(self) -> None:
        """Have the next run on ranks that have run nothing before. Raises UnsupportedError if it cannot."""
        raise UnsupportedError("fresh=True: this backend cannot start rank processes for a test")

    def close(self) -> None:
        """End every rank. Nothing of the executor outlives this call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """The options that an executor of rank processes gets before it starts any.

    ``prelude`` runs once in the fork server or the rank process, before the first body: it prepares
    the imports of the modules that bodies refer to.
    """

    ranks: int = 8  # the most that a world will have: an MPI job starts with so many
    mpiexec: str = ""  # how an MPI job is started, with its arguments; found by itself if empty
    capture: bool = True  # the ranks' output is kept apart, rather than let through
    check: bool = True  # the board (--smp-check)
    prelude: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """A named pair of an executor and a fabric."""

    name: str
    summary: str
    open_executor: Callable[[], Executor]
    capabilities: Capabilities = EVERYTHING  # claims of its own, or everything
    #: The file of failures that are expected of it (docs/conformance.md): a path (that starts at
    #: ``__file__``), or ``package:path`` below an importable package. The suite alone reads it.
    expectations: Path | str | None = None

    @property
    def open_host(self) -> Callable[[], Executor]:
        """The former name of `open_executor`."""
        warnings.warn("Backend.open_host: use open_executor", DeprecationWarning, stacklevel=2)
        return self.open_executor
