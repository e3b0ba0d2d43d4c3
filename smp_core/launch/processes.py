"""Rank processes of a script, on this machine: started by an MPI or by a supervisor, and followed to their ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import smp_core
from smp_core.errors import BackendError
from smp_core.launch import mpiexec, supervisor
from smp_core.launch.job import ScriptJob, import_path
from smp_core.launch.mpiexec import outside_jobs, session_variables
from smp_core.launch.output import RankOutput
from smp_core.launch.rank import JOB, SOCKET
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.private_folder import JOB_FOLDER, private_folder

_OTHERS = 5.0  # seconds that the other ranks get to end by themselves after the first has failed
_PATIENCE = 10.0  # seconds between a signal and the next, harder one: a script may save something
_AT_ONCE = (
    1.0  # seconds in which a failure is not yet shown: its cause may be another's that comes later
)
_LEFT = 10.0  # seconds for which ranks go on after others have ended their scripts, before a line says so
_SLICE = 0.1  # seconds between two looks at what no descriptor tells
_WIDTH = 120  # characters of a line about a rank that failed later


@dataclasses.dataclass(slots=True)
class RankFailure:
    """The failure of a rank.

    Attributes:
        rank: the rank.
        at: when it happened, by the machine's monotonic clock.
        code: the exit code; negative for a signal.
        text: a traceback, or the words of ``sys.exit``.
        last: the last line of ``text``.
    """

    rank: int
    at: float
    code: int
    text: str = ""
    last: str = ""

    @property
    def cause(self) -> str:
        """The end of the process in words."""
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"failed with exit code {self.code}"


def run_processes(job: ScriptJob, output: RankOutput) -> int:
    """Run a job on rank processes that meet by Gloo; return the exit code of the first rank that failed, or 0."""
    with _requests_to_end() as requests, _Run(job, output, requests) as run:
        words = [str(job.ranks), str(run.ends), str(run.folder)]
        run.follow([*_python("smp_core.launch.starter"), *words], {})
    return run.conclude()


def run_mpi(job: ScriptJob, output: RankOutput) -> int:
    """Run a job as an MPI job; return the exit code of the first rank that failed, or 0.

    Raises BackendError if there is no MPI, or no mpi4py.
    """
    command, environment = mpiexec.find_mpiexec(job.mpiexec)
    if not mpiexec.has_mpi4py():
        raise BackendError(
            "mpi4py is not installed, by which ranks take part in an MPI job: pip install mpi4py, or take "
            "--backend gloo"
        )
    options = job.mpi_options
    if options and not mpiexec.is_open_mpi(command[0]):
        output.say(f"smp-run: {command[0]} is not Open MPI's: left out {shlex.join(options)}")
        options = ()
    with _requests_to_end() as requests, _Run(job, output, requests) as run:
        above = [sys.executable, "-I", "-S", supervisor.__file__, str(run.ends)]
        starter = [*command, *options, "-n", str(job.ranks), *above]
        words = [*_python("smp_core.launch.rank"), str(run.folder)]
        run.follow([*starter, *words], environment)
    return run.conclude()


def _python(module: str) -> list[str]:
    """The command that runs ``main`` of a module of ours, found as it was found here.

    The present folder, or that of this process's own script, is no place to import from. PYTHONPATH stays as it is:
    other programs that the script starts read it, too.
    """
    path = import_path()
    root = str(Path(smp_core.__file__).resolve().parents[1])
    if root not in path:
        path.append(root)
    return [
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path[:] = {path!r}; from {module} import main; main()",
    ]


class _Requests:
    """Signals that ask the launcher to end. None raises an exception, which could come between making a folder or a
    process and the statement that removes it.

    Attributes:
        act: acts upon a signal at once; None where it has to wait.
        waiting: the signals that wait, the oldest first.
    """

    def __init__(self) -> None:
        self.act: Callable[[signal.Signals], None] | None = None
        self.waiting: deque[signal.Signals] = deque()

    def come(self, number: int, frame: object) -> None:
        """The handler of the signals."""
        if self.act is None:
            self.waiting.append(signal.Signals(number))
        else:
            self.act(signal.Signals(number))

    @contextlib.contextmanager
    def acting(self, act: Callable[[signal.Signals], None]) -> Iterator[None]:
        """While entered, ``act`` is called for each signal, and now for those that wait."""
        self.act = act
        try:
            while self.waiting:
                act(self.waiting.popleft())
            yield
        finally:
            self.act = None


@contextlib.contextmanager
def _requests_to_end() -> Iterator[_Requests]:
    """Take signals for requests while entered; at the end those that still wait are raised anew.

    Signals belong to the main thread: in another one there are none.
    """
    requests = _Requests()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, requests.come)
    try:
        yield requests
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in requests.waiting:
            signal.raise_signal(number)


class _Run:
    """One run of a script on rank processes, which has a folder while it is entered."""

    def __init__(self, job: ScriptJob, output: RankOutput, requests: _Requests) -> None:
        self._job, self._output, self._requests = job, output, requests
        self._code = 0  # the exit code of the job
        self._started: set[int] = set()
        self._left: dict[int, float] = {}  # when ranks have ended their scripts without a failure
        self._ended: dict[int, int] = {}  # exit codes; negative for signals
        self._pids: dict[int, int] = {}
        self._failures: dict[int, RankFailure] = {}
        self._shown: RankFailure | None = None
        self._stopped: list[
            int
        ] = []  # ranks that were ended, because another one had failed or by a signal
        self._deadline: float | None = None
        self._signals: Iterator[signal.Signals] = iter(())
        self._interrupted: signal.Signals | None = None
        self._said_left = False

    def __enter__(self) -> _Run:
        self.folder = Path(private_folder())
        self.ends = self.folder / "ended"
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def follow(self, starter: list[str], environment: dict[str, str]) -> None:
        """Start the ranks by a command, and follow them until all have ended."""
        self.ends.mkdir(0o700)
        self._job.write(self.folder / JOB)
        with (
            socket.socket(socket.AF_UNIX) as listener,
            selectors.DefaultSelector() as waiting,
        ):
            listener.bind(str(self.folder / SOCKET))
            listener.listen(self._job.ranks)
            waiting.register(listener, selectors.EVENT_READ, None)
            process = self._start(starter, environment)
            try:
                with self._requests.acting(functools.partial(self._interrupt, process)):
                    self._wait(process, listener, waiting)
            finally:
                _end(process)
                for key in list(waiting.get_map().values()):
                    if key.fileobj is not listener:
                        os.close(key.fd)
        self._code = process.returncode

    def _start(self, starter: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        keeper = [sys.executable, "-I", "-S", supervisor.__file__]
        keeper += ["--job", str(os.getpid()), str(self.folder)]
        return subprocess.Popen(
            [*keeper, *starter],
            stdin=subprocess.DEVNULL,
            env={
                **environment,
                **session_variables(str(self.folder)),
                **outside_jobs(os.environ),
                **self._job.variables(),
                JOB_FOLDER: str(self.folder),
            },
            start_new_session=True,  # Ctrl-C in the terminal is this process's to handle
        )

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        listener: socket.socket,
        waiting: selectors.BaseSelector,
    ) -> None:
        """Follow the ranks until the job is over and everything that they wrote is read."""
        while True:
            over = process.poll() is not None
            ready = waiting.select(0 if over else _SLICE)
            for key, _ in ready:
                if key.data is None:
                    self._meet(listener, waiting)
                elif not self._read(key.fd, key.data):
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
            self._look_for_ends()
            if over and not ready:
                return
            self._stop_others()
            self._look_for_ranks_that_left()

    def _meet(self, listener: socket.socket, waiting: selectors.BaseSelector) -> None:
        """Take the connection of a rank, which brings the ends of two pipes with it."""
        connection, _ = listener.accept()
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            line, pipes, _, _ = socket.recv_fds(connection, 1 << 10, 2)
            if not line:  # it was ended meanwhile
                return
            hello = json.loads(line)
            stack.pop_all()
        rank = hello["rank"]
        self._pids[rank] = hello["pid"]
        waiting.register(connection.detach(), selectors.EVENT_READ, _Stream(rank, "events"))
        for pipe, name in zip(pipes, ("stdout", "stderr"), strict=True):
            waiting.register(pipe, selectors.EVENT_READ, _Stream(rank, name))
        if self._interrupted is not None:  # before this rank was there
            self._signal(self._interrupted)

    def _read(self, descriptor: int, stream: _Stream) -> bool:
        """Read what a rank has sent; return whether more may come."""
        try:
            data = os.read(descriptor, 1 << 16)
        except ConnectionError:  # it was killed
            return False
        if stream.name != "events":
            self._output.take(stream.rank, stream.name, data)
            return bool(data)
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        for line in lines:
            self._take(stream.rank, json.loads(line))
        return bool(data)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if message["event"] == "started":
            self._started.add(rank)
            if len(self._started) == self._job.ranks:
                many = (
                    "the rank runs" if self._job.ranks == 1 else f"all {self._job.ranks} ranks run"
                )
                self._output.say(f"smp-run: {many} the script")
        elif message["event"] == "left":
            self._left[rank] = time.monotonic()
        else:
            about = {name: message[name] for name in ("at", "code", "text", "last")}
            self._failures[rank] = RankFailure(rank, **about)

    def _look_for_ends(self) -> None:
        """Read which ranks have ended, as their supervisors tell."""
        for name in set(os.listdir(self.ends)):
            if not name.isdecimal() or int(name) in self._ended:
                continue
            rank = int(name)
            code = self._ended[rank] = json.loads((self.ends / name).read_text())["code"]
            if code and rank not in self._stopped:
                # The rank's own word stays: its MPI may have killed it on the way out.
                self._failures.setdefault(rank, RankFailure(rank, time.monotonic(), code))

    def _look_for_ranks_that_left(self) -> None:
        """Say once that ranks go on for long without others: they may wait for them."""
        if self._said_left or self._failures or not self._left:
            return
        going = sorted(set(range(self._job.ranks)) - self._left.keys() - self._ended.keys())
        if going and time.monotonic() - max(self._left.values()) > _LEFT:
            self._said_left = True
            self._output.say(f"smp-run: {self._those_that_left()}; {ranks_text(going)} goes on")

    def _those_that_left(self) -> str:
        return f"{ranks_text(sorted(self._left))} has ended the script without an error"

    def _stop_others(self) -> None:
        """After a first failure: show it, give the others time, then end them."""
        if not (self._failures or self._interrupted):
            return
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + _OTHERS
            self._signals = iter((signal.SIGTERM, signal.SIGKILL))
        elif now > self._deadline:
            self._signal(next(self._signals, signal.SIGKILL))
            self._deadline = now + _PATIENCE
        if self._failures and now - min(each.at for each in self._failures.values()) > _AT_ONCE:
            self._show_first()

    def _interrupt(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Hand a signal on to the ranks; end the job at the second one, and where not every rank has started.

        Called by the handler of the signal, because this process may be waiting in a write.
        """
        self._output.leave_who_does_not_read()
        if self._interrupted is not None or len(self._started) < self._job.ranks:
            process.terminate()
        self._interrupted = number
        self._signal(number)
        self._deadline = time.monotonic() + _PATIENCE
        self._signals = iter((signal.SIGTERM, signal.SIGKILL))

    def _signal(self, number: signal.Signals) -> None:
        for rank, pid in self._pids.items():
            if rank not in self._ended:
                self._stopped.append(rank)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)

    def _in_order(self) -> list[RankFailure]:
        """The failures, the first one first."""
        # Others notice the death of a process before its supervisor has told of it.
        died = {each.rank for each in self._failures.values() if each.code < 0}
        return sorted(self._failures.values(), key=lambda each: (each.rank not in died, each.at))

    def _show_first(self) -> None:
        """Show the first failure, once."""
        if self._shown is not None or not self._failures:
            return
        first = self._shown = self._in_order()[0]
        left = [rank for rank, at in self._left.items() if at < first.at and rank != first.rank]
        if left:
            self._output.say(f"smp-run: before, {self._those_that_left()}")
        self._output.say(f"smp-run: rank {first.rank} {first.cause}")
        if first.text:
            self._output.say(first.text)

    def conclude(self) -> int:
        """Show the rest of the output, and how the ranks have ended, the first failure first; return the exit code."""
        self._output.end()
        self._show_first()
        self._show_others()
        if self._interrupted is not None:
            self._output.say(f"smp-run: ended by {self._interrupted.name}; no rank is left")
            return 128 + self._interrupted
        if self._shown is not None:
            return self._shown.code if self._shown.code >= 0 else 128 - self._shown.code
        missing = sorted(set(range(self._job.ranks)) - self._ended.keys())
        if not missing:
            return 0
        if not self._ended and not self._pids:
            raise BackendError(f"the ranks did not start: exit code {self._code} of the job")
        left = sorted(rank for rank, ended in self._ended.items() if not ended)
        after = f" after {ranks_text(left)} had ended with exit code 0" if left else ""
        self._output.say(
            f"smp-run: {ranks_text(missing)} was ended by the launcher of the job{after}"
        )
        return self._code or 1

    def _show_others(self) -> None:
        """Show failures after the first, alike ones together, and the ranks that had to be ended."""
        kinds: dict[str, list[RankFailure]] = {}
        for each in self._in_order():
            if each is not self._shown and each.last:
                kinds.setdefault(each.last.partition(":")[0], []).append(each)
        for alike in kinds.values():
            ranks = ranks_text(sorted(each.rank for each in alike))
            line, _, _ = alike[0].last.partition("\n")
            self._output.say(f"smp-run: then {ranks}: {textwrap.shorten(line, _WIDTH)}")
        killed = {rank for rank, code in self._ended.items() if code < 0}
        waited = sorted(killed.intersection(self._stopped) - self._failures.keys())
        if waited:
            self._output.say(f"smp-run: {ranks_text(waited)} went on, and had to be ended")


@dataclasses.dataclass(slots=True)
class _Stream:
    """One descriptor that a rank writes to."""

    rank: int
    name: str
    rest: bytes = b""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job, if it has not."""
    for end, patience in ((process.terminate, _PATIENCE), (process.kill, None)):
        if process.poll() is None:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
