"""Hooks and loads that fail on one rank: every rank is told, and the next step works."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from smp_core import runtime
from smp_core.torch.exceptions import CheckpointError, PartitionError, StepAbortedError
from smp_core.torch.execution.collective_try import collective_try

pytestmark = pytest.mark.smp(
    ranks=4, microbatches=2, pipeline_parallel_degree=2, auto_partition=False, default_partition=0
)


def model_of(smp):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = smp.DistributedModel(net)
    smp.set_partition(net[2], 1)

    @smp.step
    def step(model, x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    return model, net, step


def frames(error):
    """The functions in the traceback that the rank which failed has sent."""
    return re.findall(r"line \d+, in (\w+)", "".join(error.__notes__))


@pytest.mark.parametrize("kind", ["post_partition", "post_step"])
@pytest.mark.parametrize("where", range(4))
def test_a_hook_that_raises_on_one_rank(smp, kind, where):
    model, _, step = model_of(smp)

    def hook(model, optimizer):
        if smp.rank() == where:
            raise KeyError("broken")

    getattr(model, f"register_{kind}_hook")(hook)
    with pytest.raises(KeyError if smp.rank() == where else StepAbortedError) as raised:
        step(model, torch.randn(4, 4))
    if smp.rank() != where:
        text = str(raised.value)
        assert f"(world rank {where}) raised KeyError: 'broken', in a post-" in text
        assert "hook" in text
        assert frames(raised.value) == ["hook"]
    step(model, torch.randn(4, 4))
    assert all(parameter.grad is not None for parameter in model.local_parameters())


@pytest.mark.parametrize("where", [0, 3])
def test_a_load_that_fails_on_one_rank(smp, where):
    model, net, step = model_of(smp)
    state = net.state_dict()
    if smp.rank() == where:
        del state["0.weight"]
    model.load_state_dict(state)
    kind = RuntimeError if smp.rank() == where else StepAbortedError
    with pytest.raises(kind, match="Missing") as raised:
        step(model, torch.randn(4, 4))
    if smp.rank() != where:  # no line of the user's failed, so that the whole stack is told
        assert frames(raised.value)[-1] == "load_state_dict"
    step(model, torch.randn(4, 4))


class Untold(Exception):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("where", [0, 1])
def test_an_exception_without_a_text(smp, where):
    model, net, step = model_of(smp)

    def fail(*_):
        raise Untold

    step(model, torch.randn(4, 4))
    layer = net[2 * where]
    handle = layer.register_forward_hook(fail)
    with pytest.raises(Untold if smp.rank() == where else StepAbortedError):
        step(model, torch.randn(4, 4))
    handle.remove()
    step(model, torch.randn(4, 4))


def test_ranks_that_tie_other_parameters(smp):
    model, net, step = model_of(smp)
    if smp.rank() != 2:
        net[2].weight = net[0].weight
    smp.set_partition(net[2], 0)
    with pytest.raises(
        PartitionError, match=r"'2.weight' .*, tied to '0.weight' where world rank 2"
    ):
        step(model, torch.randn(4, 4))


@pytest.mark.smp(ranks=2, microbatches=2, ddp=True, pipeline_parallel_degree=1)
def test_hooks_after_a_join_in_which_one_replica_had_no_batch(smp):
    model = smp.DistributedModel(nn.Linear(4, 4))
    calls = []
    model.register_post_step_hook(lambda *_: calls.append("step"))

    @smp.step
    def step(model, x):
        model.backward(model(x).pow(2).mean())

    with model.join():
        for _ in range(2 * smp.rank()):
            step(model, torch.randn(4, 4))
    step(model, torch.randn(4, 4))
    assert calls == ["step"]


@pytest.mark.smp(ranks=3, pipeline_parallel_degree=1)
@pytest.mark.parametrize("alone", [False, True], ids=["step", "no step"])
@pytest.mark.parametrize("where", range(3))
def test_replicas_of_a_whole_model_are_told(smp, where, alone):
    net = nn.Linear(4, 4)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    right = optimizer.state_dict()
    optimizer.load_state_dict(right if smp.rank() != where else {"state": {}, "param_groups": []})
    model = smp.DistributedModel(net)

    def train(model, x):
        model.backward(model(x).pow(2).mean())

    step = train if alone else smp.step(train)
    if not alone:
        with pytest.raises(ValueError if smp.rank() == where else StepAbortedError, match="group"):
            step(model, torch.randn(4, 4))
        optimizer.load_state_dict(right)
    elif smp.rank() == where:  # a call outside of steps is nobody else's
        with pytest.raises(ValueError, match="group"):
            step(model, torch.randn(4, 4))
        optimizer.load_state_dict(right)
    step(model, torch.randn(4, 4))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.smp(ranks=3, pipeline_parallel_degree=1)
def test_all_ranks_have_the_values_of_all(smp):
    assert collective_try(runtime.current("test"), smp.rank, "now") == [0, 1, 2]


@pytest.mark.smp(ranks=3, pipeline_parallel_degree=1)
@pytest.mark.parametrize("kind", [CheckpointError, KeyError], ids=["ours", "the user's"])
def test_of_several_failures_each_rank_raises_its_own_and_the_others_the_first(smp, kind):
    def action():
        if smp.rank() > 0:
            raise kind(f"on {smp.rank()}")

    known = kind if smp.rank() > 0 or kind is CheckpointError else StepAbortedError
    with pytest.raises(known, match=f"on {max(smp.rank(), 1)}"):
        collective_try(runtime.current("test"), action, "now")
    first = CheckpointError if kind is CheckpointError else (KeyError, StepAbortedError)
    with pytest.raises(first, match="on 1"):
        collective_try(runtime.current("test"), action, "now", same=True)
    assert collective_try(runtime.current("test"), lambda: 5, "now") == [5, 5, 5]
