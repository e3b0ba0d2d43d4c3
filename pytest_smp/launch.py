"""Under a launcher (mpiexec, torchrun, srun) the process of rank 0 runs pytest, and all serve it."""

from __future__ import annotations

import os

import pytest

_NAME = "external"


def split(config: pytest.Config) -> int | None:
    """In a process of a launcher's job that is not to run pytest: serve until the job is over, and
    return the exit code. Elsewhere return None.

    A job is split where the backend is `external`, or nothing was said about it.
    """
    if hasattr(config, "workerinput"):
        return None
    asked = config.getoption("smp_backend") or str(config.getini("smp_backend") or "")
    if asked not in ("", _NAME):
        return None
    from smp_core.backends.hosts.launchers import launch_of
    from smp_core.errors import BackendError

    try:
        launch = launch_of(os.environ)
    except BackendError as error:
        raise pytest.UsageError(str(error)) from None
    if launch is None:
        return None
    from smp_core.backends.hosts import external

    return external.split(launch, capture=config.getoption("capture", "fd") != "no")


def job_size() -> int | None:
    """The number of ranks of the job whose controller this process is."""
    import sys

    external = sys.modules.get("smp_core.backends.hosts.external")
    job = None if external is None else external.Job.current
    return None if job is None else int(job.launch.size)
