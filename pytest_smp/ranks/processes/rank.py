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
from pytest_smp.ranks.board.recorder import Recorder
from pytest_smp.ranks.isolation import reset
from pytest_smp.ranks.processes import measuring, wire
from pytest_smp.ranks.processes.output import Output
from pytest_smp.ranks.processes.process_state import Belongings, Surroundings, adopt_orphans
from pytest_smp.ranks.processes.process_table import ProcessTable
from pytest_smp.ranks.processes.stacks import Stacks
from pytest_smp.ranks.processes.tasks import Done, Errand, Forming, Orders, Preparing
from pytest_smp.ranks.protocols import Job, Outcome, OutcomeKind
from smp_core.errors import Cancelled, PayloadError, SmpError
from smp_core.transport import current_rank, stack_frames
from smp_core.transport.launchers import RENDEZVOUS, launch_variables
from smp_core.transport.protocols import RankFabric, Seat

if TYPE_CHECKING:
    from pytest_smp.ranks.faults.process import ProcessStrikes

DISMISSED = -1  # in the place of the number of a run: another rank takes this one's place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """Where a rank process finds its controller, and which of its ranks it is."""

    slot: int
    folder: str  # private to the run
    address: wire.Address
    secret: str  # in hexadecimal
    capture: bool = True  # output goes to files in the folder


class ProcessContext:
    """One rank of one run, as the API sees it (compare rank_context.RankContext)."""

    __slots__ = ("fabric", "job", "rank", "retire", "runtime", "size")

    def __init__(self, rank: int, size: int, job: Job, fabric: RankFabric) -> None:
        self.rank, self.size, self.job, self.fabric = rank, size, job, fabric
        self.runtime: Any = None
        self.retire = ""  # why this process is not to serve another run


