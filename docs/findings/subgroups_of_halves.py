"""Two halves of a world divide themselves by new_subgroups(group=...), and sum over each other.

Runs four ranks of Gloo on this machine, with torch alone. The exit status is 0 if a sum is wrong or
never comes, which is what torch 2.13.0 does, 1 if PROMISED happens, and 2 for anything else.
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

RANKS, ROUNDS = 4, 5
# What each rank sees: the sum of 10**rank over its half, each time.
PROMISED = [[11.0] * ROUNDS, [11.0] * ROUNDS, [1100.0] * ROUNDS, [1100.0] * ROUNDS]
HANGS = "a sum never comes"
SECONDS = 60  # for all of it


def on_rank(rank: int) -> object:
    """Every rank of the world makes both halves; each half then divides itself, into one part."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sums = []
    for _ in range(ROUNDS):
        part, _ = dist.new_subgroups(2, group=halves[rank // 2])
        print(f"rank {rank}: its part is called {part.group_name}", flush=True)
        number = torch.tensor([10.0**rank])
        dist.all_reduce(number, group=part)
        sums.append(number.item())
    return sums


def run(rank: int, folder: Path) -> None:
    """Form the group and leave in a file what the rank sees; then stay, as the others may be busy."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    dist.barrier()
    try:
        seen = on_rank(rank)
    except Exception as error:  # a rank of the other half answers, or nobody does
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        seen = HANGS
    (folder / f"{rank}.new").write_text(json.dumps(seen))
    (folder / f"{rank}.new").rename(folder / f"{rank}.json")
    time.sleep(SECONDS)


def main() -> int:
    """Run the ranks, and compare."""
    limit = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = torch.multiprocessing.get_context("fork").Process
        ranks = [start(target=run, args=(rank, folder), daemon=True) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        happened: list[object] = [None] * RANKS
        while None in happened and time.monotonic() < limit:
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
    happened = [HANGS if each is None else each for each in happened]
    for rank in range(RANKS):
        print(f"rank {rank} promised: {PROMISED[rank]}")
        print(f"rank {rank} happened: {happened[rank]}")
    if happened == PROMISED:
        return 1
    return 0 if all(each == HANGS or isinstance(each, list) for each in happened) else 2


if __name__ == "__main__":
    sys.exit(main())
