"""smp.amp.GradScaler: torch's scaler where one rank's overflow is every rank's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

MANUAL = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}


class Spiked(nn.Module):
    """Gives parameter ``weight`` the gradient that the input says."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class Net(nn.Module):
    def __init__(self, smp=None):
        super().__init__()
        self.near, self.far = Spiked(), Spiked()
        if smp is not None:
            smp.set_partition(self.far, 1)

    def forward(self, near, far):
        return self.near(near) + self.far(far)


def loop(module, optimizer, scaler, batches, run):
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        run(module, batch)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


BATCHES = [
    (1.0, 2.0), (1.0, float("inf")), (2.0, 1.0), (float("nan"), 1.0), (1.0, 1.0), (1.0, 1.0),
]  # fmt: skip
OPTIONS = {"init_scale": 8.0, "growth_interval": 2}


def plain():
    module = Net()
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)

    def run(module, batch):
        scaler.scale(module(*map(torch.tensor, batch)).sum()).backward()

    scales = loop(module, torch.optim.SGD(module.parameters(), lr=0.5), scaler, BATCHES, run)
    return [each.item() for each in module.parameters()], scales, scaler.state_dict()


@pytest.mark.smp(ranks=4, **MANUAL)
def test_an_overflow_of_one_partition_is_skipped_and_scaled_back_on_all_ranks(smp):
    model = smp.DistributedModel(Net(smp))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.module.parameters(), lr=0.5))
    scaler = smp.amp.GradScaler(**OPTIONS)

    @smp.step
    def body(model, scaler, near, far):
        model.backward(scaler.scale(model(near, far).sum()))

    def run(model, batch):
        body(model, scaler, *(torch.tensor([value]) for value in batch))

    values, scales, state = plain()
    assert loop(model, optimizer, scaler, BATCHES, run) == scales
    assert scales == [8.0, 4.0, 4.0, 2.0, 2.0, 4.0]
    assert [each.item() for each in model.local_parameters()] == [values[smp.pp_rank()]]
    assert scaler.state_dict() == state
    other = smp.amp.GradScaler()
    other.load_state_dict(state)
    assert other.get_scale() == scales[-1]


@pytest.mark.smp(ranks=2, ddp=True)
def test_an_overflow_of_one_replica_alone_reaches_the_other(smp):
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)  # not reduced: the ranks' gradients differ
    scaler = smp.amp.GradScaler(4.0)
    parameter.grad = torch.tensor([float("inf") if smp.rank() else 4.0])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 1.0
    assert scaler.get_scale() == 2.0


@pytest.mark.smp(ranks=2)
def test_a_scaler_that_is_not_enabled_talks_to_nobody(smp):
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = smp.amp.GradScaler(enabled=False)
    if smp.rank() == 0:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 0.5
    assert scaler.state_dict() == {}
    assert isinstance(smp.amp.GradScaler(device="cuda"), torch.amp.GradScaler)
