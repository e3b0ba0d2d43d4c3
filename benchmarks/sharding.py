"""A step of sharded data parallelism on four ranks, beside FSDP2 and DDP: the same ranks (torchrun), the same
model, the same batches, in one job whose process groups are Gloo's, and in one whose are `smddp`'s.

Each step is a whole one: forward, backward, clipping, optimizer. Time is measured, with the engines
taking turns; bytes are counted. All are checked to have the same gradients first, each within what rounding
may do to a sum of four numbers.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import autograd, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

import smp_core.torch as smp
from benchmarks.figures import Figure, median, seconds
from smp_core.torch.sharding.sharded_model import ShardedModel

RANKS = 4
BLOCKS, WIDTH, HEADS, CHARACTERS = 4, 256, 4, 64
BLOCK = 12 * WIDTH**2 + 13 * WIDTH  # the elements of a block's parameters
LINES, LENGTH = 4, 64  # the batch of each rank is (LINES, LENGTH)
WARM, TIMED = 3, 15  # steps
CLIPPING = 1.0

ON_GLOO = "FSDP2 on Gloo"  # where the other groups of the job are smddp's

#: By backend our degrees, with the engines of torch that each is measured beside.
JOBS = {
    "gloo": {4: ("FSDP2", "DDP"), 2: ("HSDP", "DDP")},
    "smddp": {4: (ON_GLOO, "FSDP2")},
}
#: By the first of those the most that ours may take of its time.
BUDGETS = {"FSDP2": 1.0, "HSDP": 1.0, ON_GLOO: 0.7}


class GPT(nn.Module):
    """Characters (N, T) to logits (N, T, characters)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(characters)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


@smp.step
def train_step(model: Any, x: torch.Tensor, wanted: torch.Tensor) -> Any:
    loss = loss_of(model(x), wanted)
    model.backward(loss)
    return loss


class Engine:
    """One way to train: ``forward_backward`` leaves the gradients, ``update`` uses them.

    ``parts`` are this rank's parts of each parameter's gradient, flat, with where each begins.
    """

    def __init__(
        self,
        forward_backward: Callable[[], None],
        update: Callable[[], None],
        parts: Callable[[], Iterator[tuple[torch.Tensor, int]]],
    ) -> None:
        self.forward_backward, self.update, self.parts = forward_backward, update, parts

    def step(self) -> None:
        self.forward_backward()
        self.update()


def ours(module: GPT, x: torch.Tensor, wanted: torch.Tensor) -> tuple[Engine, Any]:
    """Sharded data parallelism of the degree that ``smp.init`` was given, and its counters."""
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
    sharding = model.sharding
    assert isinstance(sharding, ShardedModel)

    def forward_backward() -> None:
        optimizer.zero_grad()
        train_step(model, x, wanted)

    def parts() -> Iterator[tuple[torch.Tensor, int]]:
        for parameter in model.parameters():
            shard = sharding.shard(parameter)
            assert shard is not None
            assert parameter.grad is not None
            yield parameter.grad, shard.owned_range[0]

    return Engine(forward_backward, optimizer.step, parts), sharding.collectives.traffic


def torchs(name: str, module: GPT, x: torch.Tensor, wanted: torch.Tensor) -> Engine:
    """One of torch's engines."""
    model: Any = module
    if name == "DDP":
        model = DistributedDataParallel(module)
    else:
        shape, names = ((2, 2), ("copy", "shard")) if name == "HSDP" else ((RANKS,), ("shard",))
        backend: Any = {"shard": "gloo"} if name == ON_GLOO else None
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backend)
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    optimizer = optimizer_of(model.parameters())

    def forward_backward() -> None:
        optimizer.zero_grad()
        autograd.backward(loss_of(model(x), wanted))

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()

    def parts() -> Iterator[tuple[torch.Tensor, int]]:
        for parameter in module.parameters():
            gradient: Any = parameter.grad
            if hasattr(gradient, "full_tensor"):
                gradient = gradient.full_tensor()
            yield gradient.reshape(-1), 0

    return Engine(forward_backward, update, parts)


