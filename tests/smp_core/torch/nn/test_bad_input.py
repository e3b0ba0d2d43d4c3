"""Mistakes with tensor parallelism are errors that say where and what to do, and nobody hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging

import pytest
import torch
from torch import nn

import smp_core.torch as api
from smp_core.config import IgnoredKeyWarning
from smp_core.errors import ArgumentError, ArgumentTypeError, BatchSizeError, SmpError
from smp_core.torch.exceptions import (
    IndivisibleError,
    StepAbortedError,
    TensorParallelError,
    UnsupportedTrainingError,
)
from smp_core.torch.tensor_parallel import exchange

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
                    "normal": nn.utils.spectral_norm(nn.Linear(4, 2)),
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
        "normal: its parameters are not those of its class",
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
            r"microbatch 0, tensor 0 is \[3, 2\] of torch.float32, and not \[2, 2\]",
        ),
        (
            PRESCALED,
            lambda: torch.full((2, 2), float(api.rank())),
            "the values of microbatch 0, tensor 0 differ",
        ),
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


@api.step
def with_labels(model, x, labels):
    loss = (model(x).sum(1) - labels).sum()
    model.backward(loss)
    return loss


def test_a_difference_in_the_second_microbatch_is_named(smp_world):
    def body():
        model = api.DistributedModel(linear(2, 2))
        labels = torch.zeros(4)
        with_labels(model, torch.ones(4, 2), labels)
        labels[2] = api.tp_rank()
        with pytest.raises(
            TensorParallelError, match=r"step 2: .*: the values of microbatch 1, tensor 1 differ"
        ):
            with_labels(model, torch.ones(4, 2), labels)

    smp_world.run(body, ranks=2, config={**PRESCALED, "microbatches": 2})


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


@dataclasses.dataclass
class Sample:
    x: object
    label: object = None


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Sliced:
    """A batch whose part is an object of another class."""

    def __init__(self, x):
        self.x = x

    def smp_slice(self, num_mb, mb, axis):
        return Slotted(self.x)


@api.step(non_split_inputs=["other"])
def with_other(model, x, other):
    loss = model(x).sum()
    model.backward(loss)
    return loss


def nested(layout: torch.layout, *lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(each, 2) for each in lengths], layout=layout)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        pytest.param(
            lambda rank: Sample(torch.full((2,), float(rank))),
            "the values of microbatch 0, tensor 1 differ",
            id="dataclass",
        ),
        pytest.param(
            lambda rank: [Sample([1, 2], {"a": [rank]})],
            "the values of microbatch 0, argument 2 differ",
            id="numbers in a dataclass",
        ),
        pytest.param(
            lambda rank: Sliced(torch.full((2,), rank)),
            "the values of microbatch 0, tensor 1 differ",
            id="sliced object",
        ),
        pytest.param(
            lambda rank: torch.full((2,), rank).numpy(),
            "the values of microbatch 0, array 0 differ",
            id="array",
        ),
        pytest.param(
            lambda rank: torch.ones(2 + rank).numpy(),
            r"microbatch 0, array 0 is \[3\] of float32, and not \[2\]",
            id="array shape",
        ),
        pytest.param(
            lambda rank: torch.full((2,), rank).numpy().astype("M8[D]"),
            "the values of microbatch 0, array 0",
            id="dates",
        ),
        pytest.param(
            lambda rank: torch.full((2,), rank).numpy().astype(object),
            "the values of microbatch 0, argument 2",
            id="array of objects",
        ),
        pytest.param(
            lambda rank: {"ids": [[1, 2], [3, rank]]},
            "the values of microbatch 0, argument 2 differ",
            id="ids",
        ),
        pytest.param(lambda rank: (rank,), "microbatch 0, argument 2 is 1, and not 0", id="number"),
        pytest.param(
            lambda rank: [f"text {rank}"],
            "microbatch 0, argument 2 is 'text 1', and not 'text 0'",
            id="string",
        ),
        pytest.param(
            lambda rank: {f"key {rank}": 1},
            "the values of microbatch 0, argument 2 differ",
            id="key",
        ),
        pytest.param(
            lambda rank: {"text", f"text {rank}"},
            "the values of microbatch 0, argument 2 differ",
            id="set",
        ),
        pytest.param(
            lambda rank: [1] * (rank + 2),
            "microbatch 0, argument 2 is 3 values, and not 2 values",
            id="longer list",
        ),
        pytest.param(
            lambda rank: [1, 2] if rank else None,
            "it has 2 entries, and not 1|has nothing in the place|argument 2",
            id="list or none",
        ),
        pytest.param(
            lambda rank: [] if rank else [1],
            "it has nothing in the place of microbatch 0, argument 2",
            id="empty list",
        ),
        pytest.param(
            lambda rank: torch.eye(2).mul(rank + 1).to_sparse(),
            "the values of microbatch 0, tensor 1 differ",
            id="sparse values",
        ),
        pytest.param(
            lambda rank: torch.eye(2).roll(rank, 0).to_sparse(),
            "the values of microbatch 0, tensor 1 differ",
            id="sparse indices",
        ),
        pytest.param(
            lambda rank: torch.eye(2).roll(rank, 0).to_sparse_csr(),
            "the values of microbatch 0, tensor 1 differ",
            id="csr",
        ),
        pytest.param(
            lambda rank: torch.eye(2).roll(rank, 0).to_sparse_csc(),
            "the values of microbatch 0, tensor 1 differ",
            id="csc",
        ),
        pytest.param(
            lambda rank: nested(torch.strided, 1 + rank, 2 - rank),
            "the values of microbatch 0, tensor 1 differ",
            id="nested",
        ),
        pytest.param(
            lambda rank: nested(torch.jagged, 1 + rank, 2 - rank),
            "the values of microbatch 0, tensor 1 differ",
            id="jagged",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_whatever_a_prescaled_batch_consists_of_is_compared(smp_world, other, match):
    def body():
        model = api.DistributedModel(linear(2, 2))
        x = torch.ones(2, 2)
        function = train_step_with if isinstance(other(0), Sliced) else with_other
        function(model, x, other(0))
        with pytest.raises(TensorParallelError, match=match) as caught:
            function(model, x, other(api.tp_rank()))
        assert "rank 1's batch is not that of rank 0" in str(caught.value)

    smp_world.run(body, ranks=2, config=PRESCALED)


@dataclasses.dataclass
class Settings:
    """The settings of a script."""

    local_rank: int
    device: str


@pytest.mark.parametrize(
    "own",
    [
        lambda rank: rank,
        lambda rank: f"cuda:{rank}",
        lambda rank: Settings(rank, f"cuda:{rank}"),
        lambda rank: {"local_rank": rank},
    ],
    ids=["number", "string", "settings", "dict"],
)
def test_settings_of_a_ranks_own_are_not_compared(smp_world, own):
    def body():
        model = api.DistributedModel(linear(2, 2))
        with_other(model, torch.ones(2, 2), own(api.tp_rank()))

    smp_world.run(body, ranks=2, config=PRESCALED)


@api.step
def train_step_with(model, x, other):
    loss = model(x).sum()
    model.backward(loss)
    return loss


class Logger:
    def __init__(self):
        self.rank = api.rank()


@pytest.mark.parametrize(
    "other",
    [
        lambda: [Logger(), print, torch.device("cpu"), Logger],
        lambda: {f"key {number}" for number in range(20)},
        lambda: [torch.eye(2).to_sparse(), nested(torch.strided, 1, 2), nested(torch.jagged, 1, 2)],
    ],
    ids=["of one rank", "a set", "layouts"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_objects_of_one_rank_are_no_batch(smp_world, other):
    def body():
        model = api.DistributedModel(linear(2, 2))
        whole = with_other(model, torch.ones(2, 2), other())
        assert whole is not None

    smp_world.run(body, ranks=2, config=PRESCALED)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_own_batches_may_be_nested_differently_and_numbers_differ(smp_world, layout):
    def body():
        model = api.DistributedModel(linear(2, 2))
        other = [nested(layout, 1, 1 + api.tp_rank()), api.tp_rank(), Sample(torch.ones(1))]
        with_other(model, torch.ones(2, 2), other)
        other[2].x = torch.ones(1 + api.tp_rank())
        with pytest.raises(
            TensorParallelError, match=r"microbatch 0, tensor 2 is \[2\] of .*, and not \[1\]"
        ):
            with_other(model, torch.ones(2, 2), other)

    smp_world.run(body, ranks=2, config=CONFIG)


class Refused:
    """A batch that raises when it is split."""

    def smp_slice(self, num_mb, mb, axis):
        raise ValueError("no such batch")


@pytest.mark.parametrize(
    ("batch", "types", "match"),
    [
        (lambda: torch.ones(2 + api.tp_rank(), 2), [TensorParallelError] * 4, "rank 1's batch is"),
        (Refused, [ValueError] * 2 + [StepAbortedError] * 2, "no such batch"),
        (
            lambda: Refused() if api.tp_rank() else torch.ones(2, 2),
            [TensorParallelError, ValueError, TensorParallelError, TensorParallelError],
            "no such batch",
        ),
    ],
    ids=["sizes", "split on both", "split on one"],
)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_refused_batch_of_one_group_ends_the_step_of_all(
    smp_world, pipeline, batch, types, match
):
    def body():
        model = api.DistributedModel(nn.Sequential(linear(2, 2), linear(2, 2)))
        train_step(model, torch.ones(2, 2))
        before = [each.grad.clone() for each in model.local_parameters()]
        with pytest.raises(Exception, match=match) as caught:
            train_step(model, batch() if api.rdp_rank() == 0 else torch.ones(2, 2))
        after = [each.grad for each in model.local_parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        train_step(model, torch.ones(2, 2))
        return api.pp_rank(), api.rdp_rank(), api.tp_rank(), type(caught.value), str(caught.value)

    config = {**CONFIG, "pipeline_parallel_degree": pipeline}
    caught = smp_world.run(body, ranks=4 * pipeline, config=config)
    drivers = {place[1:3]: place[3] for place in caught if place[0] == 0}
    assert [drivers[place] for place in sorted(drivers)] == types
    assert len({place[4] for place in caught if place[1] == 1}) == 1  # one text for other replicas


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


@pytest.mark.parametrize("width", [0, 2, 6, 7, 12])
@pytest.mark.parametrize("config", [CONFIG, PRESCALED], ids=["own", "prescaled"])
def test_inputs_of_other_widths_are_refused_on_every_rank(smp_world, config, width):
    def body():
        model = api.DistributedModel(linear(8, 4))
        with pytest.raises(ArgumentError) as caught:
            model(torch.ones(2, width))
        assert str(caught.value) == (
            f"smp.nn.DistributedLinear: the input is [2, {width}]: its last axis has {width} channels, and "
            "in_features is 8"
        )
        assert model(torch.ones(2, 8)).shape == (2, 4)

    smp_world.run(body, ranks=4, config={**config, "tensor_parallel_degree": 4})


def test_channels_that_cannot_be_split_are_refused_on_every_rank(smp_world):
    def body():
        layer = linear(8, 4)
        model = api.DistributedModel(layer)
        group = next(model.distributed_modules()).group()
        for change in (exchange.slice_channels, exchange.sum_channels):
            with pytest.raises(ArgumentError) as caught:
                change(torch.ones(2, 6), group, "Own")
            assert str(caught.value) == (
                "Own: an activation is [2, 6], and 6 channels cannot be split over 4 tp ranks"
            )

    smp_world.run(body, ranks=4, config={**PRESCALED, "tensor_parallel_degree": 4})


@pytest.mark.parametrize(
    ("config", "batch", "match"),
    [
        (
            CONFIG,
            lambda: torch.ones(4 - api.tp_rank(), 2),
            r"tensor 0 is \[3, 2\] of torch.float32, and not \[4, 2\]",
        ),
        (PRESCALED, lambda: torch.full((2, 2), float(api.rank())), "the values of tensor 0 differ"),
    ],
    ids=["sizes", "values"],
)
def test_calls_outside_of_steps_that_do_not_go_together_are_named(smp_world, config, batch, match):
    def body():
        model = api.DistributedModel(nn.Sequential(linear(2, 2), nn.ReLU())).eval()
        with pytest.raises(TensorParallelError, match=match) as caught:
            model(batch())
        first = api.rank() - api.tp_rank()
        assert f"outside of steps: rank {first + 1}'s batch is not that of rank {first}" in str(
            caught.value
        )
        assert model(torch.ones(2, 2)).shape == (2, 2)

    smp_world.run(body, ranks=4, config=config)


def test_ranks_call_replicas_of_a_whole_model_alone(smp_world):
    def body():
        with pytest.warns(IgnoredKeyWarning, match="no module is distributed"):
            model = api.DistributedModel(nn.Linear(2, 2))
        if api.rank() == 0:
            assert model(torch.ones(2, 2)).shape == (2, 2)

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


LAYER = {
    "num_attention_heads": 4,
    "attention_head_size": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"num_attention_heads": 3}, {}, "num_attention_heads = 3 is no multiple of .* = 2"),
        ({"intermediate_size": 15}, {}, "intermediate_size = 15 is no multiple"),
        ({"hidden_size": 7}, {"optimize": "memory"}, "hidden_size = 7 is no multiple"),
        ({}, {"pre_layernorm": False, "post_layernorm": False}, "at least one of pre_layernorm"),
        (
            {},
            {"attention_dropout_prob": 1.5},
            "attention_dropout_prob must be from 0 to 1, not 1.5",
        ),
        ({}, {"activation": "step"}, "activation must be one of .*, not 'step'"),
        ({}, {"window_size": 2}, "window_size = 2 is of causal attention"),
        ({}, {"window_size": 0, "causal_mask_size": 4}, "window_size must be at least 1, not 0"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads must be at least 1, not 0"),
        ({}, {"rotary_dim": 1}, "rotary_dim must be even, and from 2 to attention_head_size = 2"),
        ({}, {"rotary_dim": 4}, "rotary_dim must be even, and from 2 to attention_head_size = 2"),
        ({}, {"optimize": "money"}, 'optimize must be "speed" or "memory", not'),
        ({}, {"parallel_attn_output": True}, "parallel_attn_output needs pre_layernorm=True"),
    ],
)
def test_arguments_of_a_layer_that_do_not_go_together(smp_world, sizes, options, message):
    def body():
        with pytest.raises((IndivisibleError, ArgumentError), match=message):
            api.nn.DistributedTransformerLayer(**{**LAYER, **sizes}, **options)

    smp_world.run(body, ranks=2, config={**CONFIG, "optimize": "speed"})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda x: x, "the input is a tuple of 2, not one value"),
        (lambda x: (x,), "the input is a tuple of 2, not 1 values"),
        (lambda x: (None, x), "hidden_states is NoneType, not a tensor"),
        (lambda x: (x, torch.zeros(3, 5)), "attention_mask is .3, 5.: .* and B is 2"),
        (lambda x: (x, torch.zeros(2, 4)), "attention_mask is .2, 4., for 5 positions"),
        (lambda x: (x[0], None), "hidden_states is .5, 8.: it must be .B, S, hidden_size."),
        (lambda x: (x[..., :4], None), "hidden_states is .2, 5, 4.: .* hidden_size is 8"),
        (lambda x: (x, torch.zeros(2, 3, 5, 5)), "attention_mask is for 3 heads, and there are 4"),
    ],
)
def test_inputs_of_a_layer_that_are_not_as_documented(smp_world, inputs, message):
    def body():
        layer = api.nn.DistributedTransformerLayer(**LAYER, causal_mask_size=5)
        model = api.DistributedModel(layer)
        with pytest.raises(ArgumentError, match=message):
            model(inputs(torch.zeros(2, 5, 8)))
        with pytest.raises(
            ArgumentError, match="a sequence of 6 is longer than causal_mask_size = 5"
        ):
            model((torch.zeros(2, 6, 8), None))

    smp_world.run(body, ranks=2, config=CONFIG)


def test_labels_and_token_types_need_their_parts(smp_world):
    def body():
        sizes = {**LAYER, "num_layers": 1, "vocab_size": 4, "num_positions": 5}
        head = api.nn.DistributedTransformerLMHead(**sizes, add_lm_head=False)
        model = api.DistributedModel(head)
        ids = torch.zeros(2, 5, dtype=torch.long)
        with pytest.raises(ArgumentError, match="labels are given, and there is no head"):
            model((ids, None, None, None, ids))
        with pytest.raises(
            ArgumentError, match="token_type_ids are given, and num_token_types is 0"
        ):
            model((ids, None, ids, None, None))

    smp_world.run(body, ranks=2, config=CONFIG)


class Chooses(nn.Module):
    """One of two distributed layers, by the data."""

    def __init__(self):
        super().__init__()
        self.one, self.other = linear(2, 2), linear(2, 2)

    def forward(self, x):
        return self.one(x) if float(x.detach().sum()) > 0 else self.other(x)


def test_ranks_that_call_different_modules_are_told(smp_world):
    def body():
        model = api.DistributedModel(Chooses())
        before = [each.detach().clone() for each in model.parameters()]
        train_step(model, torch.ones(2, 2))
        given = [each.grad for each in model.parameters()]
        model.zero_grad()
        with pytest.raises(TensorParallelError, match="rank 1 called other distributed modules"):
            train_step(model, torch.ones(2, 2) * (1 - 2 * api.tp_rank()))
        assert [each.grad for each in model.parameters()] == [None] * len(given)
        assert all(map(torch.equal, before, model.parameters()))
        train_step(model, torch.ones(2, 2))  # the next step begins anew
        assert all(
            torch.equal(each.grad, one)
            for each, one in zip(model.parameters(), given, strict=True)
            if one is not None
        )

    smp_world.run(body, ranks=2, config=CONFIG)


class Detour(nn.Module):
    """Calls a module of the other pp rank if the data say so, and a distributed layer behind it."""

    def __init__(self):
        super().__init__()
        self.far, self.layer = nn.Linear(2, 2), linear(2, 2)

    def forward(self, x):
        return self.layer(self.far(x) if float(x.detach().sum()) > 0 else x)


def test_ranks_that_run_microbatches_in_different_orders_are_told(smp_world):
    def body():
        model = api.DistributedModel(Detour())
        api.set_partition(model.module.far, 1)
        x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
        train_step(model, x)  # alike on both
        # Ranks of the other partition have no distributed module, and have not met.
        told = pytest.raises(TensorParallelError, match="or for other microbatches first")
        with contextlib.nullcontext() if api.pp_rank() else told:
            train_step(model, x if api.tp_rank() else -x)

    pipeline = {"pipeline_parallel_degree": 2, "microbatches": 2, "skip_tracing": True}
    config = {**CONFIG, **pipeline, "auto_partition": False, "default_partition": 0}
    smp_world.run(body, ranks=4, config=config)


class PenalisedLayer(nn.Module):
    """A module that computes with the weight of its distributed child, or only asks for its type."""

    def __init__(self, penalty):
        super().__init__()
        self.layer, self.penalty = linear(4, 2), penalty

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).sum() + self.penalty(self.layer.weight)


@pytest.mark.parametrize(
    ("penalty", "operation"),
    [
        (lambda weight: weight.square().sum(), "square"),  # any shape fits: a wrong loss otherwise
        (lambda weight: weight.T.sum(), "T"),
        (lambda weight: torch.cat([weight, weight]).sum(), "cat"),
    ],
    ids=["shapes fit", "a view", "in a list"],
)
@pytest.mark.parametrize("sharding", [1, 2])
def test_a_slice_is_not_taken_for_the_whole_parameter(smp_world, penalty, operation, sharding):
    expected = (
        rf"module '' \(PenalisedLayer\) reads parameter 'weight' of the distributed module 'layer' \({operation}\), "
        r"of which tp rank \d has the slice \[2, 2\] of \[2, 4\]"
    )

    def body():
        model = api.DistributedModel(PenalisedLayer(penalty))
        with pytest.raises(TensorParallelError, match=expected):
            train_step(model, torch.ones(2, 4))

    config = {**PRESCALED, "sharded_data_parallel_degree": sharding}
    small = {"sdp_param_persistence_threshold": 2} if sharding > 1 else {}
    smp_world.run(body, ranks=2 * sharding, config={**config, **small})


class Passing(nn.Module):
    """A module that takes a tensor, gives it back, and computes nothing with it, as layers of DeBERTa may."""

    def forward(self, weight):
        return weight


def asked(weight):
    return float(Passing()(weight).requires_grad)


class PassingLayer(PenalisedLayer):
    def __init__(self):
        super().__init__(lambda weight: float(self.passing(weight).requires_grad))
        self.passing = Passing()


@pytest.mark.parametrize("sharding", [1, 2])
@pytest.mark.parametrize("make", [lambda: PenalisedLayer(asked), PassingLayer])
def test_a_slice_may_be_asked_for_its_type_and_handed_on(smp_world, sharding, make):
    def body():
        model = api.DistributedModel(make())
        train_step(model, torch.ones(2, 4))
        assert all(parameter.grad is not None for parameter in model.parameters())

    config = {**PRESCALED, "sharded_data_parallel_degree": sharding}
    small = {"sdp_param_persistence_threshold": 2} if sharding > 1 else {}
    smp_world.run(body, ranks=2 * sharding, config={**config, **small})
