"""Random generators of a pipeline's ranks stay alike, so that a script may restore the state of any one on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from pytest_smp import replay
from smp_core.torch.execution import streams

STEPS = 2


class Draws(torch.autograd.Function):
    """The identity, whose backward pass draws from the rank's generator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        torch.rand(5)
        return gradients[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Draws.apply(self.drop(self.linear(x)))  # type: ignore[no-untyped-call, no-any-return]


def make(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Layer() for _ in range(4)])


def batch() -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def train(state: torch.Tensor | None, weights: Any) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """Some steps, from these weights and generators. The weights, the generator's state and the losses after them."""
    module = make(0)
    if weights is not None:
        module.load_state_dict(weights)
    for index, layer in enumerate(module):
        smp.set_partition(layer, index % smp.pp_size())
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        model.backward(loss)
        return loss

    torch.manual_seed(7)
    if state is not None:
        torch.set_rng_state(state)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(model, batch()).reduce_mean())
        optimizer.step()
    return model.state_dict(), torch.get_rng_state(), losses


def resumed(config: dict[str, Any]) -> Any:
    """The same training in one piece and in two; between the two, the state of the last rank is restored on all."""
    smp.init(config)
    weights, state, first = train(None, None)
    weights = {name: value.clone() for name, value in weights.items()}
    smp.shutdown()
    smp.init(config)
    last = smp.allgather(state, smp.WORLD)[-1]
    _, after, second = train(last, weights)
    return state, after, [*first, *second]


def plain(microbatches: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All steps on one process, in one piece."""
    module = make(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
    torch.manual_seed(7)
    losses = []
    for _ in range(2 * STEPS):
        seed = streams.draw_seed()

        def body(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = module(x).square().mean()
            state = torch.get_rng_state()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.set_rng_state(state)
            return loss.detach()

        parts = [(part,) for part in batch().chunk(microbatches)]
        done = replay.gradients(module, body, parts, seed=seed, divisor=microbatches)
        for name, parameter in module.named_parameters():
            parameter.grad = done.gradients[name]
        optimizer.step()
        losses.append(torch.stack(done.results).mean())
    return torch.get_rng_state(), losses


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_training_resumes_with_the_state_of_any_rank(smp_world, degree, microbatches):
    config = {
        "pipeline_parallel_degree": degree,
        "microbatches": microbatches,
        "auto_partition": False,
        "default_partition": 0,
    }
    state, losses = plain(microbatches)
    for between, after, found in smp_world.run(resumed, config, ranks=degree, init=False):
        assert not torch.equal(between, after)
        assert torch.equal(after, state)
        assert torch.equal(torch.stack(found), torch.stack(losses))
