"""How an MPI job is started."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.mpi.mpiexec import MpiexecPool
from pytest_smp.ranks.protocols import ExecutorOptions
from smp_core.errors import BackendError
from smp_core.launch import supervisor

#: The variables of a shell that srun, mpiexec or torchrun started, by their documentation.
OUTER = {
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "PMIX_RANK": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
}


def test_ranks_are_not_told_who_an_outer_launcher_takes_them_for(tmp_path, monkeypatch):
    """With PMI_RANK=0 around it every rank of an Open MPI job took itself for rank 0."""
    for name, value in {**OUTER, "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    script, seen = tmp_path / "mpiexec.py", tmp_path / "seen"
    script.write_text(f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))")
    command = shlex.join([sys.executable, str(script)])
    pool = MpiexecPool(ExecutorOptions(ranks=2, mpiexec=command))
    try:
        pool.start(range(2))
        assert pool._job is not None
        pool._job.wait(timeout=300)
    finally:
        pool.close()
    environment = json.loads(seen.read_text())
    # Open MPI leaves its session folder when it is killed; that of the pool goes.
    assert environment["PRTE_MCA_prte_tmpdir_base"] == pool.folder
    assert environment["OMPI_MCA_orte_tmpdir_base"] == pool.folder
    assert not OUTER.keys() & environment.keys()
    assert environment["SLURM_JOB_ID"] == "7"  # of the allocation, where mpiexec is to run


def test_mpi_without_mpi4py_is_refused_before_a_rank_starts(monkeypatch):
    monkeypatch.setattr("pytest_smp.ranks.mpi.mpiexec.has_mpi4py", lambda: False)
    with pytest.raises(BackendError, match="the mpi backend needs mpi4py: pip install"):
        open_backend("mpi", ExecutorOptions(ranks=2))


@pytest.mark.parametrize("name", ["PMI_RANK", "OMPI_COMM_WORLD_RANK"])
@pytest.mark.timeout(900)
def test_a_job_below_an_outer_launcher(command, pytester, name):
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.smp(ranks=2)
        def test_it(smp):
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
        """
    )
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--smp-backend=mpi"]
    code, text = command([*words, "--smp-ranks=2", str(pytester.path)], **{name: "0"}).end()
    assert code == 0, text


MAKES_MEMORY = """
import mmap, os, sys, time
path = "/dev/shm/mpich_shm_{name}"
descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 4096)
kept = mmap.mmap(descriptor, 4096)
os.close(descriptor)
open({note!r}, "w").write("made")
time.sleep(600)
"""


def test_shared_memory_of_a_killed_job_is_removed_and_no_other(tmp_path):
    """As MPICH makes it: it unlinks it when the job finalises, which a killed one does not."""
    name, note, script = uuid.uuid4().hex, tmp_path / "note", tmp_path / "mpiexec.py"
    script.write_text(MAKES_MEMORY.format(name=name, note=str(note)))
    ours, others = (Path(f"/dev/shm/mpich_shm_{each}") for each in (name, f"other-{name}"))
    pool = MpiexecPool(ExecutorOptions(ranks=2, mpiexec=shlex.join([sys.executable, str(script)])))
    try:
        pool.start(range(2))
        deadline = time.monotonic() + 60
        while not note.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        others.touch()
        assert ours.exists()
        pool.kill([])
        assert not ours.exists()
        assert others.exists()
    finally:
        pool.close()
        for path in (ours, others):
            path.unlink(missing_ok=True)


#: supervisor.py, where the kernel has no pidfd_open, as below some sandboxes.
WITHOUT_PIDFD = """
import os, runpy, sys
def pidfd_open(pid, flags=0):
    raise OSError(38, "Function not implemented")
os.pidfd_open = pidfd_open
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CONTROLLER = """
import os, subprocess, sys
words = [sys.executable, "-c", sys.argv[1], sys.argv[2], "--job", str(os.getpid()), sys.argv[3]]
job = subprocess.Popen([*words, sys.executable, "-c", sys.argv[4]])
sys.exit(job.wait())
"""


def _controller(folder, code):
    words = [
        sys.executable,
        "-c",
        CONTROLLER,
        WITHOUT_PIDFD,
        supervisor.__file__,
        str(folder),
        code,
    ]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_a_job_runs_where_nobody_can_watch_a_process(tmp_path):
    with _controller(tmp_path, "print('ran'); raise SystemExit(7)") as controller:
        text, _ = controller.communicate(timeout=300)
    assert (text, controller.returncode) == ("ran\n", 7)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_a_job_that_nobody_can_watch_ends_with_its_controller(tmp_path):
    code = "import time; print('started', flush=True); time.sleep(600)"
    with _controller(tmp_path, code) as controller:
        assert controller.stdout.readline() == "started\n"
        controller.kill()
        # The job holds the other end of the pipe: it is read to its end when the job is gone.
        assert controller.communicate(timeout=300)[0] == ""
