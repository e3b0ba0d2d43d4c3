"""Random numbers of distributed modules: alike where tp ranks hold the same, different where activations are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smp_core.torch as api

HEADS, SIZE, LENGTH, BATCH = 4, 8, 8, 4
HIDDEN = HEADS * SIZE


@api.step
def train_step(model, *inputs):
    output = model(*inputs)
    model.backward(output.sum())
    return output


def gathered(value: torch.Tensor) -> list[torch.Tensor]:
    return api.allgather(value, api.TP_GROUP)


def replicated() -> None:
    """Dropout after a distributed layer, of activations that all tp ranks hold."""
    api.init()
    torch.manual_seed(api.rank())
    with api.tensor_parallelism():
        first = nn.Linear(HIDDEN, HIDDEN, bias=False)
    model = api.DistributedModel(nn.Sequential(first, nn.Dropout(0.5)))
    outputs = []
    for _ in range(2):
        outputs.append(train_step(model, torch.ones(BATCH, HIDDEN)).concat())
        assert all(torch.equal(each, outputs[-1]) for each in gathered(outputs[-1]))
    kept = [each != 0 for each in outputs]
    assert 0 < kept[0].sum() < kept[0].numel()
    assert not torch.equal(*kept)


def test_replicated_activations_are_dropped_alike_whatever_the_seeds(smp_world):
    config = {"tensor_parallel_degree": 4, "ddp": True, "prescaled_batch": True}
    smp_world.run(replicated, ranks=4, config=config)


def replicated_outside_of_steps() -> None:
    api.init()
    torch.manual_seed(api.rank())
    with api.tensor_parallelism():
        first = nn.Linear(HIDDEN, HIDDEN, bias=False)
    model = api.DistributedModel(nn.Sequential(first, nn.Dropout(0.5)))
    outputs, gradients = [], []
    for _ in range(2):
        model.zero_grad()
        outputs.append(model(torch.ones(BATCH, HIDDEN)))
        model.backward(outputs[-1].sum())
        assert all(torch.equal(each, outputs[-1]) for each in gathered(outputs[-1].detach()))
        gradients.append(next(model.parameters()).grad.clone())
        # Of replicas the seeds stay their own.
        assert (
            len(
                {
                    tuple(each.flatten().tolist())
                    for each in api.allgather(torch.rand(1), api.TP_GROUP)
                }
            )
            > 1
        )
    kept = [each != 0 for each in outputs]
    assert not torch.equal(*kept)
    state = torch.get_rng_state()
    model.eval()(torch.ones(BATCH, HIDDEN))
    assert torch.equal(state, torch.get_rng_state())


def test_replicated_activations_are_dropped_alike_outside_of_steps(smp_world):
    config = {"tensor_parallel_degree": 4, "ddp": True, "prescaled_batch": True}
    smp_world.run(replicated_outside_of_steps, ranks=4, config=config)


def split_heads() -> None:
    """Attention to values of 1 with equal scores: an output channel is the sum of the weights that were kept."""
    api.init()
    attention = api.nn.DistributedAttentionLayer(
        HEADS, SIZE, HIDDEN, 0.5, 0.0, pre_layernorm=True, post_layernorm=False
    )
    model = api.DistributedModel(attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        attention.value.bias.fill_(1)
        # The channels of a head go to its own output channels.
        eye = torch.eye(HIDDEN)
        start = HIDDEN // api.tp_size() * api.tp_rank()
        attention.dense.weight.copy_(eye[:, start : start + HIDDEN // api.tp_size()])
    x = torch.zeros(BATCH, LENGTH, HIDDEN)
    output = train_step(model, (x, None)).concat()
    sums = output.view(BATCH, LENGTH, HEADS, SIZE)[..., 0]
    alike = {tuple(head.flatten().tolist()) for head in sums.unbind(-1)}
    assert len(alike) == HEADS
    assert all(torch.equal(each, output) for each in gathered(output))


def test_the_heads_of_tp_ranks_drop_other_weights(smp_world):
    config = {"tensor_parallel_degree": 4, "ddp": True, "prescaled_batch": True}
    smp_world.run(split_heads, ranks=4, config=config)


def split_channels() -> None:
    api.init()
    block = api.nn.DistributedTransformerOutputLayer(
        HIDDEN, HIDDEN, 0.5, pre_layernorm=True, post_layernorm=False
    )
    model = api.DistributedModel(block)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        block.dense2.bias.fill_(1)
    output = train_step(model, torch.zeros(BATCH, LENGTH, HIDDEN)).concat()
    assert set(output.flatten().tolist()) == {0.0, 2.0}
    parts = {tuple(part.flatten().tolist()) for part in output.chunk(api.tp_size(), dim=-1)}
    assert len(parts) == api.tp_size()
    if api.state.cfg.prescaled_batch:
        assert all(torch.equal(each, output) for each in gathered(output))


@pytest.mark.parametrize("prescaled", [False, True], ids=["own batches", "prescaled"])
@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_the_channels_of_a_block_are_dropped_one_by_one(smp_world, optimize, prescaled):
    config = {
        "tensor_parallel_degree": 4,
        "ddp": True,
        "prescaled_batch": prescaled,
        "optimize": optimize,
    }
    smp_world.run(split_channels, ranks=4, config=config)


def checkpointed() -> None:
    """A layer that is repeated in backward drops what it dropped before, and takes its tuple as one argument with and
    without ``pack_args_as_tuple``.
    """
    api.init()
    torch.manual_seed(0)
    shape = (HEADS, SIZE, HIDDEN, HIDDEN, 0.5, 0.5)
    stack = api.nn.DistributedTransformer(2, *shape)
    model = api.DistributedModel(stack)
    gradients = []
    strategies: list[dict[str, Any]] = [
        {"pack_args_as_tuple": packed, "strategy": strategy}
        for packed in (False, True)
        for strategy in ("each", "contiguous", "group_2")
    ]
    for options in (None, *strategies):
        torch.manual_seed(1)
        model.zero_grad()
        if options is not None:
            api.set_activation_checkpointing(stack.seq_layers, **options)
        x = torch.linspace(-1, 1, BATCH * LENGTH * HIDDEN).view(BATCH, LENGTH, HIDDEN)
        train_loss(model, (x, None))
        gradients.append([each.grad.clone() for each in model.parameters()])
    assert all(
        torch.equal(*pair)
        for repeated in gradients[1:]
        for pair in zip(gradients[0], repeated, strict=True)
    )


@api.step
def train_loss(model, inputs):
    output = model(inputs)[0]
    model.backward((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum())


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_a_repeated_layer_drops_the_same(smp_world, optimize, degree):
    config = {"tensor_parallel_degree": degree, "ddp": True, "optimize": optimize}
    smp_world.run(checkpointed, ranks=4, config=config)
