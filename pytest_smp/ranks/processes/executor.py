"""The controller's side of every executor whose ranks are processes: it has them started and replaced,
forms worlds of them, and runs one job at a time.

How the processes come to exist is a WorkerPool's business (pool, mpiexec, external).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import operator
import os
import pickle
import selectors
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from pytest_smp.ranks import serialization
from pytest_smp.ranks.board.analysis import Board
from pytest_smp.ranks.faults import Claim
from pytest_smp.ranks.processes import wire
from pytest_smp.ranks.processes.output import output_files, read_output
from pytest_smp.ranks.processes.process_state import changes, environment
from pytest_smp.ranks.processes.rank import DISMISSED
from pytest_smp.ranks.processes.run import TICK, Run
from pytest_smp.ranks.processes.stacks import stacks_file
from pytest_smp.ranks.processes.tasks import Forming, JobSpec, Preparing, Task
from pytest_smp.ranks.processes.worker_pool import Ended, RankProcess, WorkerPool
from pytest_smp.ranks.protocols import (
    PROTOCOL_VERSION,
    Executor,
    ExecutorOptions,
    Factory,
    Job,
    Report,
    World,
)
from smp_core.errors import BackendError, JobLost, SmpError

# pytest leaves these frames out below an error that we raise on purpose; a bug of ours shows them.
__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)

log = logging.getLogger("pytest_smp.ranks")

_START = 300.0  # seconds for rank processes to start and connect: on a machine at work they import for a minute
_FORM = 300.0  # seconds for a world to form
_ATTEMPTS = 3  # to have a world, if its processes are lost meanwhile
_ENDED = "its process has ended"
_SETTLE = 20.0  # seconds that a rank which has sent its result gets to wait for the next task


class _ProcessLost(BackendError):
    """A rank process has ended before its world was there, for no reason of its own."""


class _PendingConnections:
    """Pairs the two connections of each rank process that connects."""

    def __init__(self) -> None:
        self._halves: dict[tuple[int, int, str, str], dict[str, Connection]] = {}
        # Of a slot there may be several: a process that ended while it connected, and the one in its place.
        self._ready: dict[int, list[RankProcess]] = {}
        self._changed = threading.Condition()

    def welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Called by the listener's threads."""
        with self._changed:
            key = hello["slot"], hello["pid"], hello["host"], hello["folder"]
            halves = self._halves.setdefault(key, {})
            halves[hello["wire"]] = connection
            if len(halves) == 2:
                rank = RankProcess(*key, halves["control"], halves["line"])
                self._ready.setdefault(rank.slot, []).append(rank)
                del self._halves[key]
                self._changed.notify_all()

    def take(self, slot: int, timeout: float) -> RankProcess | None:
        """The rank of this slot that connected first, once one is there."""
        with self._changed:
            self._changed.wait_for(lambda: slot in self._ready, timeout)
            ready = self._ready.pop(slot, [])
            if ready[1:]:
                self._ready[slot] = ready[1:]
            return ready[0] if ready else None

    def drop(self, slot: int) -> None:
        """Forget the rank processes of this slot that have connected."""
        with self._changed:
            self._ready.pop(slot, None)

    def leftover(self) -> list[RankProcess]:
        """Remove and return the rank processes that have connected and that nobody took."""
        with self._changed:
            ranks, self._ready = [*itertools.chain(*self._ready.values())], {}
        return ranks


class ProcessWorld:
    """A world of ``size`` rank processes."""

    def __init__(self, executor: ProcessExecutor, size: int) -> None:
        self.size = size
        self._executor = executor

    def run(self, job: Job) -> Report:
        """Run the job on every rank; see the World protocol."""
        return self._executor.run(job, self.size)


