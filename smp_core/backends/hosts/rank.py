"""A rank process: it connects to its controller, joins worlds, and runs one body after the other.

Its main thread reads the control connection and runs the bodies. A second connection, the line,
carries records for the board up, and `cancel` down; a thread waits on it, and when it hangs up, the
controller is gone and so is the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
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
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_core.backends import frames, parcels
from smp_core.backends.base import Factory, Job, Outcome, OutcomeKind, RankFabric, Seat
from smp_core.backends.board.recorder import Recorder
from smp_core.backends.hosts import current, wire
from smp_core.backends.hosts.isolation import reset
from smp_core.backends.hosts.stacks import stacks_file
from smp_core.errors import Cancelled, PayloadError, SmpError

if TYPE_CHECKING:
    from smp_core.backends.faults.process import ProcessStrikes

STACKS = signal.SIGUSR2  # asks a rank for its stacks, whatever it is doing
_HANDLED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, STACKS}
DISMISSED = -1  # in the place of the number of a run: another rank takes this one's place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Berth:
    """Where a rank process finds its controller, and which of its ranks it is."""

    slot: int
    folder: str  # private to the run
    address: wire.Address
    secret: str  # in hexadecimal
    capture: bool = True  # output goes to files in the folder


@dataclasses.dataclass(frozen=True, slots=True)
class Errand:
    """One run, as the controller sends it to a rank."""

    number: int
    size: int
    body_key: int
    body: bytes | None  # None: the rank has it
    job: bytes  # (arguments, and the fields of Job that a rank needs)
    environment: dict[str, str | None]  # what the controller changed since it started the ranks
    directory: str | None
    path: list[str] | None  # sys.path, if it changed
    check: bool  # the board is on


@dataclasses.dataclass(slots=True)
class Done:
    """What a rank sends back."""

    number: int
    outcome: Outcome
    error: bytes | None  # the outcome's, pickled by itself: the rest must arrive in any case
    value: bytes | None
    groups: list[str]  # process groups left behind
    unclean: list[str]  # why this rank must be replaced
    records: int  # bytes sent on the line


class RankProcess:
    """One rank of one run, as the API sees it (compare threads.RankContext)."""

    __slots__ = ("fabric", "job", "rank", "runtime", "size")

    def __init__(self, rank: int, size: int, job: Job, fabric: RankFabric) -> None:
        self.rank, self.size, self.job, self.fabric = rank, size, job, fabric
        self.runtime: Any = None


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
                self._cancelled = int(self._connection.recv_bytes(64))
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


class _Server:
    """What a rank process keeps from run to run."""

    def __init__(
        self, berth: Berth, control: Connection, line: Connection, output: _Output | None
    ) -> None:
        self._output = output
        self._berth, self._control = berth, control
        self._line = _Line(line, berth.folder)
        self._recorder = Recorder(berth.slot, self._line.write)
        self._instrument: Any = None
        self._worlds: dict[int, RankFabric] = {}
        self._bodies: dict[int, Callable[..., Any]] = {}
        self._strikes: ProcessStrikes | None = None  # from the run's start until its result is sent
        self._environment = dict(os.environ)
        self._process = os.getpid()
        self._threads = set(threading.enumerate())
        self._descriptors: set[str] = set()
        self._path = list(sys.path)
        self._stacks = _Stacks(berth.folder)

    def serve(self) -> None:
        """Until the controller says exit, or is gone."""
        answers: dict[type, Callable[[Any], Any]] = {
            Errand: self._run,
            Forming: self._form,
            Preparing: _prepare,
        }
        while True:
            request = pickle.loads(self._control.recv_bytes())
            answer = answers[type(request)](request) if request is not None else None
            if os.getpid() != self._process:  # a body forked, and its child came back to here
                os._exit(0)
            if request is None:
                return
            self._control.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
            if self._strikes is not None:
                strikes, self._strikes = self._strikes, None
                strikes.moment("sent")
            if isinstance(answer, Done):
                self._control.send_bytes(b"")  # nothing of the run is left that could end it

    # Worlds.

    def _form(self, forming: Forming) -> str | None:
        old = self._worlds.pop(forming.size, None)
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
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._descriptors = _descriptors()
            self._threads = set(threading.enumerate())
        return None

    # Runs.

    def _run(self, errand: Errand) -> Done:
        self._line.run = errand.number
        start = self._line.sent
        fabric = self._worlds[errand.size]
        if self._output is not None:
            self._output.renew()
        with self._surroundings(errand):
            outcome = self._outcome(errand, fabric)
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
        unclean = self._unclean(getattr(fabric, "holds", False)) + broken
        if self._output is not None:
            outcome.stdout, outcome.stderr = self._output.written()
        records = self._line.sent - start
        return Done(errand.number, outcome, packed, value, groups, unclean, records)

    def _outcome(self, errand: Errand, fabric: RankFabric) -> Outcome:
        rank = self._berth.slot
        skips: tuple[type[BaseException], ...] = ()
        try:
            fabric.enter()
            job = self._job(errand)
            skips = job.skips
            reset(job.seed)
            current.set_process(RankProcess(rank, errand.size, job, fabric))
            args, kwargs = job.arguments(rank)
            mine = any(fault.rank == rank for fault in job.faults)
            body = self._struck(job, fabric, errand) if mine else job.body
            if errand.check or (self._strikes is not None and self._strikes.of_tensors):
                self._watch(errand.number)
            value = body(*args, **kwargs)
            return Outcome(rank, OutcomeKind.RETURNED, value)
        except Cancelled as error:
            return Outcome(rank, OutcomeKind.CANCELLED, detail=str(error))
        except skips as error:
            frames.cut_traceback(error, ours=False)
            return Outcome(rank, OutcomeKind.SKIPPED, error=error)
        except BaseException as error:
            frames.cut_traceback(error, ours=isinstance(error, SmpError))
            return Outcome(rank, OutcomeKind.RAISED, error=error)
        finally:
            self._recorder.end()
            if self._strikes is not None:
                self._strikes.close()
            current.set_process(None)

    def _struck(self, job: Job, fabric: RankFabric, errand: Errand) -> Callable[..., Any]:
        """The body, and from now to its end what the job's faults do to this rank."""
        from smp_core.backends.faults.process import ProcessStrikes

        self._strikes = strikes = ProcessStrikes(job, self._berth.slot, fabric, self._recorder)
        if not errand.check:
            strikes.silence()
        return strikes.body(job.body)

    def _watch(self, run: int) -> None:
        """Record what the body communicates. Where torch is loaded, it is torch's business too."""
        if self._instrument is None:
            from smp_core.backends.board.instrument import Instrument

            self._instrument = Instrument(self._recorder)
        self._instrument.install()
        self._recorder.begin(run)

    def _job(self, errand: Errand) -> Job:
        if errand.body is not None:
            self._bodies = {errand.body_key: pickle.loads(errand.body)}
        arguments, fields, filters = pickle.loads(errand.job)
        warnings.filters[:] = (  # type: ignore[index]
            filters  # as they are in the controller: the test's, and the session's
        )
        warnings._filters_mutated()  # type: ignore[attr-defined]
        return Job(body=self._bodies[errand.body_key], arguments=arguments, **fields)

    def _pack(self, outcome: Outcome) -> tuple[bytes | None, bytes | None]:
        if outcome.kind is OutcomeKind.RETURNED:
            try:
                return parcels.dumps(outcome.value), None
            except Exception as reason:
                outcome.kind = OutcomeKind.RAISED
                outcome.error = PayloadError(
                    f"rank {outcome.rank}: what the body returned, a "
                    f"{type(outcome.value).__qualname__}, cannot be pickled: "
                    f"{type(reason).__name__}: {reason}. A rank is a process here: return what can"
                )
        return None, None if outcome.error is None else parcels.dump_error(outcome.error)

    @contextlib.contextmanager
    def _surroundings(self, errand: Errand) -> Iterator[None]:
        """The controller's environment, folder and import path; what the body changes is undone."""
        if errand.path is not None:
            self._path = errand.path
        sys.path[:] = self._path
        limit = sys.getrecursionlimit()
        handlers = {each: signal.getsignal(each) for each in _HANDLED}
        self._stacks.renew()
        _apply(self._environment, errand.environment)
        if errand.directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(errand.directory)
        streams = sys.stdin, sys.stdout, sys.stderr
        try:
            with warnings.catch_warnings():
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler and handler is not None:
                    signal.signal(number, handler)
            sys.setrecursionlimit(limit)
            sys.stdin, sys.stdout, sys.stderr = streams
            _apply(self._environment, {})

    def _unclean(self, holds: bool) -> list[str]:
        """What the body left that no next body may find.

        While the world ``holds`` process groups, descriptors are theirs or the body's, and nobody can
        tell; the body's are found after a later run.
        """
        left = []
        for thread in set(threading.enumerate()) - self._threads:
            left.append(f"thread {thread.name!r} still runs")
        for child in _children():
            left.append(f"process {child} still runs")
        if not holds and _descriptors(self._descriptors):
            gc.collect()
            new = _descriptors(self._descriptors)
            left += [f"file descriptor {each} is open: {_target(each)}" for each in sorted(new)]
        return left


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


