"""A rank process: it connects to its controller, joins worlds, and runs one body after the other.

Its main thread reads the control connection and runs the bodies. A second connection, the line,
carries records for the board up, and `cancel` down; a thread waits on it, and when it hangs up, the
controller is gone and so is the rank.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_smp.ranks import serialization
from pytest_smp.ranks.board.recorder import BoardRecorder
from pytest_smp.ranks.isolation import reset
from pytest_smp.ranks.processes import incidents, measuring, wire
from pytest_smp.ranks.processes.output import Output
from pytest_smp.ranks.processes.process_state import Belongings, ProcessState, adopt_orphans
from pytest_smp.ranks.processes.process_table import ProcessTable
from pytest_smp.ranks.processes.stacks import Stacks
from pytest_smp.ranks.processes.tasks import LOADED, Done, Forming, JobSpec, Preparing, Task
from pytest_smp.ranks.protocols import INSIDE, Job, Outcome, OutcomeKind
from smp_core.errors import Cancelled, PayloadError, SmpError, UnsupportedError
from smp_core.transport import current_rank, stack_frames
from smp_core.transport.helper_threads import HelperThread
from smp_core.transport.launchers import RENDEZVOUS, launch_variables
from smp_core.transport.protocols import RankEnvironment, RankFabric

if TYPE_CHECKING:
    from pytest_smp.ranks.faults.process import ProcessStrikes

DISMISSED = -1  # in the place of the number of a run: another rank takes this one's place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The address of a rank process's controller, and the slot that the process has there."""

    slot: int
    folder: str  # private to the run
    address: wire.Address
    secret: str  # in hexadecimal
    capture: bool = True  # output goes to files in the folder


class ProcessContext:
    """One rank of one run, as the API sees it (compare rank_context.RankContext)."""

    __slots__ = ("_recorder", "fabric", "job", "rank", "records", "retire", "runtime", "size")

    def __init__(
        self, rank: int, size: int, job: Job, fabric: RankFabric, recorder: BoardRecorder
    ) -> None:
        self.rank, self.size, self.job, self.fabric = rank, size, job, fabric
        self._recorder = recorder
        self.records: dict[str, Any] = {}  # see protocols.RecordingRank
        self.runtime: Any = None
        self.retire = ""  # why this process is not to serve another run

    def record(self, name: str, value: Any) -> None:
        """See protocols.RecordingRank."""
        self.records[name] = value
        if name == INSIDE:
            self._recorder.inside_block(value)


