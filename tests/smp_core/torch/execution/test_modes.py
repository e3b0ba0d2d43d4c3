"""``model.train()`` and ``model.eval()`` hold on every rank of a pipeline, wherever they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.smp(
    ranks=2, microbatches=2, pipeline_parallel_degree=2, auto_partition=False, default_partition=0
)


class Net(nn.Module):
    """A norm on rank 1, in whose midst rank 0 has another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4)))

    def forward(self, x):
        return self.rest(self.first(x))


def made(smp):
    torch.manual_seed(0)
    net = Net()
    model = smp.DistributedModel(net)
    smp.set_partition(net.rest, 1)
    smp.set_partition(net.rest[1], 0)

    @smp.step
    def step(model, x, mode=None):
        if mode is not None:
            model.train(mode)
        return model(x), model.training

    return model, net, step


def own_norm(smp, net):
    return net.rest[0] if smp.rank() else net.rest[1][0]


@pytest.mark.parametrize("where", ["in the function", "on pp_rank 0", "on every rank"])
def test_evaluation_changes_no_statistics(smp, where):
    model, net, step = made(smp)
    x = torch.randn(6, 4)
    step(model, x)
    norm = own_norm(smp, net)
    for _ in range(2):
        before = norm.running_mean.clone()
        if where == "on every rank" or (where == "on pp_rank 0" and smp.rank() == 0):
            model.eval()
        once, modes = step(model, x, False if where == "in the function" else None)
        again, _ = step(model, x)
        assert modes == [False, False]
        assert not norm.training
        assert torch.equal(norm.running_mean, before)
        assert torch.equal(once.concat(), again.concat())
        if where == "on every rank" or smp.rank() == 0:
            model.train()
        step(model, x)
        assert norm.training
        assert not torch.equal(norm.running_mean, before)


def test_a_mode_that_its_own_rank_has_set_stays(smp):
    model, net, step = made(smp)
    x = torch.randn(6, 4)
    step(model, x)
    if smp.rank() == 1:
        net.rest[0].eval()
    before = own_norm(smp, net).running_mean.clone()
    step(model, x)
    step(model, x)
    assert torch.equal(own_norm(smp, net).running_mean, before) == (smp.rank() == 1)


class Drops(nn.Module):
    """Dropout on either rank, before and after a call that crosses."""

    def __init__(self):
        super().__init__()
        self.drops = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.drops[2](self.linear(self.drops[0](x)))


@pytest.mark.parametrize("left", [True, False])
def test_a_function_that_evaluates_and_trains(smp, left):
    torch.manual_seed(0)
    net = Drops()
    model = smp.DistributedModel(net)
    smp.set_partition(net.linear, 1)

    @smp.step
    def step(model, x):
        trained = model(x)
        model.backward(trained.sum())
        model.eval()
        with torch.no_grad():
            evaluated = model(x), model(x)
        model.train(left)
        return trained, *evaluated

    torch.manual_seed(1)
    x = torch.ones(64, 4)
    for _ in range(2):
        model.train()
        trained, first, second = (each.outputs for each in step(model, x))
        for one, other, dropped in zip(first, second, trained, strict=True):
            assert torch.equal(one, other)
            assert (one != 0).all()
            assert 0.4 < (dropped == 0).double().mean() < 0.6
        if smp.rank() == 0:
            assert all(drop.training == left for drop in net.drops)


class Norms(nn.Module):
    """A norm whose activations are not kept, and which the backward pass so runs again."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 4))

    def forward(self, x):
        return self.rest(self.first(x))


@pytest.mark.parametrize("owner", [0, 1])
def test_a_repetition_runs_in_the_mode_of_its_call(smp, owner):
    torch.manual_seed(0)
    net = Norms()
    plain = Norms()
    plain.load_state_dict(net.state_dict())
    model = smp.DistributedModel(net)
    smp.set_partition(net.rest, owner)
    smp.set_activation_checkpointing(net.rest, strategy="contiguous")

    @smp.step
    def step(model, x):
        model.train()
        loss = model(x).pow(2).mean()
        model.eval()
        with torch.no_grad():
            model(x)
        model.backward(loss)

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    step(model, x)
    for part in x.chunk(2):
        (plain(part).pow(2).mean() / 2).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)


@pytest.mark.smp(ranks=2, microbatches=2, pipeline_parallel_degree=1)
def test_a_parameter_that_a_step_unfreezes(smp):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    model = smp.DistributedModel(net)

    @smp.step
    def step(model, x):
        net[1].weight.requires_grad_(True)
        model.backward(model(x).pow(2).mean())

    torch.manual_seed(smp.rank())
    step(model, torch.randn(4, 4))
    one, other = smp.allgather(net[1].weight.grad, smp.DP_GROUP)
    assert torch.equal(one, other)
