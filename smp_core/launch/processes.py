"""Rank processes of a script, on this machine: started by an MPI or by a supervisor, and followed to their ends."""

from __future__ import annotations

import contextlib
import dataclasses
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smp_core.errors import BackendError
from smp_core.launch import supervisor
from smp_core.launch.job import ScriptJob
from smp_core.launch.mpiexec import find_mpiexec, is_open_mpi, outside_jobs
from smp_core.launch.output import RankOutput
from smp_core.launch.rank import JOB, SOCKET
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.private_folder import JOB_FOLDER, private_folder

_PYTHON = [sys.executable, "-P", "-c"]  # -P: the present folder is no place to import from
_RANK = "from smp_core.launch.rank import main; main()"
_STARTER = "from smp_core.launch.starter import main; main()"
_OTHERS = 5.0  # seconds that the other ranks get to end by themselves after the first has failed
_PATIENCE = 5.0  # seconds between a signal and the next, harder one
_SLICE = 0.1  # seconds between two looks at what no descriptor tells
_WIDTH = 120  # characters of a line about a rank that failed later
_INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it


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
    run = _Run(job, output)
    return run.follow([*_PYTHON, _STARTER, str(job.ranks), str(run.told), str(run.folder)], {})


def run_mpi(job: ScriptJob, output: RankOutput) -> int:
    """Run a job as an MPI job; return the exit code of the first rank that failed, or 0.

    Raises BackendError if there is no MPI.
    """
    command, environment = find_mpiexec(job.mpiexec)
    options = job.mpi_options
    if options and not is_open_mpi(command[0]):
        output.say(f"smp-run: {command[0]} is not Open MPI's: left out {shlex.join(options)}")
        options = ()
    run = _Run(job, output)
    above = [sys.executable, "-I", "-S", supervisor.__file__, str(run.told)]
    starter = [*command, *options, "-n", str(job.ranks), *above]
    return run.follow([*starter, *_PYTHON, _RANK, str(run.folder)], environment)


