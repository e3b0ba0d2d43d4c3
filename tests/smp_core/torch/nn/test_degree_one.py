"""Distributed modules at ``tensor_parallel_degree`` 1: the same modules as at every degree, with the weights and the
gradients of the plain ones, over two updates.

Both compute in float64. The values of `Linear` are dyadic fractions of few bits, whose sums are exact in any order, so
the values are equal. The bound of the others' difference is four times the error of the plain model in float32: they
compute in float64, where an error of theirs is smaller by a factor of 2**29 than one in float32.
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
    """Layers of torch, with small integers as weights. The loss is a mean over a power of two of samples."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.linear = nn.Linear(8, 3)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randint(-2, 3, each.shape))

    def forward(self, input_ids, labels):
        del labels
        values = self.linear(self.embedding(input_ids))
        return {"loss": values.square().flatten(1).sum(1).mean()}


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


def _whole(model):
    """The whole state of the model, with the names of the plain one."""
    state = model.state_dict()
    for there, _ in smp.state.module_manager.translate_functions:
        state = there(state)
    return state


def _gradients(model, parameters, state_of):
    """The gradients of a model, in the form of its state."""
    kept = [each.detach().clone() for each in parameters]
    with torch.no_grad():
        for each in parameters:
            each.copy_(torch.zeros_like(each) if each.grad is None else each.grad)
        found = {name: value.clone() for name, value in state_of(model).items()}
        for each, value in zip(parameters, kept, strict=True):
            each.copy_(value)
    return found


def _compare(what, found, expected, coarse, exact):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not value.is_floating_point():
            continue
        bound = 0 if exact else 4 * (coarse[name].double() - value).abs().max()
        difference = (found[name] - value).abs().max()
        assert difference <= bound, (what, name, difference, bound)


def _trains_as_the_plain_one(make, path, config):
    """Compare weights and gradients over two updates. Return the names of the classes of the part at the path."""
    torch.set_default_dtype(torch.float64)
    smp.init({"ddp": True, "microbatches": 2, **config})
    torch.manual_seed(0)
    plain = make()
    coarse, exact = copy.deepcopy(plain).float(), make is Linear
    with smp.tensor_parallelism():
        wished = make()
    wished.load_state_dict(copy.deepcopy(plain.state_dict()))
    model = smp.DistributedModel(wished)
    part = model.get_module().get_submodule(path)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    twins = [(each, torch.optim.SGD(each.parameters(), lr=0.5)) for each in (plain, coarse)]
    ids = torch.randint(0, VOCABULARY, (4, 8))  # the same on all replicas
    for number in range(2):
        _step(model, ids)
        for each, _ in twins:
            each(input_ids=ids, labels=ids)["loss"].backward()
        gradients = (
            _gradients(each, list(each.parameters()), lambda module: module.state_dict())
            for each, _ in twins
        )
        if number == 0:
            _compare("weights", _whole(model), plain.state_dict(), {}, exact=True)
        found = _gradients(model, list(model.local_parameters()), _whole)
        _compare(f"gradients of step {number}", found, *gradients, exact)
        for each in (optimizer, *(each for _, each in twins)):
            each.step()
            each.zero_grad()
    _compare("updated weights", _whole(model), *(each.state_dict() for each, _ in twins), exact)
    return {type(each).__name__ for each in part.modules()}


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_wished_model_of_degree_1_trains_as_the_plain_one(smp_world, make, config):
    for kinds in smp_world.run(_trains_as_the_plain_one, make, MODELS[make], config, ranks=RANKS):
        assert any(kind.startswith("Distributed") for kind in kinds)


def _state_without_initialisation(make, loaded):
    """The whole state of a wished model whose initialisation a script has switched off."""
    smp.init()
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        wished = make()
    before = copy.deepcopy(wished.state_dict())
    if loaded:
        for value in before.values():
            value.mul_(0.5)
        wished.load_state_dict(before)
    return before, _whole(smp.DistributedModel(wished))


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("make", [gpt2, gptj, bert], ids=lambda make: make.__name__)
def test_a_model_that_was_never_initialised_has_the_weights_of_every_degree(
    smp_world, make, monkeypatch, caplog
):
    """Public scripts switch the initialisation off, because distributed modules draw weights of their own."""
    monkeypatch.setattr(transformers.PreTrainedModel, "init_weights", lambda self: None)
    (_, one), (_, two) = (
        smp_world.run(
            _state_without_initialisation,
            make,
            False,
            ranks=2,
            config={"ddp": True, "tensor_parallel_degree": degree},
        )[0]
        for degree in (1, 2)
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert caplog.text.count("Transformers has neither initialised nor loaded them") == 2  # ranks


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_weights_that_a_script_has_loaded_stay(smp_world, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "init_weights", lambda m: m.tie_weights())
    for make in (gpt2, gptj, bert):
        [(before, after)] = smp_world.run(_state_without_initialisation, make, True, ranks=1)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
