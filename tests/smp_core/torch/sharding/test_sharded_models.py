"""Every kind of module and parameter: a sharded one trains to the bits of one that every rank has whole."""

from __future__ import annotations

import pytest
import torch

import smp_core.torch as smp
from tests.smp_core.torch.sharding.degrees import dense, gradients, same, wrapped
from tests.smp_core.torch.sharding.modules import MODELS


def train(name):
    """Two steps, and an evaluation outside of steps."""
    make, data = MODELS[name]
    torch.manual_seed(3)
    sparse = name == "Sparse"
    model, optimizer = wrapped(
        make(), None if sparse else lambda each: torch.optim.AdamW(each, lr=0.1)
    )

    @smp.step
    def step(model, x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    generator, seen = torch.Generator().manual_seed(smp.rank()), []
    for _ in range(2):
        optimizer.zero_grad()
        seen.append(step(model, data(generator)).stack())
        seen.append(dict(gradients(model)))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        seen.append(model(data(generator)))
    return seen, {key: dense(value) for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_sharded_as_whole(smp_world, name):
    same(smp_world, train, name)


@pytest.mark.parametrize("name", ["Sizes", "Tied", "Unused", "Dtypes"])
def test_sharded_as_whole_with_replicas_of_shards(smp_world, name):
    same(smp_world, train, name, degrees=(1, 2, 4), ranks=4)
