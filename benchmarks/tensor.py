"""Forward and backward of a transformer layer that four ranks split, beside torch's ``parallelize_module``: the same
ranks (torchrun, Gloo), the same layer, the same batch, in one job.

Both split heads and intermediate channels, and sum the blocks' outputs. Time is measured, with the engines taking
turns; bytes are counted. Outputs and gradients are checked first: their errors against one process in float64 are at
most four times those of one process in float32 (docs/spec/engines.md#2.2).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import autograd, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import smp_core.torch as smp
from benchmarks.figures import Figure, median, seconds
from benchmarks.sharding import _DispatchMode, compared
from smp_core.torch import observe
from smp_core.torch.parameters.split import split_of

RANKS = 4
WIDTH, HEADS, INNER = 1024, 16, 4096
LINES, LENGTH = 4, 128  # the batch, which all ranks share, is (LINES, LENGTH, WIDTH)
WARM, TIMED = 3, 15

#: Our layouts, by the value of ``optimize``. The budget of time is for the first, which is not the default: the second
#: holds less memory and sends more.
OURS = ("speed", "memory")


class Summed(_DispatchMode):  # type: ignore[misc]
    """Counts what torch's functional all-reduces send: the bytes of a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_"):
            self.bytes += 2 * (RANKS - 1) / RANKS * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


class Plain(nn.Module):
    """The layer in torch's own modules: attention and two linear layers, each after a layer normalisation."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads  # of this rank
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalised = self.norm1(x)
        query, key, value = (
            each(normalised).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        found = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.dense(found.transpose(1, 2).flatten(2))
        return x + self.second(functional.gelu(self.first(self.norm2(x))))


#: The names of the plain layer's modules in ours.
NAMES = {
    "norm1": "attention.pre_layernorm",
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "dense": "attention.dense",
    "norm2": "output.pre_layernorm",
    "first": "output.dense1",
    "second": "output.dense2",
}


class Engine:
    """One way to compute: ``run`` leaves gradients and gives the output; ``gradients`` are whole, by plain names."""

    def __init__(
        self,
        run: Callable[[], torch.Tensor],
        gradients: Callable[[], dict[str, torch.Tensor]],
        sent: Callable[[], float],
    ) -> None:
        self.run, self.gradients, self.sent = run, gradients, sent


@smp.step
def train_step(model: Any, x: torch.Tensor) -> Any:
    output = model((x, None))[0]
    model.backward(output.square().sum())
    return output


def ours(plain: Plain, x: torch.Tensor) -> Engine:
    """The layer of ``smp.nn``, as ``smp.init`` was told to optimise."""
    model = smp.DistributedModel(
        smp.nn.DistributedTransformerLayer(
            num_attention_heads=HEADS,
            attention_head_size=WIDTH // HEADS,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            pre_layernorm=True,
            post_layernorm=False,
        )
    )
    state = plain.state_dict()
    model.load_state_dict(
        {f"{NAMES[path]}.{kind}": state[f"{path}.{kind}"] for path, kind in _keys(state)}
    )
    traffic = observe.tensor_traffic(model)

    def run() -> torch.Tensor:
        model.zero_grad()
        output: torch.Tensor = train_step(model, x).concat()
        return output

    def gradients() -> dict[str, torch.Tensor]:
        found = {}
        for path, kind in _keys(state):
            parameter = model.module.get_parameter(f"{NAMES[path]}.{kind}")
            assert parameter.grad is not None
            split = split_of(parameter)
            parts = smp.allgather(parameter.grad, smp.TP_GROUP)
            found[f"{path}.{kind}"] = parameter.grad if split is None else split.full(parts)
        return found

    def sent() -> float:
        mark = traffic.mark()
        run()
        return float(traffic.bytes(mark))

    return Engine(run, gradients, sent)


def torchs(plain: Plain, x: torch.Tensor) -> Engine:
    """Torch's ``parallelize_module``."""
    module = Plain(HEADS // RANKS)
    module.load_state_dict(plain.state_dict())
    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "first")}
    parallelize_module(
        module,
        init_device_mesh("cpu", (RANKS,)),
        {**plan, "dense": RowwiseParallel(), "second": RowwiseParallel()},
    )

    def run() -> torch.Tensor:
        module.zero_grad()
        output: torch.Tensor = module(x)
        autograd.backward(output.square().sum())
        return output

    def gradients() -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in module.named_parameters():
            gradient: Any = parameter.grad
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        return found

    def sent() -> float:
        with Summed() as counted:
            run()
        return counted.bytes

    return Engine(run, gradients, sent)


def _keys(state: dict[str, Any]) -> list[tuple[str, str]]:
    return [(path, kind) for path, _, kind in (each.partition(".") for each in state)]


