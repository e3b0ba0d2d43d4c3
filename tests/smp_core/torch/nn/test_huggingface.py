"""Models of Hugging Face, distributed, against the same models as they are.

The distributed model computes in float64. The bound of its difference from Hugging Face's in float64 is four times the
error of Hugging Face's in float32 (docs/spec/engines.md#2.2): some of these models compute parts in float32 always.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

import smp_core.torch as api
from smp_core.errors import ArgumentError
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.memory import activations
from smp_core.torch.nn.huggingface import gpt2
from smp_core.torch.pipeline.placement import PARTITION

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, BATCH, LAYERS, HEADS, HIDDEN = 32, 8, 2, 2, 8, 32
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptneo": {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def config_of(family: str):
    gpt = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    bert = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": LENGTH + 2,
    }
    neo = {
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "window_size": 3,
        "attention_types": [[["global", "local"], LAYERS // 2]],
    }
    name, sizes = {
        "gpt2": ("GPT2Config", gpt),
        "gptj": ("GPTJConfig", {**gpt, "rotary_dim": 2}),
        "gptneo": ("GPTNeoConfig", neo),
        "bert": ("BertConfig", bert),
        "roberta": ("RobertaConfig", bert),
    }[family]
    return getattr(transformers, name)(vocab_size=WORDS, **sizes, **NO_DROPOUT[family])


CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "gptneo": "GPTNeoForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
}


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # old versions use names that torch has deprecated
    MODELS = {family: getattr(transformers, name) for family, name in CLASSES.items()}


def drawn(family: str):
    """A model with weights large enough that every part of it counts."""
    model = MODELS[family](config_of(family))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def batch(number: int):
    generator = torch.Generator().manual_seed(number)
    ids, labels = (torch.randint(2, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2]])).long()
    return ids, mask, labels


def loss_of(family: str, logits, labels):
    """The loss of the models, which some of them compute in float32 always."""
    if not CLASSES[family].endswith("MaskedLM"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


@api.step
def train_step(model, family, ids, mask, labels):
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = loss_of(family, output.logits, labels)
    if api.tp_size() > 1:
        assert torch.equal(output.loss, loss)
    model.backward(loss)
    return loss, output.logits


def plain_gradients(family: str, model, share: int, shares: int):
    """Loss and logits of one share, and the gradients of the mean loss of all, as a state."""
    outputs = []
    for number in range(shares):
        ids, mask, labels = batch(number)
        logits = model(input_ids=ids, attention_mask=mask).logits
        outputs.append((loss_of(family, logits, labels), logits))
    (sum(loss for loss, _ in outputs) / shares).backward()
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(gradients.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.grad)
    return outputs[share], gradients.state_dict()


def near(what: str, ours, coarse, truth, bound=None) -> None:
    bound = 4 * (coarse.double() - truth).abs().max() if bound is None else bound
    assert (ours - truth).abs().max() <= bound, (what, (ours - truth).abs().max(), bound)


def body(family: str) -> None:
    torch.set_default_dtype(torch.float64)
    api.init()
    prescaled = api.state.cfg.prescaled_batch
    share, shares = (
        (api.rdp_rank(), api.rdp_size()) if prescaled else (api.dp_rank(), api.dp_size())
    )
    truth = drawn(family)
    state = copy.deepcopy(truth.state_dict())
    coarse = copy.deepcopy(truth).float()
    with api.tensor_parallelism():
        distributed = MODELS[family](config_of(family))
    model = api.DistributedModel(distributed)
    model.load_state_dict(state)
    distributed = any(model.is_distributed_parameter(each) for each in model.parameters())
    assert distributed == (api.tp_size() > 1)
    ours = model.state_dict()
    assert ours.keys() != state.keys()
    ((there, back),) = api.state.module_manager.translate_functions
    assert there(ours).keys() == state.keys()
    for name, value in there(ours).items():
        assert torch.equal(value, state[name]), name
    again = back(there(ours))
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], value) for name, value in ours.items())
    output, expected = plain_gradients(family, truth, share, shares)
    rough, bounds = plain_gradients(family, coarse, share, shares)
    loss, logits = train_step(model, family, *batch(share))
    near("logits", logits.concat(), rough[1], output[1])
    # A cross-entropy changes by at most twice the greatest change of a score.
    bound = 8 * (rough[1].double() - output[1]).abs().max()
    near("loss", loss.reduce_mean(), rough[0], output[0], bound)
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.copy_(parameter.grad)
    gradients = there(model.state_dict())
    for name, value in expected.items():
        if value.is_floating_point():
            near(name, gradients[name], bounds[name], value)


@pytest.mark.parametrize(
    ("degree", "prescaled", "optimize"),
    [
        (1, False, "speed"),
        (2, False, "speed"),
        (2, True, "memory"),
        (4, True, "speed"),
        (8, False, "memory"),
    ],
)
@pytest.mark.parametrize("family", list(CLASSES))
def test_a_distributed_model_computes_as_the_plain_one(
    smp_world, family, degree, prescaled, optimize
):
    config = {
        "tensor_parallel_degree": degree,
        "ddp": True,
        "prescaled_batch": prescaled,
        "optimize": optimize,
    }
    smp_world.run(body, family, ranks=8 if degree == 8 else 4, config=config)


def saved_whole(folder: str) -> None:
    """A full checkpoint has Hugging Face's names, and loads into its model and into the distributed one."""
    api.init()
    truth = drawn("gpt2")
    with api.tensor_parallelism():
        model = api.DistributedModel(MODELS["gpt2"](config_of("gpt2")))
    model.load_state_dict(truth.state_dict())
    api.save_checkpoint(folder, "whole", partial=False, model=model)
    plain = MODELS["gpt2"](config_of("gpt2"))
    plain.load_state_dict(torch.load(f"{folder}/whole", weights_only=True))
    for name, value in truth.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.zero_()
    api.resume_from_checkpoint(folder, "whole", partial=False)
    again = dict(api.state.module_manager.translate_functions[0][0](model.state_dict()))
    for name, value in truth.state_dict().items():
        assert torch.equal(again[name], value), name
    api.save_checkpoint(folder, "ours", partial=False, model=model, translate_if_full=False)
    assert torch.load(f"{folder}/ours", weights_only=True).keys() == model.state_dict().keys()