_DispatchMode: Any = _python_dispatch.TorchDispatchMode  # has no types


class Sent(_DispatchMode):  # type: ignore[misc]
    """Counts what torch's collectives send: the bytes of the ring that each of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self.bytes += _bytes_of(name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))


def _bytes_of(operation: str, args: Any) -> float:
    """The bytes that one rank sends in an operation. Raises KeyError for an unknown operation."""
    if operation in ("barrier", "broadcast_"):
        return 0.0
    times, at, group = {
        "_allgather_base_": (1, 0, 2),  # the output, of which all but one part is handed on
        "_reduce_scatter_base_": (1, 1, 2),
        "allreduce_": (2, 0, 1),
    }[operation]
    tensors = args[at] if isinstance(args[at], list) else [args[at]]
    size: int = dist.ProcessGroup.unbox(args[group]).size()
    total: int = sum(each.numel() * each.element_size() for each in tensors)
    return times * (size - 1) / size * total


def job(path: str, backend: str) -> None:
    """The work of each rank; rank 0 writes the results."""
    if backend == "smddp":
        importlib.import_module("smp_core.transport.smddp")
        dist.init_process_group("smddp")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # that its output is a view
    found = {}
    for degree, names in JOBS[backend].items():
        smp.init(
            {
                "ddp": True,
                "sharded_data_parallel_degree": degree,
                "sdp_param_persistence_threshold": 0,
                "sdp_reduce_bucket_size": BLOCK,  # block by block, as FSDP2 does
                "sdp_gradient_clipping": CLIPPING,
            }
        )
        found[degree] = measure_degree(names)
        smp.shutdown()
    if int(os.environ["RANK"]) == 0:
        Path(path).write_text(json.dumps(found))


def measure_degree(names: Sequence[str]) -> dict[str, Any]:
    """Ours and others, taking turns; every rank gets the same."""
    torch.manual_seed(smp.rank())
    x, wanted = torch.randint(CHARACTERS, (2, LINES, LENGTH))
    engines: dict[str, Engine] = {}
    engines["ours"], traffic = ours(model_of(), x, wanted)
    for name in names:
        engines[name] = torchs(name, model_of(), x, wanted)
    locals_ = local_gradients(x, wanted)
    assert sum(each.numel() for each in model_of().blocks[0].parameters()) == BLOCK
    whole: dict[str, list[float]] = {name: [] for name in engines}
    backward: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    for number in range(WARM + TIMED):
        for name in order:
            engine = engines[name]
            dist.barrier()
            first = seconds(engine.forward_backward)
            if not number:
                check(name, engine.parts(), locals_)
            second = seconds(engine.update)
            told = smp.allgather((first, first + second), smp.WORLD)
            if number >= WARM:
                backward[name].append(max(each for each, _ in told))
                whole[name].append(max(each for _, each in told))
        order = [*order[1:], order[0]]  # so that no engine always follows the same one
    sent: dict[str, float] = {}
    for name, engine in engines.items():
        if name == "ours":
            mark = traffic.mark()
            engine.forward_backward()
            sent[name] = traffic.bytes(mark)
        else:
            with Sent() as counted:
                engine.forward_backward()
            sent[name] = counted.bytes
    told = smp.allgather(sent, smp.WORLD)
    return {
        "whole": whole,
        "backward": backward,
        "bytes": {name: sorted({each[name] for each in told}) for name in engines},
        "elements": sum(gradients[0].numel() for gradients in locals_),
    }


def model_of() -> GPT:
    """A model with the same values on all ranks and engines."""
    torch.manual_seed(0)
    return GPT()


def local_gradients(x: torch.Tensor, wanted: torch.Tensor) -> list[list[torch.Tensor]]:
    """For each parameter the gradients that the ranks have of their own batches, by plain PyTorch."""
    module = model_of()
    autograd.backward(loss_of(module(x), wanted))
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        every = [torch.empty_like(parameter.grad.view(-1)) for _ in range(RANKS)]
        dist.all_gather(every, parameter.grad.view(-1))
        found.append(every)
    return found


def check(
    name: str,
    parts: Iterable[tuple[torch.Tensor, int]],
    locals_: Iterable[Sequence[torch.Tensor]],
) -> None:
    """The mean over the ranks, within what float32 may do to it in any order of additions.

    Raises AssertionError.
    """
    roundings = RANKS  # as many as additions, and one division
    unit = roundings * 2.0**-24
    for (part, begin), every in zip(parts, locals_, strict=True):
        own = torch.stack([each[begin : begin + part.numel()].double() for each in every])
        bound = unit / (1 - unit) * own.abs().sum(0) / RANKS
        wrong = (part.double() - own.mean(0)).abs() > bound
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} gradients"


def formula(degree: int, elements: int) -> float:
    """The bytes that one rank has to send in a step (ENGINES 3.2): two gathers and a reduction among
    ``degree`` ranks, and a reduction among the ranks that hold the same part.
    """
    copies = RANKS // degree
    times = 3 * (degree - 1) / degree + 2 * (copies - 1) / (copies * degree)
    return times * 4 * elements


def measure() -> list[Figure]:
    """Start the jobs, and say what they found."""
    return [each for backend in JOBS for each in measure_on(backend)]


def measure_on(backend: str) -> list[Figure]:
    """The figures of a backend's job."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*words, f"--nproc-per-node={RANKS}", "-m", "benchmarks.sharding", str(path), backend],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=600,
        )
        found = json.loads(path.read_text())
    return [
        each
        for degree, names in JOBS[backend].items()
        for each in rows(backend, degree, names, found[str(degree)])
    ]


