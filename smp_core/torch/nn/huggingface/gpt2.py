"""Hugging Face's GPT-2: GPT2LMHeadModel and GPT2Model are distributed (API 1.10)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.nn.huggingface import calls, language_model, states
from smp_core.torch.nn.huggingface.configuration import Configuration, activation, is_tied
from smp_core.torch.tensor_parallel.registry import Arguments, Registration
from smp_core.torch.tensor_parallel.translation import Translation, pairs

#: Arguments of GPT2Block.forward, of any version, that a distributed layer does not support.
_REFUSED_BY_LAYERS = (
    "layer_past",
    "past_key_value",
    "past_key_values",
    "head_mask",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "output_attentions",
)


def translation(base: str = "transformer.", tied: bool = True) -> Translation:
    """The translation of a model whose layers lie below ``base``."""
    theirs, ours = base + "h.{}.", "transformer.seq_layers.{}."
    qkv = [f"{ours}attention.{which}" for which in ("query", "key", "value")]
    return Translation(
        (
            *pairs(base + "wte", "word_embedding", "weight"),
            *pairs(base + "wpe", "position_embedding", "weight"),
            *pairs(base + "ln_f", "layernorm"),
            *pairs(theirs + "ln_1", ours + "attention.pre_layernorm"),
            *pairs(theirs + "attn.c_attn", qkv, transposed=True),
            *pairs(theirs + "attn.c_proj", ours + "attention.dense", transposed=True),
            *pairs(theirs + "ln_2", ours + "output.pre_layernorm"),
            *pairs(theirs + "mlp.c_fc", ours + "output.dense1", transposed=True),
            *pairs(theirs + "mlp.c_proj", ours + "output.dense2", transposed=True),
        ),
        tied={"lm_head.weight": base + "wte.weight"} if base and tied else {},
        dropped=(theirs + "attn.bias", theirs + "attn.masked_bias"),
    )


def layer_arguments(config: Configuration) -> dict[str, object]:
    """The arguments of a DistributedTransformerLayer for a GPT2Block with this configuration."""
    if config.add_cross_attention:
        raise UnsupportedTrainingError("add_cross_attention is not supported")
    return {
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.n_positions,
        "pre_layernorm": True,
        "post_layernorm": False,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


def registration(cls: type[nn.Module]) -> Registration:
    """The registration of GPT2LMHeadModel, or of GPT2Model."""
    head = cls.__name__ == "GPT2LMHeadModel"

    def arguments(config: Configuration) -> dict[str, object]:
        return {
            **layer_arguments(config),
            "num_layers": config.n_layer,
            "vocab_size": config.vocab_size,
            "num_positions": config.n_positions,
            "embedding_dropout_prob": config.embd_pdrop,
            "add_lm_head": head,
            "tie_input_output_embedding": config.tie_word_embeddings,
        }

    base = "transformer." if head else ""
    return language_model.registration(
        cls, arguments, lambda module: translation(base, is_tied(module))
    )


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: Mapping[str, object],
) -> dict[str, object]:
    """The state of a GPT2LMHeadModel, for the distributed one."""
    return states.to_ours("gpt2", translation(), state_dict)


#: The same, by the name that scripts before SMP 1.10 use.
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2


def translate_state_dict_to_hf_gpt2(
    state_dict: Mapping[str, object], max_seq_len: int | None = None
) -> dict[str, object]:
    """The whole state of the distributed model, for a GPT2LMHeadModel.

    ``max_seq_len``: also the causal masks of this length that old versions of Transformers keep in their states.
    """
    found = states.to_theirs("gpt2", translation(), state_dict)
    if max_seq_len is not None:
        for key in [key for key in found if key.endswith(".attn.c_attn.bias")]:
            attention = key.removesuffix("c_attn.bias")
            mask = torch.ones(max_seq_len, max_seq_len, dtype=torch.uint8).tril()
            found[f"{attention}bias"] = mask.view(1, 1, max_seq_len, max_seq_len)
            found[f"{attention}masked_bias"] = torch.tensor(-1e4)
    return found


def get_hf_gpt2_transformer_layer_hooks() -> tuple[
    Callable[..., object], Callable[..., object], Callable[..., object]
]:
    """The hooks with which ``smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)``
    registers the layers of GPT-2: of ``__init__``, of ``forward``, and of its value.

    Arguments and value are those of the installed version's GPT2Block. Caches stay empty. The hook of ``forward``
    raises UnsupportedTrainingError for a cache with content, masks of heads, cross states, and requests for attentions.
    """
    transformers = importlib.import_module("transformers")
    block: type[nn.Module] = importlib.import_module(
        "transformers.models.gpt2.modeling_gpt2"
    ).GPT2Block
    named = calls.by_name(block)
    has_presents = "layer_past" in inspect.signature(block.forward).parameters
    returns_tensor = int(transformers.__version__.partition(".")[0]) >= 5

    def init_hook(config: Configuration, layer_idx: int | None = None) -> Arguments:
        return (), {**layer_arguments(config), "layer_idx": layer_idx or 0}

    def forward_hook(*args: object, **kwargs: object) -> Arguments:
        given = named(*args, **kwargs)[1]
        for what in _REFUSED_BY_LAYERS:
            value = given.get(what)
            length = getattr(value, "get_seq_length", None)
            empty = length is not None and length() == 0  # a cache that the model has made
            if value is not None and value is not False and not empty:
                raise UnsupportedTrainingError(
                    f"{block.__name__}: {what} is not supported with tensor parallelism. Leave it out"
                )
        mask = given.get("attention_mask")
        assert mask is None or isinstance(mask, torch.Tensor)
        return ((given["hidden_states"], calls.masked(mask)),), {}

    def return_hook(value: tuple[torch.Tensor, ...]) -> object:
        if returns_tensor:
            return value[0]
        return (value[0], None) if has_presents else (value[0],)

    return init_hook, forward_hook, return_hook
