"""Which launcher started this process, and as which rank: data, read from the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from smp_core.errors import BackendError


@dataclasses.dataclass(frozen=True, slots=True)
class Launcher:
    """The environment variables by which a launcher tells ranks who they are."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    fabric: str  # what its ranks exchange data through, if nobody says


#: The first whose rank and size are there is the one: torchrun may run below srun.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), "gloo"),
    Launcher(
        "mpiexec (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "mpi",
    ),
    Launcher(
        "mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",), "mpi"
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        "mpi",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """This process as its launcher sees it. ``local_*`` are None where it does not say."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are known to be on this machine."""
        return self.local_size == self.size


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """How this process was launched, or None: by hand, or as the only rank of a job.

    Raises BackendError if a launcher's rank is not below its size, or is no number.
    """
    for launcher in LAUNCHERS:
        if launcher.rank not in environment or launcher.size not in environment:
            continue
        rank, size = (_number(environment, (name,)) for name in (launcher.rank, launcher.size))
        if rank is None or size is None or not 0 <= rank < size:
            raise BackendError(
                f"{launcher.name}: {launcher.rank}={environment[launcher.rank]} and "
                f"{launcher.size}={environment[launcher.size]} do not say which rank this is"
            )
        if size == 1:
            return None
        local_rank = _number(environment, launcher.local_rank)
        local_size = _number(environment, launcher.local_size)
        return Launch(launcher, rank, size, local_rank, local_size)
    return None


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environment.get(name, "")
        if text.isdecimal():
            return int(text)
    return None
