"""The fabric of the `mpi` backend: a torch process group and an object transport over mpi4py.

Reductions are exchanges and a local fold, so that their bits are those of `sim`.
"""

from __future__ import annotations

from types import ModuleType

from smp_core.transport import torch_parts
from smp_core.transport.protocols import RankEnvironment, RankFabric

__all__ = ["load_mpi", "open_fabric"]


def load_mpi() -> ModuleType:
    """The module ``mpi4py.MPI``. Raises BackendError, which says what to install."""
    from smp_core.transport.mpi.library import load

    return load()


def open_fabric(environment: RankEnvironment) -> RankFabric:
    """This rank's side of a world over MPI: the ranks 0 to ``environment.size - 1`` of the MPI job.

    All ranks of the world call it, and no other. Raises BackendError, which says what to install or
    how to start the ranks, without mpi4py, an MPI library, its threads, or a job of that size.
    """
    load_mpi()  # first of all: what follows imports torch
    torch_parts.require("the mpi backend")
    from smp_core.transport.mpi.fabric import MpiFabric, register_backend

    register_backend()
    return MpiFabric(environment)
