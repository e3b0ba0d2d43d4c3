"""The architectures of the table: how a tiny model of each is made, and a batch of its inputs.

Nothing is downloaded: models of Hugging Face are made of configurations. No model drops activations, because dropout
draws other numbers in plain PyTorch.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tools.models import plain_models as plain

#: Batch normalisation over two samples divides by their difference, which may be nearly zero: four rows.
ROWS, LENGTH, SIDE, CLASSES = 4, 8, 8, 5
Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name, family: as the table shows them.
        build: makes the model.
        inputs: the kind of the batch, a key of `INPUTS`.
        refused: the layouts that do not train it.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: str
    refused: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        """A model with the same weights each time, large enough that every part of it counts."""
        torch.manual_seed(0)
        model = self.build().train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 8)
        return model

    def batch(self, rows: int, seed: int) -> Batch:
        """So many samples, with labels."""
        return INPUTS[self.inputs](torch.Generator().manual_seed(seed), rows)

    def loss(self, model: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a batch: of classes by the labels, or of values by a slope that tells them apart."""
        given = dict(batch)
        labels = given.pop("labels", None)
        output = model(**given)
        if not isinstance(output, Tensor):
            output = output.logits if "logits" in output else output.last_hidden_state
        if labels is not None:
            return cross_entropy(output.flatten(0, -2), labels.flatten())
        slope = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        loss: Tensor = (output - slope).square().mean()
        return loss


# ---- Batches --------------------------------------------------------------------------------------


