"""The ways to run a script on ranks, by name: rank processes, an MPI job, and those that packages bring.

A package brings one by an entry point of the group ``smp_core.launch``, which names a ``ScriptRunner`` (runner.py).
pytest_smp brings ``sim``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from smp_core.errors import ArgumentError, BackendError
from smp_core.launch import mpiexec
from smp_core.launch.job import ScriptJob
from smp_core.launch.output import RankOutput
from smp_core.launch.processes import run_mpi, run_processes
from smp_core.launch.runner import RUNNER_VERSION

Runner = Callable[[ScriptJob, RankOutput], int]

GROUP = "smp_core.launch"
_OURS: dict[str, Runner] = {"gloo": run_processes, "mpi": run_mpi}


def names() -> list[str]:
    """The names of all backends."""
    return sorted({*_OURS, *(each.name for each in importlib.metadata.entry_points(group=GROUP))})


def runner(name: str) -> Runner:
    """The function that runs a script on a backend.

    Raises ArgumentError for an unknown name, BackendError for a backend of another version of its protocol.
    """
    if name in _OURS:
        return _OURS[name]
    for each in importlib.metadata.entry_points(group=GROUP):
        if each.name == name:
            return _checked(each)
    raise ArgumentError(f"smp-run: backend {name!r}: the backends are {', '.join(names())}")


def _checked(point: importlib.metadata.EntryPoint) -> Runner:
    """The runner of a package. Raises BackendError for one of another version of the protocol."""
    found: Runner = point.load()
    version = getattr(found, "protocol", None)
    if version != RUNNER_VERSION:
        says = "names no version" if version is None else f"was written for version {version}"
        raise BackendError(
            f"smp-run: backend {point.name!r}: {point.value} {says} of its protocol; this one has {RUNNER_VERSION}: "
            "see smp_core.launch.runner.ScriptRunner (docs/extension_points.md)"
        )
    return found


def default(given: str) -> tuple[str, str]:
    """The backend for a job that names none, and the reason to tell, if there is an MPI that cannot be used.

    An MPI job where there is an MPI, else rank processes. ``given`` is the user's mpiexec, which is not doubted.
    """
    if not mpiexec.has_mpi4py():
        return "gloo", ""
    try:
        words, _ = mpiexec.find_mpiexec(given)
    except BackendError:
        return "gloo", ""
    trouble = "" if given else mpiexec.misfit(words[0])
    return ("gloo" if trouble else "mpi"), trouble
