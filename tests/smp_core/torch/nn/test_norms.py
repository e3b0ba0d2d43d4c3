"""Norms and clipping count slices once over the TP group, and parameters that each tp rank holds whole once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import smp_core.torch as api
from tests.smp_core.torch.nn.test_linear import values

TP = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}


def build() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(values(*parameter.shape, start=number))
    return module


@api.step
def train_step(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


def gradients(shares: int) -> list[torch.Tensor]:
    """Those of one process, averaged over the shares."""
    module = build()
    for number in range(shares):
        (module(values(2, 4, start=number)).square().sum() / shares).backward()
    return [parameter.grad for parameter in module.parameters()]


def trained() -> api.DistributedModel:
    module = build()
    state = module.state_dict()
    api.set_tensor_parallelism(module[0])
    model = api.DistributedModel(module)
    model.load_state_dict(state)
    train_step(model, values(2, 4, start=api.rdp_rank()))
    return model


@pytest.mark.parametrize("sharded", [1, 2])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_torchs_norm_is_that_of_the_whole_model(smp_world, sharded, order):
    config = {
        **TP,
        "sharded_data_parallel_degree": sharded,
        "sdp_param_persistence_threshold": 3,
    }

    def body():
        model = trained()
        found = nn.utils.clip_grad_norm_(model.parameters(), 1.0, order)
        expected = nn.utils.get_total_norm([each.double() for each in gradients(2)], order)
        assert float(found) == float(
            expected.float()
        )  # gradients are integers, and so are their powers
        return [parameter.grad.norm().item() for parameter in model.parameters()], float(found)

    found = smp_world.run(body, ranks=4, config=config)
    assert len({norm for _, norm in found}) == 1


def test_sharded_clipping_counts_every_element_once(smp_world):
    config = {
        **TP,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 3,
        "sdp_gradient_clipping": 1.0,
    }

    def body():
        model = trained()
        optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        optimizer.step()
        return model.sharding.norm

    expected = math.sqrt(sum(float(each.double().square().sum()) for each in gradients(2)))
    assert smp_world.run(body, ranks=4, config=config) == [expected] * 4


def test_clipping_of_masters_counts_every_element_once(smp_world):
    def body():
        model = trained()
        optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        return float(optimizer.clip_master_grads(1.0))

    expected = math.sqrt(sum(float(each.double().square().sum()) for each in gradients(2)))
    found = smp_world.run(body, ranks=4, config={**TP, "fp16": True})
    assert found == [expected] * 4
