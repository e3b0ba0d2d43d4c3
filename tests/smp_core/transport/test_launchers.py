"""The launcher that started a process is read from its environment. The variables of each test are those
that the launcher sets, as its documentation says.
"""

from __future__ import annotations

import pytest

from smp_core.errors import BackendError
from smp_core.transport.launchers import Launch, half_set, launch_of

#: https://docs.pytorch.org/docs/stable/elastic/run.html
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
#: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
#: mpiexec of MPICH 5.0.2, seen.
MPICH = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "PMI_FD": "7",
}
#: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",  # of the allocation
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
RENDEZVOUS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def found(*environments: dict[str, str]) -> Launch:
    launch = launch_of({name: value for each in environments for name, value in each.items()})
    assert launch is not None
    return launch


@pytest.mark.parametrize(
    ("environment", "name", "fabric", "local_size"),
    [
        (TORCHRUN, "torchrun", "gloo", 4),
        (OPEN_MPI, "mpiexec (Open MPI)", "mpi", 4),
        (MPICH, "mpiexec (MPICH)", "mpi", 4),
        (SRUN, "srun", "mpi", 4),
        (SRUN | RENDEZVOUS, "srun", "gloo", 4),
        (SRUN | MPICH, "mpiexec (MPICH)", "mpi", 4),  # srun --mpi=pmi2
        (SRUN | TORCHRUN, "torchrun", "gloo", 4),  # torchrun below srun
        (MPICH | RENDEZVOUS, "mpiexec (MPICH)", "mpi", 4),
    ],
)
def test_a_launcher_is_known_by_what_it_sets(environment, name, fabric, local_size):
    launch = found(environment)
    assert (launch.launcher.name, launch.fabric) == (name, fabric)
    assert (launch.rank, launch.size, launch.local_rank) == (5, 8, 1)
    assert launch.local_size == local_size
    assert not launch.one_machine


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN | {"LOCAL_WORLD_SIZE": "8"},
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
        MPICH | {"MPI_LOCALNRANKS": "8"},
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8"},
    ],
)
def test_one_machine(environment):
    assert found(environment).one_machine


@pytest.mark.parametrize("counts", ["4,3", "4(x2),3", "4(x", "(x2)", "4(x2) ", "", "²", "²(x2)"])
def test_what_does_not_say_how_many_are_here_is_not_guessed_from(counts):
    launch = found(SRUN, {"SLURM_STEP_TASKS_PER_NODE": counts})
    assert launch.local_size is None
    assert not launch.one_machine


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "1"},  # somebody's own variable
        {"WORLD_SIZE": "2"},
        {"PMI_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},  # a batch script is no step
    ],
)
def test_a_process_that_nobody_launched(environment):
    assert launch_of(environment) is None


def test_a_single_rank():
    launch = found(TORCHRUN, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    assert (launch.rank, launch.size, launch.one_machine) == (0, 1, True)


@pytest.mark.parametrize(
    ("rank", "size"), [("8", "8"), ("-1", "8"), ("x", "8"), ("0", ""), ("0", "0"), ("1.0", "2")]
)
def test_garbage_names_the_launcher_and_the_variables(rank, size):
    with pytest.raises(BackendError) as caught:
        launch_of({"PMI_RANK": rank, "PMI_SIZE": size})
    assert str(caught.value).startswith(
        f"mpiexec (MPICH): PMI_RANK={rank} and PMI_SIZE={size} do not"
    )


@pytest.mark.parametrize(
    ("mpi", "says"),
    [
        (MPICH, "mpiexec (MPICH) rank 5 of 8"),
        (OPEN_MPI, "mpiexec (Open MPI) rank 5 of 8"),
    ],
)
def test_an_mpi_job_in_a_pod_that_has_torchs_variables(mpi, says):
    """Every process of the job would take itself for rank 0 of 1."""
    pod = {"RANK": "0", "WORLD_SIZE": "1", **RENDEZVOUS}
    with pytest.raises(BackendError) as caught:
        launch_of(pod | mpi)
    assert "RANK and WORLD_SIZE say rank 0 of 1" in str(caught.value)
    assert says in str(caught.value)
    for below in ({"TORCHELASTIC_RUN_ID": "7"}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        assert found(pod, mpi, below).size == 1  # torchrun below mpiexec


@pytest.mark.parametrize(
    ("environment", "fabric", "words"),
    [
        (TORCHRUN, "gloo", None),
        (TORCHRUN, "mpi", "starts no MPI job"),
        (TORCHRUN | MPICH, "mpi", None),  # a script below mpiexec that sets torch's variables
        (MPICH, "mpi", None),
        (MPICH, "gloo", "Set MASTER_ADDR and MASTER_PORT"),
        (MPICH | {"MASTER_ADDR": "10.0.0.1"}, "gloo", "Set MASTER_ADDR and MASTER_PORT"),
        (MPICH | RENDEZVOUS, "gloo", None),
        (OPEN_MPI, "gloo", "gloo under mpiexec (Open MPI)"),
        (SRUN, "mpi", None),
        (SRUN, "gloo", "gloo under srun"),
        (SRUN, "", None),
    ],
)
def test_a_fabric_that_a_launcher_cannot_give(environment, fabric, words):
    refused = found(environment).refusal(fabric)
    assert bool(refused) == (words is not None)
    assert (words or "") in refused


def test_torchrun_without_a_rendezvous_is_refused_by_default():
    """RANK and WORLD_SIZE alone, as by a script of somebody's own."""
    launch = found({"RANK": "0", "WORLD_SIZE": "2"})
    assert "MASTER_ADDR" in launch.refusal(launch.fabric)


@pytest.mark.parametrize(
    ("environment", "there", "missing"),
    [
        ({"RANK": "1"}, "RANK=1", "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2", "RANK"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0", "PMI_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_SIZE=3", "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_half_of_a_launchers_environment_is_told(environment, there, missing):
    assert half_set(environment).startswith(f"{there} is set and {missing} is not")


@pytest.mark.parametrize(
    "environment",
    [{}, {"WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, RENDEZVOUS],
)
def test_a_process_alone_has_no_half_of_a_launchers_environment(environment):
    assert half_set(environment) == ""
