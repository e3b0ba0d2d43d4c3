"""Mistakes with tensor parallelism are errors that say where and what to do, and nobody hangs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import smp_core.torch as api
from smp_core.errors import ArgumentError, ArgumentTypeError, BatchSizeError, SmpError
from smp_core.torch.exceptions import (
    IndivisibleError,
    TensorParallelError,
    UnsupportedTrainingError,
)

CONFIG = {"tensor_parallel_degree": 2, "ddp": True}
PRESCALED = {**CONFIG, "prescaled_batch": True}


@api.step
def train_step(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss


def linear(*sizes: int) -> nn.Linear:
    with api.tensor_parallelism():
        return nn.Linear(*sizes)


def test_modules_that_cannot_be_split_stay_and_are_logged(smp_world, caplog):
    def body():
        with api.tensor_parallelism():
            model = nn.ModuleDict(
                {
                    "odd": nn.Linear(3, 2),
                    "tied": nn.Linear(4, 4),
                    "other": nn.Linear(4, 4),
                    "normed": nn.Embedding(4, 4, max_norm=1.0),
                    "sparse": nn.Embedding(4, 4, sparse=True),
                    "split": nn.Linear(4, 2),
                }
            )
            with api.tensor_parallelism(False):
                model["off"] = nn.Linear(4, 2)
        model["other"].weight = model["tied"].weight
        model["again"] = model["again too"] = linear(4, 4)
        wrapped = api.DistributedModel(model)
        return sorted(
            path
            for path, child in wrapped.module.named_modules()
            if isinstance(child, api.nn.DistributedModule)
        )

    with caplog.at_level(logging.WARNING):
        assert smp_world.run(body, ranks=2, config=CONFIG) == [["split"]] * 2
    (text,) = {each.getMessage() for each in caplog.records if "distributed" in each.getMessage()}
    for expected in (
        "odd: DistributedLinear: in_features = 3 is no multiple of tensor_parallel_degree = 2",
        "tied: it shares a parameter with another module",
        "other: it shares a parameter with another module",
        "normed: smp.nn.DistributedEmbedding: max_norm",
        "sparse: smp.nn.DistributedEmbedding: sparse gradients",
        "again: it is used in several places of the model",
    ):
        assert expected in text
    assert "off" not in text


def test_indivisible_sizes_of_a_distributed_module_are_refused(smp_world):
    def body(make):
        with pytest.raises(IndivisibleError, match="is no multiple of tensor_parallel_degree = 2"):
            make()

    smp_world.run(body, lambda: api.nn.DistributedLinear(3, 2), ranks=2, config=CONFIG)
    smp_world.run(body, lambda: api.nn.DistributedEmbedding(2, 3), ranks=2, config=CONFIG)


def test_a_module_without_a_model_says_so(smp_world):
    def body():
        with pytest.raises(
            TensorParallelError, match=r"Call smp\.DistributedModel\(module\) first"
        ):
            api.nn.DistributedLinear(2, 2)(torch.ones(1, 2))

    smp_world.run(body, ranks=2, config=CONFIG)


@pytest.mark.parametrize("when", ["before both", "between"])
def test_an_optimizer_of_replaced_parameters_is_refused(smp_world, when):
    def body():
        layer = linear(2, 2)
        stale = torch.optim.SGD(layer.parameters(), lr=1.0)
        first, second, given = api.DistributedModel, api.DistributedOptimizer, (layer, stale)
        if when == "before both":
            first, second, given = second, first, (stale, layer)
        first(given[0])
        with pytest.raises(TensorParallelError, match="Make the optimizer after the model is"):
            second(given[1])

    smp_world.run(body, ranks=2, config=CONFIG)


@pytest.mark.parametrize(
    ("config", "batch", "match"),
    [
        (
            CONFIG,
            lambda: torch.ones(2 + api.tp_rank(), 2),
            r"tensor 0 is \[3, 2\] of torch.float32, and not \[2, 2\]",
        ),
        (PRESCALED, lambda: torch.full((2, 2), float(api.rank())), "the values of tensor 0 differ"),
        (CONFIG, lambda: torch.ones(2, 2 * (1 + api.tp_rank())), r"is \[2, 4\]"),
    ],
    ids=["sizes", "values", "channels"],
)
def test_batches_that_do_not_go_together_are_named_on_every_rank(smp_world, config, batch, match):
    def body():
        model = api.DistributedModel(linear(2, 2))
        with pytest.raises(TensorParallelError, match=match) as caught:
            train_step(model, batch())
        assert "step 1: rank 1's batch is not that of rank 0" in str(caught.value)

    smp_world.run(body, ranks=2, config=config)


def test_a_batch_that_one_rank_cannot_split_ends_the_step_everywhere(smp_world):
    def body():
        model = api.DistributedModel(linear(2, 2))
        with pytest.raises(SmpError) as caught:
            train_step(model, torch.ones(4 - api.tp_rank(), 2))
        if api.tp_rank() == 1:
            assert type(caught.value) is BatchSizeError
        else:
            assert "rank 1, of the same TP group, has no batch: BatchSize" in str(caught.value)

    smp_world.run(body, ranks=2, config={**CONFIG, "microbatches": 2})


class Plain(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("hook", ["init_hook", "forward_hook"])
@pytest.mark.parametrize("value", [None, 3, ((1, 2),), (1, {}), ((1,), {2: 3})], ids=repr)
def test_a_hook_that_returns_anything_else_is_named(smp_world, hook, value):
    def body():
        class Registered(Plain):
            pass

        api.tp_register_with_module(
            Registered,
            api.nn.DistributedLinear,
            **{"init_hook": lambda size: ((size, size), {}), hook: lambda *args: value},
        )
        with api.tensor_parallelism():
            module = Registered(4)
        with pytest.raises(
            ArgumentTypeError, match=f"{hook} '<lambda>' returned .*: it must return a pair"
        ):
            train_step(api.DistributedModel(module), torch.ones(2, 4))

    smp_world.run(body, ranks=2, config=CONFIG)


def test_bad_arguments_are_refused_at_once(smp_world):
    def body():
        with (
            pytest.raises(ArgumentError, match="unknown option 'fused_sofmax'"),
            api.tensor_parallelism(fused_sofmax=1),
        ):
            pass
        with (
            pytest.raises(ArgumentTypeError, match="enabled must be a bool"),
            api.tensor_parallelism("yes"),
        ):
            pass
        with pytest.raises(ArgumentTypeError, match=r"not a torch\.nn\.Module"):
            api.set_tensor_parallelism(3)
        with pytest.raises(ArgumentTypeError, match="dist_module is 3"):
            api.tp_register(3)(Plain)
        with pytest.raises(ArgumentTypeError, match="return_hook must be callable"):
            api.tp_register(api.nn.DistributedLinear, return_hook=3)(Plain)
        layer = linear(2, 2)
        api.DistributedModel(layer)
        kept = nn.Linear(2, 2)
        api.set_tensor_parallelism(kept)

    smp_world.run(body, ranks=2, config=CONFIG)


def test_full_optimizer_states_are_refused(smp_world):
    def body():
        model = api.DistributedModel(linear(2, 2))
        optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        with pytest.raises(UnsupportedTrainingError, match=r"optimizer\.local_state_dict"):
            optimizer.state_dict()

    smp_world.run(body, ranks=2, config=CONFIG)


def test_a_communication_hook_is_refused(smp_world):
    def body():
        model = api.DistributedModel(linear(2, 2))
        with pytest.raises(UnsupportedTrainingError, match="not with distributed modules"):
            model.register_comm_hook(None, lambda state, bucket: None)

    smp_world.run(body, ranks=2, config=CONFIG)


def test_joining_is_refused(smp_world):
    def body():
        model = api.DistributedModel(linear(2, 2))
        with pytest.raises(
            UnsupportedTrainingError, match="not with tensor_parallel_degree above 1"
        ):
            model.join()

    smp_world.run(body, ranks=2, config=CONFIG)


def test_inputs_without_a_batch_are_refused(smp_world):
    def body():
        model = api.DistributedModel(
            nn.ModuleList([linear(2, 2), api.nn.DistributedEmbedding(2, 2)])
        )
        with pytest.raises(ArgumentError, match=r"the input is \[2\], and ranks exchange batches"):
            model.module[0](torch.ones(2))
        with pytest.raises(ArgumentError, match="the input is a single id"):
            model.module[1](torch.tensor(1))

    smp_world.run(body, ranks=2, config=CONFIG)


class Fails(nn.Module):
    def forward(self, x):
        if api.tp_rank() == 1:
            raise ZeroDivisionError("on one rank")
        return x


def test_a_failure_on_one_rank_of_a_group_is_raised_there(smp_world):
    def body():
        model = api.DistributedModel(nn.Sequential(linear(2, 2), Fails(), linear(2, 2)))
        train_step(model, torch.ones(2, 2))

    with pytest.raises(ZeroDivisionError, match="on one rank"):
        smp_world.run(body, ranks=2, config=CONFIG)
