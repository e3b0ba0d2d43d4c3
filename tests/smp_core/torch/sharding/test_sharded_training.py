"""Training with sharded parameters, against data parallelism at degree 1 and plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp

DEGREES = [2, 4]


class Net(nn.Module):
    """An embedding tied to the head, blocks in a list, a norm, a module called twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        y = self.embed(x)
        for block in [*self.blocks, self.blocks[0]]:
            y = y + block(self.norm(y))
        return self.head(y)


def config(degree, **more):
    return {
        "ddp": True,
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 8,
        "sdp_gradient_clipping": 1e30,
        **more,
    }


def train(steps=3, **model_options):
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model = smp.DistributedModel(module, **model_options)
    optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def step(model, x):
        out = model(x)
        loss = (out * out).mean()
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(smp.rank())
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 7, (4, 3), generator=generator)
        optimizer.zero_grad()
        losses.append(step(model, x).reduce_mean())
        optimizer.step()
    return losses, model.state_dict()


def same(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        assert torch.equal(one[1][name], other[1][name]), name


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_degree_changes_no_bit(smp_world, degree, microbatches):
    whole = smp_world.run(train, ranks=4, config=config(1, microbatches=microbatches))
    sharded = smp_world.run(train, ranks=4, config=config(degree, microbatches=microbatches))
    for one, other in zip(whole, sharded, strict=True):
        same(one, other)
