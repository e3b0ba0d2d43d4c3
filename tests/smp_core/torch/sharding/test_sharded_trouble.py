"""Errors, and uses of parameters past the model: told where they happen; the next step is as if nothing had been."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from pytest_smp.ranks.protocols import VerdictKind
from smp_core.errors import ArgumentTypeError, SmpError
from smp_core.torch.exceptions import (
    ShardingError,
    StepAbortedError,
    UnsupportedTrainingError,
)
from tests.smp_core.torch.sharding.degrees import (
    Layers,
    batch,
    config,
    gradients,
    outcome,
    same,
    step,
    wrapped,
)

TWO = config(2)


class Trap(torch.autograd.Function):
    """The identity; its backward pass raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("backward")


class Troubled(Layers):
    """Raises where it is told to."""

    where = None

    def forward(self, x):
        y = super().forward(x)
        if self.where == "module":
            raise LookupError("module")
        return Trap.apply(y) if self.where == "backward" else y


@smp.step
def troubled(model, x, where):
    if where == "before":
        raise LookupError(where)
    loss = model(x).pow(2).mean()
    model.backward(loss)
    if where == "after":
        raise LookupError(where)
    return loss


def failed(where):
    """A step that fails on every rank, between two that do not; the first one's gradients stay."""
    model, optimizer = wrapped(Troubled())
    first = step(model, batch()).stack()
    left = dict(gradients(model))
    model.module.where = where
    # Whole, replicas agree first: the others raise for the first one.
    with pytest.raises((LookupError, StepAbortedError), match=where):
        troubled(model, batch(1), where)
    model.module.where = None
    after = dict(gradients(model))
    unsharded = model.sharding.unsharded if model.sharding.degree > 1 else None
    if unsharded is not None:
        assert (unsharded.live, unsharded._live_units, unsharded._storages) == (0, {}, {})
    unchanged = all(torch.equal(left[name], after[name]) for name in left)
    optimizer.zero_grad()
    second = step(model, batch(2)).stack()
    optimizer.step()
    return first, unchanged, second, outcome(model)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("where", ["before", "module", "backward", "after"])
def test_a_step_that_fails_on_every_rank(smp_world, where, microbatches):
    for ranks in same(smp_world, failed, where, microbatches=microbatches):
        assert [each[1] for each in ranks] == [True, True]


def fails_on_rank_1():
    model, _ = wrapped(Troubled())
    model.module.where = "module" if smp.rank() == 1 else None
    step(model, batch())


def test_a_step_that_fails_on_one_rank_ends_the_run_with_its_error(smp_world):
    with pytest.raises(LookupError, match="module"):
        smp_world.run(fails_on_rank_1, ranks=2, config=TWO)


class OtherOrder(nn.Module):
    """Two layers of one size; ranks call them in different orders."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.turned = False

    def forward(self, x):
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return x


def other_orders():
    model, _ = wrapped(OtherOrder())
    step(model, batch())
    left = dict(gradients(model))
    model.module.turned = smp.rank() == 1
    with pytest.raises(ShardingError, match="rank 1 used other parameters than rank 0") as raised:
        step(model, batch(1))
    model.module.turned = False
    after = dict(gradients(model))
    step(model, batch(1))
    return str(raised.value), all(torch.equal(left[name], after[name]) for name in left)


def test_ranks_that_call_modules_in_different_orders(smp_world):
    (one, kept), other = smp_world.run(other_orders, ranks=2, config=TWO)
    assert (one, kept) == other
    assert kept


def no_step():
    model, _ = wrapped(Layers())
    if smp.rank():
        step(model, batch())


class BackwardOnRank1(Layers):
    """Called on every rank; the backward pass of the layers, which takes their weights, is rank 1's alone."""

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + (layer(x) if smp.rank() else layer(x).detach())
        return self.head(x)


def backward_on_rank_1():
    model, _ = wrapped(BackwardOnRank1())
    step(model, batch())


@pytest.mark.parametrize("body", [no_step, backward_on_rank_1])
def test_a_rank_that_does_not_gather_what_another_needs(smp_world, body):
    # The parts are what the other waits for: nothing can be computed without them. Only a limit of time ends
    # that on a backend that sees no deadlock.
    report = smp_world.report(body, ranks=2, config=TWO, timeout=10)
    assert report.verdict in (VerdictKind.DEADLOCK, VerdictKind.TIMED_OUT)


def not_a_number():
    """On one rank."""
    model, _ = wrapped(Layers())
    x = batch()
    if smp.rank() == 1:
        x[0, 0] = float("nan")
    step(model, x)
    return {name: bool(gradient.isnan().any()) for name, gradient in gradients(model)}


def test_not_a_number_on_one_rank(smp_world):
    (_, sharded), *_ = same(smp_world, not_a_number)
    assert all(sharded.values())


def other_batches():
    model, optimizer = wrapped(Layers())
    losses = []
    for number in range(2):
        losses.append(step(model, batch(number, rows=3 + 2 * smp.rank() + number)).stack())
        optimizer.step()
    return losses, outcome(model)


def test_batches_of_other_sizes(smp_world):
    same(smp_world, other_batches)


