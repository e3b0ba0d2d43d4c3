"""Rank processes for tests of the `smddp` process group alone: forked, without an executor or a board."""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

LIMIT = datetime.timedelta(seconds=60)
#: What the parent gets from a rank that was killed.
KILLED = "killed"


def _rank(body: Callable[[int], Any], rank: int, size: int, store: str, pipe: Any) -> None:
    importlib.import_module("smp_core.transport.smddp")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "smddp",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=LIMIT,
        )
        pipe.send((True, body(rank)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def on_ranks(folder: Path, size: int, body: Callable[[int], Any]) -> list[Any]:
    """The values that a body returns on each rank, or KILLED.

    Raises AssertionError, with the trace of a rank that fails.
    """
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (body, rank, size, str(folder / "store"), theirs)
        process = context.Process(target=_rank, args=arguments)
        process.start()
        theirs.close()
        started.append((process, ours))
    values = []
    for process, ours in started:
        try:
            ok, value = ours.recv() if ours.poll(LIMIT.total_seconds()) else (False, "no answer")
        except EOFError:
            ok, value = True, KILLED
        process.kill() if not ok else None
        process.join()
        assert ok, value
        values.append(value)
    return values