def _ids(generator: torch.Generator, rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(2, plain.WORDS, (rows, length), generator=generator)


def _image(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randn(rows, 3, SIDE, SIDE, generator=generator)


def _classes(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randint(CLASSES, (rows,), generator=generator)


def _masked(generator: torch.Generator, rows: int) -> Batch:
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[::2, -2:] = 0  # every second sample is shorter
    return {"input_ids": _ids(generator, rows), "attention_mask": mask}


INPUTS: dict[str, Callable[[torch.Generator, int], Batch]] = {
    "words": lambda g, rows: {"ids": _ids(g, rows), "labels": _ids(g, rows)},
    "few words": lambda g, rows: {"ids": _ids(g, rows, 1), "labels": _ids(g, rows, 1)},
    "image": lambda g, rows: {"x": _image(g, rows)},
    "image, class": lambda g, rows: {"input": _image(g, rows), "labels": _classes(g, rows)},
    "pair, class": lambda g, rows: {"x": _image(g, rows), "labels": _classes(g, rows)},
    "signal, class": lambda g, rows: {
        "input": torch.randn(rows, 3, LENGTH, generator=g),
        "labels": _classes(g, rows),
    },
    "tokens": lambda g, rows: {**_masked(g, rows), "labels": _ids(g, rows)},
    "tokens, values": _masked,
    "two texts": lambda g, rows: {
        **_masked(g, rows),
        "decoder_input_ids": _ids(g, rows, LENGTH - 2),
        "labels": _ids(g, rows, LENGTH - 2),
    },
    "pixels": lambda g, rows: {"pixel_values": _image(g, rows)},
    "pixels, class": lambda g, rows: {"pixel_values": _image(g, rows), "labels": _classes(g, rows)},
    "sound, text": lambda g, rows: {
        "input_features": torch.randn(rows, 4, 2 * LENGTH, generator=g),
        "decoder_input_ids": _ids(g, rows),
        "labels": _ids(g, rows),
    },
}


# ---- Models of Hugging Face -----------------------------------------------------------------------

#: Sizes by the names that most configurations have, and what else all of them take.
_SIZES = {
    "vocab_size": plain.WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH + 4,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_BERT = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT = {
    "vocab_size": plain.WORDS,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_NEO = {
    "vocab_size": plain.WORDS,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": LENGTH,
    "window_size": 3,
    "attention_types": [[["global", "local"], 1]],
    "resid_dropout": 0.0,
    "embed_dropout": 0.0,
    "attention_dropout": 0.0,
}
_BOTH = {
    "vocab_size": plain.WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
}
_T5 = {
    "vocab_size": plain.WORDS,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
_PATCHES = {
    **{name: _BERT[name] for name in _BERT if "vocab" not in name and "position" not in name},
    "image_size": SIDE,
    "patch_size": 4,
}
#: The other ways of calling experts have no float64, which the truth is computed in.
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def _hugging(name: str, model: str, inputs: str, **fields: Any) -> Architecture:
    """A model by the name of its class, whose configuration is called alike."""

    def build() -> nn.Module:
        library = importlib.import_module("transformers")
        kind = getattr(library, model)
        config = kind.config_class(**fields)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # a cache is for generation
        made: nn.Module = kind(config)
        return made

    return Architecture(name, "Hugging Face", build, inputs)


# ---- The table ------------------------------------------------------------------------------------

_SHARDED = ("sharded 2", "sharded 4", "tp 2 x sharded 2")

_OWN = (
    ("Convolutional network", "convolutional", plain.convolutional, "image, class"),
    ("Residual network", "convolutional", plain.residual, "image, class"),
    ("Separable convolutions", "convolutional", plain.separable, "image, class"),
    ("Dense connections", "convolutional", plain.Dense, "pair, class"),
    ("U-Net", "convolutional", plain.UNet, "image"),
    ("Temporal convolutions, weight norm", "convolutional", plain.temporal, "signal, class"),
    ("MLP, frozen layer", "feed-forward", plain.normalised, "image, class"),
    ("MLP-Mixer", "feed-forward", plain.mixer, "image, class"),
    ("RNN", "recurrent", lambda: plain.Recurrent(nn.RNN), "words"),
    ("LSTM, two layers", "recurrent", lambda: plain.Recurrent(nn.LSTM, num_layers=2), "words"),
    ("GRU, both ways", "recurrent", lambda: plain.Recurrent(nn.GRU, bidirectional=True), "words"),
    ("LSTM cell in a loop", "recurrent", plain.Cell, "words"),
    ("GRU encoder and decoder", "recurrent", plain.Sequences, "words"),
    ("`torch.nn.Transformer`", "transformer", lambda: plain.Transformer(True), "words"),
    ("`torch.nn.TransformerEncoder`", "transformer", lambda: plain.Transformer(False), "words"),
    (
        "Experts, some of them unused",
        "mixture of experts",
        lambda: plain.Experts(1),
        "few words",
        ("tp 2", *_SHARDED),
    ),
    ("Experts, best two", "mixture of experts", lambda: plain.Experts(2), "words", ("tp 2",)),
    ("Experts, all", "mixture of experts", lambda: plain.Experts(None), "words"),
    ("Tied embedding and head", "shared weights", plain.TiedWords, "words"),
    (
        "Tied autoencoder",
        "shared weights",
        plain.Autoencoder,
        "image",
        ("tp 2", "tp 2 x sharded 2"),
    ),
    ("Siamese network", "shared weights", plain.Siamese, "pair, class"),
    ("Universal transformer", "shared weights", plain.Universal, "words"),
)

ARCHITECTURES = (
    *(Architecture(*each) for each in _OWN),
    _hugging("GPT-2", "GPT2LMHeadModel", "tokens", **_GPT),
    _hugging("GPT-Neo", "GPTNeoForCausalLM", "tokens", **_NEO),
    _hugging("GPT-J", "GPTJForCausalLM", "tokens", **_GPT, rotary_dim=2),
    _hugging("GPT-NeoX", "GPTNeoXForCausalLM", "tokens", **_SIZES),
    _hugging(
        "OPT",
        "OPTForCausalLM",
        "tokens",
        **_SIZES,
        ffn_dim=24,
        word_embed_proj_dim=16,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    _hugging(
        "Bloom", "BloomForCausalLM", "tokens", vocab_size=24, hidden_size=16, n_layer=2, n_head=4
    ),
    _hugging("Llama", "LlamaForCausalLM", "tokens", **_GROUPED),
    _hugging("Mistral", "MistralForCausalLM", "tokens", **_GROUPED, sliding_window=3),
    _hugging("Qwen2", "Qwen2ForCausalLM", "tokens", **_GROUPED),
    _hugging("Gemma", "GemmaForCausalLM", "tokens", **_GROUPED, head_dim=4),
    _hugging("Phi", "PhiForCausalLM", "tokens", **_GROUPED),
    _hugging("Falcon", "FalconForCausalLM", "tokens", **_SIZES),
    _hugging("StableLM", "StableLmForCausalLM", "tokens", **_GROUPED),
    _hugging("Mamba", "MambaForCausalLM", "tokens", **{**_SIZES, "state_size": 4}),
    _hugging(
        "Mixtral (experts)",
        "MixtralForCausalLM",
        "tokens",
        **_GROUPED,
        **_EXPERTS,
        num_local_experts=4,
    ),
    _hugging(
        "Qwen2-MoE (experts)",
        "Qwen2MoeForCausalLM",
        "tokens",
        **_GROUPED,
        **_EXPERTS,
        num_experts=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
    _hugging("BERT", "BertForMaskedLM", "tokens", **_BERT),
    _hugging("RoBERTa", "RobertaForMaskedLM", "tokens", **_BERT),
    _hugging(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "tokens",
        vocab_size=plain.WORDS,
        dim=16,
        n_layers=2,
        n_heads=4,
        hidden_dim=24,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    _hugging(
        "ALBERT (one layer for all)", "AlbertForMaskedLM", "tokens", **_BERT, embedding_size=8
    ),
    _hugging("ELECTRA", "ElectraForMaskedLM", "tokens", **_BERT, embedding_size=8),
    dataclasses.replace(
        _hugging(
            "DeBERTa-v2",
            "DebertaV2ForMaskedLM",
            "tokens",
            **_BERT,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
        ),
        refused=("tp 2", "tp 2 x sharded 2"),  # layers read the embedding of relative positions
    ),
    _hugging("T5", "T5ForConditionalGeneration", "two texts", **_T5),
    _hugging("BART", "BartForConditionalGeneration", "two texts", **_BOTH),
    _hugging("CLIP text", "CLIPTextModel", "tokens, values", **_SIZES, eos_token_id=1),
    _hugging("ViT", "ViTForImageClassification", "pixels, class", **_PATCHES, num_labels=CLASSES),
    _hugging(
        "Whisper",
        "WhisperForConditionalGeneration",
        "sound, text",
        **_BOTH,
        num_mel_bins=4,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    ),
    _hugging(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "pixels, class",
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_stages=2,
        patch_size=2,
        num_labels=CLASSES,
    ),
    _hugging(
        "ResNet",
        "ResNetForImageClassification",
        "pixels, class",
        embedding_size=4,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_labels=CLASSES,
    ),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
