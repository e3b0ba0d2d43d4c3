"""Hooks of the model: when they run, with what, and what becomes of what they raise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.torch.hooks import Hooks


def test_hooks_run_once_in_order_with_model_and_optimizer():
    hooks, seen = Hooks("post-step"), []
    hooks.register(lambda *given: seen.append(("one", given)))
    gone = hooks.register(lambda *given: seen.append("gone"))
    hooks.register(lambda *given: seen.append("two"))
    gone.remove()
    gone.remove()
    hooks.run("model", "optimizer")
    hooks.run("model", "optimizer")
    assert seen == [("one", ("model", "optimizer")), "two"]
    hooks.register(seen.append)  # what it waits for has passed
    hooks.run("model", "optimizer")
    assert len(seen) == 2


def test_a_late_hook_runs_at_once_where_that_is_meant():
    hooks, seen = Hooks("post-partition", late=True), []
    hooks.run("model", None)
    with hooks.register(lambda *given: seen.append(given)):
        assert seen == [("model", None)]


def test_a_hook_may_remove_another_and_register_one():
    hooks, seen = Hooks("post-step"), []
    hooks.register(lambda *_: second.remove())
    second = hooks.register(lambda *_: seen.append("second"))
    hooks.run(None, None)
    assert seen == []


def test_what_a_hook_raises_is_told_with_its_name():
    hooks, seen = Hooks("post-partition"), []

    def broken(model, optimizer):
        raise KeyError("x")

    hooks.register(broken)
    hooks.register(lambda *_: seen.append("after"))
    with pytest.raises(KeyError) as raised:
        hooks.run(None, None)
    assert "post-partition hook" in raised.value.__notes__[0]
    assert "broken" in raised.value.__notes__[0]
    assert seen == []
    with pytest.raises(ArgumentTypeError, match="must be callable"):
        hooks.register("no")


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2)
def test_the_model_calls_them_around_the_first_step(smp):
    seen = []
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    def partition(given, its):
        assert given is model
        assert its is optimizer
        assert given.partitioned
        assert {parameter.numel() for parameter in given.local_parameters()} == {2, 4}
        seen.append("partition")

    model.register_post_partition_hook(partition)
    model.register_post_step_hook(lambda given, its: seen.append("step"))

    @smp.step
    def run(model, x):
        if not smp.is_tracing():
            seen.append("body")
        model.backward(model(x).sum())

    for _ in range(2):
        run(model, torch.ones(1, 2))
    body = ["body"] if smp.pp_rank() == 0 else []
    assert seen == ["partition", *body, "step", *body]
