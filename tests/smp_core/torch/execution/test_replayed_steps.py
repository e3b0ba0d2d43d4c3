"""The engine against the replayed loop: bit for bit, on any model, partition and schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_smp import replay
from smp_core.torch import session as sessions
from smp_core.torch.execution import streams, timeline

WIDTH = 6


class Block(nn.Module):
    """Uses its weight before and after its child, and its child twice."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.child(x @ self.weight) + x
        return torch.tanh(self.child(y) @ self.weight + y * torch.rand(WIDTH))


class Branches(nn.Module):
    """One module many times, a skip over it, a dropout, and an output that nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(nn.Linear(WIDTH, WIDTH)), Block(self.shared)])
        self.drop = nn.Dropout(0.3)
        self.act = nn.ReLU(inplace=True)
        self.split = Split()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.shared(x))
        for _ in range(2):
            for block in self.blocks:
                y = self.act(self.shared(block(y)) * 1.5) + y / 3
        some, other = self.split({"y": y, "x": (x, None)})
        return some.sum(-1) + (self.drop(other["z"]) * y).sum(-1)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, nest: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = nest["y"]
        return y * y, {"z": self.inner(y) + y, "unused": y * 2}


class Heads(nn.Module):
    """Attention, which reads a child's weights; an RNN, which keeps a list; a norm with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None] * torch.linspace(-1, 1, 4)[:, None]
        for _ in range(2):
            attended, _ = self.attention(x, x, x)
            x, _ = self.recurrent(attended + x)
        return self.last(self.frozen(self.norm(x[:, -1]))).pow(2).sum(-1)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "branches": (Branches, {"shared": 1, "blocks.0": 1, "blocks.1": 1, "split": 1}),
    "nested": (Branches, {"blocks.0": 1, "blocks.0.child": 0, "split": 1, "split.inner": 0}),
    "heads": (Heads, {"recurrent": 1, "last": 1}),
    "other heads": (Heads, {"attention": 1, "norm": 1}),
}


def run(
    smp: Any, name: str, batch: torch.Tensor, **options: Any
) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    """This rank's gradients by name, and the losses, of one step."""
    make, places = MODELS[name]
    torch.manual_seed(0)
    module = make()
    model = smp.DistributedModel(module, **options)
    if smp.pp_size() > 1:
        for path, index in places.items():
            smp.set_partition(module.get_submodule(path), index)
    torch.manual_seed(5)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    losses = torch.stack(list(step(model, batch).outputs))
    return {key: parameter.grad for key, parameter in model.local_named_parameters()}, losses


def expected(name: str, batch: torch.Tensor, microbatches: int) -> replay.Replayed:
    torch.manual_seed(0)
    module = MODELS[name][0]()
    torch.manual_seed(5)
    seed = streams.draw_seed()

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(x).mean()
        loss.backward()
        return loss.detach()

    parts = [(part,) for part in batch.chunk(microbatches)]
    return replay.gradients(module, body, parts, seed=seed)


def batch_of(replica: int) -> torch.Tensor:
    return torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(2 + replica))


def check(smp: Any, name: str, **options: Any) -> None:
    gradients, losses = run(smp, name, batch_of(smp.dp_rank()), **options)
    replicas = [expected(name, batch_of(replica), 3) for replica in range(smp.dp_size())]
    assert torch.equal(losses, torch.stack(replicas[smp.dp_rank()].results))
    reduced = replay.reduce([replica.gradients for replica in replicas], 3 * smp.dp_size())
    compare(gradients, reduced)
    session = sessions.current("test")
    config = session.runtime.config
    assert {event.microbatch for event in session.timeline} == {0, 1, 2}
    assert timeline.violations(session.timeline, config.pipeline, config.active_microbatches) == []


def compare(
    gradients: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> None:
    for key, gradient in gradients.items():
        key = key.removeprefix("module.")
        wanted = expected[key]
        if wanted is None:
            assert gradient is None, key
        else:
            assert gradient is not None, key
            assert torch.equal(gradient, wanted), key


@pytest.mark.smp(ranks=1, microbatches=3)
@pytest.mark.parametrize("name", MODELS)
def test_one_rank(smp: Any, name: str) -> None:
    check(smp, name)


@pytest.mark.smp(
    ranks=2,
    microbatches=3,
    pipeline_parallel_degree=2,
    auto_partition=False,
    default_partition=0,
    pipeline="simple",
)
@pytest.mark.parametrize("name", MODELS)
def test_simple(smp: Any, name: str) -> None:
    check(smp, name)


@pytest.mark.smp(
    ranks=2,
    microbatches=3,
    pipeline_parallel_degree=2,
    auto_partition=False,
    default_partition=0,
    active_microbatches=2,
)
@pytest.mark.parametrize("name", MODELS)
def test_interleaved(smp: Any, name: str) -> None:
    check(smp, name)


@pytest.mark.smp(ranks=3, microbatches=3, pipeline_parallel_degree=3)
@pytest.mark.parametrize("name", MODELS)
def test_automatic_partition(smp: Any, name: str) -> None:
    check(smp, name)


@pytest.mark.smp(ranks=4, microbatches=3, pipeline_parallel_degree=2)
@pytest.mark.parametrize("name", ["branches", "heads"])
@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 1e-4}, {"overlapping_allreduce": False}, {}], ids=str
)
def test_replicas(smp: Any, name: str, options: dict[str, Any]) -> None:
    check(smp, name, **options)