def job(path: str) -> None:
    """The work of each rank; rank 0 writes the results."""
    found = {}
    for optimize in OURS:
        smp.init(
            {
                "ddp": True,
                "tensor_parallel_degree": RANKS,
                "prescaled_batch": True,
                "optimize": optimize,
            }
        )
        found[optimize] = measure_layout()
        smp.shutdown()
    if int(os.environ["RANK"]) == 0:
        Path(path).write_text(json.dumps(found))


def measure_layout() -> dict[str, Any]:
    """Ours and torch's, taking turns; every rank gets the same."""
    torch.manual_seed(0)
    plain, x = Plain(), torch.randn(LINES, LENGTH, WIDTH)
    engines = {"ours": ours(plain, x), "torch": torchs(plain, x)}
    check(plain, x, engines)
    times: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    for number in range(WARM + TIMED):
        for name in order:
            dist.barrier()
            told = smp.allgather(seconds(engines[name].run), smp.WORLD)
            if number >= WARM:
                times[name].append(max(told))
        order.reverse()  # so that no engine always follows the other
    sent = {name: engine.sent() for name, engine in engines.items()}
    told = smp.allgather(sent, smp.WORLD)
    return {"times": times, "bytes": {name: max(each[name] for each in told) for name in engines}}


def check(plain: Plain, x: torch.Tensor, engines: dict[str, Engine]) -> None:
    """Raise AssertionError for an error that rounding does not explain."""
    results = []
    for dtype in (torch.float32, torch.float64):
        module = Plain().to(dtype)
        module.load_state_dict(plain.state_dict())
        output = module(x.to(dtype))
        autograd.backward(output.square().sum())
        gradients = {name: each.grad for name, each in module.named_parameters()}
        results.append({"output": output.detach(), **gradients})
    coarse, truth = results
    for engine, found in engines.items():
        values = {"output": found.run().detach(), **found.gradients()}
        for name, value in truth.items():
            assert value is not None
            assert coarse[name] is not None
            bound = 4 * (coarse[name].double() - value).abs().max()
            error = (values[name].double() - value).abs().max()
            assert error <= bound, f"{engine}: {name}: {error} > {bound}"


def formula(optimize: str) -> float:
    """The bytes that one rank sends, by the value of ``optimize``.

    A gather and a reduce-scatter of the batch each send (t-1)/t of its bytes, on t ranks. With "speed" forward and
    backward of two blocks each sum one tensor of the batch's size, by both. With "memory" a block gathers its input and
    scatters its output's sum; in backward it gathers the gradient of its output, gathers its input again and scatters
    the sum of its input's gradient. The layer gathers its output. A layer normalisation of slices exchanges two numbers
    of each row: by a gather of t-1 parts in forward, by an all-reduce of 2(t-1)/t in backward.
    """
    rows = 4 * LINES * LENGTH  # bytes of one number of each
    part = (RANKS - 1) / RANKS
    if optimize == "speed":
        return 4 * 2 * part * rows * WIDTH
    return (2 * 5 + 1) * part * rows * WIDTH + 2 * (RANKS - 1 + 2 * part) * 2 * rows


def measure() -> list[Figure]:
    """Start the job, and say what it found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*words, f"--nproc-per-node={RANKS}", "-m", "benchmarks.tensor", str(path)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=600,
        )
        found = json.loads(path.read_text())
    return [figure for optimize in OURS for figure in rows(optimize, found[optimize])]


def rows(optimize: str, found: dict[str, Any]) -> list[Figure]:
    """The figures of one layout."""
    label, first = f"tensor, degree {RANKS}, {optimize}", optimize == OURS[0]
    times = {name: [each * 1000 for each in found["times"][name]] for name in found["times"]}
    ratio = f"{compared(times, 'torch')} of torch's"
    spread = {name: (min(each), max(each)) for name, each in times.items()}
    sent, least = found["bytes"], formula(optimize)
    figures = [
        Figure(
            f"{label}: forward and backward",
            median(times["ours"]),
            "ms",
            spread["ours"],
            ratio,
            "at most 1.00 of torch's" if first else "",
        ),
        Figure(
            f"{label}: sent",
            sent["ours"] / 1024,
            "KiB",
            None,
            f"{sent['ours'] / least:.3f} of the formula",
            "1.000 of it",
        ),
    ]
    if first:
        name = "torch parallelize_module"
        figures = [
            Figure(f"{name}: forward and backward", median(times["torch"]), "ms", spread["torch"]),
            Figure(f"{name}: sent", sent["torch"] / 1024, "KiB", None),
            *figures,
        ]
    return figures


if __name__ == "__main__":
    job(sys.argv[1])
