"""Gradients of shards: over microbatches, steps, buckets, groups and layouts the bits of whole ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.reduction.layout import bins
from tests.smp_core.torch.sharding.degrees import (
    Layers,
    batch,
    config,
    gradients,
    outcome,
    same,
    sgd,
    step,
    train,
    wrapped,
)


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches(smp_world, microbatches, pipeline):
    same(smp_world, train, microbatches=microbatches, pipeline=pipeline)


HIERARCHICAL = {"sdp_hierarchical_allgather": True, "ranks_per_node": 2}


@pytest.mark.parametrize(
    ("ranks", "degree", "more"), [(4, 2, {}), (4, 4, {}), (3, 3, {}), (4, 4, HIERARCHICAL)]
)
def test_replicas(smp_world, ranks, degree, more):
    same(smp_world, train, degrees=(1, degree), ranks=ranks, **more)


def without_overlap():
    return train(overlapping_allreduce=False)


def test_without_overlap(smp_world):
    same(smp_world, without_overlap, sdp_reduce_bucket_size=100)


@pytest.mark.filterwarnings("ignore::smp_core.config.IgnoredKeyWarning")
def test_beside_tensor_parallelism(smp_world):
    more = {"tensor_parallel_degree": 2, "prescaled_batch": True}
    same(smp_world, train, ranks=4, **more)


# Sizes. A layer has matrices of 64 elements and biases of 8; embed and head 32, 8, 16 and 2.
@pytest.mark.parametrize("threshold", [1, 63, 64, 65, 10**9])
def test_thresholds_around_the_size_of_a_parameter(smp_world, threshold):
    sizes = smp_world.run(
        kept, ranks=2, config=config(2, sdp_param_persistence_threshold=threshold)
    )
    for rank, (own, persistent) in enumerate(sizes):
        for name, parameter in Layers().named_parameters():
            size = parameter.numel()
            assert own[name] == (size if size < threshold else size // 2), (rank, name)
            assert (name in persistent) == (size < threshold)
    same(smp_world, train, sdp_param_persistence_threshold=threshold)


def kept():
    """How many elements this rank has of each parameter, and which are whole."""
    model, _ = wrapped(Layers())
    named = dict(model.module.named_parameters())
    whole = [name for name, each in named.items() if model.sharding.shard(each) is None]
    return {name: each.numel() for name, each in named.items()}, whole


def buckets():
    """How many ReduceScatters and AllReduces each step takes."""
    model, optimizer = wrapped(Layers())
    traffic, counted = model.sharding.collectives.traffic, []
    for number in range(2):
        mark = traffic.mark()
        optimizer.zero_grad()
        step(model, batch(number))
        counted.append([traffic.calls(mark, each) for each in ("reduce_scatter", "all_reduce")])
        optimizer.step()
    return counted


@pytest.mark.parametrize("most", [1, 64, 71, 72, 73, 200, 10**9])
def test_as_many_reductions_as_greedy_bins(smp_world, most):
    sizes = [each.numel() for each in Layers().parameters()][::-1]
    count, filled = 0, most + 1
    for size in sizes:
        if filled + size > most:
            count, filled = count + 1, 0
        filled += size
    assert count == len(list(bins(sizes, most)))
    counted = smp_world.run(buckets, ranks=2, config=config(2, sdp_reduce_bucket_size=most))
    assert counted == [[[count, count]] * 2] * 2
    same(smp_world, train, sdp_reduce_bucket_size=most)


class Integers(nn.Module):
    """Integer arithmetic: every order of summation gives the same bits, and plain PyTorch's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), 2):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % number - 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def whole_numbers(step_number, rank):
    generator = torch.Generator().manual_seed(10 * step_number + rank)
    return torch.randint(-2, 3, (4, 4), generator=generator).float()


