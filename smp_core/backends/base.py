"""The protocols between the API, the harness and a backend, and the values that pass between them.

A *host* opens a *world* of ranks; ``World.run(job)`` runs one body on every rank and returns a
*report*. On each rank the *fabric* gives the default process group and the object transport.
Nothing here imports torch.

The protocols carry a version: a backend states which one it was written for, and another one is
refused.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smp_core.backends import torch_parts
from smp_core.backends.capabilities import EVERYTHING, Capabilities
from smp_core.backends.schedule import ROUND_ROBIN, Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from smp_core.backends.faults import Fault

PROTOCOL_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """An ordered list of world ranks, and the name that messages give it.

    Two groups of the same members but different names are different groups, as they are on a real
    backend.
    """

    name: str
    ranks: tuple[int, ...]


class ObjectTransport(Protocol):
    """What carries picklable objects between ranks, one operation per call, by world ranks.

    Every call is synchronous (API 1.6). Each receiver gets a copy of its own. The caller has
    checked that ranks are in range, in the group, and not its own.
    """

    def send(self, obj: object, dest: int) -> None:
        """Return after ``dest`` has taken the object.

        Raises PayloadError here if it cannot be pickled.
        """

    def broadcast(self, obj: object, group: Group) -> None:
        """Send to every other member; return after all of them have taken the object."""

    def recv_from(self, src: int) -> Any:
        """Return the next object that ``src`` sent or broadcast to this rank, in the order of
        sending.
        """

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """Return the members' objects in the order of the group."""

    def barrier(self, group: Group) -> None:
        """Return after every member has called."""


#: How the names of the API's own process groups begin.
PRIVATE = "smp "


class Fabric(Protocol):
    """What one rank exchanges data through."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    objects: ObjectTransport

    def process_group(self, group: Group) -> ProcessGroup:
        """The process group over ``group``, made on the first call; members call in the same order.

        No body is given one whose name begins with ``PRIVATE``: a fabric may keep it for later runs.
        """


class Recorder(Protocol):
    """Where a rank process writes down what it is about to do (the board; see backends/board)."""

    def call(
        self, call: str, group: Group, *, to: Sequence[int] = (), source: int | None = None
    ) -> AbstractContextManager[None]:
        """Entered around a synchronous call of the object transport.

        ``call`` is its name (``smp.send``), ``to`` the world ranks that must take what it sends,
        ``source`` the world rank that it receives from; a call with neither is one that all of
        ``group`` join.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """What the fabric is told on a rank process when a world forms.

    ``folder`` is private to this forming of the world, the same on all of its ranks, and empty at
    first; ``forming`` counts the formings of this session. ``check`` raises Cancelled once the run
    has been ended: a fabric whose waits call it needs no killing (``RankFabric.cooperative``).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    folder: Path
    forming: int
    check: Callable[[], None]
    board: Recorder
    store: str = "file"  # one in `folder` serves all ranks; "env": the launcher's, by MASTER_ADDR


class RankFabric(Fabric, Protocol):
    """The fabric as a host of rank processes drives it: formed once, entered for every run.

    One that destroys the groups of a run only when the next is entered has an attribute ``holds``:
    whether there are any. Their descriptors are not counted as left open by the body. One that makes
    in a run what it keeps has a method ``opened()``: the numbers of the descriptors that this has
    opened since the last call.
    """

    cooperative: bool  # waits call Seat.check, so that a rank can be unwound without killing it

    def enter(self) -> None:
        """Before each body: torch.distributed is this world's from now on."""

    def leave(self) -> list[str]:
        """After each body, however it ended: torch.distributed is nobody's. The process groups that
        the body made and left, in words; no later run finds them.
        """

    def close(self) -> None:
        """The world is not used again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Factory:
    """Makes a rank's fabric: names a callable ``module:attribute``, imported on the rank alone, that
    takes the Seat and then ``arguments``.
    """

    reference: str
    arguments: tuple[Any, ...] = ()
    loses_tensors: bool = False  # its messages of tensors can be lost and damaged (faults)

    def __call__(self, seat: Seat) -> RankFabric:
        torch_parts.require(
            "rank processes", "the board"
        )  # before what looks them up when imported
        module, _, attribute = self.reference.partition(":")
        make = getattr(importlib.import_module(module), attribute)
        fabric: RankFabric = make(seat, *self.arguments)
        return fabric


class VerdictKind(enum.StrEnum):
    """What a run says of the world as a whole."""

    PASSED = "passed"
    FAILED = "failed"  # a rank raised
    DEADLOCK = "deadlock"
    MISMATCH = "mismatch"
    LEAK = "leak"
    RACE = "race"  # memory of an operation in flight was changed
    CRASHED = "crashed"  # a rank process ended before its body did
    TIMED_OUT = "timed out"


class OutcomeKind(enum.StrEnum):
    """How one rank's part in a run ended."""

    RETURNED = "returned"
    RAISED = "raised"
    SKIPPED = "skipped"  # raised what the job's `skips` names
    CANCELLED = "cancelled"  # unwound, because another rank ended the run
    STUCK = "stuck"  # did not come back within the time limit, or waited in a deadlock
    CRASHED = "crashed"


@dataclasses.dataclass(slots=True)
class Outcome:
    """How one rank's part in a run ended.

    ``error`` is the exception of a rank that raised or skipped; ``detail`` says in words where a
    stuck rank was and whom it waited for, or because of whom a rank was cancelled.
    """

    rank: int
    kind: OutcomeKind
    value: Any = None
    error: BaseException | None = None
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    struck: tuple[int, ...] = ()  # which of the job's faults have; unknown of a rank that is gone
    measured: bytes = b""  # what a prelude has measured on the rank (hosts/measuring.py)


@dataclasses.dataclass(slots=True)
class Report:
    """What a run gave: the world's verdict, the rank and exception that caused it, one outcome per
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
    faults: tuple[Fault, ...] = ()  # what is to go wrong; those that Host.injects allows


class World(Protocol):
    """``size`` ranks, ready to run jobs one after the other."""

    size: int

    def run(self, job: Job) -> Report:
        """Run the job on every rank.

        Never raises for what a rank does; KeyboardInterrupt passes through.
        """


class Host(Protocol):
    """How ranks come to exist. One host lives as long as a session and opens worlds of any size.

    One that injects faults has an attribute ``injects`` (see faults.Claim).
    """

    protocol: int

    def open(self, size: int) -> World:
        """A world of ``size`` ranks, numbered from 0."""

    def close(self) -> None:
        """End every rank. Nothing of the host outlives this call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What a host of rank processes is told before it starts any.

    ``prelude`` is run once where ranks come from, before the first body: it gets them ready to
    import what bodies refer to. A host that needs any of this has a method ``configure(options)``.
    """

    ranks: int = 8  # the most that a world will have: an MPI job starts with so many
    mpiexec: str = ""  # how an MPI job is started, with its arguments; found by itself if empty
    capture: bool = True  # the ranks' output is kept apart, rather than let through
    check: bool = True  # the board (--smp-check)
    prelude: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """A named pair of a host and a fabric."""

    name: str
    summary: str
    open_host: Callable[[], Host]
    capabilities: Capabilities = EVERYTHING  # claims of its own, or everything
    #: The file of failures that are expected of it (docs/conformance.md): a path (that starts at
    #: ``__file__``), or ``package:path`` below an importable package. The suite alone reads it.
    expectations: Path | str | None = None
