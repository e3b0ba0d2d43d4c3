"""A world of 1,536 ranks in one process: every group of every rank, and an allgather in each TP group; and a training
step, as the program in examples/clusters makes it.

The shape is that of AWS Sharded Data Parallelism (Example 1): 192 nodes of 8, tensor degree 8. Each runs in a
process of its own, so that the memory is that of this world alone; torch's import is part of all figures.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import subprocess
import sys
import time

from benchmarks.figures import Figure

RANKS = 1536
PARAMETERS = {
    "tensor_parallel_degree": 8,
    "sharded_data_parallel_degree": 32,
    "prescaled_batch": True,
    "ddp": True,
}


def body():
    """Every group, an allgather of objects and one of tensors in the TP group."""
    import torch
    from torch import distributed as dist

    import smp_core.torch as smp

    for kind in ("world", "mp", "dp", "pp", "tp", "rdp"):
        getattr(smp, f"get_{kind}_process_group")()
    expected = smp.get_tp_group()
    assert smp.allgather(smp.rank(), smp.TP_GROUP) == expected
    own = torch.tensor([smp.rank()])
    outputs = [torch.empty_like(own) for _ in expected]
    dist.all_gather(outputs, own, group=smp.get_tp_process_group())
    assert [int(output) for output in outputs] == expected
    return smp.rdp_rank()


def run() -> None:
    """Run the large world and print seconds and bytes; called in a process of its own."""
    start = time.perf_counter()
    from pytest_smp.ranks.backends import open_backend
    from pytest_smp.ranks.protocols import Job

    executor = open_backend("sim")
    job = Job(body=body, arguments=lambda rank: ((), {}), parameters=PARAMETERS)
    report = executor.open(RANKS).run(job)
    if report.error is not None:
        raise report.error
    assert max(report.values) == RANKS // 8 - 1
    executor.close()
    elapsed = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": elapsed, "bytes": peak}))


def train() -> None:
    """Run the program, and print seconds and bytes; called in a process of its own."""
    start = time.perf_counter()
    import pytest

    program = ["examples/clusters/train.py", "-k", "1536", f"--smp-ranks={RANKS}"]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = pytest.main([*program, "-p", "no:cacheprovider"])
    if code:
        raise RuntimeError(told.getvalue())
    elapsed = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {"seconds": elapsed, "bytes": usage.ru_maxrss * 1024}
    print(json.dumps({**figures, "processor": usage.ru_utime + usage.ru_stime}))


def measure() -> list[Figure]:
    """Seconds and GiB."""
    world, step = _measured("run"), _measured("train")
    return [
        Figure("sim: world of 1,536 ranks", world["seconds"], "s", None, "", "under 20 s"),
        Figure("its peak memory", world["bytes"] / 2**30, "GiB", None, "", "under 1.5 GiB"),
        Figure("sim: 1,536 ranks train", step["seconds"], "s", None, "", "under 120 s"),
        Figure("its processor time", step["processor"], "s", None, "", ""),
        Figure("its peak memory", step["bytes"] / 2**30, "GiB", None, "", "under 4 GiB"),
    ]


def _measured(function: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-c",
        f"from benchmarks import large_world; large_world.{function}()",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    result: dict[str, float] = json.loads(done.stdout)
    return result