def test_a_full_checkpoint_has_the_names_of_hugging_face(smp_world, tmp_path):
    config = {"tensor_parallel_degree": 2, "ddp": True}
    smp_world.run(saved_whole, str(tmp_path), ranks=4, config=config)


def calls(family: str) -> None:
    """Arguments have their meaning by name and by position, or are refused."""
    torch.set_default_dtype(torch.float64)
    api.init()
    truth = drawn(family).eval()
    with api.tensor_parallelism():
        model = api.DistributedModel(MODELS[family](config_of(family)))
    model.load_state_dict(truth.state_dict())
    ours = model.module.eval()
    ids, mask, labels = batch(0)
    expected = truth(ids, attention_mask=mask).logits
    coarse = copy.deepcopy(truth).float()(ids, attention_mask=mask).logits
    place = list(inspect.signature(type(truth).forward).parameters).index("attention_mask")
    positional = (ids, *[None] * (place - 2), mask)  # without self
    near("positions", ours(*positional).logits, coarse, expected)
    whole = ours(input_ids=ids, attention_mask=mask).logits
    for kept, rows in ((0, slice(None)), (3, slice(-3, None)), (torch.tensor([1, 4]), [1, 4])):
        cut = ours(input_ids=ids, attention_mask=mask, logits_to_keep=kept).logits
        assert torch.equal(cut, whole[:, rows])
    found = ours(input_ids=ids, labels=labels, num_items_in_batch=5)
    shifted = found.logits[:, :-1].flatten(0, 1)
    expected = cross_entropy(shifted, labels[:, 1:].flatten(), reduction="sum") / 5
    assert torch.equal(found.loss, expected)
    assert ours(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=5).loss == 0
    for refused in (
        {"use_cache": True},
        {"output_attentions": True},
        {"labels": labels, "logits_to_keep": 1},
    ):
        with pytest.raises(UnsupportedTrainingError, match=r"supported.* Leave"):
            ours(input_ids=ids, **refused)
    assert ours(input_ids=ids, use_cache=False).logits.shape == whole.shape
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        ours(ids, input_ids=ids)
    ours.config.output_hidden_states = True
    assert ours(input_ids=ids, output_hidden_states=False).logits.shape == whole.shape
    with pytest.raises(UnsupportedTrainingError, match=r"config\.output_hidden_states=True"):
        ours(input_ids=ids)


@pytest.mark.parametrize("family", ["gpt2", "gptneo", "gptj"])
def test_arguments_of_a_language_model_have_their_meaning_or_are_refused(smp_world, family):
    smp_world.run(calls, family, ranks=2, config={"tensor_parallel_degree": 2, "ddp": True})