class _Line:
    """The second connection: records up, cancel and hang-up down."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection, self._folder = connection, folder
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.sent = 0
        self.run = 0  # the number of the run that is on
        self._cancelled = 0
        self._thread = threading.Thread(target=self._listen, name="smp line", daemon=True)
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
    """What orders say, unpickled."""

    body: Callable[..., Any]
    fields: dict[str, Any]
    filters: list[Any]


class _Server:
    """What a rank process keeps from run to run."""

    def __init__(
        self, berth: Berth, control: Connection, line: Connection, output: Output | None
    ) -> None:
        self._output = output
        self._berth, self._control = berth, control
        self._line = _Line(line, berth.folder)
        self._recorder = Recorder(berth.slot, self._line.write)
        self._instrument: Any = None
        self._covered: tuple[int, int] | None = None
        self._worlds: dict[int, RankFabric] = {}
        self._launch: dict[int, dict[str, str]] = {}  # by the size of the world
        self._orders: Orders | None = None
        self._standing: _Standing | None = None
        self._retired: list[str] = []  # why this process is not to serve another run
        self._strikes: ProcessStrikes | None = None  # from the run's start until its result is sent
        self._surroundings = Surroundings()
        self._belongings = Belongings()
        self._table = ProcessTable()
        self._process = os.getpid()
        self._stacks = Stacks(berth.folder)

    def serve(self) -> None:
        """Until the controller says exit, or is gone."""
        while True:
            # A body may have made every descriptor non-blocking that it found.
            os.set_blocking(self._control.fileno(), True)
            request = pickle.loads(self._control.recv_bytes())
            if type(request) is tuple:
                self._serve_errand(Errand(*request))
            elif request is None:
                return
            else:
                answer = self._form(request) if type(request) is Forming else _prepare(request)
                self._control.send_bytes(pickle.dumps(answer))

    def _serve_errand(self, errand: Errand) -> None:
        done = self._run(errand)
        if os.getpid() != self._process:  # a body forked, and its child came back to here
            os._exit(0)
        self._control.send_bytes(done.packed())
        if self._strikes is not None:
            strikes, self._strikes = self._strikes, None
            strikes.moment("sent")
        if errand.settles:
            self._control.send_bytes(b"")  # nothing of the run is left that could end it

    # Worlds.

    def _form(self, forming: Forming) -> str | None:
        old = self._worlds.pop(forming.size, None)
        self._surroundings.set_environment({})  # as the ranks were started: a launcher's addresses
        try:
            if old is not None:
                old.close()
            folder = Path(forming.folder)
            if not folder.is_dir():  # the controller's, and this is another machine
                folder = Path(self._berth.folder, folder.name)
                folder.mkdir(mode=0o700)
            seat = Seat(
                rank=self._berth.slot,
                size=forming.size,
                local_rank=forming.local_rank,
                local_size=forming.local_size,
                folder=folder,
                store=forming.store,
                forming=forming.number,
                check=self._line.check,
                board=self._recorder,
            )
            self._worlds[forming.size] = forming.factory(seat)
            self._launch[forming.size] = _launch_variables(seat)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if self._orders is not None:
                self._surroundings.set_environment(self._orders.environment)
            self._belongings.renew()
        return None

    # Runs.

    def _run(self, errand: Errand) -> Done:
        self._line.run = errand.number
        start = self._line.sent
        fabric = self._worlds[errand.size]
        if self._output is not None:
            self._output.renew()
        self._stacks.renew()
        orders = self._take(errand)
        with self._surroundings.around(orders.directory):
            measuring.begin()
            os.environ.update(self._launch[errand.size])
            outcome = self._outcome(errand, orders, fabric)
            changed = self._table.put_back()
            if os.getpid() == self._process:
                outcome.measured = measuring.end()
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
        self._belongings.adopt(getattr(fabric, "opened", set)())
        # While the world holds process groups, descriptors are theirs or the body's, and nobody can
        # tell; the body's are found after a later run.
        unclean = self._belongings.added(descriptors=not getattr(fabric, "holds", False))
        if self._output is not None:
            outcome.stdout, outcome.stderr = self._output.written()
        records = self._line.sent - start
        retired, self._retired = self._retired, []
        reasons = changed + unclean + broken + retired
        return Done(errand.number, outcome, packed, value, groups, reasons, records)

    def _take(self, errand: Errand) -> Orders:
        if errand.orders is not None:
            self._orders, self._standing = errand.orders, None
            self._surroundings.path = errand.orders.path
            self._surroundings.set_environment(errand.orders.environment)
        assert self._orders is not None
        return self._orders

    def _outcome(self, errand: Errand, orders: Orders, fabric: RankFabric) -> Outcome:
        rank = self._berth.slot
        skips: tuple[type[BaseException], ...] = ()
        try:
            fabric.enter()
            job = self._job(errand, orders)
            skips = job.skips
            reset(job.seed)
            current_rank.set_process(ProcessContext(rank, errand.size, job, fabric))
            args, kwargs = job.arguments(rank)
            mine = any(fault.rank == rank for fault in job.faults)
            if orders.check or mine:
                self._cover(orders)  # what records its calls is no change of the body's
            self._table.note((len(sys.modules), orders.key))
            body = self._struck(job, fabric, orders) if mine else job.body
            if orders.check or (self._strikes is not None and self._strikes.of_tensors):
                self._watch(errand.number, orders)
            value = body(*args, **kwargs)
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
            if self._strikes is not None:
                self._strikes.close()
            context = current_rank.current()
            if context is not None and context.retire:
                self._retired.append(context.retire)
            current_rank.set_process(None)

    def _struck(self, job: Job, fabric: RankFabric, orders: Orders) -> Callable[..., Any]:
        """The body, and from now to its end what the job's faults do to this rank."""
        from pytest_smp.ranks.faults.process import ProcessStrikes

        self._strikes = strikes = ProcessStrikes(job, self._berth.slot, fabric, self._recorder)
        if not orders.check:
            strikes.silence()
        return strikes.body(job.body)

    def _watch(self, run: int, orders: Orders) -> None:
        """Record what the body communicates. Where torch is loaded, it is torch's business too."""
        self._cover(orders)
        self._recorder.begin(run)

    def _cover(self, orders: Orders) -> None:
        """Put in place what records calls; it is silent until the recorder begins."""
        if self._instrument is None:
            from pytest_smp.ranks.board.instrument import Instrument

            self._instrument = Instrument(self._recorder)
        # Classes of process groups come with modules, and with bodies.
        covered = len(sys.modules), orders.key
        if covered != self._covered:
            self._instrument.install()
            self._covered = covered

    def _job(self, errand: Errand, orders: Orders) -> Job:
        standing = self._standing
        if standing is None:
            body = pickle.loads(orders.body)
            standing = self._standing = _Standing(body, *pickle.loads(orders.fields))
        warnings.filters[:] = (  # type: ignore[index]
            standing.filters  # as they are in the controller: the test's, and the session's
        )
        warnings._filters_mutated()  # type: ignore[attr-defined]
        body = standing.body
        if not serialization.is_constant(body):  # the last run may have changed what it holds
            body = pickle.loads(orders.body)
        fields = dict(standing.fields)
        fields["parameters"] = copy.deepcopy(fields["parameters"])  # a body may change them
        arguments = pickle.loads(errand.arguments)
        return Job(body=body, arguments=arguments, seed=errand.seed, **fields)

    def _pack(self, outcome: Outcome) -> tuple[bytes | None, bytes | None]:
        if outcome.kind is OutcomeKind.RETURNED:
            if outcome.value is None:
                return None, None
            try:
                return serialization.dumps(outcome.value), None
            except Exception as reason:
                outcome.kind = OutcomeKind.RAISED
                outcome.error = PayloadError(
                    f"rank {outcome.rank}: what the body returned, a "
                    f"{type(outcome.value).__qualname__}, cannot be pickled: "
                    f"{type(reason).__name__}: {reason}. A rank is a process here: return what can"
                )
        return None, None if outcome.error is None else serialization.dump_error(outcome.error)


def _launch_variables(seat: Seat) -> dict[str, str]:
    """Those of a rank of this world. Where ranks of several machines meet, their launcher has said."""
    port = 20_000 + zlib.crc32(seat.folder.name.encode()) % 9_000  # one for all, of few worlds
    local = seat.local_rank, seat.local_size
    variables = launch_variables(seat.rank, size=seat.size, local=local, port=port)
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


def main(berth: Berth, at_end: Callable[[], None] | None = None) -> None:
    """Serve until the controller is done with this rank; never returns.

    ``at_end`` is called when the controller says that all is over; it may end the process.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output = Output(berth.folder) if berth.capture else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()  # a body's daemons: whoever else is their parent cannot tell whose they are
    random.seed()  # a fork of the nursery; each run seeds it again
    secret = bytes.fromhex(berth.secret)
    hello = {
        "slot": berth.slot,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "folder": berth.folder,
    }
    control = wire.connect(berth.address, secret, {**hello, "wire": "control"})
    line = wire.connect(berth.address, secret, {**hello, "wire": "line"})
    code = 1
    gc.freeze()  # what is imported stays: no rank need look for garbage in it
    try:
        _Server(berth, control, line, output).serve()
        if at_end is not None:
            at_end()
        code = 0
    except (EOFError, OSError):
        pass  # the controller is gone
    except BaseException:  # of ours: the controller shows what a rank wrote last
        sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(code)
