"""Hugging Face's ``gradient_checkpointing_enable()`` on models in pipelines: each layer checkpoints, values stay."""

from __future__ import annotations

import warnings

import pytest
import torch

import smp_core.torch as smp
from smp_core.torch.memory import activations

transformers = pytest.importorskip("transformers")

WORDS, LAYERS = 16, 2

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # old versions use names that torch has deprecated
    GPT2, BERT, T5 = (
        getattr(transformers, name)
        for name in ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration")
    )


def model_of(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "num_hidden_layers": LAYERS}
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=LAYERS, n_head=2)
        return GPT2(config)
    if family == "bert":
        config = transformers.BertConfig(
            **sizes, hidden_size=8, num_attention_heads=2, intermediate_size=8
        )
        return BERT(config)
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=LAYERS,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return T5(config)


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


PATHS = {
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "t5": [f"{stack}.block.{layer}" for stack in ("encoder", "decoder") for layer in (0, 1)],
}


def trained(family: str, enabled: bool) -> tuple[list[str], float, dict[str, torch.Tensor]]:
    """The layers with a policy, the loss, and the gradients. The second half of the layers is on the last rank."""
    module = model_of(family)
    for number, path in enumerate(PATHS[family]):
        smp.set_partition(module.get_submodule(path), number * smp.pp_size() // len(PATHS[family]))
    if enabled:
        module.gradient_checkpointing_enable()
    model = smp.DistributedModel(module)
    loss = train_step(model, torch.arange(8).view(2, 4)).reduce_mean().item()
    policies = [
        path for path, each in model.module.named_modules() if activations.MARK in vars(each)
    ]
    return policies, loss, {name: each.grad for name, each in model.local_named_parameters()}


@pytest.mark.parametrize("family", PATHS)
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_each_layer_checkpoints_and_values_stay(smp_world, monkeypatch, family, degree):
    repeated: list[str] = []  # of all simulated ranks
    region = activations._region

    def counted(module, path, *rest):
        repeated.append(path)
        return region(module, path, *rest)

    monkeypatch.setattr(activations, "_region", counted)
    config = {
        "pipeline_parallel_degree": degree,
        "auto_partition": False,
        "default_partition": 0,
        "ddp": True,
    }
    whole = smp_world.run(trained, family, False, ranks=degree, config=config)
    assert repeated == []
    asked = smp_world.run(trained, family, True, ranks=degree, config=config)
    assert sorted(repeated) == sorted(PATHS[family])
    for (none, loss, gradients), (policies, same_loss, same) in zip(whole, asked, strict=True):
        assert (none, policies) == ([], PATHS[family])
        assert same_loss == loss
        assert gradients.keys() == same.keys()
        assert all(torch.equal(each, same[name]) for name, each in gradients.items())
