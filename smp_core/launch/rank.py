"""The program of one rank process: it tells the launcher how it fares, and runs the script.

A rank connects to a socket in the job's folder. The rank sends the read ends of two pipes, through which its standard
output and error go, and then events, a line of JSON each: that it starts the script, and how the script has ended.
"""

from __future__ import annotations

import atexit
import contextlib
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
        self._pid = os.getpid()
        self._events = socket.socket(socket.AF_UNIX)
        self._events.connect(str(folder / SOCKET))
        pipes = [os.pipe(), os.pipe()]
        hello = json.dumps({"rank": rank, "pid": self._pid}).encode()
        socket.send_fds(self._events, [hello], [read for read, _ in pipes])
        for number, (read, write) in enumerate(pipes, start=1):
            os.dup2(write, number)
            os.close(read)
            os.close(write)
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            for number, errors in ((1, "surrogateescape"), (2, "backslashreplace"))
        )

    def tell(self, event: str, **about: Any) -> None:
        """Tell that something has happened. A process that the rank has forked tells nothing."""
        if os.getpid() != self._pid:
            return
        message = {"event": event, "at": time.monotonic(), **about}
        with contextlib.suppress(OSError):  # the launcher is gone
            self._events.sendall(json.dumps(message).encode() + b"\n")


def main() -> NoReturn:
    """Run the job whose folder is the first argument, on this rank."""
    # Supervisors ignore it, and ranks inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(sys.argv[1])
    job = ScriptJob.read(folder / JOB)
    launch = launch_of_process()
    assert launch is not None
    launcher = LauncherConnection(folder, launch.rank)
    run_here(job, launch, launcher)


def run_here(job: ScriptJob, launch: Launch, launcher: LauncherConnection | None) -> NoReturn:
    """Run a script in this process, a rank of ``launcher``; without one, of a launcher that is not ``smp-run``.

    Never returns: the process ends as the script has ended.
    """
    names = sys.modules["__main__"].__dict__
    script_code = None
    ending.watch()
    hook = sys.excepthook
    try:
        # MPI reads the launcher's variables, which are gone afterwards. A rank alone needs no MPI, and no mpi4py.
        if launch.fabric == "mpi" and (launch.size > 1 or launcher is not None):
            from smp_core.transport.mpi.job import join

            join(launch)
            atexit.register(_abort_mpi_after_a_failure)
        keep_for_ourselves(launch)
        script.prepare(job, launch.local_size or launch.size)
        script_code = job.code()
        names.clear()
        names.update(script.namespace_of(job.script))
        if launcher is not None:
            launcher.tell("started")
        exec(script_code, names)
    except SystemExit as error:
        code = script.exit_code(error.code)
        if launcher is not None and code:
            text = error.code if isinstance(error.code, str) else f"exit code {code}"
            launcher.tell("failed", code=code, text=text, last=text)
        elif launcher is not None:
            launcher.tell("left")
        sys.exit(code if launcher is not None else error.code)
    except BaseException as error:
        trace = script.below(error.__traceback__, script_code)
        if launcher is None or not _shows_as(sys.excepthook, hook):  # the script has one of its own
            sys.excepthook(type(error), error, trace)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        if launcher is not None:
            _tell_failure(error, trace, launcher, code)
        sys.exit(code)
    if launcher is not None:
        launcher.tell("left")
    sys.exit(0)


def _shows_as(hook: object, ours: object) -> bool:
    """Return whether an exception hook is ours, as it is or below those that torch puts around it for its ranks."""
    if hook is ours:
        return True
    if not getattr(hook, "__module__", "").startswith("torch."):
        return False
    cells = getattr(hook, "__closure__", None) or ()
    return any(
        _shows_as(each.cell_contents, ours) for each in cells if callable(each.cell_contents)
    )


def _tell_failure(
    error: BaseException, trace: TracebackType | None, launcher: LauncherConnection, code: int
) -> None:
    lines = traceback.format_exception(type(error), error, trace)
    if isinstance(error, SmpError) and trace is error.__traceback__:
        lines = traceback.format_exception_only(error)  # no line of the script has raised it
    last = traceback.format_exception_only(error)[-1].strip()
    launcher.tell("failed", code=code, text="".join(lines).rstrip(), last=last)


def _abort_mpi_after_a_failure() -> None:
    """At exit: an MPI job whose ranks do not all end without an error is aborted; MPI would wait for the others."""
    status = ending.status()
    if status:
        from mpi4py.run import set_abort_status

        set_abort_status(status)
