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


@pytest.mark.smp(
    ranks=2, ddp=True, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=1,
    sdp_gradient_clipping=0.5, fp16=True,
)  # fmt: skip
def test_a_script_may_clip_by_itself_and_step_clips_what_is_still_too_large(smp):
    """Hugging Face's Trainer does in a run with fp16."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 4.0)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=8.0
    )
    weight, gradient = torch.tensor([[4.0, 4.0]]), torch.tensor([[3.0, 4.0]])
    for max_norm in (0.25, 2.5):
        train(model, gradient)
        assert optimizer.clip_master_grads(max_norm) == 5
        optimizer.step()
        optimizer.zero_grad()
        clipped = gradient * 8 * torch.tensor(max_norm / (5 + 1e-6) / 8, dtype=torch.float32)
        assert optimizer._global_grad_norm == pytest.approx(max_norm, rel=1e-6)
        if max_norm < 0.5:
            weight = weight - clipped
        else:
            norm = clipped.double().square().sum().sqrt().item()
            weight = weight - clipped * torch.tensor(0.5 / (norm + 1e-6), dtype=torch.float32)
        assert torch.equal(model.state_dict()["weight"], weight.half())
    train(model, gradient)
    with pytest.raises(api.exceptions.UnsupportedTrainingError, match="norm_type=1: sharded"):
        optimizer.clip_master_grads(1.0, 1)
