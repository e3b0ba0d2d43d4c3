"""One run on rank processes: from sending the job to every rank's outcome, and the verdict when a
rank crashes or does not come back.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from pytest_smp.ranks.board.analysis import Board, Finding
from pytest_smp.ranks.causes import Cause, origin_of, root_cause
from pytest_smp.ranks.processes import incidents, wire
from pytest_smp.ranks.processes.tasks import LOADED, Done
from pytest_smp.ranks.processes.worker_pool import Ended, RankProcess, WorkerPool, describe_exit
from pytest_smp.ranks.protocols import INSIDE, Job, Outcome, OutcomeKind, Report, VerdictKind
from pytest_smp.ranks.remote_errors import RemoteError
from smp_core.errors import (
    BackendError,
    CrashError,
    JobLost,
    LeakError,
    PayloadError,
    RunTimeout,
)
from smp_core.transport import messages

log = logging.getLogger("pytest_smp.ranks")

_CHUNK = 1 << 16  # bytes read at a time
_CHUNKS = 4  # at most, at a look: a rank may write faster than we read
_LATE = 1.0  # seconds that a record may take that was sent before a rank came back
TICK = 0.02  # seconds between two looks at the board
_LOADING = 300.0  # seconds that ranks get to import what the body needs, before the limit counts
_LEAVING = 10.0  # seconds that a rank gets whose body is over, for its result or its error to come
_GRACE = 0.5  # seconds that the others get after a rank has failed, to end by themselves
_LOOK = 1.0  # seconds between two looks at the ranks' processes
_TOLD = 1.0  # seconds for the end to be told of a rank whose connection closed
_TOLD_OF_ENDS = 20.0  # of one whose process ends for certain: a large one takes its time
_TOLD_OF_JOB = (
    0.1  # of further ones of a job: its launcher ends them, and what would tell of their ends
)
_CANCEL = 2.0  # seconds that a cooperative fabric gets to unwind


class Ends(Protocol):
    """The part of the executor that a run needs: the ends of rank processes, whichever run they were in."""

    selector: selectors.BaseSelector  # control connections, by rank; None: the worker pool has news

    def ends(self) -> list[Ended]:
        """The rank processes that ended since the last call."""

    def unclaimed(self, ended: Ended) -> None:
        """Keep an end that is no part of this run, for the next call of ``ends``."""


class Run:
    """One run: from sending the job to every rank's outcome."""

    def __init__(
        self,
        executor: Ends,
        pool: WorkerPool,
        ranks: list[RankProcess],
        job: Job,
        number: int,
        board: Board | None,
    ) -> None:
        self._executor, self._pool, self._job = executor, pool, job
        self.ranks = ranks
        self.broken: list[RankProcess] = []  # to be replaced
        self.whole = True  # the world can serve again
        self._checks = board is not None
        self._board = Board(len(ranks)) if board is None else board
        self._board.reset(number)
        self._done: dict[int, Done] = {}
        self._errors: dict[int, BaseException] = {}  # but not those of a run that has ended
        self._stopped = False  # the ranks that still run have been told to end
        self._running = {rank.slot: rank for rank in ranks}
        self._due = math.inf  # when the limit is over
        self._loading: set[int] = set()  # ranks that have not said that they have the body
        self._crashed: dict[int, str] = {}
        self._gone: dict[
            int, RankProcess
        ] = {}  # its connection closed; how it ended is not known yet
        self._before: set[int] = set()  # ended without having read their tasks
        self._finding: Finding | None = None
        self._number = number

    def report(self, task: Callable[[RankProcess], bytes]) -> Report:
        """Send each rank its task, wait for all, and say how it went."""
        try:
            for rank in self.ranks:
                rank.records = 0
                known = rank.job_spec
                request = task(rank)
                if rank.job_spec != known:
                    self._loading.add(rank.slot)
                rank.busy = bool(self._job.faults)
                try:
                    rank.control.send_bytes(request)
                except OSError:
                    self._before.add(rank.slot)
                    self._lost(rank)
            timed_out = self._wait()
            report = self._timeout() if timed_out else self._conclude()
            self._replace_the_unfinished()
            return report
        except BaseException:  # Ctrl-C, or a signal handler of another plugin
            self._stop(list(self._running.values()))
            raise

    # Waiting.

    def _wait(self) -> bool:
        """Wait until all ranks have ended or a failure has ended the run; return whether time was up."""
        limit = math.inf if self._job.timeout is None else self._job.timeout
        begun = start = looked = looked_at_processes = time.monotonic()
        failed_at = found_at = math.inf
        held: Finding | None = None  # a finding that a late result may explain
        while self._running:
            self._hear(TICK)
            now = time.monotonic()
            # A fresh rank imports the body's module: its time says nothing of the body.
            if not self._loading.isdisjoint(self._running) and now - begun < _LOADING:
                start = now
            self._due = start + limit
            failed = self._failed()
            if self._running and self._checks and (failed or now - looked >= TICK):
                looked = now
                self._read_lines()
                if self._finding is None:
                    held = finding = self._board.look(self._running, now)
                    found_at = min(found_at, now) if finding is not None else math.inf
                    # A body that is over may have raised, which would be the cause.
                    leaving = any(self._board.body_is_over(slot) for slot in self._running)
                    if not leaving or now - found_at > _LEAVING:
                        self._finding = finding
            if self._failed() or now - start > limit or now - looked_at_processes > _LOOK:
                looked_at_processes = now
                self._notice_deaths()
            if self._failed():
                failed_at = min(failed_at, now)
                grace = _LEAVING if self._origin_runs() else _GRACE
                if self._finding is not None or now - failed_at > grace or self._all_wait():
                    self._stop(list(self._running.values()))
                    return False
            elif now - start > limit:
                if held is not None:
                    self._finding = (
                        held  # of ranks that wait: a body that is over needs long for its result
                    )
                    self._stop(list(self._running.values()))
                    return False
                if not self._job.patience():
                    return True
                start = now
        return False

    def _failed(self) -> bool:
        return bool(self._crashed or self._gone or self._errors or self._finding)

    def _origin_runs(self) -> bool:
        """Return whether all errors tell of exceptions that ranks still have to raise."""
        origins = {origin_of(error, slot) for slot, error in self._errors.items()}
        return bool(origins) and origins <= self._running.keys() and not self._gone

    def _all_wait(self) -> bool:
        """Return whether no running rank can change the verdict: each waits for others, and is alive."""
        return self._checks and all(
            self._board.blocked(slot) and (self._gone or self._pool.state(rank) is not None)
            for slot, rank in self._running.items()
        )

    def _notice_deaths(self) -> None:
        """Take ranks for gone whose processes end: what the others raise may follow from that, and
        be heard before the dead rank's connections close.
        """
        for rank in list(self._running.values()):
            state = self._pool.state(rank)
            if state is None:
                continue
            # A thread that a fatal signal is about to end looks like one that goes on, for a moment.
            alone_since = time.monotonic()
            while state.main_thread_ended and time.monotonic() - alone_since < _GRACE:
                time.sleep(0.005)
                state = self._pool.state(rank) or state
            if state.ends:
                self._hear_last(rank)
            elif state.main_thread_ended:  # nobody will tell: the process stays
                self._lost(rank)
                del self._gone[rank.slot]
                self._crashed[rank.slot] = (
                    "its main thread has ended alone, and the process goes on"
                )

    def _hear(self, timeout: float) -> None:
        for key, _ in self._executor.selector.select(timeout):
            rank = key.data
            if rank is None:
                self._hear_of_ends()
            elif rank.slot in self._running and self._running[rank.slot] is rank:
                try:
                    done = self._receive(rank)
                except Exception as error:  # it has ended, or its body wrote to this descriptor
                    self._note_early(rank, error)
                    self._lost(rank)
                    if wire.is_silence(error):
                        self._silent(rank.host)
                else:
                    if done is not None:
                        self._came_back(rank, done)
            else:
                try:
                    if not rank.busy:
                        raise EOFError
                    rank.settle()
                except (EOFError, OSError):  # its end is told elsewhere; it would wake us for ever
                    rank.busy = True  # with dying: the next run waits until that is told
                    with contextlib.suppress(KeyError, ValueError):
                        self._executor.selector.unregister(rank.control)
        if self._gone:
            self._hear_of_ends()

    def _receive(self, rank: RankProcess) -> Done | None:
        """Read a message of a rank's: its answer, or None if it has only got the body.

        Raises what reading raises if the rank has ended instead.
        """
        packed = rank.control.recv_bytes()
        if packed != LOADED:
            return Done.of(packed)
        self._loading.discard(rank.slot)
        return None

    def _came_back(self, rank: RankProcess, done: Done) -> None:
        del self._running[rank.slot]
        self._done[rank.slot] = done
        done.outcome.incidents = incidents.of(done.incidents)
        if done.error is not None:
            try:
                error = pickle.loads(done.error)
            except (Exception, SystemExit) as reason:
                error = RemoteError(
                    f"rank {rank.slot} raised what cannot be unpickled here: {reason}"
                )
            done.outcome.error = error
            if done.outcome.kind is OutcomeKind.RAISED and not self._stopped:
                self._errors[rank.slot] = error
        if done.value is not None:
            try:
                done.outcome.value = pickle.loads(done.value)
            except (Exception, SystemExit) as reason:  # the rank could read it
                error = PayloadError(
                    f"rank {rank.slot}: what the body returned was pickled there and cannot be "
                    f"unpickled here: {type(reason).__name__}: {reason}"
                )
                done.outcome.kind, done.outcome.error = OutcomeKind.RAISED, error
                self._errors[rank.slot] = error
        if done.unclean and self._pool.final:  # there is no other
            log.warning("rank %d goes on with %s", rank.slot, "; ".join(done.unclean))
            self.whole = False
        elif done.unclean:
            log.info("rank %d is replaced: %s", rank.slot, "; ".join(done.unclean))
            self.broken.append(rank)

    def _note_early(self, rank: RankProcess, error: Exception) -> None:
        """The kernel resets a connection that closes with something unread in it: the task."""
        if isinstance(error, ConnectionResetError):
            self._before.add(rank.slot)

    def _lost(self, rank: RankProcess) -> None:
        """Count a rank as lost whose connection closed: the process has ended, or will be ended."""
        if self._checks:
            self._read_line(rank)
            self._board.gone(rank.slot)
        self._running.pop(rank.slot, None)
        self._gone[rank.slot] = rank
        self.broken.append(rank)
        with contextlib.suppress(KeyError, ValueError):
            self._executor.selector.unregister(rank.control)

    def _silent(self, host: str) -> None:
        """A machine does not answer: none of its ranks will."""
        self._pool.silent(host)
        for rank in self.ranks:
            if rank.host == host and rank.slot not in self._done:
                if rank.slot in self._running:
                    self._lost(rank)
                self._gone.pop(rank.slot, None)
                self._crashed.setdefault(rank.slot, wire.silence(host))

    def _hear_of_ends(self) -> None:
        for ended in self._executor.ends():
            who = ended.slot, ended.pid
            rank = next((each for each in self.ranks if (each.slot, each.pid) == who), None)
            if rank is None:  # another's, or one that its launcher took down with the job
                self._executor.unclaimed(ended)
                continue
            self._hear_last(rank)
            self._gone.pop(rank.slot, None)
            if rank not in self.broken:
                self.broken.append(rank)
            if self._checks:
                self._board.gone(rank.slot)
            self._crashed[rank.slot] = str(ended)

    def _hear_last(self, rank: RankProcess) -> None:
        """Read the result that a rank sent before it ended, which may still lie in its connection."""
        while rank.slot in self._running and rank.control.poll(0):
            try:
                done = self._receive(rank)
                if done is not None:
                    self._came_back(rank, done)
            except Exception as error:  # as in _hear
                self._note_early(rank, error)
                break
        if rank.slot in self._running:
            self._lost(rank)

    def _read_lines(self) -> None:
        for rank in self.ranks:
            self._read_line(rank)

    def _read_line(self, rank: RankProcess, upto: int | None = None) -> None:
        """Read a rank's records for the board: those that are there, or up to byte ``upto`` of this run."""
        descriptor = rank.line.fileno()
        looks = 0
        while rank.records < upto if upto is not None else looks < _CHUNKS:
            looks += 1
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                if upto is None or not rank.line.poll(_LATE):
                    return
                continue
            except OSError:
                return  # it has ended
            if not data:
                return  # it has ended; its control connection says so too
            rank.records += len(data)
            try:
                self._board.feed(rank.slot, data)
            except BackendError as error:  # no verdict from the board, in this run
                log.warning("%s", error)
                if upto is None:
                    return  # else read on: the next run's records must not follow on this run's rest

    # The end.

    def _stop(self, ranks: list[RankProcess]) -> None:
        """End those that still run: ask where the fabric listens, kill otherwise."""
        self.whole, self._stopped = False, True
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.line.send_bytes(str(self._number).encode())
        unwinds = self._pool.restarts_together and not (self._crashed or self._gone)
        deadline = time.monotonic() + (_CANCEL if unwinds else 0.0)
        try:
            while self._running and time.monotonic() < deadline:
                self._hear(TICK)
                if self._checks:
                    self._read_lines()  # unblocks a rank in a write, which cannot see that it is to end
        finally:  # a second Ctrl-C: launchers send one to each process, and so does a terminal
            self.broken += self._running.values()
            self._running = {}

    def _replace_the_unfinished(self) -> None:
        """Count ranks with an unfinished call as broken, so that they are replaced.

        The call's process group may be at work for ever. The thread that destroys the group, be it in a
        garbage collection of a later run, would wait for that.
        """
        if self.whole or self._pool.restarts_together or self._pool.final:
            return
        self.broken += [
            rank
            for rank in self.ranks
            if rank not in self.broken
            and rank.slot in self._done
            and (not self._checks or self._board.unfinished(rank.slot))
        ]

    def _finish_reading(self) -> None:
        """Read every record that the ranks sent before they came back."""
        for rank in self.ranks:
            done = self._done.get(rank.slot)
            self._read_line(rank, None if done is None else done.records)

    def _conclude(self) -> Report:
        start = time.monotonic()
        while self._gone and time.monotonic() < start + self._until_told(start):
            self._hear_of_ends()
            time.sleep(0.001)
        if not self._crashed:
            self._crashed = {slot: describe_exit(None) for slot in self._gone}
        if self._checks:
            self._finish_reading()
            self._look_back()
        cause = root_cause(self._causes())
        root, error, verdict = None, None, VerdictKind.PASSED
        if cause is not None:
            root, error, verdict = cause.root, cause.error, cause.verdict
        if self._crashed:
            self.whole = False
        if self._pool.final and self.broken:
            error = JobLost(f"the job has lost its ranks\n{error}")
        outcomes = [self._outcome(rank, root, error) for rank in self.ranks]
        if error is None and not any(each.kind is OutcomeKind.SKIPPED for each in outcomes):
            return self._leaks(outcomes)
        if self.whole:  # a run that skipped may have left messages as well
            self.whole = self._checks and self._board.settled()
        return Report(verdict, outcomes, root, error)

    def _until_told(self, start: float) -> float:
        """The seconds to wait, from ``start``, for the news how the ranks that are gone have ended."""
        if self._crashed and self._pool.restarts_together:
            return _TOLD_OF_JOB
        states = [self._pool.state(rank) for rank in self._gone.values()]
        ends = any(state is not None and state.ends for state in states)
        return max(_TOLD, min(_TOLD_OF_ENDS, self._due - start)) if ends else _TOLD

    def _look_back(self) -> None:
        """Look at the records once more: it is known now who has died, and nothing more will come."""
        finding = self._finding
        if finding is None or (finding.follows and self._crashed):
            for rank in self.ranks:
                if rank.slot not in self._done:
                    self._board.gone(rank.slot)
            self._finding = self._board.look((), time.monotonic())

    def _causes(self) -> Iterator[Cause]:
        """The candidates for the root cause. Of errors the lowest rank's comes first, not the first in
        time: the same failure must look the same again.
        """
        if self._finding is not None:
            finding = self._finding
            yield Cause(finding.verdict, finding.root, finding.shown(), by_records=True)
        if self._crashed:
            slot = next(iter(self._crashed))  # the first that was told: others may follow from it
            yield Cause(VerdictKind.CRASHED, slot, self._crash(slot))
        for slot, error in sorted(self._errors.items()):
            yield Cause(VerdictKind.FAILED, slot, error, in_call=self._waits(slot))

    def _crash(self, slot: int) -> CrashError:
        how = self._crashed[slot]
        where = self._where(slot) or (self._board.last(slot) if self._checks else "")
        if where and how == wire.silence(self.ranks[slot].host):
            how += "; it was last seen"
        if slot in self._before:
            how += ", before it began this run: an earlier run left what ended it, or somebody else did"
        lines = [f"rank {slot} crashed: {how} {where}".rstrip()]
        others = [each for each in self._crashed if each != slot]
        lines += [f"rank {each} crashed too: {self._crashed[each]}" for each in others]
        lines += self._last_words(slot)
        return CrashError("\n".join(lines))

    def _last_words(self, slot: int) -> list[str]:
        stderr = self._pool.written(self.ranks[slot])[1].strip().splitlines()
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
            if done is not None:
                outcome.measured, outcome.incidents = done.outcome.measured, done.outcome.incidents
        outcome.stdout, outcome.stderr = self._pool.written(rank)
        finding = self._finding
        if outcome.kind is OutcomeKind.CANCELLED:
            if finding is not None and error is finding.error and slot in finding.waits:
                outcome.kind, outcome.detail = OutcomeKind.STUCK, finding.waits[slot]
                outcome.records = {INSIDE: self._board.block(slot)}
            else:
                blame = f"rank {root}" if root is not None else "another rank"
                outcome.detail = f"cancelled because of {blame}"
        return outcome

    def _leaks(self, outcomes: list[Outcome]) -> Report:
        strict = self._job.strict
        fatal, minor = self._board.leaks(strict) if self._checks else ([], [])
        groups = [(slot, text) for slot, done in sorted(self._done.items()) for text in done.groups]
        (fatal if strict else minor).extend(messages.left(groups))
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
        # Before the stacks are asked for: the signal that does so wakes a rank from a pause or a sleep in
        # C, and its later records do not tell why the run did not end.
        if self._checks:
            self._finish_reading()
        details = {slot: f"rank {slot} {self._where(slot) or 'never came back'}" for slot in stuck}
        for slot in self._loading & stuck.keys():
            details[slot] = f"rank {slot} still imports what the body needs, for {_LOADING:g} s"
        unwaited = {slot: self._unwaited(slot) for slot in stuck}
        order = sorted(stuck, key=self._blame)
        for slot in stuck:
            if self._is_stopped(slot):
                details[slot] += "\n      its process is stopped, by a signal or a debugger"
        stacks = self._pool.stacks(list(stuck.values()))
        limit = f"{self._job.timeout:g} s ({self._job.timeout_origin})"
        lines = [f"timeout: the run did not end within {limit}"]
        for slot in order:
            lines += [details[slot], *unwaited[slot], *stacks.get(slot, ())]
        for slot, done in sorted(self._done.items()):
            error = done.outcome.error
            text = "" if error is None else f" {type(error).__name__}: {error}"
            lines += [f"rank {slot} has {done.outcome.kind}{text}", *self._unwaited(slot)]
        self._stop(list(stuck.values()))
        outcomes = [self._outcome(rank, None, None) for rank in self.ranks]
        for slot, detail in details.items():
            outcomes[slot].kind, outcomes[slot].detail = OutcomeKind.STUCK, detail
        timeout = RunTimeout("\n".join(lines))
        return Report(VerdictKind.TIMED_OUT, outcomes, None, timeout)

    def _unwaited(self, slot: int) -> list[str]:
        return self._board.unwaited(slot) if self._checks else []

    def _blame(self, slot: int) -> tuple[bool, bool, bool, int]:
        """Sorts ranks by how much they are to blame for a time-out: one that is stopped; one in no
        call; one in a call that nobody keeps from ending; one that waits for others.
        """
        blocked = self._checks and self._board.blocked(slot)
        return not self._is_stopped(slot), blocked, self._waits(slot), slot

    def _is_stopped(self, slot: int) -> bool:
        state = self._pool.state(self.ranks[slot])
        return state is not None and state.stopped

    def _where(self, slot: int) -> str:
        return self._board.where(slot) if self._checks else ""

    def _waits(self, slot: int) -> bool:
        return self._checks and self._board.waits(slot)
