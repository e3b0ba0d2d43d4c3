"""Distributed modules at ``tensor_parallel_degree`` 1: the same modules as at every degree, with the weights and the
gradients of the plain ones.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import smp_core.torch as smp

transformers = pytest.importorskip("transformers", reason="models are Hugging Face's")

RANKS, VOCABULARY = 2, 40
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
BERT = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def gpt2():
    config = transformers.GPT2Config(**GPT, **NO_DROPOUT, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def gptj():
    config = transformers.GPTJConfig(
        **GPT, **NO_DROPOUT, rotary_dim=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPTJForCausalLM(config)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT))


class Linear(nn.Module):
    """Layers of torch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.linear = nn.Linear(8, 3)

    def forward(self, input_ids, labels):
        del labels
        return {"loss": self.linear(self.embedding(input_ids)).square().mean()}


#: Models, and a path that the distributed form of each has.
MODELS = {
    gpt2: "transformer.seq_layers",
    gptj: "transformer.seq_layers",
    bert: "bert.encoder.seq_layers",
    Linear: "linear",
}
CONFIGS = {
    "replicas": {},
    "pipeline": {"pipeline_parallel_degree": 2},
    "sharded": {
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 10,
        "sdp_gradient_clipping": 1e9,
    },
}


@smp.step
def _step(model, ids):
    loss = model(input_ids=ids, labels=ids)["loss"]
    model.backward(loss)
    return loss


def _losses(make, path, config):
    """The losses of two steps: distributed, and of plain PyTorch."""
    smp.init({"ddp": True, "microbatches": 2, **config})
    torch.manual_seed(0)
    plain = make()
    with smp.tensor_parallelism():
        wished = make()
    wished.load_state_dict(copy.deepcopy(plain.state_dict()))
    model = smp.DistributedModel(wished)
    part = model.get_module().get_submodule(path)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    twin = torch.optim.SGD(plain.parameters(), lr=0.5)
    ids = torch.randint(0, VOCABULARY, (4, 8))  # the same on all replicas
    found, expected = [], []
    for _ in range(2):
        found.append(_step(model, ids).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
        loss = plain(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        twin.step()
        twin.zero_grad()
        expected.append(loss.item())
    kinds = {type(each).__name__ for each in part.modules()}
    return found, expected, kinds


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_wished_model_of_degree_1_trains_as_the_plain_one(smp_world, make, config):
    for found, expected, kinds in smp_world.run(_losses, make, MODELS[make], config, ranks=RANKS):
        assert any(kind.startswith("Distributed") for kind in kinds)
        assert found[1] < found[0]
        torch.testing.assert_close(found, expected)
