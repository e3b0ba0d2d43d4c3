"""Real ranks, 8 of them: how soon they are there, what a run costs beside the bare collective, how
soon a verdict is out, and how soon the next run is clean.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import distributed as dist

import smp_core.torch as smp
from benchmarks.figures import Figure, median, seconds
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, Report, VerdictKind, World

RANKS = 8
RUNS = 200  # of one body
REPEATS = 10  # of what takes longer


class _Objects:
    """The arguments of every rank: one object each."""

    def __call__(self, rank: int) -> tuple[Any, dict[str, Any]]:
        return (list(range(RANKS)),), {}


def nothing(objects):
    """The empty body: the cost of a run in itself."""


def gather(objects):
    """One allgather of 8 objects."""
    assert smp.allgather(objects[smp.rank()], smp.WORLD) == objects


def bare(objects):
    """The time of the allgather itself, from the ranks' barrier to its end, over many calls in one run.

    Without the barrier calls overlap, and the time of one is not known.
    """
    times = []
    for _ in range(RUNS):
        smp.barrier()
        start = time.perf_counter()
        smp.allgather(objects[smp.rank()], smp.WORLD)
        times.append(time.perf_counter() - start)
    return median(times)


def reduce(objects):
    """One all_reduce of four numbers."""
    dist.all_reduce(torch.ones(4))


def bare_reduce(objects):
    """The time of the all_reduce itself, over many calls in one run."""
    tensor, times = torch.ones(4), []
    for _ in range(RUNS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return median(times)


def deadlock(objects):
    """Seven wait for one that has returned."""
    if smp.rank() != 3:
        smp.barrier()


def crash(objects):
    """Rank 3 kills itself, and the others wait for it."""
    if smp.rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    smp.barrier()


def _run(world: World, body: Any, verdict: VerdictKind = VerdictKind.PASSED) -> Report:
    report = world.run(Job(body=body, arguments=_Objects(), timeout=60))
    assert report.verdict is verdict, report.error
    return report


def _milliseconds(figures: list[Figure], name: str, times: list[float], **more: str) -> None:
    times = [each * 1000 for each in times]
    figures.append(Figure(name, median(times), "ms", (min(times), max(times)), **more))


def _costs(figures: list[Figure], backend: str, world: World) -> None:
    for _ in range(5):
        _run(world, gather)
    empty = [seconds(lambda: _run(world, nothing)) for _ in range(RUNS)]
    _milliseconds(figures, f"{backend}: a run that does nothing", empty)
    for body, alone, name in ((gather, bare, "allgather"), (reduce, bare_reduce, "all_reduce")):
        runs = [seconds(lambda body=body: _run(world, body)) for _ in range(RUNS)]
        collective = max(_run(world, alone).values) * 1000
        over = median(runs) * 1000 - collective
        figures.append(Figure(f"{backend}: {name}, one at a time in one run", collective, "ms"))
        budget = "gloo: under 2 ms over the bare collective" if backend == "gloo" else ""
        _milliseconds(
            figures,
            f"{backend}: a run of one {name}",
            runs,
            ratio=f"{over:.2f} ms over",
            budget=budget,
        )


def _verdicts(figures: list[Figure], backend: str, world: World, replaced: str) -> None:
    for body, verdict, what in (
        (deadlock, VerdictKind.DEADLOCK, "deadlock"),
        (crash, VerdictKind.CRASHED, "crash"),
    ):
        repeats = 2 if backend == "mpi" and body is crash else REPEATS
        verdicts, healed = [], []
        for _ in range(repeats):
            verdicts.append(seconds(lambda body=body, kind=verdict: _run(world, body, kind)))
            healed.append(seconds(lambda: _run(world, nothing)))
        budget = "under 100 ms" if body is deadlock else ""
        _milliseconds(figures, f"{backend}: {what} verdict", verdicts, budget=budget)
        wanted = replaced if body is crash else ""
        _milliseconds(figures, f"{backend}: next run after a {what}", healed, budget=wanted)


def measure() -> list[Figure]:
    """Milliseconds; the bare collectives were measured in the same worlds."""
    figures: list[Figure] = []
    for backend, ready, replaced in (
        ("gloo", "under 1,200 ms", "one rank: under 200 ms"),
        ("mpi", "", "under 10,000 ms"),
    ):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            executor = open_backend(backend, ExecutorOptions(ranks=RANKS))
            try:
                _run(executor.open(RANKS), gather)
                times.append(time.perf_counter() - start)
            finally:
                executor.close()
        _milliseconds(
            figures, f"{backend}: 8 ranks from nothing to their first run", times, budget=ready
        )
        executor = open_backend(backend, ExecutorOptions(ranks=RANKS))
        try:
            world = executor.open(RANKS)
            _run(world, gather)
            _costs(figures, backend, world)
            _verdicts(figures, backend, world, replaced)
        finally:
            executor.close()
    return figures
