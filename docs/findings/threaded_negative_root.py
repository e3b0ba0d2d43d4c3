"""A negative root counts from the last rank in torch's threaded backend, as an index of Python does.

Runs two ranks as threads of this process, with torch alone. The exit status is 0 if OBSERVED
happens, which is what torch 2.13.0 does, 1 if PROMISED does, and 2 for anything else.
"""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

# What each rank sees.
PROMISED = ["refused", "refused"]
OBSERVED = [11.0, 11.0]  # the value of rank 1
SECONDS = 25  # for all of it: who has not come back by then hangs


def on_rank(rank: int) -> object:
    """Broadcast from rank -1 of two."""
    value = torch.full((1,), 10.0 + rank)
    try:
        dist.broadcast(value, -1)
    except (ValueError, RuntimeError) as error:
        print(f"rank {rank}: {error}", flush=True)
        return "refused"
    return value.item()


def run(rank: int, store: dist.Store, happened: list[object]) -> None:
    """Form the group and note what the rank sees."""
    dist.init_process_group("threaded", store=store, rank=rank, world_size=2)
    dist.barrier()
    try:
        happened[rank] = on_rank(rank)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        happened[rank] = type(error).__name__


def main() -> None:
    """Run the ranks, and compare."""
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    happened: list[object] = ["hangs", "hangs"]
    store = dist.HashStore()
    ranks = [
        threading.Thread(target=run, args=(rank, store, happened), daemon=True) for rank in range(2)
    ]
    for each in ranks:
        each.start()
    limit = time.monotonic() + SECONDS
    for each in ranks:
        each.join(max(0.0, limit - time.monotonic()))
    for rank in range(2):
        print(f"rank {rank} promised: {PROMISED[rank]}")
        print(f"rank {rank} happened: {happened[rank]}", flush=True)
    # Without waiting for a rank that hangs.
    os._exit(0 if happened == OBSERVED else 1 if happened == PROMISED else 2)


if __name__ == "__main__":
    main()