def built_differently():
    wrapped(Layers(2 + smp.rank()))


def test_other_models_on_the_ranks(smp_world):
    with pytest.raises(SmpError, match="the ranks built different models"):
        smp_world.run(built_differently, ranks=2, config=TWO)


# Changes of parameters behind the engine's back.


def other_data(what):
    model, optimizer = wrapped(Layers())
    parameter = model.module.head.weight
    if what == "own size":
        parameter.data = torch.full_like(parameter.data, 0.5)
        step(model, batch())
        optimizer.step()
        return list(model.state_dict().values())
    parameter.data = torch.zeros(16) if what == "whole" else parameter.data.double()
    with pytest.raises(ShardingError, match=r"'head\.weight' was changed behind the back"):
        step(model, batch())
    return None


@pytest.mark.parametrize("what", ["whole", "dtype"])
def test_data_that_is_no_shard(smp_world, what):
    smp_world.run(other_data, what, ranks=2, config=TWO)


def test_data_of_the_shards_size_is_taken_over(smp_world):
    same(smp_world, other_data, "own size")


def replaced():
    """Parameters that are replaced between steps, the same on all ranks."""
    model, optimizer = wrapped(Layers())
    losses = [step(model, batch()).stack()]
    torch.manual_seed(5)
    layers = model.module.layers
    layers[0][0].weight, layers[2][2].bias = (
        nn.Parameter(torch.randn(8, 8)),
        nn.Parameter(torch.randn(8)),
    )
    optimizer.add_param_group({"params": [layers[0][0].weight, layers[2][2].bias]})
    for number in range(2):
        optimizer.zero_grad()
        losses.append(step(model, batch(number)).stack())
        optimizer.step()
    return losses, outcome(model)


def test_parameters_that_are_replaced(smp_world):
    same(smp_world, replaced)


class Changes(nn.Module):
    """Changes its own weight when it is called."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(4, 4)), how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.weight.mul_(0.5)
            elif self.how == "data":
                self.weight.data = self.weight.data * 0.5
        return x @ self.weight


def changes(how):
    model, _ = wrapped(Changes(how))
    said = "in place" if how == "in place" else "given other data"
    with pytest.raises(
        ShardingError, match=f"'weight' was .*{said}.*Change parameters between steps"
    ):
        step(model, batch())
    unsharded = model.sharding.unsharded
    assert (unsharded.live, unsharded._live_units, unsharded._storages) == (0, {}, {})
    model.module.how = None
    step(model, batch())


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_parameter_that_is_changed_in_forward(smp_world, how):
    smp_world.run(changes, how, ranks=2, config=TWO)


def renormalized():
    model, _ = wrapped(nn.Sequential(nn.Embedding(7, 4, max_norm=0.1), nn.Linear(4, 4)))
    with pytest.raises(ShardingError, match=r"'0\.weight' was modified in place"):
        step(model, torch.arange(4))


def test_max_norm_is_refused(smp_world):
    smp_world.run(renormalized, ranks=2, config=TWO)


def activation_in_place():
    model, _ = wrapped(Layers())

    @smp.step
    def spoils(model, x):
        y = model(x)
        z = y.exp()
        z.mul_(2)
        model.backward(z.sum())

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        spoils(model, batch())


def test_an_activation_that_is_modified_in_place(smp_world):
    same(smp_world, activation_in_place)


# Reads of parameters, and calls, past the model.


class Holds(nn.Module):
    """A weight in a list, where the engine does not see it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2, bias=False)
        self.held = [self.linear.weight]

    def forward(self, x):
        return (x[:1] * self.held[0].sum()).sum() + self.linear(x).sum()


def holds():
    model, _ = wrapped(Holds())
    with pytest.raises(
        ShardingError, match=r"'linear\.weight' was read past the model.*register_parameter"
    ):
        step(model, batch())


def test_a_parameter_that_is_read_past_the_model(smp_world):
    smp_world.run(holds, ranks=2, config=TWO)


def register_what_is_none():
    with pytest.raises(ArgumentTypeError, match="module is a int"):
        smp.register_parameter(3, nn.Parameter(torch.ones(2)))
    with pytest.raises(ArgumentTypeError, match="parameter is a Tensor"):
        smp.register_parameter(nn.Linear(1, 1), torch.ones(2))


def test_register_parameter_checks_its_arguments(smp_world):
    smp_world.run(register_what_is_none, ranks=1)


def refused():
    model, _ = wrapped(Layers())
    with pytest.raises(UnsupportedTrainingError, match=r"model\.register_comm_hook"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UnsupportedTrainingError, match=r"model\.join"), model.join():
        pass


def test_what_is_refused(smp_world):
    smp_world.run(refused, ranks=2, config=TWO)


def one_memory():
    module = Layers()
    module.head.weight.data = module.embed.weight.data.view(8, 4).view(-1)[:16].view(2, 8)
    with pytest.raises(UnsupportedTrainingError, match="different tensors on the same memory"):
        smp.DistributedModel(module)


def test_two_parameters_on_one_memory(smp_world):
    smp_world.run(one_memory, ranks=2, config=TWO)