class _Line:
    """The second connection: records up, cancel and hang-up down."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection, self._folder = connection, folder
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.sent = 0
        self.run = 0  # the number of the run that is on
        self._cancelled = 0
        self._thread = HelperThread(target=self._listen, name="smp line", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while True:
                try:
                    self._cancelled = int(self._connection.recv_bytes(64))
                except BlockingIOError:  # made so by the body, as any descriptor that it found
                    os.set_blocking(self._connection.fileno(), True)
                if self._cancelled == DISMISSED:
                    os._exit(1)
        except (EOFError, OSError):
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)

    def write(self, data: bytes) -> None:
        with self._lock:
            if os.getpid() == self._process:  # a body may fork
                self.sent += len(data)
                rest = memoryview(data)
                while rest:  # bytes without frames: the board's records end by themselves
                    rest = rest[os.write(self._connection.fileno(), rest) :]

    def check(self) -> None:
        """Raise Cancelled once the controller has ended the run."""
        if self._cancelled == self.run:
            raise Cancelled("the run has ended")


@dataclasses.dataclass(frozen=True, slots=True)
class _Standing:
    """The body and the fields of a job spec, unpickled."""

    body: Callable[..., Any]
    fields: dict[str, Any]
    filters: list[Any]


class _Server:
    """The state that a rank process keeps from run to run, and its loop over requests."""

    def __init__(
        self, membership: Membership, control: Connection, line: Connection, output: Output | None
    ) -> None:
        self._output = output
        self._membership, self._control = membership, control
        self._line = _Line(line, membership.folder)
        self._recorder = BoardRecorder(membership.slot, self._line.write)
        self._instrument: Any = None
        self._covered: tuple[int, int] | None = None
        self._worlds: dict[int, RankFabric] = {}
        self._launch: dict[int, dict[str, str]] = {}  # by the size of the world
        self._job_spec: JobSpec | None = None
        self._standing: _Standing | None = None
        self._retired: list[str] = []  # why this process is not to serve another run
        self._records: dict[str, Any] = {}  # of the run
        self._strikes: ProcessStrikes | None = None  # from the run's start until its result is sent
        self._process_state = ProcessState()
        self._belongings = Belongings()
        self._table = ProcessTable()
        self._process = os.getpid()
        self._stacks = Stacks(membership.folder)
        self._incidents = incidents.IncidentRecorder()

    def serve(self) -> None:
        """Answer requests until the controller says exit, or is gone."""
        while True:
            # A body may have made every descriptor non-blocking that it found.
            os.set_blocking(self._control.fileno(), True)
            request = pickle.loads(self._control.recv_bytes())
            if type(request) is tuple:
                self._serve_task(Task(*request))
            elif request is None:
                return
            else:
                answer = self._form(request) if type(request) is Forming else _prepare(request)
                self._control.send_bytes(pickle.dumps(answer))

    def _serve_task(self, task: Task) -> None:
        done = self._run(task)
        if os.getpid() != self._process:  # a body forked, and its child came back to here
            os._exit(0)
        self._control.send_bytes(done.packed())
        if self._strikes is not None:
            strikes, self._strikes = self._strikes, None
            strikes.moment("sent")
        if task.settles:
            self._control.send_bytes(b"")  # nothing of the run is left that could end it

    # Worlds.

    def _form(self, forming: Forming) -> str | None:
        old = self._worlds.pop(forming.size, None)
        self._process_state.set_environment({})  # as the ranks were started: a launcher's addresses
        try:
            if old is not None:
                old.close()
            folder = Path(forming.folder)
            if not folder.is_dir():  # the controller's, and this is another machine
                folder = Path(self._membership.folder, folder.name)
                folder.mkdir(mode=0o700)
            environment = RankEnvironment(
                rank=self._membership.slot,
                size=forming.size,
                local_rank=forming.local_rank,
                local_size=forming.local_size,
                folder=folder,
                store=forming.store,
                forming=forming.number,
                check=self._line.check,
                board=self._recorder,
            )
            self._worlds[forming.size] = forming.factory(environment)
            self._launch[forming.size] = _launch_variables(environment)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if self._job_spec is not None:
                self._process_state.set_environment(self._job_spec.environment)
            self._belongings.renew()
        return None

    # Runs.

    def _run(self, task: Task) -> Done:
        self._line.run = task.number
        start = self._line.sent
        fabric = self._worlds[task.size]
        if self._output is not None:
            self._output.renew()
        self._stacks.renew()
        job_spec = self._take(task)
        state = self._process_state.around(job_spec.directory)
        with state, self._incidents.recording() as shown_warnings:
            measuring.begin()
            os.environ.update(self._launch[task.size])
            outcome = self._outcome(task, job_spec, fabric, shown_warnings)
            if os.getpid() == self._process:
                outcome.measured = measuring.end()
        outcome.records, self._records = self._records, {}
        value = packed = None
        if os.getpid() == self._process:
            value, packed = self._pack(outcome)
        outcome.value = outcome.error = None
        if self._strikes is not None:
            outcome.struck = tuple(sorted(self._strikes.struck))
        groups: list[str] = []
        broken = []
        try:
            groups = fabric.leave()
        except Exception as error:
            broken = [f"its world is broken: {type(error).__name__}: {error}"]
        self._belongings.adopt(fabric.opened())
        # While the world holds process groups, a new descriptor may be theirs or the body's; the body's
        # are found after a later run.
        unclean = self._belongings.added(descriptors=not fabric.holds)
        if self._output is not None:
            outcome.stdout, outcome.stderr = self._output.written()
        records = self._line.sent - start
        retired, self._retired = self._retired, []
        reasons = retired + unclean + broken
        happened = self._incidents.take()
        return Done(task.number, outcome, packed, value, groups, reasons, records, happened)

    def _take(self, task: Task) -> JobSpec:
        if task.job_spec is not None:
            self._job_spec, self._standing = task.job_spec, None
            self._process_state.path = task.job_spec.path
            self._process_state.set_environment(task.job_spec.environment)
        assert self._job_spec is not None
        return self._job_spec

    def _outcome(
        self,
        task: Task,
        job_spec: JobSpec,
        fabric: RankFabric,
        shown_warnings: list[incidents.Shown],
    ) -> Outcome:
        rank = self._membership.slot
        skips: tuple[type[BaseException], ...] = ()
        try:
            try:
                fabric.enter()
                job = self._job(task, job_spec)
                skips = job.skips
                reset(job.seed)
                current_rank.set_process(
                    ProcessContext(rank, task.size, job, fabric, self._recorder)
                )
                args, kwargs = job.arguments(rank)
                mine = any(fault.rank == rank for fault in job.faults)
                if job_spec.check or mine:
                    self._cover(job_spec)  # before the table is noted: no change of the body's
                self._table.note((len(sys.modules), job_spec.key))
                body = self._struck(job, fabric, job_spec) if mine else job.body
                if job.records_calls:
                    self._record_calls(job_spec)
                if job_spec.check or (self._strikes is not None and self._strikes.of_tensors):
                    self._watch(task.number, job_spec)
                shown_warnings.clear()  # those of imports: the controller's import has shown them
                self._set_filters()
                if task.job_spec is not None:
                    self._control.send_bytes(LOADED)
                value = body(*args, **kwargs)
            finally:  # first: the code below calls builtins and functions of modules
                self._retired += self._table.put_back()
            self._belongings.join_threads()
            return Outcome(rank, OutcomeKind.RETURNED, value)
        except Cancelled as error:
            return Outcome(rank, OutcomeKind.CANCELLED, detail=str(error))
        except skips as error:
            stack_frames.cut_traceback(error, ours=False)
            return Outcome(rank, OutcomeKind.SKIPPED, error=error)
        except BaseException as error:
            stack_frames.cut_traceback(error, ours=isinstance(error, SmpError))
            return Outcome(rank, OutcomeKind.RAISED, error=error)
        finally:
            self._recorder.end()
            self._recorder.calls = None
            if self._strikes is not None:
                self._strikes.close()
            context = current_rank.current()
            if isinstance(context, ProcessContext):
                self._records = context.records
                if context.retire:
                    self._retired.append(context.retire)
            current_rank.set_process(None)

    def _struck(self, job: Job, fabric: RankFabric, job_spec: JobSpec) -> Callable[..., Any]:
        """The body, and from now to its end what the job's faults do to this rank."""
        from pytest_smp.ranks.faults.process import ProcessStrikes

        self._strikes = strikes = ProcessStrikes(job, self._membership.slot, fabric, self._recorder)
        if not job_spec.check:
            strikes.silence()
        return strikes.body(job.body)

    def _record_calls(self, job_spec: JobSpec) -> None:
        if not job_spec.check:
            raise UnsupportedError(
                "smp_calls: rank processes record calls for the board; leave out --smp-check=false"
            )
        from pytest_smp.ranks.call_records import CALLS

        context = current_rank.current()
        assert isinstance(context, ProcessContext)
        self._recorder.calls = context.records[CALLS] = []

    def _watch(self, run: int, job_spec: JobSpec) -> None:
        """Record what the body communicates. Where torch is loaded, it is torch's business too."""
        self._cover(job_spec)
        self._recorder.begin(run)

    def _cover(self, job_spec: JobSpec) -> None:
        """Put in place what records calls; it is silent until the recorder begins."""
        if self._instrument is None:
            from pytest_smp.ranks.board.instrument import Instrument

            self._instrument = Instrument(self._recorder)
        # Classes of process groups come with modules, and with bodies.
        covered = len(sys.modules), job_spec.key
        if covered != self._covered:
            self._instrument.install()
            self._covered = covered

    def _job(self, task: Task, job_spec: JobSpec) -> Job:
        standing = self._standing
        if standing is None:
            body = pickle.loads(job_spec.body)
            standing = self._standing = _Standing(body, *pickle.loads(job_spec.fields))
        body = standing.body
        if not serialization.is_constant(body):  # the last run may have changed its cells
            body = pickle.loads(job_spec.body)
        fields = dict(standing.fields)
        fields["parameters"] = copy.deepcopy(fields["parameters"])  # a body may change them
        arguments = pickle.loads(task.arguments)
        return Job(body=body, arguments=arguments, seed=task.seed, **fields)

    def _set_filters(self) -> None:
        """Filter warnings as the controller does, by the test's filters and the session's."""
        assert self._standing is not None
        self._incidents.filters = [*self._standing.filters]
        warnings.filters[:] = self._standing.filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    def _pack(self, outcome: Outcome) -> tuple[bytes | None, bytes | None]:
        if outcome.kind is OutcomeKind.RETURNED:
            if outcome.value is None:
                return None, None
            try:
                return serialization.dump_value(outcome.value), None
            except (
                BaseException
            ) as reason:  # a __reduce__ may raise anything, and so may what it names
                outcome.kind = OutcomeKind.RAISED
                outcome.error = PayloadError(
                    f"rank {outcome.rank}: what the body returned, a "
                    f"{type(outcome.value).__qualname__}, cannot be pickled: "
                    f"{type(reason).__name__}: {reason}. A rank is a process here: return what can"
                )
        return None, None if outcome.error is None else serialization.dump_error(outcome.error)


