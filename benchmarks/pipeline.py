"""A step of a pipeline of four stages, beside torch.distributed.pipelining: the same ranks (torchrun,
Gloo), the same model, the same batch, in one job.

Time is measured; activations in flight and bytes sent are counted. All steps are checked to have the
same gradients first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import smp_core.torch as smp
from benchmarks.figures import Figure, median, seconds

STAGES = 4
BLOCKS = 2  # of each stage
MICROBATCHES = 8
LINES, LENGTH, WIDTH, HEADS = 32, 32, 128, 4  # the batch is (LINES, LENGTH, WIDTH)
CAP = STAGES + 2  # active_microbatches, as by default
WARM, TIMED = 3, 15  # steps
ACTIVATION = LINES * LENGTH * WIDTH * 4  # bytes, of all microbatches together

#: Our schedule, and torch's that it is measured against.
PAIRS = {"simple": ScheduleGPipe, "interleaved": Schedule1F1B}


class Stage(nn.Sequential):
    """Blocks of a transformer, (N, T, width) to the same."""

    def __init__(self, index: int) -> None:
        torch.manual_seed(index)
        super().__init__(
            *(
                nn.TransformerEncoderLayer(
                    WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(BLOCKS)
            )
        )


def loss_of(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(y, wanted)


@smp.step
def train_step(model: Any, x: torch.Tensor, wanted: torch.Tensor) -> Any:
    loss = loss_of(model(x), wanted)
    model.backward(loss)
    return loss


def job(path: str) -> None:
    """The work of each rank; rank 0 writes the results."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    x, wanted = torch.randn(2, LINES, LENGTH, WIDTH)
    for name in PAIRS:
        found[name] = measure_pair(name, x, wanted)
        smp.shutdown()
    if int(os.environ["RANK"]) == 0:
        Path(path).write_text(json.dumps(found))