def encoder_calls() -> None:
    api.init()
    with api.tensor_parallelism():
        model = api.DistributedModel(MODELS["bert"](config_of("bert")))
    ids = batch(0)[0]
    encoder = model.module.bert.encoder
    hidden = torch.ones(BATCH, LENGTH, HIDDEN)
    positions = torch.arange(LENGTH)[None]
    assert encoder(hidden, position_ids=positions)[0].shape == hidden.shape
    assert model.module(input_ids=ids, position_ids=positions).logits.shape[:2] == ids.shape
    with pytest.raises(UnsupportedTrainingError, match="encoder_hidden_states is not supported"):
        encoder(hidden, encoder_hidden_states=hidden)
    encoder.config.output_hidden_states = True
    with pytest.raises(UnsupportedTrainingError, match=r"config\.output_hidden_states=True"):
        encoder(hidden)


def test_an_encoder_takes_the_positions_of_the_model_around_it(smp_world):
    smp_world.run(encoder_calls, ranks=2, config={"tensor_parallel_degree": 2, "ddp": True})


def part_of_state() -> None:
    """Any entry with Hugging Face's name is loaded by itself."""
    api.init()
    with api.tensor_parallelism():
        model = api.DistributedModel(MODELS["gpt2"](config_of("gpt2")))
    weight = drawn("gpt2").transformer.wte.weight.detach()
    result = model.load_state_dict({"transformer.wte.weight": weight}, strict=False)
    assert result.unexpected_keys == []
    assert torch.equal(model.state_dict()["word_embedding.weight"], weight)
    local = model.local_state_dict()
    for function in (
        gpt2.translate_state_dict_to_hf_gpt2,
        gpt2.translate_hf_state_dict_to_smdistributed_gpt2,
    ):
        with pytest.raises(ArgumentError, match="Gather the whole first"):
            function(local)


def test_a_part_of_a_state_is_loaded_and_a_ranks_part_is_not_translated(smp_world):
    smp_world.run(part_of_state, ranks=2, config={"tensor_parallel_degree": 2, "ddp": True})


def untied(family: str, folder: str) -> None:
    """A head with a weight of its own goes through states and full checkpoints both ways."""
    api.init()
    config = config_of(family)
    config.tie_word_embeddings = False
    truth = MODELS[family](config)
    state = truth.state_dict()
    assert not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    with api.tensor_parallelism():
        model = api.DistributedModel(MODELS[family](config))
    assert not model.load_state_dict(state).missing_keys
    public = importlib.import_module(f"smp_core.torch.nn.huggingface.{family}")
    there = getattr(public, f"translate_state_dict_to_hf_{family}")
    back = getattr(public, f"translate_hf_state_dict_to_smdistributed_{family}")
    ours = model.state_dict()
    assert back(state).keys() == ours.keys()
    api.save_checkpoint(folder, "whole", partial=False, model=model)
    whole = torch.load(f"{folder}/whole", weights_only=True)
    for found in (there(ours), there(back(state)), whole):
        for name in truth.state_dict():
            assert torch.equal(found[name], state[name]), name
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.zero_()
    api.resume_from_checkpoint(folder, "whole", partial=False)
    again = model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in ours.items())


@pytest.mark.parametrize("family", ["gpt2", "gptneo"])
def test_a_head_that_is_not_tied_is_kept(smp_world, family, tmp_path):
    config = {"tensor_parallel_degree": 2, "ddp": True}
    smp_world.run(untied, family, str(tmp_path), ranks=2, config=config)