def _launch_variables(environment: RankEnvironment) -> dict[str, str]:
    """The variables of a launcher for a rank of this world; a launcher's own rendezvous is kept."""
    port = (
        20_000 + zlib.crc32(environment.folder.name.encode()) % 9_000
    )  # one for all, of few worlds
    local = environment.local_rank, environment.local_size
    variables = launch_variables(environment.rank, size=environment.size, local=local, port=port)
    return {
        name: os.environ.get(name, value) if name in RENDEZVOUS else value
        for name, value in variables.items()
    }


def _prepare(preparing: Preparing) -> str | None:
    try:
        pickle.loads(preparing.prelude)()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(membership: Membership, at_end: Callable[[], None] | None = None) -> None:
    """Serve until the controller is done with this rank; never returns.

    ``at_end`` is called when the controller says that all is over; it may end the process.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output = Output(membership.folder) if membership.capture else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()  # a body's daemons: no other parent could tell their rank
    random.seed()  # a fork of the fork server; each run seeds it again
    secret = bytes.fromhex(membership.secret)
    hello = {
        "slot": membership.slot,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "folder": membership.folder,
    }
    control = wire.connect(membership.address, secret, {**hello, "wire": "control"})
    line = wire.connect(membership.address, secret, {**hello, "wire": "line"})
    code = 1
    gc.freeze()  # what is imported stays: no rank need look for garbage in it
    try:
        _Server(membership, control, line, output).serve()
        if at_end is not None:
            at_end()
        code = 0
    except (EOFError, OSError):
        pass  # the controller is gone
    except BaseException:  # of ours: the controller shows a rank's last output
        sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(code)
