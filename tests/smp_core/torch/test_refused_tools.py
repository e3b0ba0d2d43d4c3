"""torch's own checkpoint and compiler around modules of the model: one answer, whatever the partition, at once and by
name. And what of them works: a checkpoint around functions, and a function that is not compiled.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

import smp_core.torch as smp
from smp_core.torch.exceptions import UnsupportedTrainingError

PLAIN = {"auto_partition": False, "default_partition": 0}
CONFIGS = {
    "degree 1": PLAIN,
    "degree 2": {**PLAIN, "pipeline_parallel_degree": 2, "skip_tracing": True},
    "traced": {"pipeline_parallel_degree": 2},
    "sharded": {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 0,
        "sdp_gradient_clipping": 1e300,
    },
}


def caught(function, *args):
    try:
        return function(*args)
    except UnsupportedTrainingError as error:
        return str(error)


class Checkpointed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.before = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return {
            "module": lambda x: torchs.checkpoint(self.block, x, use_reentrant=False),
            "older": lambda x: torchs.checkpoint(self.block, x, use_reentrant=True),
            "sequential": lambda x: torchs.checkpoint_sequential(
                self.block, 2, x, use_reentrant=False
            ),
            "forward": lambda x: torchs.checkpoint(self.block.forward, x, use_reentrant=False),
            "function": lambda x: torchs.checkpoint(self.function, x, use_reentrant=False),
            "older function": lambda x: torchs.checkpoint(self.function, x, use_reentrant=True),
        }[self.how](self.before(x))

    def function(self, x):
        return torch.tanh(nn.functional.dropout(x @ self.before.weight, 0.0))


@smp.step
def train(model, x):
    loss = model(x).square().sum()
    model.backward(loss)
    return loss


def checkpointed(how, place):
    torch.manual_seed(0)
    module = Checkpointed(how)
    if place:
        smp.set_partition(module.block, smp.pp_size() - 1)
    model = smp.DistributedModel(module)
    told = caught(train, model, torch.ones(2, 4))
    if isinstance(told, str):
        return told
    if model.sharding.degree > 1:
        own = dict(model.module.named_parameters())
        grads = model.sharding.full_tensors([(p, p.grad) for p in own.values()])
        return dict(zip(own, [each.clone() for each in grads], strict=True))
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("how", ["module", "older", "sequential", "forward"])
def test_a_module_under_torchs_checkpoint_is_refused(smp_world, how, place, config):
    told = smp_world.run(checkpointed, how, place, ranks=2, config=CONFIGS[config])
    for each in told:
        assert "was called under torch.utils.checkpoint" in each
        assert "smp.set_activation_checkpointing" in each


def functions(how):
    module = Checkpointed(how)
    del module.block  # each rank uses all that it has
    module.block = nn.Identity()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def of_functions(how):
    module = functions(how)
    model = smp.DistributedModel(module)
    train(model, torch.ones(2, 4))
    own = dict(model.local_named_parameters())
    if model.sharding.degree == 1:
        return {name: parameter.grad for name, parameter in own.items()}
    grads = model.sharding.full_tensors([(p, p.grad) for p in own.values()])
    return dict(zip(own, [each.clone() for each in grads], strict=True))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", ["function", "older function"])
def test_a_function_under_torchs_checkpoint_trains(smp_world, how, config):
    module = functions(how)
    module(torch.ones(2, 4)).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    found = {}
    for part in smp_world.run(of_functions, how, ranks=2, config=CONFIGS[config]):
        found.update(part)
    torch.testing.assert_close(found, expected)


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x))


def compile(what):
    return torch.compile(what, backend="eager")  # the default one takes seconds to import


class Decorated(Tree):
    @compile
    def forward(self, x):
        return super().forward(x)


class Uncompiled(Tree):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def compiled(how):
    module = Tree()
    if how == "whole":
        return caught(smp.DistributedModel, compile(module))
    if how == "child":
        module.second = compile(module.second)
    if how == "in place":
        module.second.compile(backend="eager")
    if how == "forward":
        module.second.forward = compile(module.second.forward)
    if how == "class":
        module.second = Decorated()
    if how == "later":
        model = smp.DistributedModel(module)
        module.second.compile(backend="eager")
        return caught(train, model, torch.ones(2, 4))
    if how == "the model":
        return caught(smp.DistributedModel(module).compile)
    return caught(smp.DistributedModel, module)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "how", ["whole", "child", "in place", "forward", "class", "later", "the model"]
)
def test_compiled_modules_are_refused_by_name(smp_world, how, config):
    for told in smp_world.run(compiled, how, ranks=2, config=CONFIGS[config]):
        assert "torch.compile" in told
        if how not in ("whole", "the model"):
            assert "module 'second" in told


def uncompiled():
    model = smp.DistributedModel(Uncompiled())
    train(model, torch.ones(2, 4))
    return True


def test_a_function_that_the_compiler_is_to_leave_alone(smp_world):
    assert smp_world.run(uncompiled, ranks=1) == [True]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Middle(Base):
    """Has no forward of its own."""


class Derived(Middle):
    def forward(self, x, scale=2.0):
        return super()._orig_forward(x) * scale


class Most(Derived):
    def forward(self, x):
        return super()._orig_forward(x, scale=3.0) + self._shared(x)

    def _shared(self, x):
        return Base._orig_forward(self, x)


class Scaled(nn.Linear):
    def forward(self, x):
        return super()._orig_forward(x) * 2


def originals():
    smp.DistributedModel(Base())  # an earlier model of the base class
    smp.shutdown()
    torch.manual_seed(0)
    module = nn.Sequential(Most(), Scaled(4, 4))
    smp.set_partition(module[1], smp.pp_size() - 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model, x):
        y = model(x)
        model.backward(y.sum())
        return y

    return step(model, torch.ones(2, 4)).concat()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_forward_of_a_base_class_by_its_other_name(smp_world, config):
    torch.manual_seed(0)
    module = nn.Sequential(Most(), Scaled(4, 4))
    most, scaled = module
    x = most.linear(torch.ones(2, 4)) * 3 + most.linear(torch.ones(2, 4))
    expected = nn.functional.linear(x, scaled.weight, scaled.bias) * 2
    for output in smp_world.run(originals, ranks=2, config=CONFIGS[config]):
        torch.testing.assert_close(output, expected.detach())


class Own(nn.Module):
    """Has the name for itself."""

    def __init__(self):
        super().__init__()
        self.add_module("_orig_forward", nn.Linear(4, 4))

    def forward(self, x):
        return self._orig_forward(x)


def own():
    train(smp.DistributedModel(Own()), torch.ones(2, 4))
    return True


def test_a_child_of_that_name_is_the_users(smp_world):
    assert smp_world.run(own, ranks=1) == [True]
