"""MPICH over UCX: a short message that is there first is not received from any source.

Runs two ranks of MPICH on this machine, with mpi4py alone: as if each were on a machine of its own,
which MPIR_CVAR_NOLOCAL says. The exit status is 0 if OBSERVED happens, which is what mpich 5.0.2
does, 1 if PROMISED does, and 2 for anything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mpi4py import rc

# What each rank sees: of rank 0's receives, that from any source, and that from rank 1 after it.
PROMISED = [["the first", "the second"], ["sent"]]
OBSERVED = [["nothing", "the second"], ["sent"]]
SECONDS = 60  # for all of it


def on_rank(comm: Any, MPI: Any) -> object:
    """Rank 1 sends; rank 0 looks until the message is there, and receives it then. Twice."""
    if comm.rank == 1:
        comm.send("the first", 0, tag=1)
        comm.send("the second", 0, tag=2)
        return ["sent"]
    print(MPI.Get_library_version().splitlines()[0], flush=True)
    return [received(comm, MPI.ANY_SOURCE, tag=1), received(comm, 1, tag=2)]


def received(comm: Any, source: int, tag: int) -> object:
    """What comes within two seconds, once a probe has said that it is there."""
    while not comm.Iprobe(source, tag):
        time.sleep(0.01)
    request = comm.irecv(source=source, tag=tag)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        came, message = request.test()
        if came:
            return message
    return "nothing"


def run(folder: Path) -> None:
    """Leave in a file what the rank sees; then stay in MPI, which the other's messages may need.

    Never finalizes: a receive may be open.
    """
    rc.finalize = False
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        seen = on_rank(comm, MPI)
    except Exception as error:
        print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
        seen = type(error).__name__
    (folder / f"{comm.rank}.new").write_text(json.dumps(seen))
    (folder / f"{comm.rank}.new").rename(folder / f"{comm.rank}.json")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        comm.Iprobe()
        time.sleep(0.01)


def main() -> int:
    """Run the ranks, and compare."""
    limit = time.monotonic() + SECONDS
    mpiexec = Path(sys.prefix, "bin", "mpiexec")  # that of the wheel
    apart = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [str(mpiexec), "-n", "2", sys.executable, __file__, name]
        job = subprocess.Popen(command, env={**os.environ, **apart})
        happened: list[object] = ["hangs", "hangs"]
        while "hangs" in happened and time.monotonic() < limit and job.poll() is None:
            time.sleep(0.02)
            for rank in range(2):
                seen = folder / f"{rank}.json"
                if seen.exists():
                    happened[rank] = json.loads(seen.read_text())
        job.terminate()  # mpiexec passes it on
        job.wait()
    for rank in range(2):
        print(f"rank {rank} promised: {PROMISED[rank]}")
        print(f"rank {rank} happened: {happened[rank]}")
    return 0 if happened == OBSERVED else 1 if happened == PROMISED else 2


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]))
    else:
        sys.exit(main())