class ProcessExecutor(Executor):
    """Keeps rank processes warm, and runs one job at a time on as many of them as it needs.

    ``factory`` makes the fabric on each rank. ``synchronous_sends`` says that its sends of tensors
    are over only when their receives have come, and ``ordered_receives`` that the oldest receive that
    fits takes a message, so that the board knows.
    """

    protocol = PROTOCOL_VERSION
    steady = False  # a run may take long because ranks are started or replaced: no deadline on it

    def __init__(
        self,
        pool: Callable[[ExecutorOptions], WorkerPool],
        factory: Factory,
        *,
        synchronous_sends: bool = False,
        ordered_receives: bool = False,
    ) -> None:
        self._make_pool, self._factory = pool, factory
        tensors = {Claim.TENSORS} if factory.loses_tensors else set()
        self.injects = {Claim.STRIKES, Claim.PROCESSES} | tensors
        self._matching = {
            "synchronous_sends": synchronous_sends,
            "ordered_receives": ordered_receives,
        }
        self.lost = ""  # why nothing more can run, once that is so
        self._numbers = itertools.count(1)
        self._formings = itertools.count(1)
        self._running = False
        self._process = os.getpid()
        self.replaced = 0  # rank processes that had to be

    def configure(self, options: ExecutorOptions) -> None:
        """Get ready to start rank processes."""
        self._options = options
        self._ranks: dict[int, RankProcess] = {}
        self._starting: set[int] = set()
        self._killed: set[tuple[int | None, int | None]] = set()  # their ends are no news
        self._unclaimed: list[Ended] = []
        self._folders: dict[int, str] = {}  # of worlds, by size
        self._check = options.check
        self._renew_job_cache()
        self._prelude = None if options.prelude is None else serialization.dumps(options.prelude)
        self._pool = pool = self._make_pool(options)
        self._pending = _PendingConnections()
        self._listener = wire.Listener(pool.address, pool.secret, self._welcome)
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        descriptor = pool.fileno()
        if descriptor is not None:
            self.selector.register(descriptor, selectors.EVENT_READ, None)

    @property
    def refused(self) -> int:
        """Strangers that tried to connect."""
        return self._listener.refused

    def open(self, size: int) -> World:
        """A world of ``size`` ranks; processes are started when a run needs them."""
        if size < 1:
            raise BackendError(f"a world needs at least one rank, not {size}")
        if self._pool.limit is not None and size > self._pool.limit:
            raise BackendError(
                f"a world of {size} ranks was asked for, and there are {self._pool.limit} rank "
                "processes: start the job with more, or ask for fewer (--smp-ranks)"
            )
        return ProcessWorld(self, size)

    def renew(self) -> None:
        """Replace all rank processes."""
        if self._pool.final:
            super().renew()
        self.replace(list(self._ranks.values()))

    def close(self) -> None:
        """End all rank processes."""
        if os.getpid() != self._process:  # a fork of the controller has nothing to end
            return
        with contextlib.suppress(BackendError, JobLost):
            self._pool.gather()
            if self._pool.final and not self.lost:  # they end together, or not at all
                self._ensure_ranks(self._pool.limit or 0, news=[])
        self._listener.close()
        ranks = [*self._ranks.values(), *self._pending.leftover()]
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.control.send_bytes(pickle.dumps(None))
        self._pool.close()
        for rank in ranks:
            self._forget(rank)
        self.selector.close()

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
            self._renew_folder()
            news = self._gather(size)
            ranks = [self._ranks[slot] for slot in range(size)]
            number = next(self._numbers)
            board = None
            if self._check:
                board = Board(size, **self._matching)
            run = Run(self, self._pool, ranks, job, number, board)
            try:
                report = run.report(self._tasks(job, size, number))
            finally:
                self._replace_lost(run)
            report.warnings[:0] = news
            return report
        finally:
            self._running = False

    # Rank processes.

    def _renew_folder(self) -> None:
        """Begin with a new pool if somebody has removed its folder, or a part of it (a cleaner of TMPDIR):
        no process could connect, and no world form.
        """
        paths = [*self._folders.values()]
        if isinstance(self._pool.address, str):
            paths.append(self._pool.address)
        missing = next((path for path in paths if not os.path.exists(path)), None)
        if missing is None or self._pool.final:  # those that a launcher started have no other
            return
        log.warning("%s of the rank processes is gone, and others take their places", missing)
        self.close()
        self.configure(self._options)

    def _welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        if hello["wire"] == "fork_server":
            self._pool.welcome(connection, hello)
        else:
            self._pending.welcome(connection, hello)

    def ends(self) -> list[Ended]:
        """The rank processes that ended since the last call, without those that this executor killed."""
        told, self._unclaimed = [*self._unclaimed, *self._pool.ended()], []
        news = [ended for ended in told if (ended.slot, ended.pid) not in self._killed]
        self._killed.difference_update((ended.slot, ended.pid) for ended in told)
        for ended in told:
            rank = None if ended.slot is None else self._ranks.get(ended.slot)
            if rank is not None and rank.pid == ended.pid:
                rank.over = True
        return news

    def unclaimed(self, ended: Ended) -> None:
        """Keep an end that is no part of the run that read it, for the next call of ``ends``."""
        self._unclaimed.append(ended)

    def _kill(self, ranks: Collection[RankProcess]) -> None:
        self._killed.update((rank.slot, rank.pid) for rank in ranks if not rank.over)
        self._pool.kill(ranks)

    def _gather(self, size: int) -> list[str]:
        """Form a world of ``size`` ranks; return the ends of its processes since the last run, in words."""
        news: list[str] = []  # of all attempts: an end is told of once
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._ensure_ranks(size, news)
                self._form(size)
            except BaseException as error:  # a signal handler's too: answers may be on their way
                if not self._pool.final:
                    self._terminate(list(self._ranks.values()))
                if not isinstance(error, _ProcessLost) or self._pool.final or attempt == _ATTEMPTS:
                    raise
                log.warning("%s; they are started again", error)
            else:
                return news
        raise AssertionError("unreachable")

    def _ensure_ranks(self, size: int, news: list[str]) -> None:
        """Have a rank process for each rank. `news` gets what happened to some since the last run, in words."""
        ranks = [self._ranks.get(slot) for slot in range(size)]
        if all(rank is not None and not rank.busy for rank in ranks) and not (
            self._starting or self._unclaimed or self.selector.select(0)
        ):
            return  # all ranks are there, and no process has ended
        told = len(news)
        self._settle()
        if self.lost:  # a rank that did not settle: nobody would come in its place
            raise JobLost(self.lost)
        for ended in self.ends():
            rank = None if ended.slot is None else self._ranks.get(ended.slot)
            now = rank is not None and ended.pid in (rank.pid, None) and not ended.past
            if rank is not None and now:
                self._forget(rank)
            if now or ended.past:
                text = f"the process of rank {ended.slot} ended after its last run ({ended})"
                news.append(
                    text if self._pool.final else f"{text}; another one has taken its place"
                )
            elif ended.slot in self._starting:  # before any run needed it
                self._starting.discard(ended.slot)
                self._pending.drop(ended.slot)
        if news[told:] and self._pool.final:
            self.lost = (
                "the job has lost its ranks, and its launcher starts no others: run it again"
            )
            raise JobLost("\n".join(["the job has lost its ranks", *news]))
        if news[told:] and self._pool.restarts_together:
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
            self.selector.register(rank.control, selectors.EVENT_READ, rank)
            newcomers.append(rank)
        if newcomers and not self._pool.prepares and self._prelude is not None:
            problems = self._ask(newcomers, Preparing(self._prelude), _START)
            if problems:
                self._terminate(newcomers)
                raise BackendError("the rank processes cannot be prepared: " + "; ".join(problems))

    def _settle(self) -> None:
        """Have every rank wait for its next task: one may have ended after it sent its result,
        and the next run must not be blamed for that.
        """
        late = []
        deadline = time.monotonic() + _SETTLE
        told_of = {key.data for key, _ in self.selector.select(0)}
        for rank in [each for each in self._ranks.values() if each.busy or each in told_of]:
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
        if self._pool.restarts_together and not self._pool.final:
            self._killed.clear()  # of the last job
            # Unread ends are of the last job, too: the new ranks have the same numbers.
            self._unclaimed = [dataclasses.replace(ended, past=True) for ended in self._unclaimed]
            for rank in self._pending.leftover():  # of the last job too: no run had needed them
                self._forget(rank)
            self._renew_job_cache()  # the new job begins with the present environment
        self._starting.update(self._pool.start(slots))

    def _await(self, slot: int, deadline: float) -> RankProcess:
        while True:
            left = deadline - time.monotonic()
            rank = self._pending.take(slot, max(0.0, min(left, 0.2)))
            state = None if rank is None else self._pool.state(rank)
            if rank is not None and state is not None and state.ends:
                # Of the last job: it ended while its connections were being made. (A new one that
                # has ended is told by `ends`.)
                rank.control.close()
                rank.line.close()
            elif rank is not None:
                return rank
            for ended in self.ends():
                if ended.slot not in self._starting:
                    self._unclaimed.append(ended)
                else:
                    self._starting.discard(ended.slot)  # the next run tries again
                    if self._pool.restarts_together:
                        self._starting.clear()
                        self._terminate(list(self._ranks.values()))
                    if self._pool.final:
                        self.lost = f"the job has lost rank {ended.slot} before it was ready"
                    text = self._pool.last_words()
                    text += "".join(read_output(self._pool.folder, ended.pid or 0))[-2000:]
                    # A process that exits with an error, or has no shared memory (SIGBUS), would do so again:
                    # only one that was killed otherwise is restarted.
                    again = (ended.code or 0) <= 0 and ended.code != -signal.SIGBUS
                    kind = _ProcessLost if again else BackendError
                    raise kind(
                        f"the process of rank {ended.slot} ended before it was ready: "
                        f"{ended}\n{text}".rstrip()
                    )
            if left <= 0:
                raise BackendError(f"the process of rank {slot} was not ready within {_START:g} s")

    def _forget(self, rank: RankProcess) -> None:
        self._ranks.pop(rank.slot, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(rank.control)
        # The process may live a little longer, and must not take the closed connection for the
        # controller's end, at which a rank removes the run's folder.
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
        if self._pool.final:
            slots = ", ".join(str(rank.slot) for rank in ranks)
            self.lost = (
                f"the job has lost rank {slots}, and its launcher starts no other: run it again"
            )
            self._terminate(list(ranks))
            return
        if self._pool.restarts_together:
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
        folder = os.path.join(self._pool.folder, f"world-{number}")
        os.mkdir(folder, 0o700)
        shutil.rmtree(self._folders.get(size, ""), ignore_errors=True)  # of the last forming
        self._folders[size] = folder
        requests = []
        for rank in ranks:
            rank.worlds[size] = number
            local_rank, local_size = self._pool.place(rank.slot, size)
            requests.append(
                Forming(
                    number, size, local_rank, local_size, folder, self._pool.store, self._factory
                )
            )
        problems = self._ask(ranks, requests, _FORM)
        if problems:
            self._terminate(ranks)
            kind = _ProcessLost if any(_ENDED in each for each in problems) else BackendError
            raise kind(f"the world of {size} ranks cannot form: " + "; ".join(problems))

    def _ask(self, ranks: list[RankProcess], requests: Any, timeout: float) -> list[str]:
        """Send each rank a request (one for all, or a list) and take the answers: what went wrong."""
        if not isinstance(requests, list):
            requests = [requests] * len(ranks)
        problems = []
        for rank, request in zip(ranks, requests, strict=True):
            try:
                rank.control.send_bytes(pickle.dumps(request))
            except OSError:
                problems.append(f"rank {rank.slot}: {_ENDED}")
        waiting = {rank.slot: rank for rank in ranks}
        deadline = time.monotonic() + timeout
        while waiting and not problems:
            if time.monotonic() > deadline:
                return self._late(waiting, timeout)
            for key, _ in self.selector.select(TICK):
                rank = key.data
                if rank is None:
                    self._unclaimed += self.ends()
                if rank is None or rank.slot not in waiting:
                    continue
                del waiting[rank.slot]
                try:
                    answer = pickle.loads(rank.control.recv_bytes())
                except (EOFError, OSError):
                    answer = _ENDED
                if answer is not None:
                    problems.append(f"rank {rank.slot}: {answer}")
        return problems

    def _late(self, waiting: dict[int, RankProcess], timeout: float) -> list[str]:
        """A text for each rank that has not answered, with its stacks."""
        stacks = self._pool.stacks(list(waiting.values()))
        return [
            "\n".join([f"rank {slot} did not answer within {timeout:g} s", *stacks.get(slot, ())])
            for slot in waiting
        ]

    def _terminate(self, ranks: list[RankProcess]) -> None:
        if self._pool.restarts_together and not self._pool.final:
            ranks = list(self._ranks.values())  # their job ends with them
        self._kill(ranks)
        for rank in ranks:
            self._forget(rank)

    def _replace_lost(self, run: Run) -> None:
        """Replace the run's broken ranks, and drop its world if traffic stopped midway."""
        self.replace(run.broken)
        if not run.whole:
            for rank in run.ranks:
                rank.worlds.pop(len(run.ranks), None)

    # Jobs.

    def _renew_job_cache(self) -> None:
        self._job_cache = _JobCache(dict(os.environ), self._check)

    def _tasks(self, job: Job, size: int, number: int) -> Callable[[RankProcess], bytes]:
        job_spec = self._job_cache.job_spec(job)
        arguments = serialization.dumps(job.arguments)

        @functools.cache  # ranks that have the job spec get the same bytes
        def task(known: bool) -> bytes:
            told = None if known else job_spec
            return Task(number, size, told, job.seed, arguments, bool(job.faults)).packed()

        def task_of(rank: RankProcess) -> bytes:
            known, rank.job_spec = rank.job_spec == job_spec.key, job_spec.key
            return task(known)

        return task_of


class _JobCache:
    """The job spec that was made last: another is made when something has changed."""

    def __init__(self, started_with: dict[str, str], check: bool) -> None:
        self._started_with, self._check = started_with, check
        self._body: Any = None
        self._basis: tuple[Any, ...] = ()
        self._job_spec = JobSpec(0, b"", b"", {}, None, [], check)

    def job_spec(self, job: Job) -> JobSpec:
        """The job spec of ``job``: the last one, or a new one if something has changed."""
        fields = {
            name: getattr(job, name)
            for name in (
                *("parameters", "automatic_init", "strict", "capture", "skips"),
                *(("faults",) if job.faults else ()),
                *(("records_calls",) if job.records_calls else ()),
            )
        }
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None
        last, body = self._job_spec, self._job_spec.body
        if job.body is not self._body or not serialization.is_constant(job.body):
            body = serialization.dumps(job.body)
        # Of the parameters their pickle, which tells 1 from True; the others are compared by value.
        told = {**fields, "parameters": _pickled(job.parameters)}
        basis = (told, directory, sys.path, warnings.filters, environment())
        if not last.key or body != last.body or basis != self._basis:
            self._job_spec = JobSpec(
                last.key + 1,
                body,
                serialization.dumps((fields, list(warnings.filters))),
                changes(self._started_with, os.environ),
                directory,
                list(sys.path),
                self._check,
            )
        self._body, self._basis = job.body, tuple(map(copy.copy, basis))
        return self._job_spec


def _pickled(parameters: object) -> bytes:
    try:
        return pickle.dumps(parameters)  # a hundred times faster, where it can
    except Exception:
        return serialization.dumps(parameters)
