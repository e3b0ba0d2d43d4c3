"""The requests of the controller and the answers of a rank process, on the control connection."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from pytest_smp.ranks.protocols import Factory, Outcome, OutcomeKind


@dataclasses.dataclass(frozen=True, slots=True)
class JobSpec:
    """The part of a job that rarely changes from run to run; sent when it changes."""

    key: int
    body: bytes
    fields: bytes  # the fields of Job that a rank needs, and the warning filters
    environment: dict[str, str | None]  # what the controller changed since it started the ranks
    directory: str | None
    path: list[str]  # sys.path
    check: bool  # the board is on


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One run, as the controller sends it to a rank."""

    number: int
    size: int
    job_spec: JobSpec | None  # None: those that the rank has
    seed: int
    arguments: bytes
    settles: bool  # the rank says, beside its result, that it waits for the next task

    def packed(self) -> bytes:
        """The task as bytes for the wire."""
        return pickle.dumps(
            (self.number, self.size, self.job_spec, self.seed, self.arguments, self.settles),
            pickle.HIGHEST_PROTOCOL,
        )


#: A rank's answer to a task that has a job spec, before it calls the body: all that the body needs is imported.
LOADED = b"loaded"


@dataclasses.dataclass(frozen=True, slots=True)
class Forming:
    """Asks a rank to join a world."""

    number: int
    size: int
    local_rank: int
    local_size: int
    folder: str
    store: str
    factory: Factory


@dataclasses.dataclass(frozen=True, slots=True)
class Preparing:
    """Asks a rank that was not forked from a prepared process to prepare itself."""

    prelude: bytes


@dataclasses.dataclass(slots=True)
class Done:
    """A rank's answer to a task."""

    number: int
    outcome: Outcome
    error: bytes | None  # the outcome's, pickled by itself: the rest must arrive in any case
    value: bytes | None
    groups: list[str]  # process groups left behind
    unclean: list[str]  # why this rank must be replaced
    records: int  # bytes sent on the line
    incidents: bytes | None = None  # of the run (incidents.IncidentRecorder)

    def packed(self) -> bytes:
        """The answer as bytes for the wire: plain values alone, which pickle ten times as fast as objects."""
        outcome = self.outcome
        told = (outcome.rank, outcome.kind.value, outcome.detail, outcome.stdout, outcome.stderr)
        return pickle.dumps(
            (
                self.number,
                told,
                outcome.struck,
                outcome.measured,
                outcome.records,
                self.error,
                self.value,
                self.groups,
                self.unclean,
                self.records,
                self.incidents,
            ),
            pickle.HIGHEST_PROTOCOL,
        )

    @classmethod
    def of(cls, packed: bytes) -> Done:
        """The reverse of ``packed``."""
        told: Any
        number, told, struck, measured, noted, *rest = pickle.loads(packed)
        rank, kind, detail, stdout, stderr = told
        outcome = Outcome(
            rank,
            OutcomeKind(kind),
            detail=detail,
            stdout=stdout,
            stderr=stderr,
            struck=struck,
            measured=measured,
            records=noted,
        )
        return cls(number, outcome, *rest)
