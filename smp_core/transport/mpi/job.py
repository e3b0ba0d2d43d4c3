"""MPI in a process that a launcher started: initialised so that it loses nothing and listens where it
must, and compared with the launcher's variables.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from smp_core.errors import BackendError
from smp_core.transport.helper_threads import HelperThread
from smp_core.transport.launchers import Launch
from smp_core.transport.mpi.library import load

_PULSE = 0.01  # seconds between two calls of MPI in a rank, whatever it does
_NO_TAG = 32767  # every MPI has tags up to this one; nobody sends it


def join(launch: Launch) -> Any:
    """The communicator of the job's ranks; MPI is initialised.

    Collective over the ranks of the job. Raises BackendError, which says what to install, without
    mpi4py or an MPI library, and if the launcher is another MPI's.
    """
    _choose_transport(launch)
    mpi = load()
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if (rank, size) != (launch.rank, launch.size):
        library = mpi.Get_library_version().strip().splitlines()[0]
        raise BackendError(
            f"{launch.launcher.name} says that this is rank {launch.rank} of {launch.size}, and "
            f"mpi4py's MPI ({library}) rank {rank} of {size}: take the mpiexec of that MPI"
        )
    return world


#: The variables that keep an MPI's ranks to shared memory: otherwise each listens on an outer address.
_SHARED_MEMORY = (
    ("MPICH", {"UCX_TLS": "self,posix,sysv"}),
    ("Open MPI", {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}),
)


def _choose_transport(launch: Launch) -> None:
    """On one machine, keep MPI to shared memory. Between machines, keep MPICH off UCX where MPICH has another
    module to choose. A variable that the user has set stays.

    With UCX, MPICH 5.0.2 loses a message from another machine that comes before its receive was
    posted from any source (docs/findings.md). Where MPICH was built with UCX alone, naming another module
    ends the process, so this function asks for the build first.
    """
    with contextlib.suppress(ImportError, RuntimeError):  # `load` says what is missing
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI

        library, chosen = MPI.Get_library_version(), {}
        if launch.one_machine:
            chosen = next((what for name, what in _SHARED_MEMORY if library.startswith(name)), {})
        elif "ch4:ucx ofi" in library:
            chosen = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
        for name, value in chosen.items():
            os.environ.setdefault(name, value)
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)


class Pulse:
    """Calls MPI now and then, whatever the rank does: between machines a short message may be queued
    by its sender after the call that sent it has returned, and moves when the sender calls again.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self._end = threading.Event()
        self._thread = HelperThread(target=self._beat, name="smp pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._end.wait(_PULSE):
            self._world.Iprobe(tag=_NO_TAG)

    @classmethod
    def of(cls, launch: Launch, world: Any) -> Pulse | None:
        """One that beats, where it is needed and MPI allows it."""
        mpi = load()
        if launch.one_machine or mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            return None
        return cls(world)

    def stop(self) -> None:
        """No call of MPI any more."""
        self._end.set()
        self._thread.join()