@smp.step
def add(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


def windows(passes):
    """Two windows of accumulation: what each step sends across, and what it leaves in the gradients."""
    model, optimizer = wrapped(Integers(), backward_passes_per_step=passes)
    traffic, told = model.sharding.collectives.traffic, []
    for number in range(2 * passes):
        mark = traffic.mark()
        add(model, whole_numbers(number, smp.rank()))
        sent = [traffic.calls(mark, each) for each in ("reduce_scatter", "all_reduce")]
        told.append((sent, dict(gradients(model))))
        if (number + 1) % passes == 0:
            optimizer.zero_grad()
    return told


@pytest.mark.parametrize("passes", [2, 3])
def test_all_reduce_at_the_end_of_a_window_only(smp_world, passes):
    told = smp_world.run(windows, passes, ranks=4, config=config(2))
    for window in range(2):
        numbers = range(window * passes, (window + 1) * passes)
        module = Integers()
        for number in numbers:
            for rank in range(4):
                module(whole_numbers(number, rank)).sum().backward()
        for rank in range(4):
            for number in numbers:
                sent, found = told[rank][number]
                last = number == numbers[-1]
                assert sent == [1, int(last)]
                for name, parameter in module.named_parameters():
                    if last:
                        assert torch.equal(found[name], parameter.grad / 4), (rank, number, name)
                    else:
                        assert found[name] is None


def frozen_in_turn(what):
    """Parameters, or a whole unit, that are frozen in some steps."""
    model, optimizer = wrapped(Layers())
    losses = []
    for number in range(4):
        for position, parameter in enumerate(model.module.parameters()):
            parameter.requires_grad_((position + number) % 3 != 0 or what == "unit")
        if what == "unit":
            model.module.layers[1].requires_grad_(number % 2 == 0)
        optimizer.zero_grad()
        losses.append(step(model, batch(number)).stack())
        optimizer.step()
    return losses, outcome(model)


@pytest.mark.parametrize("what", ["parameters", "unit"])
def test_frozen_between_steps(smp_world, what):
    same(smp_world, frozen_in_turn, what)


class OnSomeRanks(nn.Module):
    """Its last module, whose bucket is the first, is called on every rank, and has a gradient on odd ones only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.last = Bias()

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer(y)
        return y + (self.last(x) if smp.rank() % 2 else self.last(x).detach())


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x + self.bias


def on_some_ranks():
    return train(OnSomeRanks, 2)


def test_a_gradient_on_some_ranks_only(smp_world):
    # A sum that is complete early on one rank is not on another: sums are launched between other gathers.
    same(smp_world, on_some_ranks, degrees=(1, 2, 4), ranks=4, sdp_reduce_bucket_size=1)


def hooked():
    """The gradients that hooks of both kinds see, and change."""
    model, _ = wrapped(Layers())
    parameters, seen, after = list(model.module.parameters()), [], []

    def double(gradient):
        seen.append(gradient.clone())
        return gradient * 2

    parameters[2].register_hook(double)
    parameters[3].register_post_accumulate_grad_hook(
        lambda parameter: after.append(parameter.grad.shape == parameter.shape)
    )
    loss = step(model, batch()).stack()
    return loss, seen, after, outcome(model)


def test_hooks_of_parameters(smp_world):
    (_, sharded), _ = same(smp_world, hooked, microbatches=2)
    assert len(sharded[1]) == 2
    assert sharded[2] == [True]
    assert sharded[1][0].shape == (8, 8)  # whole, as the microbatch has summed it


class OutOfPlace(torch.optim.Optimizer):
    """SGD that gives parameters new data."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, foreach=True)


OPTIMIZERS = {
    "out of place": OutOfPlace,
    "foreach": adamw,
    "Rprop": torch.optim.Rprop,
    "momentum": sgd,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(smp_world, name):
    same(smp_world, optimized, name)


def optimized(name):
    return train(Layers, 3, OPTIMIZERS[name])


def groups_and_a_schedule(first):
    """Groups, a schedule, gradients set to zero; the optimizer is made before the model, or after."""
    module = Layers()
    if first == "model":
        model = smp.DistributedModel(module)
    named = list(module.named_parameters())
    groups = [
        {"params": [each for name, each in named if "bias" in name], "weight_decay": 0.0},
        {"params": [each for name, each in named if "bias" not in name], "lr": 0.05},
    ]
    inner = torch.optim.AdamW(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = smp.DistributedOptimizer(inner)
    if first == "optimizer":
        model = smp.DistributedModel(module)
    losses = []
    for number in range(3):
        optimizer.zero_grad(set_to_none=False)
        losses.append(step(model, batch(number)).stack())
        optimizer.step()
        schedule.step()
    return losses, outcome(model)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_groups_and_a_schedule(smp_world, first):
    same(smp_world, groups_and_a_schedule, first)


def from_before():
    """Gradients that were there before the model was wrapped are added to."""
    module = Layers()
    module(torch.ones(2, 4)).sum().backward()
    model, optimizer = wrapped(module)
    loss = step(model, batch()).stack()
    optimizer.step()
    return loss, outcome(model)


def test_gradients_from_before(smp_world):
    same(smp_world, from_before)


def several_backward_calls():
    """A body that calls the model three times, and backward twice, on integers."""
    model, optimizer = wrapped(Integers())

    @smp.step
    def several(model, x):
        one = model(x).sum() + model(x + 1).sum()
        model.backward(one)
        two = model(2 * x).sum()
        model.backward(two)
        return one, two

    one, two = several(model, whole_numbers(0, smp.rank()))
    optimizer.step()
    return one.stack(), two.stack(), outcome(model)


def test_several_backward_calls(smp_world):
    # A gradient after the launch of its bucket is a summand of its own: on real values the last bit may differ.
    same(smp_world, several_backward_calls)


def some_without_backward():
    """A step without any, then one with."""
    model, optimizer = wrapped(Layers())

    @smp.step
    def forward(model, x):
        return model(x).pow(2).mean()

    forward(model, batch())
    nothing = [gradient is None for _, gradient in gradients(model)]
    loss = step(model, batch(1)).stack()
    optimizer.step()
    return nothing, loss, outcome(model)


def test_a_step_without_backward(smp_world):
    (_, sharded), _ = same(smp_world, some_without_backward)
    assert all(sharded[0])


def backward_on_one_microbatch():
    model, optimizer = wrapped(Layers())

    @smp.step
    def one_of_two(model, x):
        loss = model(x).pow(2).mean()
        if x[0, 0] > 0:
            model.backward(loss)
        return loss

    loss = one_of_two(model, torch.cat([torch.ones(2, 4), -torch.ones(2, 4)])).stack()
    optimizer.step()
    return loss, outcome(model)


def test_backward_on_one_microbatch_of_two(smp_world):
    same(smp_world, backward_on_one_microbatch, microbatches=2)


def loss_backward():
    """loss.backward() in the body, in place of model.backward(loss)."""
    model, optimizer = wrapped(Layers())

    @smp.step
    def plain(model, x):
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    losses = []
    for number in range(2):
        optimizer.zero_grad()
        losses.append(plain(model, batch(number)).stack())
        optimizer.step()
    return losses, outcome(model)


def test_loss_backward_in_the_body(smp_world):
    same(smp_world, loss_backward)
