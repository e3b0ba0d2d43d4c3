"""The controller's side of every host whose ranks are processes: forming worlds, running jobs, and
the verdicts when a rank crashes or does not come back.

How the processes come to exist is a Crew's business (pool, mpiexec, external).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from smp_core.backends import parcels
from smp_core.backends.base import (
    PROTOCOL_VERSION,
    Factory,
    HostOptions,
    Job,
    Outcome,
    OutcomeKind,
    Report,
    VerdictKind,
    World,
)
from smp_core.backends.board.analysis import Board, Finding
from smp_core.backends.faults import Claim
from smp_core.backends.hosts import wire
from smp_core.backends.hosts.rank import (
    DISMISSED,
    STACKS,
    Done,
    Errand,
    Forming,
    Preparing,
    output_files,
    read_output,
)
from smp_core.backends.hosts.stacks import read_stacks, stacks_file
from smp_core.errors import (
    BackendError,
    CollectiveMismatchError,
    CrashError,
    JobLost,
    LeakError,
    PayloadError,
    RunTimeout,
)

log = logging.getLogger("smp_core.hosts")

_CHUNK = 1 << 16  # bytes read at a time
_CHUNKS = 4  # at most, at a look: a rank may write faster than we read
_LATE = 1.0  # seconds that a record may take that was sent before a rank came back
_TICK = 0.02  # seconds between two looks at the board
_START = 60.0  # seconds for rank processes to start and connect
_FORM = 60.0  # seconds for a world to form
_GRACE = 0.5  # seconds that the others get after a rank has failed, to end by themselves
_SETTLE = 2.0  # seconds that a rank which has sent its result gets to wait for the next errand
_CANCEL = 2.0  # seconds that a cooperative fabric gets to unwind


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A rank process that has ended. ``code`` is its exit code; negative is a signal.

    Only slot and pid together say which process it was: machines give out the same numbers.
    """

    slot: int | None
    pid: int | None
    code: int | None
    words: str = ""  # how, where there is no code

    def __str__(self) -> str:
        return self.words or describe_exit(self.code)


class Crew(ABC):
    """How rank processes come to exist, and end."""

    folder: str  # private to the run
    address: wire.Address | socket.socket  # where ranks connect, or what listens there already
    secret: bytes
    limit: int | None  # at most so many ranks
    restarts_together: bool  # one that ends takes all others with it
    final: bool = False  # who is lost is lost for good
    store: str = "file"  # see Seat
    prepares: bool  # runs the options' prelude by itself, before it starts ranks

    @abstractmethod
    def start(self, slots: Collection[int]) -> Collection[int]:
        """Start rank processes for these slots, and say for which others too; they connect when
        they are ready.
        """

    @abstractmethod
    def ended(self) -> list[Ended]:
        """Those that ended since the last call. Does not wait."""

    @abstractmethod
    def kill(self, ranks: Collection[RankProcess]) -> None:
        """End these processes at once, with everything that their bodies started."""

    @abstractmethod
    def close(self) -> None:
        """End what is left. Nothing of the crew outlives this call."""

    def welcome(self, connection: Connection, hello: dict[str, Any]) -> None:  # noqa: B027
        """A nursery has connected. Called in a thread of the listener's."""

    def gather(self) -> None:  # noqa: B027
        """Wait for what starts by itself."""

    def silent(self, host: str) -> None:  # noqa: B027
        """A machine does not answer. Called in the midst of a run."""

    def last_words(self) -> str:
        """What is known beside the ranks' own output when they cannot start."""
        return ""

    def stacks(self, ranks: Sequence[RankProcess]) -> dict[int, list[str]]:
        """Every rank's Python stack, whatever it is doing: its own signal handler writes it."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, STACKS)
        return {rank.slot: read_stacks(rank.folder, rank.pid) for rank in ranks}

    def written(self, rank: RankProcess) -> tuple[str, str]:
        """What a rank has written in this run, to standard output and to standard error."""
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
    body: int = 0  # the key of the body that it has
    path: list[str] | None = None  # the sys.path that it has
    records: int = 0  # bytes read from its line in this run
    over: bool = False  # its end has been told
    busy: bool = False  # has an errand, and has not said yet that it waits for the next

    def settle(self) -> None:
        """Hear that it waits again. Raises EOFError or OSError if it has ended instead."""
        if self.control.recv_bytes():
            raise EOFError("it sent something else")
        self.busy = False


class _Lobby:
    """Pairs the two connections of each rank process that connects."""

    def __init__(self) -> None:
        self._halves: dict[tuple[int, int, str, str], dict[str, Connection]] = {}
        self._ready: dict[int, RankProcess] = {}
        self._changed = threading.Condition()

    def welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Called by the listener's threads."""
        with self._changed:
            key = hello["slot"], hello["pid"], hello["host"], hello["folder"]
            halves = self._halves.setdefault(key, {})
            halves[hello["wire"]] = connection
            if len(halves) == 2:
                rank = RankProcess(*key, halves["control"], halves["line"])
                self._ready[rank.slot] = rank
                del self._halves[key]
                self._changed.notify_all()

    def take(self, slot: int, timeout: float) -> RankProcess | None:
        """The rank of this slot, once it is there."""
        with self._changed:
            self._changed.wait_for(lambda: slot in self._ready, timeout)
            return self._ready.pop(slot, None)

    def leftover(self) -> list[RankProcess]:
        """Those that nobody took."""
        with self._changed:
            ranks, self._ready = [*self._ready.values()], {}
        return ranks


