"""Clipping inside ``optimizer.step()``: which gradients count, and which are multiplied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as api


@api.step
def train(model, x):
    model.backward(model(x).sum())


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(scale, marks=pytest.mark.smp(
            ranks=2, ddp=True, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=1,
            sdp_gradient_clipping=0.5, fp16=scale > 1,
        ), id=name)
        for name, scale in (("fp32", 1.0), ("fp16", 8.0))
    ],
)  # fmt: skip
def test_a_parameter_that_is_not_the_models_neither_counts_nor_is_clipped(smp, scale):
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 4.0)
    model, own = smp.DistributedModel(module), nn.Parameter(torch.ones(1))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([*model.parameters(), own], lr=1.0), static_loss_scale=scale
    )
    train(model, torch.tensor([[3.0, 4.0]]))
    own.grad = torch.full((1,), 2 * scale)  # as the script's own backward, its loss scaled, gives
    optimizer.step()
    assert optimizer._global_grad_norm == 5
    assert own.item() == 1 - 2
    factor = torch.tensor(0.5 / (5 + 1e-6) / scale, dtype=torch.float32)
    updated = 4 - torch.tensor([[3.0, 4.0]]) * scale * factor
    assert torch.equal(model.state_dict()["weight"], updated.to(module.weight.dtype))
