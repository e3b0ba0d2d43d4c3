"""What public training scripts do, on every backend, against plain PyTorch on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.backends import open_backend
from smp_core.backends.base import Host, HostOptions, Job

RANKS = 4
PIPELINE = {
    "pipeline_parallel_degree": RANKS,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}


def _nothing(rank: int) -> Any:
    return (), {}


@pytest.fixture(scope="module", params=["sim", "gloo", "mpi"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    opened = open_backend(request.param, HostOptions(ranks=RANKS))
    yield opened
    opened.close()


def run(host: Host, body: Callable[[], Any], config: dict[str, Any]) -> list[Any]:
    """What ``body()`` returned, by rank."""
    job = Job(body=body, arguments=_nothing, parameters=config, timeout=120.0)
    report = host.open(RANKS).run(job)
    if report.error is not None:
        raise report.error
    return report.values


class Attention(nn.Module):
    """As BERT and ViT have it: attention called by the names of its arguments, and an output layer that is given the
    residual and does not use it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dtype=torch.float64)
        self.output = Output(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(query=hidden, key=hidden, value=hidden)
        return hidden + self.output(attended, hidden)  # type: ignore[no-any-return]


class Output(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.dense(hidden)  # type: ignore[no-any-return]


class Vision(nn.Module):
    """A vision transformer of two layers, each on two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4, dtype=torch.float64))
        self.layers = nn.ModuleList([Attention(4), Attention(4)])
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden[:, 0])  # type: ignore[no-any-return]


def _vision() -> tuple[Vision, torch.Tensor]:
    torch.manual_seed(3)
    return Vision(), torch.randn(4, 3, 4, dtype=torch.float64)


def vision_gradients() -> dict[str, torch.Tensor]:
    module, patches = _vision()
    for index, layer in enumerate(module.layers):
        smp.set_partition(layer, index)
        smp.set_partition(layer.output, index + 2)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, patches: torch.Tensor) -> None:
        model.backward(model(patches).square().sum())

    step(model, patches)
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


def test_an_argument_that_a_module_on_another_rank_does_not_use(host: Host) -> None:
    module, patches = _vision()
    for part in patches.chunk(2):
        (module(part).square().sum() / 2).backward()  # type: ignore[no-untyped-call]
    found = {
        name: each for part in run(host, vision_gradients, PIPELINE) for name, each in part.items()
    }
    expected = {name: each.grad for name, each in module.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(RANKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5)
        return x


def generators() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    module = Drops()
    for index, layer in enumerate(module.layers):
        smp.set_partition(layer, index)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    before = torch.get_rng_state()
    step(model, torch.ones(2, 4))
    return before, torch.get_rng_state()


def test_a_step_draws_alike_from_the_generators_of_all_ranks(host: Host) -> None:
    (before, after), *others = run(host, generators, PIPELINE)
    assert not torch.equal(before, after)
    assert all(torch.equal(other, after) for _, other in others)
