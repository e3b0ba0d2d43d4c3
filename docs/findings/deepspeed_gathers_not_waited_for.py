"""ZeRO-3 of DeepSpeed 0.16.4 gathers several parameters, and waits for the last alone.

Runs two ranks of Gloo on this machine, with torch and DeepSpeed alone. The exit status is 0 if
OBSERVED happens, which is what DeepSpeed 0.16.4 does, 1 if PROMISED does, and 2 for anything else.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

# What each rank sees: of three gathers, which have been waited for when the parameters are used.
PROMISED = [[True, True, True]] * 2
OBSERVED = [[False, False, True]] * 2
SECONDS = 50  # for all of it; DeepSpeed's first import takes most


class Watched:
    """A work that knows whether it was waited for."""

    def __init__(self, work: Any) -> None:
        self.work, self.waited = work, False

    def wait(self) -> Any:
        """As the work's own."""
        self.waited = True
        return self.work.wait()


def on_rank(rank: int) -> object:
    """Gather three parameters of a sharded model."""
    import deepspeed
    from deepspeed.comm.torch import TorchBackend

    backend = sys.modules["deepspeed.comm.torch"]  # its package gives that name to torch
    backend.build_shm_op = lambda: None  # it would be compiled here, and is not what this is about
    deepspeed.init_distributed("gloo")
    configuration = {"zero_optimization": {"stage": 3}, "train_batch_size": 2}
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
    works: list[Watched] = []

    def watched(gather: Any, *args: Any, **kwargs: Any) -> Watched:
        works.append(Watched(gather(*args, **kwargs)))
        return works[-1]

    for name in ("all_gather_into_tensor", "all_gather"):
        gather = getattr(TorchBackend, name)
        setattr(TorchBackend, name, lambda *args, gather=gather, **kw: watched(gather, *args, **kw))
    with deepspeed.zero.GatheredParameters([each.weight for each in layers]):
        return [each.waited for each in works]


def run(rank: int, folder: Path) -> None:
    """Form the group and leave in a file what the rank sees; then stay, as the other may be busy."""
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "DEEPSPEED_LOG_LEVEL": "error",
    }
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
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
