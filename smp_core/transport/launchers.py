"""The launcher that started this process, and the rank that it gave: data, read from the environment."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, MutableMapping

from smp_core.errors import BackendError
from smp_core.transport.private_folder import JOB_FOLDER


@dataclasses.dataclass(frozen=True, slots=True)
class Launcher:
    """The environment variables by which a launcher tells ranks who they are."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    #: The default fabric of its ranks, in an environment with a rendezvous of torch's and in one
    #: without.
    with_rendezvous: str
    without: str
    #: How it is told the number of ranks: of all, or of each machine (``local``).
    command: str
    local: bool = False
    #: The variable that names the folder where its ranks meet; empty if they meet by torch's own (``env://``).
    folder: str = ""

    @property
    def starts_mpi(self) -> bool:
        """True if its ranks are always those of an MPI job."""
        return (self.with_rendezvous, self.without) == ("mpi", "mpi")


_TORCHRUN = "torchrun"

#: The first entry whose rank and size are in the environment counts: torchrun may run below srun.
LAUNCHERS = (
    Launcher(
        "smp-run",
        "SMP_RUN_RANK",
        "SMP_RUN_SIZE",
        "SMP_RUN_RANK",  # all ranks are on one machine
        "SMP_RUN_SIZE",
        "gloo",
        "gloo",
        "smp-run --backend gloo -n ",
        folder=JOB_FOLDER,
    ),
    Launcher(
        _TORCHRUN,
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "gloo",
        "gloo",
        "torchrun --nproc-per-node=",
        local=True,
    ),
    Launcher(
        "mpiexec (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpi",
        "mpi",
        "mpiexec -n ",
    ),
    Launcher(
        "mpiexec (MPICH)",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "mpi",
        "mpi",
        "mpiexec -n ",
    ),
    # Alone it may or may not have started an MPI job; a user who sets a rendezvous means torch's.
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",  # "4" on one machine, "4(x2)" or "4,3" on several; see _local_size
        "gloo",
        "mpi",
        "srun -n ",
    ),
)
#: The variables of torch's rendezvous (``env://``).
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
#: One of these is there in every process that a launcher of MPI jobs started.
MPI_JOB = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PMI_FD", "SLURM_PROCID")
#: torchrun itself sets these beside rank and size; others, such as an operator of pods, need not.
_OF_TORCHRUN = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")
#: Set outside of any job as well.
_ALONE = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """This process as its launcher sees it. ``local_*`` are None where it does not say."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    meeting: str  # the address of torch's rendezvous; empty if none is given
    mpi: bool  # this may be a rank of an MPI job

    @property
    def rendezvous(self) -> bool:
        """True if torch's rendezvous is given."""
        return bool(self.meeting)

    @property
    def one_machine(self) -> bool:
        """True if all ranks are known to be on this machine."""
        return self.local_size == self.size

    @property
    def starts_one_rank(self) -> bool:
        """True if this process is the only rank, and no shell: srun starts shells with the variables of a rank.

        A rank of an MPI job that has a rendezvous may be either's.
        """
        either = self.rendezvous and self.fabric == "mpi"
        return self.size == 1 and self.launcher.rank not in _ALONE and not either

    @property
    def fabric(self) -> str:
        """The default fabric."""
        return self.launcher.with_rendezvous if self.rendezvous else self.launcher.without

    def command_for(self, ranks: int) -> str:
        """The launcher's command for so many ranks on as many machines, without the program to start."""
        machines = -(-self.size // (self.local_size or self.size)) if self.launcher.local else 1
        return f"{self.launcher.command}{-(-ranks // machines)}"

    def refusal(self, fabric: str) -> str:
        """The reason why the ranks cannot use this fabric, and the remedy; empty if they can."""
        if fabric == "gloo" and not self.rendezvous:
            return (
                f"gloo under {self.launcher.name}: the ranks need a place to meet. Set "
                f"{' and '.join(RENDEZVOUS)}, the address of rank 0's machine and a free port on it, "
                "for all ranks"
            )
        if fabric == "mpi" and not self.mpi:
            return f"mpi under {self.launcher.name}, which starts no MPI job: take mpiexec"
        return ""


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """The launch of this process, or None if it was started by hand.

    Raises BackendError if a launcher's rank is not below its size, or is no number, if two MPIs contradict each
    other, and if an MPI contradicts torch's variables where torchrun has not set them.
    """
    for launcher in LAUNCHERS:
        if launcher.rank not in environment or launcher.size not in environment:
            continue
        _check_one_mpi(launcher, environment)
        rank, size = (_number(environment, name) for name in (launcher.rank, launcher.size))
        if rank is None or size is None or not 0 <= rank < size:
            raise BackendError(
                f"{launcher.name}: {launcher.rank}={environment[launcher.rank]} and "
                f"{launcher.size}={environment[launcher.size]} do not say which rank this is"
            )
        return Launch(
            launcher,
            rank,
            size,
            _number(environment, launcher.local_rank),
            _local_size(environment.get(launcher.local_size, "")),
            _meeting(launcher, environment),
            any(name in environment for name in MPI_JOB),
        )
    return None


def _check_one_mpi(first: Launcher, environment: Mapping[str, str]) -> None:
    """Raise BackendError if another MPI's variables say another rank: a launcher was started inside of another one, or
    an MPI job in a pod whose operator has set torch's variables.

    torchrun below srun or mpiexec is none of these: each machine's task of the outer one starts the ranks.
    """
    pod = first.name == _TORCHRUN and not any(name in environment for name in _OF_TORCHRUN)
    said = [environment[name] for name in (first.rank, first.size)]
    for other in LAUNCHERS:
        if other is first or not other.starts_mpi or not (first.starts_mpi or pod):
            continue
        theirs = [environment.get(name) for name in (other.rank, other.size)]
        if None in theirs or theirs == said:
            continue
        if pod and _is_smaller(
            said[1], theirs[1]
        ):  # a larger one may be of ranks that each process has started
            raise BackendError(
                f"{first.rank} and {first.size} say rank {said[0]} of {said[1]}, and {other.name} rank {theirs[0]} of "
                f"{theirs[1]}. Unset {first.rank} and {first.size}, which torchrun has not set, or {other.rank} and "
                f"{other.size}"
            )
        if pod:
            continue
        raise BackendError(
            f"{first.name} says rank {said[0]} of {said[1]}, and {other.name} rank {theirs[0]} of {theirs[1]}: one "
            "of them was started by the other. Unset the variables of the outer one "
            f"({other.rank}, {other.size}, or {first.rank}, {first.size})"
        )


def _is_smaller(size: str, other: str | None) -> bool:
    return size.isdecimal() and other is not None and other.isdecimal() and int(size) < int(other)


class _Process:
    """The launch of this process, after its variables were taken away."""

    launch: Launch | None = None


def launch_of_process() -> Launch | None:
    """The launch of this process, or None if it was started by hand. Raises BackendError as ``launch_of`` does."""
    return _Process.launch or launch_of(os.environ)


def keep_for_ourselves(launch: Launch) -> None:
    """Take the launchers' variables out of the environment, and remember this launch in their place.

    Libraries that find them make a world of their own, beside that of ``smp.init``.
    """
    _Process.launch = launch
    remove_variables(os.environ)


def remove_variables(environment: MutableMapping[str, str]) -> None:
    """Take every launcher's variables out of an environment."""
    for launcher in LAUNCHERS:
        for name in (launcher.rank, launcher.size, launcher.local_rank, launcher.local_size):
            environment.pop(name, None)


def _meeting(launcher: Launcher, environment: Mapping[str, str]) -> str:
    if launcher.folder:
        folder = environment.get(launcher.folder, "")
        return f"file://{folder}/store" if folder else ""
    return "env://" if all(environment.get(name) for name in RENDEZVOUS) else ""


def half_set(environment: Mapping[str, str]) -> str:
    """A message for an environment in which a launcher's rank is set without its size, or its size of several ranks
    without the rank; empty in any other.

    Every process of such a job would take itself for the only one. Called where ``launch_of`` found
    no launcher. Slurm sets a rank for scripts that are no step of a job, too.
    """
    for launcher in LAUNCHERS:
        rank, size = launcher.rank in environment, launcher.size in environment
        missing, there = (launcher.size, launcher.rank) if rank else (launcher.rank, launcher.size)
        if rank == size or there in _ALONE or (size and environment[there] == "1"):
            continue
        return (
            f"{there}={environment[there]} is set and {missing} is not: start the ranks by a "
            f"launcher (torchrun, mpiexec, srun), which sets both; for a process alone unset {there}"
        )
    return ""


def _number(environment: Mapping[str, str], name: str) -> int | None:
    return _number_in(environment.get(name, ""))


def _number_in(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _local_size(text: str) -> int | None:
    """The number of ranks of this machine, where every machine has as many: Slurm writes ``4(x2)`` for two of them."""
    return _number_in(_UNIFORM.sub("", text))


_UNIFORM = re.compile(r"(?<=[0-9])\(x[0-9]+\)\Z")
_PORT = 29500  # torchrun's own


def launch_variables(
    rank: int, *, size: int, local: tuple[int, int] | None = None, port: int = _PORT
) -> dict[str, str]:
    """The environment variables by which torchrun tells a rank about itself; scripts and libraries read them.

    Args:
        rank: the world rank.
        size: of the world.
        local: the rank's number on its machine, and how many ranks are there; one machine if left out.
        port: where ``env://`` meets. Nothing listens there until somebody makes a store.
    """
    local_rank, local_size = local or (rank, size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