def _prepare(preparing: Preparing) -> str | None:
    try:
        pickle.loads(preparing.prelude)()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def _apply(base: dict[str, str], changes: dict[str, str | None]) -> None:
    """Make os.environ ``base`` with ``changes``."""
    wanted = {**base, **changes}
    for name in set(os.environ) | set(wanted):
        value = wanted.get(name)
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


def _descriptors(known: Collection[str] = ()) -> set[str]:
    """This process's open descriptors, by number, apart from those that are known."""
    found = set(os.listdir("/proc/self/fd")).difference(known)
    return {each for each in found if _is_open(int(each))}  # the one that listed them is not


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _target(descriptor: str) -> str:
    """What a descriptor is."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return "closed again"


def _children() -> list[int]:
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


# Output: descriptors 1 and 2 are files in the run's folder, so that what C++ writes while it dies
# is kept as well.


def output_files(folder: str, pid: int) -> tuple[Path, Path]:
    """Where a rank process writes."""
    return Path(folder, f"{pid}.out"), Path(folder, f"{pid}.err")


def read_output(folder: str, pid: int) -> tuple[str, str]:
    """What a rank process has written in its run, to standard output and to standard error."""
    texts = []
    for path in output_files(folder, pid):
        try:
            texts.append(path.read_text(errors="replace"))
        except OSError:
            texts.append("")
    return texts[0], texts[1]


class _Stacks:
    """Has the signal STACKS write every thread's stack to a file. A body may take the signal away."""

    def __init__(self, folder: str) -> None:
        self._file = open(stacks_file(folder, os.getpid()), "w")  # noqa: SIM115
        self.renew()

    def renew(self) -> None:
        """As if no body had run."""
        faulthandler.unregister(STACKS)
        faulthandler.register(STACKS, file=self._file, all_threads=True)


