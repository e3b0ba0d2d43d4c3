"""Blocks, layers, stacks and language models take the same arguments, and name what they refuse."""

from __future__ import annotations

import inspect
from collections import defaultdict

import pytest
import torch

import smp_core.torch as api
from smp_core.errors import ArgumentError

CONFIG = {"tensor_parallel_degree": 2, "ddp": True}
SIZES = {
    "num_layers": 1,
    "num_attention_heads": 4,
    "attention_head_size": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 4,
    "num_positions": 5,
}
BLOCKS = ("DistributedAttentionLayer", "DistributedTransformerOutputLayer")
STACKS = ("DistributedTransformerLayer", "DistributedTransformer")
HEAD = "DistributedTransformerLMHead"


def test_arguments_of_one_name_have_one_default():
    defaults = defaultdict(dict)
    for name in (*BLOCKS, *STACKS, HEAD):
        for argument in inspect.signature(getattr(api.nn, name)).parameters.values():
            defaults[argument.name][name] = argument.default
    assert set(defaults["hidden_size"]) == {*BLOCKS, *STACKS, HEAD}
    different = {
        argument: found
        for argument, found in defaults.items()
        if len({(type(each), each) for each in found.values()}) > 1
    }
    assert different == {}


def made(name: str, **options: object) -> torch.nn.Module:
    taken = inspect.signature(getattr(api.nn, name)).parameters
    return getattr(api.nn, name)(
        **{key: each for key, each in SIZES.items() if key in taken}, **options
    )


X = torch.zeros(2, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.long)
NO_BATCH, OTHER_BATCH, OTHER_KEYS = torch.zeros(5, 8), torch.zeros(3, 5), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("name", "options", "inputs", "message"),
    [
        (BLOCKS[0], {}, (3, None), "hidden_states is int, not a tensor"),
        (BLOCKS[0], {}, (NO_BATCH, None), "hidden_states is [5, 8]: it must be (B, S, hidden_size)"),
        (BLOCKS[0], {}, (X, [1]), "attention_mask is list, not a tensor"),
        (BLOCKS[0], {}, (X, OTHER_BATCH), "attention_mask is [3, 5]: it must be (B, T)"),
        (BLOCKS[0], {"cross_attention": True}, (X, NO_BATCH, None), "cross_states is [5, 8]"),
        (BLOCKS[1], {}, (NO_BATCH,), "hidden_states is [5, 8]: it must be (B, S, hidden_size)"),
        *(
            case
            for name in STACKS
            for case in (
                (name, {}, (None, None), "hidden_states is NoneType, not a tensor"),
                (name, {}, (X, OTHER_KEYS), "attention_mask is [2, 4], for 5 positions that"),
                (name, {"add_cross_attention": True}, (X, X, None, 3), "cross_mask is int, not a"),
                (name, {"add_cross_attention": True}, (X, X, None, OTHER_BATCH), "cross_mask is [3, 5]: it"),
                (name, {"add_cross_attention": True}, (X, X, None, OTHER_KEYS), "cross_mask is [2, 4], for 5"),
                (name, {"add_cross_attention": True}, (X, 3, None, None), "cross_states is int, not a"),
            )
        ),
        (HEAD, {}, (None, None, None, None, None), "input_ids is None: it must be (B, S)"),
        (HEAD, {}, ("ids", None, None, None, None), "input_ids is str, not a tensor"),
        (HEAD, {}, (IDS, [1], None, None, None), "attention_mask is list, not a tensor"),
        (HEAD, {}, (IDS, None, 1, None, None), "token_type_ids is int, not a tensor"),
        (HEAD, {}, (IDS, None, None, 1, None), "position_ids is int, not a tensor"),
        (HEAD, {}, (IDS, None, None, None, 1), "labels is int, not a tensor"),
        (HEAD, {"add_cross_attention": True}, (IDS, None, None, None, 1, None, None), "cross_states is int"),
        (HEAD, {"add_cross_attention": True}, (IDS, None, None, None, X, 1, None), "cross_mask is int"),
        (HEAD, {"add_cross_attention": True}, (IDS, None, None, None, X, None, 1), "labels is int"),
    ],
)  # fmt: skip
def test_an_input_is_refused_by_class_and_name(smp_world, name, options, inputs, message):
    def body():
        with pytest.raises(ArgumentError) as caught:
            made(name, **options)(inputs)
        assert str(caught.value).startswith(f"{name}: {message}")

    smp_world.run(body, ranks=2, config=CONFIG)
