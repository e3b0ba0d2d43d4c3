"""A small process above each rank of a job, and above the job itself.

    supervisor.py --job PID FOLDER COMMAND...   runs a job; when the process PID, its controller, is gone,
                                            ends all of the job and removes FOLDER
    supervisor.py ENDS COMMAND...               runs a rank of an MPI job; writes how it ended to the folder ENDS

This file runs by itself, without this project or anything else imported: it must cost next to nothing.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import struct
import sys

#: The rank of a process that `fork_ranks` has made, and the number of ranks.
OWN_RANK, OWN_SIZE = "SMP_RUN_RANK", "SMP_RUN_SIZE"
#: Where the launchers of MPI jobs that we know say which rank a process is.
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
    sys.exit(f"supervisor: none of {', '.join(RANK_VARIABLES)} says which rank this is")


def fork_ranks(size: int, ends: str) -> None:
    """Fork ``size`` ranks of this process, each below a supervisor of its own. Returns in the ranks alone; this process
    ends with the exit code of the first that failed, or 0.
    """
    starter, failed = os.getpid(), 0
    for rank in range(size):
        if os.fork() == 0:
            die_with(starter)
            os.environ.update({OWN_RANK: str(rank), OWN_SIZE: str(size)})
            _fork_below(str(rank), ends)
            return
    for _ in range(size):
        _, status = os.wait()
        failed = failed or _exit_code(os.waitstatus_to_exitcode(status))
    os._exit(failed)


def _fork_below(slot: str, ends: str) -> None:
    """Fork a rank of this process, which becomes its supervisor. Returns in the rank alone."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        supervisor = os.getpid()
        _adopt_orphans()
        pid = os.fork()
        if pid:
            os._exit(_follow(pid, slot, ends))
    except BaseException:
        os._exit(127)
    die_with(supervisor)
    os.setsid()  # a group of its own, with what the bodies start


def _follow(pid: int, slot: str, ends: str) -> int:
    """Wait for the end of a rank, end what it leaves behind, and write how it ended; return its exit code."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _kill_orphans()
    path = os.path.join(ends, slot)
    with contextlib.suppress(FileNotFoundError):  # the controller is gone, and its folder
        with open(path + ".new", "w") as file:
            json.dump({"pid": pid, "code": code}, file)
        os.rename(path + ".new", path)
    return _exit_code(code)


def _keep(controller: int, folder: str, command: list[str]) -> int:
    """Run a job. Nothing of it, and of what its ranks have started, outlives this call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _adopt_orphans()
    keeper, memory = os.getpid(), _SharedMemory()
    job = os.fork()
    if job == 0:
        try:
            die_with(keeper)
            os.execvp(command[0], command)
        finally:
            os._exit(127)

    def hand_on(*_: object) -> None:
        if memory.descriptor >= 0:
            memory.look()  # while the job's processes still show that they use a file
        os.kill(job, signal.SIGTERM)

    signal.signal(signal.SIGTERM, hand_on)
    orphaned = _outlives(controller, job, memory)
    if orphaned:
        os.kill(job, signal.SIGKILL)
    _, status = os.waitpid(job, 0)
    _kill_orphans()
    memory.remove()
    if orphaned:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    return _exit_code(os.waitstatus_to_exitcode(status))


class _SharedMemory:
    """The files in shared memory that an MPI makes for a job, and leaves if the job is killed.

    Their names say nothing of the job, so the kernel tells when one is made, and the job's processes
    show whether it is theirs. Another user's or another job's is not touched.
    """

    _FOLDER = "/dev/shm"
    _NAMES = "mpich_shm_", "sm_segment."  # of MPICH, of Open MPI
    _IN_CREATE = 0x100

    def __init__(self) -> None:
        self._found: set[str] = set()
        libc = ctypes.CDLL(None)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor >= 0:  # else a limit of the machine: files may stay
            libc.inotify_add_watch(self.descriptor, self._FOLDER.encode(), self._IN_CREATE)

    def look(self) -> None:
        """Read which files were made since the last call."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.descriptor, 1 << 16)
            while data:
                (length,) = struct.unpack_from("I", data, 12)
                name = os.fsdecode(data[16 : 16 + length].rstrip(b"\0"))
                data = data[16 + length :]
                path = os.path.join(self._FOLDER, name)
                if name.startswith(self._NAMES) and any(_uses(pid, path) for pid in _descendants()):
                    self._found.add(path)

    def remove(self) -> None:
        """The job is over: nobody uses them."""
        for path in self._found:
            with contextlib.suppress(OSError):  # the MPI has removed it
                os.unlink(path)


def _uses(pid: int, path: str) -> bool:
    """Return whether a process has a file open or mapped; shared memory is opened, mapped and then closed."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") == path:
                    return True
        with open(f"/proc/{pid}/maps") as maps:
            return any(line.rstrip().endswith(path) for line in maps)
    return False


def _descendants(pid: int | None = None) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid or 'self'}/task"):
            with open(f"/proc/{pid or 'self'}/task/{task}/children") as file:
                children = [int(child) for child in file.read().split()]
            found += [each for child in children for each in (child, *_descendants(child))]
    return found


def _can_watch() -> bool:
    """Return whether the kernel tells when a process ends. Some sandboxes, and old kernels, do not."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _outlives(controller: int, job: int, memory: _SharedMemory) -> bool:
    """Wait until the controller or the job has ended; return whether the controller has."""
    try:
        watched = os.pidfd_open(controller)
    except ProcessLookupError:
        return True
    if os.getppid() != controller:  # it died in between, and its number may be another's
        return True
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    ended = os.pidfd_open(job)
    poll.register(ended, select.POLLIN)
    if memory.descriptor >= 0:
        poll.register(memory.descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if memory.descriptor in ready:
            memory.look()
        if ready & {watched, ended}:
            return watched in ready


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind when they die (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_orphans() -> None:
    """End every child; again for the children that they leave behind."""
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
    """Run a job, or a rank of an MPI job, by the words of the command line that the module lists."""
    if arguments[0] == "--job":
        if not _can_watch():  # the controller ends the job, or on Linux the kernel
            die_with(int(arguments[1]))
            os.execvp(arguments[3], arguments[3:])
        sys.exit(_keep(int(arguments[1]), arguments[2], arguments[3:]))
    ends, *command = arguments
    _fork_below(rank_of_launcher(), ends)
    try:
        os.execv(command[0], command)
    finally:
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