class _Output:
    """Descriptors 1 and 2 as files in the run's folder. A body may close or redirect them, and the
    streams over them: each run begins with new ones.
    """

    def __init__(self, folder: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._files = [os.open(each, flags, 0o600) for each in output_files(folder, os.getpid())]
        self._streams: list[Any] = []
        self.renew()

    def renew(self) -> None:
        """Empty files, on descriptors 1 and 2."""
        self._flush()
        for descriptor, file in zip((1, 2), self._files, strict=True):
            os.ftruncate(file, 0)
            os.dup2(file, descriptor)
        if not self._streams or any(stream.closed for stream in self._streams):
            self._streams = [open(each, "w", buffering=1, closefd=False) for each in (1, 2)]  # noqa: SIM115
            sys.__stdout__, sys.__stderr__ = self._streams  # type: ignore[misc]
        sys.stdout, sys.stderr = self._streams

    def written(self) -> tuple[str, str]:
        """What was written since the last renewal."""
        self._flush()
        out, err = (os.pread(file, os.fstat(file).st_size, 0) for file in self._files)
        return out.decode(errors="replace"), err.decode(errors="replace")

    def _flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError, OSError):  # the body closed it
                stream.flush()


def main(berth: Berth, at_end: Callable[[], None] | None = None) -> None:
    """Serve until the controller is done with this rank; never returns.

    ``at_end`` is called when the controller says that all is over; it may end the process.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output = _Output(berth.folder) if berth.capture else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
