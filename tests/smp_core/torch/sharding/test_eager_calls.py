"""Calls of a sharded model outside of steps, which pipeline degree 1 allows, and in the body past its modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smp_core.torch as smp
from smp_core.torch.exceptions import OutsideStepError
from tests.smp_core.torch.sharding.degrees import (
    Layers,
    batch,
    outcome,
    same,
    step,
    train,
    wrapped,
)
from tests.smp_core.torch.sharding.test_sharded_trouble import Troubled


def loss_backward_outside():
    """Refused, and no trace of it is left."""
    model, optimizer = wrapped(Layers())
    if model.sharding.degree > 1:
        with pytest.raises(OutsideStepError, match=r"Call model.backward\(loss\)"):
            model(batch()).sum().backward()
    loss = model(batch(1)).pow(2).mean()
    model.backward(loss)
    optimizer.step()
    return loss, outcome(model)


def test_loss_backward_outside_of_steps(smp_world):
    same(smp_world, loss_backward_outside)


def outside():
    """Training and evaluation outside of steps, in turn with steps."""
    model, optimizer = wrapped(Layers())
    seen = []
    for number in range(3):
        optimizer.zero_grad()
        one, two = model(batch(number)).mean(), model(batch(number, rows=5)).pow(2).mean()
        model.backward([one, two])
        optimizer.step()
        with torch.no_grad():
            seen.append(model(batch(number)))
        with torch.inference_mode():
            seen.append(model(batch(number)).clone())
        seen += [one, two, model.module.layers[0](torch.ones(2, 8))]
        optimizer.zero_grad()
        seen.append(step(model, batch(number)).stack())
        optimizer.step()
    return seen, outcome(model)


def test_outside_of_steps(smp_world):
    same(smp_world, outside)


def in_the_body():
    """Parameters and modes in the body; parameters that it returns."""
    model, optimizer = wrapped(Layers())

    @smp.step
    def reads(model, x):
        module = model.module
        with torch.no_grad():
            target = model(x)
        model.eval()
        with torch.inference_mode():
            number = model(x).sum().item()
        model.train()
        loss = (model(x) - target / 2).pow(2).mean() * number
        loss = loss + F.linear(module.head(torch.ones(1, 8)), module.head.weight.t()).sum()
        loss = loss + 0.01 * sum(each.pow(2).sum() for each in model.parameters())
        model.backward(loss)
        return loss, module.head.weight, module.head.bias[:1]

    seen = []
    for number in range(2):
        optimizer.zero_grad()
        seen.append([each.stack() for each in reads(model, batch(number))])
        optimizer.step()
    return seen, outcome(model)


def test_in_the_body(smp_world):
    same(smp_world, in_the_body)


def fails_outside():
    """A call outside of steps that fails on every rank."""
    model, optimizer = wrapped(Troubled())
    model.module.where = "module"
    with pytest.raises(LookupError):
        model(batch())
    model.module.where = "backward"
    with pytest.raises(LookupError):
        model.backward(model(batch()).mean())
    model.module.where = None
    loss = model(batch()).pow(2).mean()
    model.backward(loss)
    second = step(model, batch(1)).stack()
    optimizer.step()
    return loss, second, outcome(model)


def test_calls_outside_of_steps_that_fail(smp_world):
    same(smp_world, fails_outside)


def penalty():
    """A gradient of a gradient: the body asks torch for one, to be differentiated again."""
    model, optimizer = wrapped(Layers())

    @smp.step
    def penalized(model, x):
        x = x.clone().requires_grad_()
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.pow(2).mean() + gradient.norm(2, 1).pow(2).mean()
        model.backward(loss)
        return loss

    losses = []
    for number in range(2):
        optimizer.zero_grad()
        losses.append(penalized(model, batch(number)).stack())
        optimizer.step()
    return losses, outcome(model)


def test_gradients_of_gradients(smp_world):
    same(smp_world, penalty)


def parts_called():
    """The body calls the model's modules, not the model."""
    model, optimizer = wrapped(Layers())

    @smp.step
    def by_parts(model, x):
        module = model.module
        x = module.embed(x)
        for layer in module.layers:
            x = layer.forward(x)
        loss = module.head(x).pow(2).mean()
        model.backward(loss)
        return loss

    loss = by_parts(model, batch()).stack()
    optimizer.step()
    return loss, outcome(model)


def test_modules_that_the_body_calls(smp_world):
    same(smp_world, parts_called)


class Hooked(Layers):
    """Hooks of modules, which read parameters."""

    def __init__(self):
        super().__init__()
        self.layers[0].register_forward_hook(lambda module, x, y: y * module[0].weight.sum())
        self.layers[1].register_forward_pre_hook(lambda module, x: (x[0] + module[2].bias,))
        self.layers[1].register_full_backward_hook(lambda module, x, y: (x[0] * 2,))
        self.head.register_full_backward_pre_hook(
            lambda module, y: (y[0] * module.weight.detach().sum(),)
        )


class Keeps(nn.Module):
    """A parameter that a call leaves on the module, for whoever comes after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.linear, self.scale, self.kept = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), [None]

    def forward(self, x):
        self.kept[0] = self.scale
        return self.linear(x * self.scale)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.keeps, self.more = Keeps(), nn.Linear(4, 4)

    def forward(self, x):
        y = self.more(self.keeps(x))
        return y * self.keeps.kept[0].sin()


class Mapped(nn.Module):
    """Under ``vmap``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        linear = self.linear
        return torch.func.vmap(lambda row: F.linear(row, linear.weight, linear.bias))(x)


@pytest.mark.parametrize("make", [Hooked, Around, Mapped])
def test_modules_with_ways_of_their_own(smp_world, make):
    same(smp_world, train, make, 2)
