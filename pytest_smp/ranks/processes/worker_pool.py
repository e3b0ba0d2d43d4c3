"""Rank processes as the controller sees them: how they come to exist, end, and are connected."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pytest_smp.ranks.processes import wire
from pytest_smp.ranks.processes.output import read_output
from pytest_smp.ranks.processes.process_status import ProcessStatus
from pytest_smp.ranks.processes.stacks import STACKS, read_stacks


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A rank process that has ended. ``code`` is its exit code; negative is a signal. ``past``: it
    was one of a job that has been replaced since.

    Only slot and pid together say which process it was: machines give out the same numbers.
    """

    slot: int | None
    pid: int | None
    code: int | None
    words: str = ""  # how, where there is no code
    past: bool = False

    def __str__(self) -> str:
        return self.words or describe_exit(self.code)


class WorkerPool(ABC):
    """Starts and ends rank processes."""

    folder: str  # private to the run
    address: wire.Address | socket.socket  # where ranks connect, or what listens there already
    secret: bytes
    limit: int | None  # at most so many ranks
    restarts_together: bool  # one that ends takes all others with it
    final: bool = False  # a lost rank is not started again
    store: str = "file"  # see RankEnvironment
    prepares: bool  # runs the options' prelude by itself, before it starts ranks

    @abstractmethod
    def start(self, slots: Collection[int]) -> Collection[int]:
        """Start rank processes for these slots, and say for which others too; they connect when
        they are ready.
        """

    @abstractmethod
    def ended(self) -> list[Ended]:
        """The rank processes that ended since the last call. Does not wait."""

    @abstractmethod
    def kill(self, ranks: Collection[RankProcess]) -> None:
        """End these processes at once, with everything that their bodies started."""

    @abstractmethod
    def close(self) -> None:
        """End what is left. Nothing of the worker pool outlives this call."""

    def welcome(self, connection: Connection, hello: dict[str, Any]) -> None:  # noqa: B027
        """A fork server has connected. Called in a thread of the listener's."""

    def gather(self) -> None:  # noqa: B027
        """Wait for what starts by itself."""

    def silent(self, host: str) -> None:  # noqa: B027
        """A machine does not answer. Called in the midst of a run."""

    def last_words(self) -> str:
        """Text for the error when ranks cannot start, beside their own output."""
        return ""

    def stacks(self, ranks: Sequence[RankProcess]) -> dict[int, list[str]]:
        """Every rank's Python stack, whatever it is doing: its own signal handler writes it."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, STACKS)
        return {rank.slot: read_stacks(rank.folder, rank.pid) for rank in ranks}

    def state(self, rank: RankProcess) -> ProcessStatus | None:
        """The state of a rank's process; None if nobody can tell (another machine's)."""
        return ProcessStatus.of(rank.pid)

    def written(self, rank: RankProcess) -> tuple[str, str]:
        """The text that a rank has written in this run, to standard output and to standard error."""
        return read_output(rank.folder, rank.pid)

    def place(self, slot: int, size: int) -> tuple[int, int]:
        """The rank's number on its machine, and how many of a world of ``size`` are there."""
        return slot, size

    def fileno(self) -> int | None:
        """A descriptor that is readable when ``ended`` has news."""
        return None


@dataclasses.dataclass(slots=True, eq=False)
class RankProcess:
    """One rank process, while it is connected."""

    slot: int
    pid: int
    host: str
    folder: str  # on its machine: where it keeps its output
    control: Connection
    line: Connection
    worlds: dict[int, int] = dataclasses.field(default_factory=dict)  # size: forming
    job_spec: int = 0  # the key of the job spec that it has
    records: int = 0  # bytes read from its line in this run
    over: bool = False  # its end has been told
    busy: bool = False  # is to say that it waits for the next task, and has not yet

    def settle(self) -> None:
        """Hear that it waits again. Raises EOFError or OSError if it has ended instead."""
        if self.control.recv_bytes():
            raise EOFError("it sent something else")
        self.busy = False


def describe_exit(code: int | None) -> str:
    """An exit status in words; negative is a signal."""
    if code is None:
        return "its connection closed"
    if code >= 0:
        return f"exit code {code}"
    try:
        text = f"killed by {signal.Signals(-code).name} (signal {-code})"
    except ValueError:
        return f"killed by signal {-code}"
    return text + (_shared_memory() if -code == signal.SIGBUS else "")


def _shared_memory() -> str:
    """The room in shared memory, in words: a write where there is none ends a process by SIGBUS."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return (
        "; shared memory that is full or too small ends its writers so: /dev/shm has "
        f"{usage.free >> 10} KiB free "
        f"of {usage.total >> 10} KiB"
    )
