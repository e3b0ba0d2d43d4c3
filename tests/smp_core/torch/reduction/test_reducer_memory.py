"""The memory behind `p.grad` of sharded parameters is that of the shards, without the padding of any collective."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as api


@api.step
def train_step(model, x):
    model.backward(model(x).sum())


@pytest.mark.smp(ranks=4, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=0)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_gradient_keeps_no_padding_of_the_all_reduce(smp, rows):
    # Two replicas: a shard of an odd number of elements is padded to an even one for the all-reduce.
    model = smp.DistributedModel(nn.Linear(2, rows, bias=False))
    train_step(model, torch.ones(1, 2))
    (parameter,) = model.parameters()
    assert parameter.grad.untyped_storage().nbytes() == rows * parameter.element_size()
