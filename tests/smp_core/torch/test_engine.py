"""Modules called over the ranks of a pipeline give the gradients of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch import DistributedModel

MANUAL = {"auto_partition": False, "default_partition": 0, "skip_tracing": True}


class Chain(nn.Module):
    """Layers, one on each of so many partitions; the root on the last."""

    def __init__(self, parts, width=4):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(parts))
        for index, layer in enumerate(self.layers):
            layer._smp_partition = index

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def plain(module, x, microbatches):
    """Gradients of the mean over microbatches, by plain PyTorch."""
    for part in x.chunk(microbatches):
        (module(part).mean() / microbatches).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def check_chain(parts, microbatches):
    torch.manual_seed(2)
    x = torch.randn(8, 4)
    expected = plain(Chain(parts), x, microbatches)
    model = DistributedModel(Chain(parts))

    @smp.step
    def train(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return loss

    losses = train(model, x)
    mine = {
        name: p for name, p in model.module.named_parameters() if f"layers.{smp.pp_rank()}." in name
    }
    assert len(mine) == 2
    for name, p in mine.items():
        torch.testing.assert_close(p.grad, expected[name])
    return losses.reduce_mean().item()


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (4, 4), (4, 1), (3, 8)])
def test_a_chain(smp_world, ranks, microbatches, pipeline):
    config = {
        **MANUAL,
        "pipeline_parallel_degree": ranks,
        "microbatches": microbatches,
        "pipeline": pipeline,
    }
    losses = smp_world.run(check_chain, ranks, microbatches, ranks=ranks, config=config)
    assert len(set(losses)) == 1