def rows(backend: str, degree: int, names: Sequence[str], found: dict[str, Any]) -> list[Figure]:
    """The figures of one degree. The budget is against the first of ``names``."""
    figures = []
    own = f"sharded, degree {degree}" + (" on smddp" if backend == "smddp" else "")
    labels = {name: f"torch {name}" for name in names} | {"ours": own}
    if backend == "smddp":
        labels["FSDP2"] += " on smddp"
    for name, label in labels.items():
        times = [each * 1000 for each in found["whole"][name]]
        figure = Figure(f"{label}: a step", median(times), "ms", (min(times), max(times)))
        if name == "ours":
            words = [f"{compared(found['whole'], each)} of {each}'s" for each in names]
            figure = dataclasses.replace(
                figure,
                ratio=", ".join(words),
                budget=f"at most {BUDGETS[names[0]]:.2f} of {names[0]}'s",
            )
        figures.append(figure)
    words = [f"{compared(found['backward'], each)} of {each}'s" for each in names]
    times = [each * 1000 for each in found["backward"]["ours"]]
    figures.append(
        Figure(
            f"{own}: forward and backward",
            median(times),
            "ms",
            (min(times), max(times)),
            ", ".join(words),
        )
    )
    if backend == "smddp":  # torch's counters know nothing of its groups
        return figures
    least = formula(degree, found["elements"])
    for name, label in labels.items():
        sent = found["bytes"][name]
        figures.append(
            Figure(
                f"{label}: sent in a step",
                max(sent) / 1024,
                "KiB",
                None,
                f"{max(sent) / least:.3f} of the formula" if name == "ours" else "",
                "1.000 of it" if name == "ours" else "",
            )
        )
    return figures


def compared(times: dict[str, list[float]], name: str) -> str:
    """Ours over another's, round by round: the median, and the middle half."""
    ratios = sorted(ours / theirs for ours, theirs in zip(times["ours"], times[name], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    job(*sys.argv[1:])