class ProcessWorld:
    """A world of ``size`` rank processes."""

    def __init__(self, host: ProcessHost, size: int) -> None:
        self.size = size
        self._host = host

    def run(self, job: Job) -> Report:
        """Run the job on every rank; see the World protocol."""
        return self._host.run(job, self.size)


class ProcessHost:
    """Keeps rank processes warm, and runs one job at a time on as many of them as it needs.

    ``factory`` makes the fabric on each rank. ``synchronous_sends`` says that its sends of tensors
    are over only when their receives have come, so that the board knows.
    """

    protocol = PROTOCOL_VERSION
    steady = False  # a run may take long because ranks are started or replaced: no deadline on it

    def __init__(
        self,
        crew: Callable[[HostOptions], Crew],
        factory: Factory,
        *,
        synchronous_sends: bool = False,
    ) -> None:
        self._make_crew, self._factory = crew, factory
        self.injects = {Claim.STRIKES, Claim.PROCESSES}
        if factory.loses_tensors:
            self.injects.add(Claim.TENSORS)
        self._synchronous_sends = synchronous_sends
        self.lost = ""  # why nothing more can run, once that is so
        self._ranks: dict[int, RankProcess] = {}
        self._starting: set[int] = set()
        self._killed: set[tuple[int | None, int | None]] = set()  # their ends are no news
        self._unclaimed: list[Ended] = []
        self._folders: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._formings = itertools.count(1)
        self._environment = dict(os.environ)
        self._bodies: tuple[Any, int, bytes] = (None, 0, b"")
        self._running = False
        self._process = os.getpid()
        self.replaced = 0  # rank processes that had to be

    def configure(self, options: HostOptions) -> None:
        """Get ready to start rank processes."""
        self._check = options.check
        self._prelude = None if options.prelude is None else parcels.dumps(options.prelude)
        self._crew = crew = self._make_crew(options)
        self._lobby = _Lobby()
        self._listener = wire.Listener(crew.address, crew.secret, self._welcome)
        self._selector = selectors.DefaultSelector()
        descriptor = crew.fileno()
        if descriptor is not None:
            self._selector.register(descriptor, selectors.EVENT_READ, None)

    @property
    def refused(self) -> int:
        """Strangers that tried to connect."""
        return self._listener.refused

    def open(self, size: int) -> World:
        """A world of ``size`` ranks; processes are started when a run needs them."""
        if size < 1:
            raise BackendError(f"a world needs at least one rank, not {size}")
        if self._crew.limit is not None and size > self._crew.limit:
            raise BackendError(
                f"a world of {size} ranks was asked for, and there are {self._crew.limit} rank "
                "processes: start the job with more, or ask for fewer (--smp-ranks)"
            )
        return ProcessWorld(self, size)

    def close(self) -> None:
        """End all rank processes."""
        if os.getpid() != self._process:  # a fork of the controller has nothing to end
            return
        with contextlib.suppress(BackendError, JobLost):
            self._crew.gather()
            if self._crew.final and not self.lost:  # they end together, or not at all
                self._muster(self._crew.limit or 0)
        self._listener.close()
        ranks = [*self._ranks.values(), *self._lobby.leftover()]
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.control.send_bytes(pickle.dumps(None))
        self._crew.close()
        for rank in ranks:
            self._forget(rank)
        self._selector.close()

    def run(self, job: Job, size: int) -> Report:
        """Run ``job`` on ranks 0 to ``size`` - 1."""
        if self._running:
            raise BackendError(
                "a run was started inside another run; a world runs one job at a time"
            )
        if self.lost:
            raise BackendError(self.lost)
        self._running = True
        try:
            try:
                news = self._muster(size)
                self._form(size)
            except BaseException:  # a signal handler's too: answers may be on their way
                if not self._crew.final:
                    self._dismiss(list(self._ranks.values()))
                raise
            ranks = [self._ranks[slot] for slot in range(size)]
            run = _Run(self, self._crew, ranks, job, self._synchronous_sends)
            try:
                report = run.report(self._errands(job, size), self._check)
            finally:
                self._heal(run)
            report.warnings[:0] = news
            return report
        finally:
            self._running = False

    # Rank processes.

    def _welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        if hello["wire"] == "nursery":
            self._crew.welcome(connection, hello)
        else:
            self._lobby.welcome(connection, hello)

    def ends(self) -> list[Ended]:
        """Those that ended, but for those that this host killed."""
        told, self._unclaimed = [*self._unclaimed, *self._crew.ended()], []
        news = [ended for ended in told if (ended.slot, ended.pid) not in self._killed]
        self._killed.difference_update((ended.slot, ended.pid) for ended in told)
        for ended in told:
            rank = None if ended.slot is None else self._ranks.get(ended.slot)
            if rank is not None and rank.pid == ended.pid:
                rank.over = True
        return news

    def unclaimed(self, ended: Ended) -> None:
        """For whoever asks next."""
        self._unclaimed.append(ended)

    def _kill(self, ranks: Collection[RankProcess]) -> None:
        self._killed.update((rank.slot, rank.pid) for rank in ranks if not rank.over)
        self._crew.kill(ranks)

    def _muster(self, size: int) -> list[str]:
        """Have a rank process for each rank. What happened to some since the last run, in words."""
        news = []
        self._settle()
        for ended in self.ends():
            rank = None if ended.slot is None else self._ranks.get(ended.slot)
            if rank is not None and ended.pid in (rank.pid, None):
                self._forget(rank)
                text = f"the process of rank {rank.slot} ended after its last run ({ended})"
                news.append(
                    text if self._crew.final else f"{text}; another one has taken its place"
                )
            elif ended.slot in self._starting:  # before any run needed it
                self._starting.discard(ended.slot)
                self._lobby.take(ended.slot, 0.0)
        if news and self._crew.final:
            self.lost = (
                "the job has lost its ranks, and its launcher starts no others: run it again"
            )
            raise JobLost("\n".join(["the job has lost its ranks", *news]))
        if news and self._crew.restarts_together:
            self.replace(list(self._ranks.values()))
        missing = [
            slot for slot in range(size) if slot not in self._ranks and slot not in self._starting
        ]
        if missing:
            self._start(missing)
        deadline = time.monotonic() + _START
        newcomers = []
        for slot in sorted(self._starting & set(range(size))):
            self._ranks[slot] = rank = self._await(slot, deadline)
            os.set_blocking(rank.line.fileno(), False)
            self._starting.discard(slot)
            self._selector.register(rank.control, selectors.EVENT_READ, rank)
            newcomers.append(rank)
        if newcomers and not self._crew.prepares and self._prelude is not None:
            problems = self._ask(newcomers, Preparing(self._prelude), _START)
            if problems:
                self._dismiss(newcomers)
                raise BackendError("the rank processes cannot be prepared: " + "; ".join(problems))
        return news

    def _settle(self) -> None:
        """Have every rank wait for its next errand: one may have ended after it sent its result,
        and the next run must not be blamed for that.
        """
        late = []
        deadline = time.monotonic() + _SETTLE
        for rank in [rank for rank in self._ranks.values() if rank.busy]:
            try:
                if rank.control.poll(max(0.0, deadline - time.monotonic())):
                    rank.settle()
                else:
                    late.append(rank)
            except (EOFError, OSError):
                late.append(rank)
        told: list[Ended] = []
        while late and time.monotonic() < deadline:  # how they ended is told in a moment
            told += self.ends()
            late = [each for each in late if each.slot not in {ended.slot for ended in told}]
            time.sleep(0.001)
        self._unclaimed += told
        self.replace(late)

    def _start(self, slots: list[int]) -> None:
        if self._crew.restarts_together and not self._crew.final:
            self._killed.clear()  # of the last job
            for rank in self._lobby.leftover():  # of the last job too: no run had needed them
                self._forget(rank)
            self._environment = dict(os.environ)  # the new job begins with what is set now
        self._starting.update(self._crew.start(slots))

    def _await(self, slot: int, deadline: float) -> RankProcess:
        while True:
            left = deadline - time.monotonic()
            rank = self._lobby.take(slot, max(0.0, min(left, 0.2)))
            if rank is not None:
                return rank
            for ended in self.ends():
                if ended.slot not in self._starting:
                    self._unclaimed.append(ended)
                else:
                    self._starting.discard(ended.slot)  # the next run tries again
                    if self._crew.restarts_together:
                        self._starting.clear()
                        self._dismiss(list(self._ranks.values()))
                    if self._crew.final:
                        self.lost = f"the job has lost rank {ended.slot} before it was ready"
                    text = self._crew.last_words()
                    text += "".join(read_output(self._crew.folder, ended.pid or 0))[-2000:]
                    raise BackendError(
                        f"the process of rank {ended.slot} ended before it was ready: "
                        f"{ended}\n{text}".rstrip()
                    )
            if left <= 0:
                raise BackendError(f"the process of rank {slot} was not ready within {_START:g} s")

    def _forget(self, rank: RankProcess) -> None:
        self._ranks.pop(rank.slot, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(rank.control)
        # It may live a little longer, and must not take this for the controller's end, at which a rank
        # removes the run's folder.
        with contextlib.suppress(OSError):
            rank.line.send_bytes(str(DISMISSED).encode())
        rank.control.close()
        rank.line.close()
        for path in (*output_files(rank.folder, rank.pid), stacks_file(rank.folder, rank.pid)):
            with contextlib.suppress(OSError):  # on another machine, or gone with the folder
                path.unlink()

    def replace(self, ranks: Collection[RankProcess]) -> None:
        """Kill these rank processes and start others in their places; does not wait for them."""
        if not ranks or self.lost:
            return
        if self._crew.final:
            slots = ", ".join(str(rank.slot) for rank in ranks)
            self.lost = (
                f"the job has lost rank {slots}, and its launcher starts no other: run it again"
            )
            self._dismiss(list(ranks))
            return
        if self._crew.restarts_together:
            ranks = list(self._ranks.values())
        self._kill(ranks)
        for rank in ranks:
            self._forget(rank)
        self.replaced += len(ranks)
        self._start([rank.slot for rank in ranks])

    # Worlds.

    def _form(self, size: int) -> None:
        ranks = [self._ranks[slot] for slot in range(size)]
        formings = {rank.worlds.get(size) for rank in ranks}
        if len(formings) == 1 and None not in formings:
            return
        number = next(self._formings)
        folder = os.path.join(self._crew.folder, f"world-{number}")
        os.mkdir(folder, 0o700)
        shutil.rmtree(self._folders.get(size, ""), ignore_errors=True)  # of the last forming
        self._folders[size] = folder
        requests = []
        for rank in ranks:
            rank.worlds[size] = number
            local_rank, local_size = self._crew.place(rank.slot, size)
            requests.append(
                Forming(
                    number, size, local_rank, local_size, folder, self._crew.store, self._factory
                )
            )
        problems = self._ask(ranks, requests, _FORM)
        if problems:
            self._dismiss(ranks)
            raise BackendError(f"the world of {size} ranks cannot form: " + "; ".join(problems))

    def _ask(self, ranks: list[RankProcess], requests: Any, timeout: float) -> list[str]:
        """Send each rank a request (one for all, or a list) and take the answers: what went wrong."""
        if not isinstance(requests, list):
            requests = [requests] * len(ranks)
        problems = []
        for rank, request in zip(ranks, requests, strict=True):
            try:
                rank.control.send_bytes(pickle.dumps(request))
            except OSError:
                problems.append(f"rank {rank.slot}: its process has ended")
        waiting = {rank.slot: rank for rank in ranks}
        deadline = time.monotonic() + timeout
        while waiting and not problems:
            if time.monotonic() > deadline:
                return [f"rank {slot} did not answer within {timeout:g} s" for slot in waiting]
            for key, _ in self._selector.select(_TICK):
                rank = key.data
                if rank is None:
                    self._unclaimed += self.ends()
                if rank is None or rank.slot not in waiting:
                    continue
                del waiting[rank.slot]
                try:
                    answer = pickle.loads(rank.control.recv_bytes())
                except (EOFError, OSError):
                    answer = "its process has ended"
                if answer is not None:
                    problems.append(f"rank {rank.slot}: {answer}")
        return problems

    def _dismiss(self, ranks: list[RankProcess]) -> None:
        if self._crew.restarts_together and not self._crew.final:
            ranks = list(self._ranks.values())  # their job ends with them
        self._kill(ranks)
        for rank in ranks:
            self._forget(rank)

    def _heal(self, run: _Run) -> None:
        """After a run: replace who is broken, and let a world whose traffic stopped midway go."""
        self.replace(run.broken)
        if not run.whole:
            for rank in run.ranks:
                rank.worlds.pop(len(run.ranks), None)

    # Jobs.

    def _errands(self, job: Job, size: int) -> Callable[[RankProcess], Errand]:
        number = next(self._numbers)
        body, key, packed = self._bodies
        if body is not job.body or not parcels.is_constant(body):
            again = parcels.dumps(job.body)
            if again != packed:
                self._bodies = _, key, packed = job.body, key + 1, again
        fields = {
            name: getattr(job, name)
            for name in (
                *("parameters", "automatic_init", "seed", "strict", "capture", "skips"),
                *(("faults",) if job.faults else ()),
            )
        }
        rest = parcels.dumps((job.arguments, fields, list(warnings.filters)))
        environment = _changes(self._environment, os.environ)
        path = list(sys.path)
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None

        def errand(rank: RankProcess) -> Errand:
            known = rank.body == key
            moved = rank.path != path
            rank.body, rank.path = key, path
            return Errand(
                number,
                size,
                key,
                None if known else packed,
                rest,
                environment,
                directory,
                path if moved else None,
                self._check,
            )

        return errand


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    changed: dict[str, str | None] = {
        name: value for name, value in now.items() if before.get(name) != value
    }
    changed.update({name: None for name in before if name not in now})
    return changed


class _Run:
    """One run: from sending the job to every rank's outcome."""

    def __init__(
        self,
        host: ProcessHost,
        crew: Crew,
        ranks: list[RankProcess],
        job: Job,
        synchronous_sends: bool,
    ) -> None:
        self._host, self._crew, self._job = host, crew, job
        self.ranks = ranks
        self.broken: list[RankProcess] = []  # to be replaced
        self.whole = True  # the world can serve again
        self._board = Board(len(ranks), synchronous_sends=synchronous_sends)
        self._done: dict[int, Done] = {}
        self._errors: dict[int, BaseException] = {}
        self._running = {rank.slot: rank for rank in ranks}
        self._crashed: dict[int, str] = {}
        self._gone: dict[
            int, RankProcess
        ] = {}  # its connection closed; how it ended is not known yet
        self._finding: Finding | None = None
        self._number = 0
        self._checks = False

    def report(self, errand: Callable[[RankProcess], Errand], check: bool) -> Report:
        """Send the job, wait for all, and say how it went."""
        self._checks = check
        try:
            for rank in self.ranks:
                rank.records = 0
                request = errand(rank)
                if not self._number:
                    self._number = request.number
                    self._board.reset(self._number)
                rank.busy = True
                try:
                    rank.control.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
                except OSError:
                    self._lost(rank)
            timed_out = self._wait()
            if timed_out:
                return self._timeout()
            return self._conclude()
        except BaseException:  # Ctrl-C, or a signal handler of another plugin
            self._stop(list(self._running.values()))
            raise

    # Waiting.

    def _wait(self) -> bool:
        """Until all ranks have ended, or one's failure has ended the run. Whether time was up."""
        limit = math.inf if self._job.timeout is None else self._job.timeout
        start = time.monotonic()
        failed_at = found_at = math.inf
        while self._running:
            self._hear(_TICK)
            now = time.monotonic()
            if self._running and self._checks:
                self._read_lines()
                if self._finding is None:
                    finding = self._board.look(self._running, now)
                    found_at = min(found_at, now) if finding is not None else math.inf
                    # A body that is over may have raised, which would be the cause.
                    leaving = any(self._board.body_is_over(slot) for slot in self._running)
                    if not leaving or now - found_at > _GRACE:
                        self._finding = finding
            if self._failed():
                failed_at = min(failed_at, now)
                if self._finding is not None or now - failed_at > _GRACE or self._all_wait():
                    self._stop(list(self._running.values()))
                    return False
            elif now - start > limit:
                if not self._job.patience():
                    return True
                start = now
        return False

    def _failed(self) -> bool:
        return bool(self._crashed or self._gone or self._errors or self._finding)

    def _all_wait(self) -> bool:
        return self._checks and all(self._board.blocked(slot) for slot in self._running)

    def _hear(self, timeout: float) -> None:
        for key, _ in self._host._selector.select(timeout):
            rank = key.data
            if rank is None:
                self._hear_of_ends()
            elif rank.slot in self._running and self._running[rank.slot] is rank:
                try:
                    done: Done = pickle.loads(rank.control.recv_bytes())
                except (EOFError, OSError) as error:
                    self._lost(rank)
                    if wire.is_silence(error):
                        self._silent(rank.host)
                else:
                    self._came_back(rank, done)
            else:
                try:
                    if not rank.busy:
                        raise EOFError
                    rank.settle()
                except (EOFError, OSError):  # its end is told elsewhere; it would wake us for ever
                    with contextlib.suppress(KeyError, ValueError):
                        self._host._selector.unregister(rank.control)
        if self._gone:
            self._hear_of_ends()

    def _came_back(self, rank: RankProcess, done: Done) -> None:
        del self._running[rank.slot]
        self._done[rank.slot] = done
        if done.error is not None:
            try:
                error = pickle.loads(done.error)
            except Exception as reason:
                error = parcels.RemoteError(
                    f"rank {rank.slot} raised what cannot be unpickled here: {reason}"
                )
            done.outcome.error = error
            if done.outcome.kind is OutcomeKind.RAISED:
                self._errors[rank.slot] = error
        if done.value is not None:
            try:
                done.outcome.value = pickle.loads(done.value)
            except Exception as reason:
                error = PayloadError(
                    f"rank {rank.slot}: what the body returned was pickled there and cannot be "
                    f"unpickled here: {type(reason).__name__}: {reason}"
                )
                done.outcome.kind, done.outcome.error = OutcomeKind.RAISED, error
                self._errors[rank.slot] = error
        if done.unclean and self._crew.final:  # there is no other
            log.warning("rank %d goes on with %s", rank.slot, "; ".join(done.unclean))
            self.whole = False
        elif done.unclean:
            log.info("rank %d is replaced: %s", rank.slot, "; ".join(done.unclean))
            self.broken.append(rank)

    def _lost(self, rank: RankProcess) -> None:
        """Its connection closed: it has ended, or will be ended."""
        if self._checks:
            self._read_line(rank)
            self._board.gone(rank.slot)
        self._running.pop(rank.slot, None)
        self._gone[rank.slot] = rank
        self.broken.append(rank)
        with contextlib.suppress(KeyError, ValueError):
            self._host._selector.unregister(rank.control)

    def _silent(self, host: str) -> None:
        """A machine does not answer: none of its ranks will."""
        self._crew.silent(host)
        for rank in self.ranks:
            if rank.host == host and rank.slot not in self._done:
                if rank.slot in self._running:
                    self._lost(rank)
                self._gone.pop(rank.slot, None)
                self._crashed.setdefault(rank.slot, wire.silence(host))

    def _hear_of_ends(self) -> None:
        for ended in self._host.ends():
            who = ended.slot, ended.pid
            rank = next((each for each in self.ranks if (each.slot, each.pid) == who), None)
            if rank is None:  # another's, or one that its launcher took down with the job
                self._host.unclaimed(ended)
                continue
            if rank.slot in self._running:
                # What it sent before it ended still lies in its connection.
                while rank.slot in self._running and rank.control.poll(0):
                    try:
                        self._came_back(rank, pickle.loads(rank.control.recv_bytes()))
                    except (EOFError, OSError):
                        break
                if rank.slot in self._running:
                    self._lost(rank)
            self._gone.pop(rank.slot, None)
            if rank not in self.broken:
                self.broken.append(rank)
            self._crashed[rank.slot] = str(ended)

    def _read_lines(self) -> None:
        for rank in self.ranks:
            self._read_line(rank)

    def _read_line(self, rank: RankProcess, upto: int | None = None) -> None:
        """What a rank has written for the board, or, with ``upto``, so many bytes of this run."""
        descriptor = rank.line.fileno()
        try:
            for _ in itertools.repeat(None) if upto is not None else range(_CHUNKS):
                if upto is not None and rank.records >= upto:
                    return
                if upto is not None and not rank.line.poll(_LATE):
                    return
                data = os.read(descriptor, _CHUNK)
                if not data:
                    return  # it has ended; its control connection says so too
                rank.records += len(data)
                self._board.feed(rank.slot, data)
        except BlockingIOError:
            pass
        except OSError:
            pass  # it has ended
        except BackendError as error:  # no verdict from the board, in this run
            log.warning("%s", error)

    # The end.

    def _stop(self, ranks: list[RankProcess]) -> None:
        """End those that still run: ask where the fabric listens, kill otherwise."""
        self.whole = False
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.line.send_bytes(str(self._number).encode())
        deadline = time.monotonic() + (_CANCEL if self._crew.restarts_together else 0.0)
        while self._running and time.monotonic() < deadline:
            self._hear(_TICK)
            if self._checks:
                self._read_lines()  # who writes a record does not look whether it is to end
        self.broken += self._running.values()
        self._running = {}

    def _finish_reading(self) -> None:
        """Read every record that the ranks sent before they came back."""
        for slot, done in self._done.items():
            self._read_line(self.ranks[slot], done.records)
        self._read_lines()

    def _conclude(self) -> Report:
        deadline = time.monotonic() + 1.0
        while self._gone and time.monotonic() < deadline:  # how they ended is told in a moment
            self._hear_of_ends()
            time.sleep(0.001)
        if not self._crashed:
            self._crashed = {slot: describe_exit(None) for slot in self._gone}
        if self._checks:
            self._finish_reading()
            if self._finding is None:
                self._finding = self._board.look((), time.monotonic())
        root, error, verdict = self._cause()
        if self._crew.final and self.broken:
            error = JobLost(f"the job has lost its ranks\n{error}")
        outcomes = [self._outcome(rank, root, error) for rank in self.ranks]
        if error is None and not any(each.kind is OutcomeKind.SKIPPED for each in outcomes):
            return self._leaks(outcomes)
        if self.whole:  # a run that skipped may have left messages as well
            self.whole = self._checks and self._board.settled()
        return Report(verdict, outcomes, root, error)

    def _cause(self) -> tuple[int | None, BaseException | None, VerdictKind]:
        """The root cause: a crash, a finding of the board, or the first that raised by itself."""
        finding = self._finding
        mismatch = finding is not None and isinstance(finding.error, CollectiveMismatchError)
        if finding is not None and mismatch:
            return finding.root, finding.error, VerdictKind.MISMATCH
        if self._crashed:
            self.whole = False
            slot = next(iter(self._crashed))  # the first that was told: others may follow from it
            return slot, self._crash(slot), VerdictKind.CRASHED
        if self._errors:
            slot = min(self._errors, key=self._rank_of_cause)
            return slot, self._errors[slot], VerdictKind.FAILED
        if finding is not None:
            return finding.root, finding.error, VerdictKind.DEADLOCK
        return None, None, VerdictKind.PASSED

    def _rank_of_cause(self, slot: int) -> tuple[bool, int]:
        """Errors out of a communication call are often the consequence of another rank's. Among the
        others the lowest rank's, not the first in time: the same failure must look the same again.
        """
        return self._waits(slot), slot

    def _crash(self, slot: int) -> CrashError:
        how, where = self._crashed[slot], self._where(slot)
        if where and how == wire.silence(self.ranks[slot].host):
            how += "; it was last seen"
        lines = [f"rank {slot} crashed: {how} {where}".rstrip()]
        others = [each for each in self._crashed if each != slot]
        lines += [f"rank {each} crashed too: {self._crashed[each]}" for each in others]
        lines += self._last_words(slot)
        return CrashError("\n".join(lines))

    def _last_words(self, slot: int) -> list[str]:
        stderr = self._crew.written(self.ranks[slot])[1].strip().splitlines()
        return ["it wrote last:", *(f"    {line}" for line in stderr[-12:])] if stderr else []

    def _outcome(self, rank: RankProcess, root: int | None, error: BaseException | None) -> Outcome:
        slot = rank.slot
        done = self._done.get(slot)
        if slot in self._crashed:
            outcome = Outcome(slot, OutcomeKind.CRASHED, detail=f"crashed: {self._crashed[slot]}")
        elif done is not None and done.outcome.kind is not OutcomeKind.CANCELLED:
            return done.outcome
        else:
            outcome = Outcome(slot, OutcomeKind.CANCELLED)
        outcome.stdout, outcome.stderr = self._crew.written(rank)
        finding = self._finding
        if outcome.kind is OutcomeKind.CANCELLED:
            if finding is not None and error is finding.error and slot in finding.waits:
                outcome.kind, outcome.detail = OutcomeKind.STUCK, finding.waits[slot]
            else:
                blame = f"rank {root}" if root is not None else "another rank"
                outcome.detail = f"cancelled because of {blame}"
        return outcome

    def _leaks(self, outcomes: list[Outcome]) -> Report:
        strict = self._job.strict
        fatal, minor = self._board.leaks(strict) if self._checks else ([], [])
        for slot, done in sorted(self._done.items()):
            for text in done.groups:
                (fatal if strict else minor).append(f"rank {slot}: {text}")
        if fatal:
            self.whole = False
            error = LeakError(
                "\n".join(["leak: the run left something behind", *(f"  {each}" for each in fatal)])
            )
            return Report(VerdictKind.LEAK, outcomes, None, error, warnings=minor)
        self.whole = self.whole and not (self._checks and self._board.parted())
        return Report(VerdictKind.PASSED, outcomes, warnings=minor)

    def _timeout(self) -> Report:
        """The verdict on a run that did not end in time: every rank's state and stack."""
        stuck = dict(self._running)
        stacks = self._crew.stacks(list(stuck.values()))
        if self._checks:
            self._finish_reading()
        limit = f"{self._job.timeout:g} s (--smp-timeout)"
        lines = [f"timeout: the run did not end within {limit}"]
        details = {slot: f"rank {slot} {self._where(slot) or 'never came back'}" for slot in stuck}
        for slot in sorted(stuck, key=lambda each: (self._waits(each), each)):
            lines += [details[slot], *stacks.get(slot, ())]  # the one to blame first
        for slot, done in sorted(self._done.items()):
            error = done.outcome.error
            text = "" if error is None else f" {type(error).__name__}: {error}"
            lines.append(f"rank {slot} has {done.outcome.kind}{text}")
        self._stop(list(stuck.values()))
        outcomes = [self._outcome(rank, None, None) for rank in self.ranks]
        for slot, detail in details.items():
            outcomes[slot].kind, outcomes[slot].detail = OutcomeKind.STUCK, detail
        timeout = RunTimeout("\n".join(lines))
        return Report(VerdictKind.TIMED_OUT, outcomes, None, timeout)

    def _where(self, slot: int) -> str:
        return self._board.where(slot) if self._checks else ""

    def _waits(self, slot: int) -> bool:
        return self._checks and self._board.waits(slot)


def describe_exit(code: int | None) -> str:
    """An exit status in words; negative is a signal."""
    if code is None:
        return "its connection closed"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name} (signal {-code})"
    except ValueError:
        return f"killed by signal {-code}"
