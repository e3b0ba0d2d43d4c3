"""smp.DistributedOptimizer, against the plain optimizer over the whole module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.torch.exceptions import SecondModelError

MANUAL = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}


def net(smp=None, seed=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    if smp is not None:
        smp.set_partition(model[1], 1)
    return model


def groups(module):
    """The order of the groups is not that of the module, and one is of one partition alone."""
    return [
        {"params": [*module[1].parameters(), module[0].weight], "lr": 0.5},
        {"params": [module[2].weight, module[0].bias]},
    ]


def adam(module):
    return torch.optim.Adam(groups(module), lr=0.25)


X = torch.arange(8.0).view(2, 4)


def train(module, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()


def distributed_step(smp, model, optimizer):
    @smp.step
    def run(model, x):
        model.backward(model(x).sum())

    optimizer.zero_grad()
    run(model, X)
    optimizer.step()


def equal(one, other):
    """Nested equality of states, keys in order."""
    if isinstance(other, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(other, dict):
        assert list(one) == list(other)
        for key in other:
            equal(one[key], other[key])
    elif isinstance(other, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            equal(*pair)
    else:
        assert one == other


@pytest.mark.smp(ranks=4, **MANUAL)
@pytest.mark.parametrize("wrapped", ["first", "between", "late"])
def test_the_gathered_state_is_the_plain_optimizers_whenever_it_was_made(smp, wrapped):
    module = net(smp)
    if wrapped == "first":
        optimizer = smp.DistributedOptimizer(adam(module))
        model = smp.DistributedModel(module)
    else:
        model = smp.DistributedModel(module)
        if wrapped == "late":
            smp.step(lambda model, x: None)(model, X)
        optimizer = smp.DistributedOptimizer(adam(module))
    for _ in range(2):
        distributed_step(smp, model, optimizer)
    plain = net()
    reference = adam(plain)
    train(plain, reference, 2)
    wanted = reference.state_dict()
    wanted["state"] = dict(sorted(wanted["state"].items()))
    state = optimizer.state_dict()
    equal(state, wanted)
    assert [len(group["params"]) for group in optimizer.param_groups] == (
        [1, 2] if smp.pp_rank() == 0 else [2, 0]
    )
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
    part = optimizer.local_state_dict(gather_if_shard=False)
    assert part["_smp_is_partial"] is True
    assert set(part["state"]) == ({2, 3, 4} if smp.pp_rank() == 0 else {0, 1})
    equal(part["param_groups"], wanted["param_groups"])


@pytest.mark.smp(ranks=2, **MANUAL)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("partial", [False, True])
def test_a_state_is_loaded_full_or_merged_before_and_after_partitioning(smp, when, partial):
    plain = net()
    reference = adam(plain)
    train(plain, reference, 2)
    for group in reference.param_groups:
        group["lr"] /= 2
    wanted = copy.deepcopy(reference.state_dict())
    wanted["state"] = dict(sorted(wanted["state"].items()))
    state = dict(wanted)
    if partial:  # of another partition, by index
        own = {index: each for index, each in wanted["state"].items() if index % 2 == smp.rank()}
        state = {**wanted, "state": own, "_smp_is_partial": True}
    model = smp.DistributedModel(net(smp))
    optimizer = smp.DistributedOptimizer(adam(model.module))
    partition = smp.step(lambda model, x: None)
    if when == "after":
        partition(model, X)
    optimizer.load_state_dict(state)
    if when == "before":
        partition(model, X)
    equal(optimizer.state_dict(), wanted)


@pytest.mark.smp(ranks=2, **MANUAL)
def test_a_rank_without_parameters_steps_and_runs_the_closure(smp):
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(module.parameters()))
    model = smp.DistributedModel(module)

    @smp.step
    def run(model, x):
        model.backward(model(x).sum())

    run(model, torch.ones(1, 1))
    assert len(optimizer.param_groups) == 1
    assert optimizer.step() is None
    assert optimizer.step(lambda: 5) == 5
    assert list(optimizer.state_dict()["state"]) == [0, 1]
    assert len(optimizer.state) == (2 if smp.pp_rank() == 0 else 0)


@pytest.mark.smp(ranks=1)
def test_schedulers_take_the_wrapper_and_hooks_and_groups_are_the_inner_ones(smp):
    module = net()
    inner = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
    optimizer = smp.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer is inner
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    module(X).sum().backward()
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.5
    assert called == [1]
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 2.0})
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.5, 2.0]
    optimizer.zero_grad()
    assert module[0].weight.grad is None


@pytest.mark.smp(ranks=2, **MANUAL)
def test_named_parameters_keep_their_names(smp):
    model = smp.DistributedModel(net(smp))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.module.named_parameters(), lr=1.0))
    names = [name for name, _ in net().named_parameters()]
    smp.step(lambda model, x: None)(model, X)
    own = [name for name, _ in model.local_named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == own
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == names
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["param_names"] == own


@pytest.mark.smp(ranks=1)
@pytest.mark.parametrize(
    "arguments",
    [
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2**20, "scale_window": 5}},
        {"static_loss_scale": 8.0, "min_scale": 1, "delayed_shift": 2},
        {"dynamic_loss_args": {}},
    ],
)
def test_loss_scale_arguments_are_ignored_in_fp32(smp, arguments):
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net().parameters(), lr=1.0), **arguments)
    assert optimizer.param_groups[0]["lr"] == 1.0


class FP16_Optimizer:
    """As scripts brought one along before SMP 1.10, with masters of its own, which are not needed."""

    def __init__(self, model, init_optimizer, static_loss_scale=None, dynamic_loss_scale=True):
        del model, static_loss_scale, dynamic_loss_scale
        self.optimizer = init_optimizer


@pytest.mark.smp(ranks=1, fp16=True)
def test_the_optimizer_inside_of_a_scripts_own_fp16_optimizer_is_wrapped(smp):
    model = smp.DistributedModel(net())
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = smp.DistributedOptimizer(FP16_Optimizer(model, inner), dynamic_loss_scale=True)
    assert optimizer.optimizer is inner
    distributed_step(smp, model, optimizer)
    assert optimizer.loss_scale > 1


@pytest.mark.smp(ranks=1)
def test_a_scripts_own_fp16_optimizer_needs_the_parameter_fp16(smp):
    wrapper = FP16_Optimizer(None, torch.optim.SGD(net().parameters(), lr=1.0))
    with pytest.raises(
        ArgumentTypeError, match=r'FP16_Optimizer around a SGD: .* Give "fp16": True'
    ):
        smp.DistributedOptimizer(wrapper)


@pytest.mark.smp(ranks=2, **MANUAL)
def test_bad_use_is_refused_with_what_to_do(smp):
    inner = torch.optim.SGD(net().parameters(), lr=1.0)
    with pytest.raises(ArgumentError, match="'init_scal'"):
        smp.DistributedOptimizer(inner, dynamic_loss_args={"init_scal": 1})
    with pytest.raises(ArgumentTypeError, match="not a plain"):
        smp.DistributedOptimizer(net())
    optimizer = smp.DistributedOptimizer(inner)
    with pytest.raises(SecondModelError, match="one optimizer"):
        smp.DistributedOptimizer(inner)
    with pytest.raises(ArgumentTypeError, match="'param_groups'"):
        optimizer.load_state_dict({"state": {}})
    model = smp.DistributedModel(net(smp))
    smp.step(lambda model, x: None)(model, X)
    short = torch.optim.SGD(net()[0].parameters(), lr=1.0).state_dict()
    with pytest.raises(ValueError, match=r"different size: \[2\] parameters, \[5\] here"):
        optimizer.load_state_dict(short)
