"""A small process above each rank of an MPI job, and above the job itself.

    warden.py --exec PID COMMAND...    becomes the command, which the kernel ends with that parent
    warden.py TOLD COMMAND...          runs a rank; writes how it ended to the folder TOLD

Runs by itself, without this project or anything else imported: it must cost next to nothing.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys

#: Where the launchers that we know say which rank a process is.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GENERATIONS = 20  # of processes that start processes, before we give up on a body


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent process dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)


def rank_of_launcher() -> str:
    """This process's rank, as its launcher says it."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return os.environ[name]
    sys.exit(f"warden: none of {', '.join(RANK_VARIABLES)} says which rank this is")


def _ward(told: str, command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    slot, warden = rank_of_launcher(), os.getpid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        try:
            die_with(warden)
            os.setsid()  # a group of its own, with what the bodies start
            os.execv(command[0], command)
        finally:
            os._exit(127)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _kill_orphans()
    path = os.path.join(told, slot)
    with open(path + ".new", "w") as file:
        json.dump({"pid": pid, "code": code}, file)
    os.rename(path + ".new", path)
    return code if code >= 0 else 128 - code


def _kill_orphans() -> None:
    """What the rank's bodies put into groups of their own; again for what that leaves behind."""
    for _ in range(_GENERATIONS):
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                orphans = [int(pid) for pid in file.read().split()]
        except OSError:
            return  # not Linux
        if not orphans:
            return
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # another user's by now
                return
            os.waitpid(pid, 0)


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments[0] == "--exec":
        die_with(int(arguments[1]))
        os.execvp(arguments[2], arguments[2:])
    sys.exit(_ward(arguments[0], arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
