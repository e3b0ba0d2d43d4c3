"""Tensor collectives of 8 rank processes on one host: the `smddp` backend beside Gloo, in the same processes, in turns.

The time of a call is that of a run of calls, from a barrier to the last rank's end, divided by their number.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.figures import Figure, median

RANKS = 8
SIZES = (8, 1024, 64 * 1024, 1024**2, 8 * 1024**2, 64 * 1024**2)  # bytes of the whole tensor
TURNS = 3
_BUDGET = "at least 5 times Gloo"


def _calls(size: int, whole: int) -> dict[str, Callable[[Any], Any]]:
    """Each collective, on a whole tensor of so many bytes; a rank's part is at least one element."""
    numbers = max(whole // 4 // size, 1)
    part, full = torch.ones(numbers), torch.ones(numbers * size)
    other = torch.empty_like(full)
    return {
        "all_gather": lambda group: dist.all_gather_single(other, part, group),
        "reduce_scatter": lambda group: dist.reduce_scatter_single(part, full, group=group),
        "all_reduce": lambda group: dist.all_reduce(full, group=group),
        "broadcast": lambda group: dist.broadcast(full, 0, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, full, group=group),
    }


def _repetitions(whole: int) -> int:
    return max(2, min(100, 16 * 1024**2 // whole))


def _seconds(call: Callable[[Any], Any], group: Any, repetitions: int) -> float:
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(repetitions):
        call(group)
    dist.barrier(group)
    return (time.perf_counter() - start) / repetitions


def _rank(rank: int, folder: str, results: Any) -> None:
    importlib.import_module("smp_core.transport.smddp")  # on the rank: torch starts threads
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(minutes=5),
    )
    groups = {"gloo": dist.group.WORLD, "smddp": dist.new_group(backend="smddp")}
    figures = []
    for whole in SIZES:
        for name, call in _calls(RANKS, whole).items():
            times: dict[str, list[float]] = {each: [] for each in groups}
            for group in groups.values():
                call(group)
            for _ in range(TURNS):
                for each, group in groups.items():
                    times[each].append(_seconds(call, group, _repetitions(whole)))
            figures.append((name, whole, times))
    if rank == 0:
        results.put(figures)
    dist.destroy_process_group()


def _text(count: int) -> str:
    for unit, size in (("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} B"


def measure() -> list[Figure]:
    """Milliseconds of one call; the ratio is that of the medians of Gloo and of `smddp`."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, str(Path(folder)), results))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        measured = results.get(timeout=3600)
        for process in ranks:
            process.join()
    figures = []
    for name, whole, times in measured:
        middle = {each: median(values) for each, values in times.items()}
        for each, values in times.items():
            values = [1000 * value for value in values]
            ours = each == "smddp"
            figures.append(
                Figure(
                    f"{each}: {name} of {_text(whole)} on {RANKS} ranks",
                    median(values),
                    "ms",
                    (min(values), max(values)),
                    ratio=f"{middle['gloo'] / middle['smddp']:.1f} times Gloo" if ours else "",
                    budget=_BUDGET if ours else "",
                )
            )
    return figures