class Blocks(torch.nn.Module):
    """Layers of GPT-2 in a model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        config = config_of("gpt2")
        config._attn_implementation = "eager"
        block = importlib.import_module("transformers.models.gpt2.modeling_gpt2").GPT2Block
        self.h = torch.nn.ModuleList(block(config, layer_idx=number) for number in range(LAYERS))

    def forward(self, x, mask):
        for block in self.h:
            x = block(x, attention_mask=mask)
            x = x if isinstance(x, torch.Tensor) else x[0]
        return x


@api.step
def blocks_step(model, x, mask):
    output = model(x, mask)
    model.backward(output.square().sum())
    return output


def layers() -> None:
    torch.set_default_dtype(torch.float64)
    api.init()
    truth = Blocks()
    state = copy.deepcopy(truth.state_dict())
    block = type(truth.h[0])
    hooks = gpt2.get_hf_gpt2_transformer_layer_hooks()
    api.tp_register_with_module(block, api.nn.DistributedTransformerLayer, *hooks)
    with api.tensor_parallelism():
        model = api.DistributedModel(Blocks())
    assert all(isinstance(each, api.nn.DistributedTransformerLayer) for each in model.module.h)
    ours = {
        name.replace("transformer.seq_layers.", "h."): value
        for name, value in gpt2.translation("").to_ours(state).items()
    }
    model.load_state_dict(ours)
    x = torch.linspace(-1, 1, BATCH * LENGTH * HIDDEN).view(BATCH, LENGTH, HIDDEN).sin()
    causal = torch.full((LENGTH, LENGTH), torch.finfo(x.dtype).min).triu(1)
    expected = truth(x, causal.view(1, 1, LENGTH, LENGTH))
    rough = copy.deepcopy(truth).float()(x.float(), causal.float().view(1, 1, LENGTH, LENGTH))
    padding = torch.zeros(BATCH, 1, 1, LENGTH)
    near("output", blocks_step(model, x, padding).concat(), rough, expected)


def test_layers_of_gpt2_are_registered_by_hooks(smp_world):
    config = {"tensor_parallel_degree": 2, "ddp": True}
    smp_world.run(layers, ranks=2, config=config)


@api.step
def base_step(model, ids, mask):
    hidden = model(ids, attention_mask=mask).last_hidden_state
    model.backward(hidden.square().sum())
    return hidden


def layers_inside() -> None:
    """Hugging Face's GPT2Model calls its layers, which alone are distributed."""
    torch.set_default_dtype(torch.float64)
    api.init()
    truth = drawn("gpt2").transformer.eval()
    block = type(truth.h[0])
    hooks = gpt2.get_hf_gpt2_transformer_layer_hooks()
    api.tp_register_with_module(block, api.nn.DistributedTransformerLayer, *hooks)
    module = type(truth)(config_of("gpt2"))
    api.set_tensor_parallelism(module.h)
    model = api.DistributedModel(module)
    assert all(isinstance(each, api.nn.DistributedTransformerLayer) for each in model.module.h)
    state = {}
    for name, value in truth.state_dict().items():
        translated = gpt2.translation("").to_ours({name: value})
        for ours, part in translated.items() if name.startswith("h.") else ((name, value),):
            state[ours.replace("transformer.seq_layers.", "h.")] = part
    model.load_state_dict(state)
    ids, mask, _ = batch(api.dp_rank())
    coarse = copy.deepcopy(truth).float()
    expected = truth(ids, attention_mask=mask).last_hidden_state
    rough = coarse(ids, attention_mask=mask).last_hidden_state
    # A plain model may give a position that is masked any value.
    rows = mask.bool()
    near("padded", base_step(model, ids, mask).concat()[rows], rough[rows], expected[rows])
    near("whole", model.module(ids)[0], coarse(ids)[0], truth(ids)[0])
    hidden = torch.ones(BATCH, LENGTH, HIDDEN)
    layer = model.module.h[0]
    for refused in ({"head_mask": hidden}, {"encoder_hidden_states": hidden}, {"layer_past": (1,)}):
        with pytest.raises(UnsupportedTrainingError, match="is not supported with tensor"):
            layer(hidden, **refused)


def test_layers_inside_of_gpt2_are_registered_by_hooks(smp_world):
    config = {"tensor_parallel_degree": 2, "ddp": True}
    smp_world.run(layers_inside, ranks=2, config=config)


def unsupported() -> None:
    api.init()
    config = config_of("gpt2")
    config.add_cross_attention = True
    with api.tensor_parallelism():
        model = api.DistributedModel(MODELS["gpt2"](config))
    assert type(model.get_module()) is MODELS["gpt2"]
    assert api.state.module_manager.translate_functions == ()


def test_a_model_with_an_unsupported_configuration_stays_and_the_log_says_why(smp_world, caplog):
    smp_world.run(unsupported, ranks=2, config={"tensor_parallel_degree": 2, "ddp": True})
    assert "the model itself: add_cross_attention is not supported" in caplog.text


