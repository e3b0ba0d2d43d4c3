"""Calls of a sharded model outside of steps, which pipeline degree 1 allows, and in the body past its modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import smp_core.torch as smp
from smp_core.torch.exceptions import OutsideStepError
from tests.smp_core.torch.sharding.degrees import Layers, batch, outcome, same, step, wrapped
from tests.smp_core.torch.sharding.test_sharded_trouble import Troubled


def loss_backward_outside():
    """Refused, and no trace of it is left."""
    model, optimizer = wrapped(Layers())
    if model.sharding is not None:
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
