"""The reducer holds no memory longer than needed: padding behind `p.grad`, sums that are in a bucket's rows."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import smp_core.torch as api
from smp_core.torch.reduction.bucket_reducer import BucketReducer
from smp_core.torch.reduction.buckets import Bucket
from smp_core.torch.reduction.layout import Layout
from smp_core.torch.reduction.policy import LateGradients


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


@pytest.mark.parametrize("late", LateGradients)
def test_the_sums_of_a_bucket_are_freed_before_its_exchange(late):
    parameter = nn.Parameter(torch.zeros(6))
    total = torch.arange(6.0)
    held, seen = weakref.ref(total), []

    def pack(bucket, totals):
        return [bucket.rows(totals)]

    def launch(bucket, packed):
        seen.append((held() is None, packed[0].tolist()))

    bucket = Bucket([parameter], [Layout(6, 2)], torch.float32)
    reducer = BucketReducer([bucket], pack, launch, late)
    reducer.on_ready(parameter, total)
    del total
    reducer.advance()
    assert seen == [(True, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])]
