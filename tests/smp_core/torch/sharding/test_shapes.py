"""The true shapes of a sharded model's parameters, by which scripts group them for weight decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def module_of(smp, delayed):
    with smp.delay_param_initialization(delayed):
        return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.smp(
            ranks=2, ddp=True, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=4,
            bf16=half,
        ), id="bf16" if half else "fp32")
        for half in (False, True)
    ],
)  # fmt: skip
def test_every_parameter_says_its_shape_and_its_master_too(smp, delayed):
    model = smp.DistributedModel(module_of(smp, delayed))
    expected = {name: each.shape for name, each in model.state_dict().items()}
    assert [len(shape) for shape in expected.values()] == [2, 1, 1, 1, 2, 1]
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    for named in (model.named_parameters(), model.virtual_named_parameters()):
        assert {name.removeprefix("module."): each.ds_shape for name, each in named} == expected
    for each in model.parameters():  # split or persistent
        part = -(-each.ds_numel // 2)
        assert each.ds_tensor.ds_numel == part
        first = smp.dp_rank() * part
        flat = dict(zip(map(id, model.parameters()), model.state_dict().values(), strict=True))[
            id(each)
        ].reshape(-1)
        own = flat[first : first + part]
        assert torch.equal(each.ds_tensor[: len(own)], own)
    numels = [each.ds_numel for group in optimizer.param_groups for each in group["params"]]
    assert numels == [shape.numel() for shape in expected.values()]
