"""The public names for what training did: counters, timeline, traffic, unsharded memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as api
from smp_core.errors import NotInitializedError
from smp_core.torch import observe


@api.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)


@pytest.mark.smp(ranks=2, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=0)
def test_what_a_sharded_model_did(smp):
    model = smp.DistributedModel(nn.Linear(4, 6, bias=False))
    assert observe.counters() == (0, 0)
    assert observe.timeline() == ()
    for _ in range(3):
        train_step(model, torch.ones(2, 4))
    assert observe.counters() == (3, 3)
    assert {event.microbatch for event in observe.timeline()} == {0}
    # Two ranks: of 24 elements each sends its 12 in a gather, and the other's 12 in a reduce-scatter.
    traffic = observe.traffic(model)
    gathers = traffic.calls(None, "all_gather")
    assert traffic.bytes() == (gathers + traffic.calls(None, "reduce_scatter")) * 12 * 4
    assert traffic.calls(None, "reduce_scatter") == 3
    assert gathers >= 3
    assert observe.unsharded_peak(model) == 24


@pytest.mark.smp(ranks=2)
def test_what_replicas_did(smp):
    model = smp.DistributedModel(nn.Linear(4, 6))
    train_step(model, torch.ones(2, 4))
    assert observe.counters() == (1, 1)
    assert observe.traffic(model).bytes() == 0
    assert observe.unsharded_peak(model) == 0


def test_before_init_there_is_nothing_to_observe():
    with pytest.raises(NotInitializedError):
        observe.counters()


@pytest.mark.smp(ranks=1)
def test_the_former_names_of_a_whole_model_work_for_one_version(smp):
    model = smp.DistributedModel(nn.Linear(2, 2))
    train_step(model, torch.ones(1, 2))
    with pytest.warns(DeprecationWarning, match=r"observe\.unsharded_peak"):
        assert model.sharding.gathered.peak == 0
    with pytest.warns(DeprecationWarning, match=r"observe\.traffic"):
        assert model.sharding.collectives.traffic.bytes() == 0


@pytest.mark.smp(ranks=1, fp16=True)
def test_a_module_called_outside_of_steps_computes_what_has_no_16_bit_kernel(smp):
    model = smp.DistributedModel(nn.Sequential(nn.AvgPool3d(2)))
    x = torch.ones(1, 1, 2, 2, 2, dtype=torch.float16)
    model(x)
    assert model.module(x).item() == 1
