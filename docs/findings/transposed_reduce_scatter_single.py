"""Gloo's reduce_scatter_single adds up a transposed input in the order of its memory.

Runs two ranks of Gloo on this machine, with torch alone. The exit status is 0 if OBSERVED happens,
which is what torch 2.13.0 does, 1 if PROMISED does, and 2 for anything else.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

# What each rank sees.
PROMISED = [[[2, 4], [6, 8]], [[10, 12], [14, 16]]]
OBSERVED = [[[2, 5], [8, 11]], [[8, 13], [11, 16]]]
SECONDS = 60  # for all of it


def on_rank(rank: int) -> object:
    """Add up equal matrices, of which rank 1's is a transposed view."""
    given = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    if rank == 1:
        given = given.t().contiguous().t()
    output = torch.zeros(2, 2, dtype=torch.int64)
    dist.reduce_scatter_single(output, given)
    return output.tolist()


def run(rank: int, folder: Path) -> None:
    """Form the group and leave in a file what the rank sees; then stay, as the other may be busy."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), 2)
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.barrier()
    try:
        seen = on_rank(rank)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        seen = type(error).__name__
    (folder / f"{rank}.new").write_text(json.dumps(seen))
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")
    time.sleep(SECONDS)


def main() -> int:
    """Run the ranks, and compare."""
    limit = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = torch.multiprocessing.get_context("fork").Process
        ranks = [start(target=run, args=(rank, folder), daemon=True) for rank in range(2)]
        for each in ranks:
            each.start()
        happened: list[object] = ["hangs", "hangs"]
        while "hangs" in happened and time.monotonic() < limit:
            time.sleep(0.02)
            for rank, each in enumerate(ranks):
                ended, seen = each.exitcode, folder / f"{rank}.json"
                if seen.exists():
                    happened[rank] = json.loads(seen.read_text())
                elif ended is not None:
                    happened[rank] = f"exit code {ended}"
        for each in ranks:
            each.kill()
            each.join()
    for rank in range(2):
        print(f"rank {rank} promised: {PROMISED[rank]}")
        print(f"rank {rank} happened: {happened[rank]}")
    return 0 if happened == OBSERVED else 1 if happened == PROMISED else 2


if __name__ == "__main__":
    sys.exit(main())