def measure_pair(name: str, x: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    """Measure both engines in turns; every rank gets the same results."""
    smp.init(
        {
            "pipeline_parallel_degree": STAGES,
            "microbatches": MICROBATCHES,
            "active_microbatches": CAP,
            "pipeline": name,
            "auto_partition": False,
            "default_partition": 0,
            "skip_tracing": True,
            "ddp": True,
        }
    )
    rank = smp.pp_rank()
    module = nn.Sequential(*(Stage(index) for index in range(STAGES)))
    for index, stage in enumerate(module):
        smp.set_partition(stage, index)
    model = smp.DistributedModel(module)

    def ours() -> None:
        for parameter in model.local_parameters():
            parameter.grad = None
        train_step(model, x, wanted)

    theirs, in_flight_buffers = torchs(PAIRS[name], rank, x, wanted)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(WARM + TIMED):
        for who, step in (("ours", ours), ("theirs", theirs.step)):
            dist.barrier()
            took = max(smp.allgather(seconds(step), smp.WORLD))
            if number >= WARM:
                times[who].append(took)
        if not number:
            check(model.local_parameters(), theirs.parameters())
    transport: Any = model.transport()
    before = transport.bytes, transport.messages
    ours()
    sent = transport.bytes - before[0], transport.messages - before[1]
    in_flight_buffers.clear()
    theirs.step()
    return {
        "ours": times["ours"],
        "theirs": times["theirs"],
        "in_flight": smp.allgather(peak_of_session(), smp.WORLD),
        "their_in_flight": smp.allgather(peak(in_flight_buffers), smp.WORLD),
        "bytes": sum(each for each, _ in smp.allgather(sent, smp.WORLD)),
        "messages": sum(each for _, each in smp.allgather(sent, smp.WORLD)),
    }


class Theirs:
    """Torch's schedule on this rank's stage."""

    def __init__(self, step: Callable[[], None], stage: nn.Module) -> None:
        self.step, self.parameters = step, stage.parameters


def torchs(
    schedule: Any, rank: int, x: torch.Tensor, wanted: torch.Tensor
) -> tuple[Theirs, list[tuple[str, int]]]:
    """The step of torch's schedule, and a list that its forward and backward passes are written to."""
    module = Stage(rank)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"), group=dist.group.WORLD)
    runner = schedule(stage, MICROBATCHES, loss_fn=loss_of)
    in_flight_buffers: list[tuple[str, int]] = []
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

    def counted_forward(number: int, *args: Any, **kwargs: Any) -> Any:
        in_flight_buffers.append(("F", number))
        return forward(number, *args, **kwargs)

    def counted_backward(number: int, *args: Any, **kwargs: Any) -> Any:
        in_flight_buffers.append(("B", number))
        return backward(number, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = counted_forward, counted_backward

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            runner.step(x)
        elif rank == STAGES - 1:
            runner.step(target=wanted, losses=[])
        else:
            runner.step()

    return Theirs(step, module), in_flight_buffers


def check(ours: Iterable[nn.Parameter], theirs: Iterable[nn.Parameter]) -> None:
    """Check that both engines have the same gradients, up to the order of sums."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def peak(passes: Iterable[tuple[str, int]]) -> int:
    """The most microbatches at a time whose forward has run here, and whose backward has not ended."""
    passes = list(passes)
    last = {number: at for at, (kind, number) in enumerate(passes) if kind == "B"}
    live: Counter[int] = Counter()
    most = 0
    for at, (kind, number) in enumerate(passes):
        if kind == "F":
            live[number] = 1
            most = max(most, len(live))
        elif last[number] == at:
            del live[number]
    return most


def peak_of_session() -> int:
    """The peak of our last step on this rank's own stage, from the timeline."""
    from smp_core.torch import observe

    events = sorted(observe.timeline(), key=lambda event: event.ended)
    return peak((str(event.phase), event.microbatch) for event in events)


def measure() -> list[Figure]:
    """Start the job, and say what it found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*words, f"--nproc-per-node={STAGES}", "-m", "benchmarks.pipeline", str(path)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=600,
        )
        found = json.loads(path.read_text())
    figures = []
    for name, schedule in PAIRS.items():
        figures += rows(name, schedule.__name__.removeprefix("Schedule"), found[name])
    return figures


def rows(name: str, theirs: str, found: dict[str, Any]) -> list[Figure]:
    """The figures of one schedule."""
    figures = []
    bare = median(found["theirs"]) * 1000
    for who, key in ((f"torch {theirs}", "theirs"), (f"pipeline, {name}", "ours")):
        times = [each * 1000 for each in found[key]]
        ratio = f"{median(times) / bare:.2f} of torch's" if key == "ours" else ""
        figures.append(
            Figure(f"{who}: a step", median(times), "ms", (min(times), max(times)), ratio)
        )
    theory = MICROBATCHES if name == "simple" else min(MICROBATCHES, CAP)
    for who, key, budget in (
        (f"torch {theirs}", "their_in_flight", ""),
        (f"pipeline, {name}", "in_flight", f"at most {theory}"),
    ):
        counted = found[key]
        figures.append(
            Figure(
                f"{who}: activations in flight",
                max(counted),
                "microbatches",
                None,
                "by rank " + ", ".join(map(str, counted)),
                budget,
            )
        )
    # The least traffic: each stage's output goes to the next, the last one's to the rank that computes the
    # loss, the gradients go back, and a loss for each microbatch goes to each other rank.
    least = 2 * STAGES * ACTIVATION + (STAGES - 1) * MICROBATCHES * 4
    figures.append(
        Figure(
            f"pipeline, {name}: sent in a step",
            found["bytes"] / 1024,
            "KiB",
            None,
            f"{found['bytes'] / least:.2f} of the least, in {found['messages']:,} messages",
        )
    )
    return figures


if __name__ == "__main__":
    job(sys.argv[1])
