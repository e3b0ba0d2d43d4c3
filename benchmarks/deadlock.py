"""A run on 8 ranks that ends in a deadlock verdict, and right after it one that passes on the same threads."""

from __future__ import annotations

from torch import distributed as dist

import smp_core.torch as smp
from benchmarks.figures import Figure, median, seconds
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job, VerdictKind

RANKS = 8
REPEATS = 200


def objects():
    """Seven ranks wait for one that has returned."""
    if smp.rank() != 3:
        smp.barrier()


def tensors():
    """A barrier of torch.distributed that rank 3 never enters."""
    if dist.get_rank() != 3:
        dist.barrier()


def measure() -> list[Figure]:
    """Milliseconds from the start of the run to the verdict in words."""
    executor = open_backend("sim")
    figures = []
    try:
        world = executor.open(RANKS)
        for body, label in ((objects, "smp.barrier"), (tensors, "dist.barrier")):
            job = Job(body=body, arguments=lambda rank: ((), {}))

            def once(job: Job = job) -> None:
                report = world.run(job)
                assert report.verdict is VerdictKind.DEADLOCK
                assert "rank 3, which has returned" in str(report.error)

            once()
            times = [seconds(once) * 1000 for _ in range(REPEATS)]
            name = f"sim: deadlock verdict, 8 ranks, {label}"
            budget = "under 10 ms"
            figures.append(Figure(name, median(times), "ms", (min(times), max(times)), "", budget))
    finally:
        executor.close()
    return figures
