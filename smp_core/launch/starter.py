"""The process that rank processes of ``smp-run`` are forked from: torch is imported once, not once for each rank."""

from __future__ import annotations

import gc
import sys

from smp_core.launch import supervisor


def main() -> None:
    """``starter RANKS ENDS FOLDER``: fork the ranks, which run the job of a folder; their ends are written to another.

    Never returns in this process; in a rank it ends as the script does.
    """
    ranks, ends = int(sys.argv[1]), sys.argv[2]
    sys.argv[:] = [sys.argv[0], sys.argv[3]]
    gc.disable()  # looking for garbage among what is imported takes a quarter of the time
    import numpy.random
    import torch._dynamo  # a process's first optimizer imports it, half as long as torch itself

    import smp_core.torch  # noqa: F401
    from smp_core.launch import rank

    gc.enable()
    gc.freeze()  # what is there now is shared by all ranks as long as nobody writes to it
    supervisor.fork_ranks(ranks, ends)
    # These would be the same on all ranks; Python's own generator seeds itself after a fork.
    numpy.random.seed()
    torch.seed()
    rank.main()
