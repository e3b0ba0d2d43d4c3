"""Under a launcher (mpiexec, torchrun, srun) the process of rank 0 runs pytest, and all serve it."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from smp_core.transport.launchers import Launch

_NAME = "external"
_AFTER_YOU = 2.0  # seconds


def split(config: pytest.Config) -> int | None:
    """Serve until the job is over and return the exit code, in a process of a launcher's job that is not
    to run pytest. Elsewhere return None.

    A job is split if the backend is `external`, or if no backend was named and there are several ranks.

    Raises pytest.UsageError if the job cannot meet the options.
    """
    if hasattr(config, "workerinput"):
        return None
    asked = config.getoption("smp_backend") or str(config.getini("smp_backend") or "")
    if asked and not is_external(asked):
        return None
    from pytest_smp.ranks.backends import find_backend
    from smp_core.errors import BackendError
    from smp_core.transport.launchers import launch_of

    try:
        launch = launch_of(os.environ)
    except BackendError as error:
        raise pytest.UsageError(str(error)) from None
    if launch is None or (launch.size == 1 and not asked):
        return None
    fabric = asked.partition(":")[2]
    try:
        find_backend(asked or _NAME)
        refused = launch.refusal(fabric or launch.fabric)
        if refused:
            other = {"gloo": "mpi", "mpi": "gloo"}[fabric or launch.fabric]
            refused += f"; or take --smp-backend={_NAME}:{other}"
    except BackendError as error:
        refused = str(error)
    if refused:
        if launch.rank:  # rank 0 says it first, and the launcher ends the others then
            time.sleep(_AFTER_YOU)
        raise pytest.UsageError(refused)
    from pytest_smp.ranks.processes import external

    try:
        return external.split(launch, fabric, capture=config.getoption("capture", "fd") != "no")
    except BackendError as error:
        raise pytest.UsageError(str(error)) from None


def is_external(backend: str) -> bool:
    """Return whether a launcher starts the ranks of this backend."""
    return backend.partition(":")[0] == _NAME


def job_size() -> int | None:
    """The number of ranks of the job whose controller this process is."""
    launch = _job()
    return None if launch is None else int(launch.size)


def shortage(ranks: int, there: int) -> str:
    """The sentence that ``ranks`` are needed and fewer are there, with the command that starts enough."""
    launch = _job()
    if launch is None or ranks <= launch.size:
        return f"needs {ranks} ranks, and {there} are there: pytest --smp-ranks={ranks}"
    started = f"{launch.launcher.name} started {launch.size}"
    return f"needs {ranks} ranks, and {started}: {launch.command_for(ranks)} pytest"


def _job() -> Launch | None:
    external = sys.modules.get("pytest_smp.ranks.processes.external")
    job = None if external is None else external.ExternalJob.current
    return None if job is None else job.launch
