"""The program of one rank process: it tells the launcher how it fares, and runs the script.

A rank connects three times to a socket in the job's folder: its standard output and error go through two of the
connections, and through the third it tells, a line of JSON each, that it starts the script, and by which exception the
script has ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from smp_core.errors import SmpError
from smp_core.launch import script
from smp_core.launch.job import ScriptJob
from smp_core.transport import ending
from smp_core.transport.launchers import Launch, keep_for_ourselves, launch_of_process

#: The files in a job's folder: the job itself, and the socket that ranks connect to.
JOB, SOCKET = "job.json", "launcher"


class LauncherConnection:
    """The connection to the launcher."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = str(folder / SOCKET), rank
        self._events = self._connect("events")
        for stream in (sys.stdout, sys.stderr):
            connection = self._connect("stdout" if stream is sys.stdout else "stderr")
            os.dup2(connection.fileno(), stream.fileno())
            connection.close()
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def _connect(self, what: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        _send(connection, {"rank": self._rank, "what": what, "pid": os.getpid()})
        return connection

    def tell(self, event: str, **about: Any) -> None:
        """Tell that something has happened. The launcher may be gone."""
        try:
            _send(self._events, {"event": event, "at": time.monotonic(), **about})
        except OSError:
            return


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def main() -> NoReturn:
    """Run the job whose folder is the first argument, on this rank."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # supervisors ignore it, and ranks inherit that
    folder = Path(sys.argv[1])
    job = ScriptJob.read(folder / JOB)
    launch = launch_of_process()
    assert launch is not None
    launcher = LauncherConnection(folder, launch.rank)
    run_here(job, launch, launcher)


def run_here(job: ScriptJob, launch: Launch, launcher: LauncherConnection | None) -> NoReturn:
    """Run a script in this process, which is a rank of a launcher; ``launcher`` is ours, if it is ours.

    Never returns: the process ends as the script has ended.
    """
    names = sys.modules["__main__"].__dict__
    script_code = None
    ending.watch()
    try:
        if launch.fabric == "mpi":  # MPI reads the launcher's variables, which are gone afterwards
            from smp_core.transport.mpi.job import join

            join(launch)
        keep_for_ourselves(launch)
        script.prepare(job, launch.local_size or launch.size)
        script_code = job.code()
        names.clear()
        names.update(script.namespace_of(job.script))
        if launcher is not None:
            launcher.tell("started")
        exec(script_code, names)
    except SystemExit as error:
        if error.code not in (None, 0) and launcher is not None:
            text = error.code if isinstance(error.code, str) else f"exit code {error.code}"
            code = error.code if isinstance(error.code, int) else 1
            launcher.tell("failed", code=code, text=text, last=text)
        sys.exit(error.code)
    except BaseException as error:
        trace = script.below(error.__traceback__, script_code)
        _fail(error, trace, launcher)
    sys.exit(0)


def _fail(
    error: BaseException, trace: TracebackType | None, launcher: LauncherConnection | None
) -> NoReturn:
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if launcher is None:
        sys.excepthook(type(error), error, trace)
    else:
        lines = traceback.format_exception(type(error), error, trace)
        if isinstance(error, SmpError) and trace is error.__traceback__:
            lines = traceback.format_exception_only(error)  # no line of the script's has raised it
        last = traceback.format_exception_only(error)[-1].strip()
        launcher.tell("failed", code=code, text="".join(lines).rstrip(), last=last)
    sys.exit(code)
