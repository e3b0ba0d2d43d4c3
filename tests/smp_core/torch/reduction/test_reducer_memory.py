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
    """Where they were copied to rows, as for every backend but smddp, which sends the sums themselves."""
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


def drawn_gradients(kind):
    """Of four parameters of two ranks' shards: in order, or of a kind that must be copied on the way."""
    if kind == "absent":
        return [None] * 4
    if kind == "sparse":
        return [torch.eye(4).to_sparse() * n for n in range(4)]
    if kind == "of another dtype":
        return [torch.arange(16.0).view(4, 4).double() for _ in range(4)]
    whole = torch.arange(16.0).view(4, 4)
    return [whole.t() + n if kind == "in order" else (whole + n).t() for n in range(4)]


@pytest.mark.parametrize("shape", [(4, 4), (3, 5)], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", ["in order", "transposed", "sparse", "of another dtype", "absent"])
def test_rows_are_made_of_one_gradient_after_the_other(monkeypatch, kind, shape):
    """No more than one is copied beside the rows."""
    parameters = [nn.Parameter(torch.zeros(shape)) for _ in range(4)]
    layout = Layout(parameters[0].numel(), 2)
    bucket = Bucket(parameters, [layout] * 4, torch.float32)
    given = drawn_gradients(kind)
    if shape == (3, 5):
        given = [None if each is None else each.to_dense().reshape(-1)[:15] for each in given]
    totals = {
        each: total for each, total in zip(parameters, given, strict=True) if total is not None
    }
    expected = torch.cat(
        [
            layout.shards(torch.zeros(layout.numel) if each is None else each.to_dense())
            for each in given
        ],
        1,
    )
    made, column = [], Bucket._columns_of

    def noted(self, *args):
        assert not any(each() is not None for each in made)
        found = column(self, *args)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Bucket, "_columns_of", noted)
    rows = bucket.rows(totals)
    assert len(made) == 4
    assert torch.equal(rows, expected.float())
    del made[:]
    monkeypatch.undo()
    columns = bucket.columns(totals)
    assert torch.equal(torch.cat(columns, 1), rows)
    # One reduce-scatter takes them all, as they lie.
    assert {each.dtype for each in columns} == {bucket.dtype}
    assert all(each.is_contiguous() for each in columns)


def test_columns_are_the_gradients_themselves():
    """Where ranks divide them, and they lie in order; smddp sends them from there."""
    parameters = [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(3))]
    bucket = Bucket(parameters, [Layout(16, 2), Layout(3, 2)], torch.float32)
    totals = {parameters[0]: torch.arange(16.0).view(4, 4), parameters[1]: torch.ones(3)}
    first, second = bucket.columns(totals)
    assert first.data_ptr() == totals[parameters[0]].data_ptr()
    assert second.tolist() == [[1.0, 1.0], [1.0, 0.0]]
