"""Hugging Face's GPT-Neo: GPTNeoForCausalLM and GPTNeoModel are distributed (API 1.10)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smp_core.torch.nn.huggingface import language_model, states
from smp_core.torch.nn.huggingface.configuration import Configuration, activation, is_tied
from smp_core.torch.tensor_parallel.registry import Registration
from smp_core.torch.tensor_parallel.translation import Translation, pairs


def translation(base: str = "transformer.", tied: bool = True) -> Translation:
    """The translation of a model whose layers lie below ``base``."""
    theirs, ours = base + "h.{}.", "transformer.seq_layers.{}."
    attention = theirs + "attn.attention."
    return Translation(
        (
            *pairs(base + "wte", "word_embedding", "weight"),
            *pairs(base + "wpe", "position_embedding", "weight"),
            *pairs(base + "ln_f", "layernorm"),
            *pairs(theirs + "ln_1", ours + "attention.pre_layernorm"),
            *pairs(attention + "q_proj", ours + "attention.query", "weight"),
            *pairs(attention + "k_proj", ours + "attention.key", "weight"),
            *pairs(attention + "v_proj", ours + "attention.value", "weight"),
            *pairs(attention + "out_proj", ours + "attention.dense"),
            *pairs(theirs + "ln_2", ours + "output.pre_layernorm"),
            *pairs(theirs + "mlp.c_fc", ours + "output.dense1"),
            *pairs(theirs + "mlp.c_proj", ours + "output.dense2"),
        ),
        tied={"lm_head.weight": base + "wte.weight"} if base and tied else {},
        dropped=(attention + "bias", attention + "masked_bias"),
    )


def registration(cls: type[nn.Module]) -> Registration:
    """The registration of GPTNeoForCausalLM, or of GPTNeoModel."""
    head = cls.__name__ == "GPTNeoForCausalLM"

    def arguments(config: Configuration) -> dict[str, object]:
        windows = {"global": None, "local": config.window_size}
        return {
            "num_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "attention_head_size": config.hidden_size // config.num_heads,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_positions": config.max_position_embeddings,
            "attention_dropout_prob": config.attention_dropout,
            "hidden_dropout_prob": config.resid_dropout,
            "embedding_dropout_prob": config.embed_dropout,
            "activation": activation(config.activation_function),
            "layernorm_epsilon": config.layer_norm_epsilon,
            "initializer_range": config.initializer_range,
            "use_normal_initialization": True,
            "causal_mask_size": config.max_position_embeddings,
            "window_sizes": tuple(windows[each] for each in config.attention_layers),
            "pre_layernorm": True,
            "post_layernorm": False,
            "scale_attention_scores": False,
            "attention_in_fp32": True,
            "use_qkv_bias": False,
            "add_lm_head": head,
            "tie_input_output_embedding": config.tie_word_embeddings,
        }

    base = "transformer." if head else ""
    return language_model.registration(
        cls, arguments, lambda module: translation(base, is_tied(module))
    )


def translate_hf_state_dict_to_smdistributed_gptneo(
    state_dict: Mapping[str, object],
) -> dict[str, object]:
    """The state of a GPTNeoForCausalLM, for the distributed one."""
    return states.to_ours("gptneo", translation(), state_dict)


def translate_state_dict_to_hf_gptneo(
    state_dict: Mapping[str, object], max_seq_len: int | None = None
) -> dict[str, object]:
    """The whole state of the distributed model, for a GPTNeoForCausalLM. ``max_seq_len`` has no effect."""
    return states.to_theirs("gptneo", translation(), state_dict)
