"""Delayed initialisation with distributed modules: slices get the values of the code without delay."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.exceptions import UnsupportedTrainingError
from tests.smp_core.torch.checkpoint.tensor_runs import WORLDS, batch, module, train_step, world
from tests.smp_core.torch.sharding.checkpoint_models import equal, snapshot


def drawn(delayed, make, *args):
    """The wrapped model, a number that is drawn then, and the parameters that have memory before the partition."""
    torch.manual_seed(5)
    with smp.delay_param_initialization() if delayed else contextlib.nullcontext():
        net = make(*args)
    model = smp.DistributedModel(net)
    after = torch.rand(1)
    with_memory = [
        name
        for name, each in model.module.named_parameters()
        if not (model.partitioned or each.is_meta)
    ]
    return model, after, with_memory


@pytest.mark.parametrize(
    "name", ["tp2", "tp4", "pp2tp2rdp2", "tp2sdp2rdp4", "pp2tp2fp16", "tp2sdp2bf16"]
)
def test_weights_are_those_without_delay(smp_world, name):
    def body(delayed):
        model, after, with_memory = drawn(delayed, module, 3)
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        train_step(model, batch(0))
        assert not any(each.is_meta for each in model.module.parameters())
        names = [path for path, _ in model.module.named_modules() if path]
        split = [each for each in model.parameters() if model.is_distributed_parameter(each)]
        assert len(split) == 3
        return snapshot(model.state_dict()), after, names, with_memory

    plain = smp_world.run(body, False, **world(name))
    for one, other in zip(smp_world.run(body, True, **world(name)), plain, strict=True):
        equal(one[:3], other[:3])
        assert one[3] == []


class Blocks(nn.Module):
    """Distributed modules that the script creates itself."""

    def __init__(self):
        super().__init__()
        self.embed = smp.nn.DistributedEmbedding(7, 8, padding_idx=2)
        self.block = smp.nn.DistributedTransformerLayer(4, 2, 8, 16, pre_layernorm=True)
        self.last = smp.nn.DistributedLinear(8, 6)

    def forward(self, ids):
        hidden, _ = self.block((self.embed(ids), None))
        return self.last(hidden)


@pytest.mark.parametrize("name", ["tp2", "tp2sdp2", "pp2tp2"])
def test_distributed_modules_of_the_script_are_delayed_too(smp_world, name):
    def body(delayed):
        model, after, with_memory = drawn(delayed, Blocks)
        train_step(model, batch(0))
        return snapshot(model.state_dict()), after, with_memory

    plain = smp_world.run(body, False, **world(name))
    for one, other in zip(smp_world.run(body, True, **world(name)), plain, strict=True):
        equal(one[:2], other[:2])
        assert one[2] == []


def test_the_configuration_key_delays_in_model_creation(smp_world):
    def body():
        with smp.model_creation(tensor_parallelism=True, dtype=torch.float64):
            net = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4))
        assert all(each.is_meta for each in net.parameters())
        model = smp.DistributedModel(net)
        kinds = [type(each).__name__ for each in model.distributed_modules()]
        return kinds, [str(each.dtype) for each in model.parameters()]

    how = world("tp2", delayed_parameter_initialization=True)
    kinds = ["DistributedLinear", "DistributedEmbedding"]
    assert smp_world.run(body, **how) == [(kinds, ["torch.float64"] * 3)] * 2


def test_parameters_on_meta_of_the_users_own_are_refused(smp_world):
    def body():
        with smp.delay_param_initialization():
            nn.Linear(2, 2)
        with torch.device("meta"), smp.tensor_parallelism():
            net = nn.Linear(4, 4)
        smp.DistributedModel(net)

    with pytest.raises(UnsupportedTrainingError, match="is on the meta device and has no"):
        smp_world.run(body, **world("tp2"))


def test_a_delayed_model_takes_a_full_state(smp_world):
    """As a script does that loads pretrained weights: the state waits for the partition."""

    def whole():
        model, *_ = drawn(False, module, 4)
        return snapshot(model.state_dict())

    (expected,) = smp_world.run(whole, ranks=1)

    def body():
        model, *_ = drawn(True, module, 3)
        model.load_state_dict(expected)
        if not model.partitioned:
            model.eval()  # buffers stay
            train_step(model, batch(0))
        return snapshot(model.state_dict())

    for name in WORLDS:
        if "16" not in name and "parts" not in name:
            for found in smp_world.run(body, **world(name)):
                equal(found, expected)