class _Run:
    """One run of a script on rank processes."""

    def __init__(self, job: ScriptJob, output: RankOutput) -> None:
        self._job, self._output = job, output
        self.folder = Path(private_folder())
        self.told = self.folder / "ended"
        self._started: set[int] = set()
        self._ended: dict[int, int] = {}  # exit codes; negative for signals
        self._pids: dict[int, int] = {}
        self._failures: dict[int, RankFailure] = {}
        self._stopped: list[int] = []  # ranks that were ended because another one had failed
        self._deadline: float | None = None
        self._signals: Iterator[signal.Signals] = iter(())
        self._interrupted = False

    def follow(self, starter: list[str], environment: dict[str, str]) -> int:
        """Start the ranks by a command, and follow them until all have ended."""
        try:
            self.told.mkdir(0o700)
            self._job.write(self.folder / JOB)
            with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as waiting:
                listener.bind(str(self.folder / SOCKET))
                listener.listen(3 * self._job.ranks)
                waiting.register(listener, selectors.EVENT_READ, None)
                process = self._start(starter, environment)
                try:
                    self._wait(process, listener, waiting)
                finally:
                    _end(process)
            self._output.end()
            return self._conclude(process.returncode)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, starter: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        keeper = [sys.executable, "-I", "-S", supervisor.__file__]
        keeper += ["--job", str(os.getpid()), str(self.folder)]
        return subprocess.Popen(
            [*keeper, *starter],
            stdin=subprocess.DEVNULL,
            env={
                **environment,
                **outside_jobs(os.environ),
                **self._job.variables(),
                JOB_FOLDER: str(self.folder),
                "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
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
        open_connections = 0
        while True:
            try:
                over = process.poll() is not None
                ready = waiting.select(0 if over else _SLICE)
                for key, _ in ready:
                    if key.data is None:
                        connection, _ = listener.accept()
                        waiting.register(connection, selectors.EVENT_READ, _Connection())
                        open_connections += 1
                    elif not self._read(key.fileobj, key.data):  # type: ignore[arg-type]
                        waiting.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
                        open_connections -= 1
                self._look_for_ends()
                if over and not ready:
                    return
                self._stop_others()
            except KeyboardInterrupt:
                self._interrupt(process)

    def _read(self, connection: socket.socket, state: _Connection) -> bool:
        """Read what a rank has sent; return whether more may come."""
        data = connection.recv(1 << 16)
        if state.hello is None:
            state.rest += data
            line, found, state.rest = state.rest.partition(b"\n")
            if not found:
                state.rest = line
                return bool(data)
            state.hello = json.loads(line)
            self._pids[state.hello["rank"]] = state.hello["pid"]
            got, state.rest = state.rest, b""
        else:
            got = data
        if state.hello["what"] != "events":
            self._output.take(state.hello["rank"], state.hello["what"], got)
        else:
            *lines, state.rest = (state.rest + got).split(b"\n")
            for line in lines:
                self._take(state.hello["rank"], json.loads(line))
        return bool(data)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if message["event"] == "started":
            self._started.add(rank)
            if len(self._started) == self._job.ranks:
                self._output.say(f"smp-run: all {self._job.ranks} ranks run the script")
        else:
            about = {name: message[name] for name in ("at", "code", "text", "last")}
            self._failures[rank] = RankFailure(rank, **about)

    def _look_for_ends(self) -> None:
        """Read which ranks have ended, as their supervisors tell."""
        for name in set(os.listdir(self.told)):
            if not name.isdecimal() or int(name) in self._ended:
                continue
            rank = int(name)
            code = self._ended[rank] = json.loads((self.told / name).read_text())["code"]
            if code and rank not in self._stopped:
                self._failures.setdefault(
                    rank, RankFailure(rank, time.monotonic(), code)
                ).code = code

    def _stop_others(self) -> None:
        """After a first failure: give the others time, then end them."""
        if not (self._failures or self._interrupted):
            return
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + _OTHERS
            self._signals = iter((signal.SIGTERM, signal.SIGKILL))
        elif now > self._deadline:
            self._signal(next(self._signals, signal.SIGKILL))
            self._deadline = now + _PATIENCE

    def _interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Ctrl-C: hand it on to the ranks; at the second one end the job at once."""
        if self._interrupted:
            process.terminate()
        self._interrupted = True
        self._signal(signal.SIGINT)
        self._deadline = time.monotonic() + _PATIENCE
        self._signals = iter((signal.SIGTERM, signal.SIGKILL))

    def _signal(self, number: signal.Signals) -> None:
        for rank, pid in self._pids.items():
            if rank not in self._ended:
                self._stopped.append(rank)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)

    def _conclude(self, code: int) -> int:
        """Tell how the ranks have ended, the first failure first; return the exit code."""
        if self._interrupted:
            self._output.say("smp-run: interrupted; all ranks have ended")
            return _INTERRUPTED
        # Others notice the death of a process before its supervisor has told of it.
        died = {rank for rank, code in self._ended.items() if code < 0} - set(self._stopped)
        failures = sorted(
            self._failures.values(), key=lambda each: (each.rank not in died, each.at)
        )
        if not failures:
            if code:
                raise BackendError(
                    f"the ranks did not start, or none of them said how it ended: exit code {code} of the job"
                )
            return 0
        first, *others = failures
        self._output.say(f"smp-run: rank {first.rank} {first.cause}")
        if first.text:
            self._output.say(first.text)
        kinds: dict[str, list[RankFailure]] = {}
        for each in others:
            if each.last:
                kinds.setdefault(each.last.partition(":")[0], []).append(each)
        for alike in kinds.values():
            ranks = ranks_text(sorted(each.rank for each in alike))
            line, _, _ = alike[0].last.partition("\n")
            self._output.say(f"smp-run: then {ranks}: {textwrap.shorten(line, _WIDTH)}")
        waited = sorted(set(self._stopped) - self._failures.keys())
        if waited:
            self._output.say(
                f"smp-run: {ranks_text(waited)} went on for {_OTHERS:g} s, and had to be ended"
            )
        return first.code if first.code >= 0 else 128 - first.code


@dataclasses.dataclass(slots=True)
class _Connection:
    """One connection of a rank."""

    hello: dict[str, Any] | None = None
    rest: bytes = b""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job, if it has not."""
    for end, patience in ((process.terminate, _PATIENCE), (process.kill, None)):
        if process.poll() is None:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