def frozen(tied: bool) -> None:
    """The embedding and the first layer's attention are frozen, and so are their counterparts."""
    api.init()
    config = config_of("gpt2")
    config.tie_word_embeddings = tied
    with api.tensor_parallelism():
        module = MODELS["gpt2"](config)
    module.transformer.wte.requires_grad_(False)
    module.transformer.h[0].attn.c_attn.requires_grad_(False)
    model = api.DistributedModel(module)
    assert {name for name, each in model.module.named_parameters() if not each.requires_grad} == {
        "word_embedding.weight",
        *(
            f"transformer.seq_layers.0.attention.{part}.{kind}"
            for part in ("query", "key", "value")
            for kind in ("weight", "bias")
        ),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parameters_stay_frozen(smp_world, tied):
    smp_world.run(frozen, tied, ranks=2, config={"tensor_parallel_degree": 2, "ddp": True})


def marked() -> None:
    """Partitions and activation checkpointing of layers are those of the distributed layers."""
    api.init()
    with api.tensor_parallelism():
        module = MODELS["gpt2"](config_of("gpt2"))
        linear = torch.nn.Linear(8, 8)
    first, second = module.transformer.h
    api.set_activation_checkpointing(first, preserve_rng_state=False)
    api.set_activation_checkpointing(linear)
    api.set_activation_checkpointing(second.mlp)
    api.set_partition(second, 1)
    model = api.DistributedModel(torch.nn.ModuleDict({"gpt": module, "linear": linear}))
    layers = model.module["gpt"].transformer.seq_layers
    policies = [vars(each).get(activations.MARK) for each in (*layers, model.module["linear"])]
    assert policies == [
        activations.CheckpointPolicy(preserve_rng_state=False),
        None,
        activations.CheckpointPolicy(),
    ]
    assert [PARTITION.of(each) for each in layers] == [None, 1]
    assert all(PARTITION.of(each) == 1 for each in layers[1].modules())


def test_marks_of_layers_are_carried_over(smp_world, caplog):
    config = {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "auto_partition": False,
        "default_partition": 0,
        "ddp": True,
    }
    smp_world.run(marked, ranks=4, config=config)
    assert "no such module: gpt.transformer.h.1.mlp" in caplog.text


def checkpointed(family: str) -> None:
    """Hugging Face's own call is honoured, layer by layer, and training stays the same."""
    api.init()
    with api.tensor_parallelism():
        module = MODELS[family](config_of(family))
    module.gradient_checkpointing_enable()
    model = api.DistributedModel(module)
    marks = [path for path, each in model.module.named_modules() if activations.MARK in vars(each)]
    assert [path.rpartition("seq_layers.")[2] for path in marks] == ["0", "1"]
    train_step(model, family, *batch(api.dp_rank()))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_is_activation_checkpointing_of_layers(smp_world, family):
    smp_world.run(checkpointed, family, ranks=2, config={"tensor_parallel_degree": 2, "ddp": True})


def trained(family: str) -> None:
    """The losses of a few steps are those of the plain model."""
    torch.set_default_dtype(torch.float64)
    api.init()
    prescaled = api.state.cfg.prescaled_batch
    share, shares = (
        (api.rdp_rank(), api.rdp_size()) if prescaled else (api.dp_rank(), api.dp_size())
    )
    truth = drawn(family)
    with api.tensor_parallelism():
        model = api.DistributedModel(MODELS[family](config_of(family)))
    model.load_state_dict(copy.deepcopy(truth.state_dict()))
    optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    plain = torch.optim.SGD(truth.parameters(), lr=0.125)
    rough = copy.deepcopy(truth).float()
    coarse = torch.optim.SGD(rough.parameters(), lr=0.125)
    for _ in range(3):
        loss, _ = train_step(model, family, *batch(share))
        optimizer.step()
        optimizer.zero_grad()
        results = []
        for other, sgd in ((truth, plain), (rough, coarse)):
            results.append(plain_gradients(family, other, share, shares)[0])
            sgd.step()
            sgd.zero_grad()
        (expected, logits), (_, rounded) = results
        # Twice the ratio rule's 4: the cross-entropy takes a label's score from the logarithm of the sum of all.
        bound = 8 * (rounded.double() - logits).abs().max()
        near("loss", loss.reduce_mean(), None, expected, bound)


@pytest.mark.parametrize(
    ("family", "pp", "tp", "sdp"), [("gpt2", 2, 2, 1), ("gptj", 1, 2, 2), ("bert", 2, 4, 1)]
)
def test_it_trains_over_pipelines_and_shards(smp_world, family, pp, tp, sdp):
    config = {
        "pipeline_parallel_degree": pp,
        "tensor_parallel_degree": tp,
        "sharded_data_parallel_degree": sdp,
        "sdp_param_persistence_threshold": 20,
        "sdp_gradient_clipping": 1e30,
        "prescaled_batch": sdp > 1,
        "ddp": True,
    }
    smp_world.run(trained, family, ranks=8, config=config)
