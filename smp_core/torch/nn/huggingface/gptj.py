"""Hugging Face's GPT-J: GPTJForCausalLM and GPTJModel are distributed (API 1.10)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.nn.huggingface import language_model, states
from smp_core.torch.nn.huggingface.configuration import Configuration, activation
from smp_core.torch.tensor_parallel.registry import Registration
from smp_core.torch.tensor_parallel.translation import Translation, pairs


def translation(base: str = "transformer.") -> Translation:
    """The translation of a model whose layers lie below ``base``."""
    theirs, ours = base + "h.{}.", "transformer.seq_layers.{}."
    return Translation(
        (
            *pairs(base + "wte", "word_embedding", "weight"),
            *pairs(base + "ln_f", "layernorm"),
            *pairs(theirs + "ln_1", ours + "attention.pre_layernorm"),
            *pairs(theirs + "attn.q_proj", ours + "attention.query", "weight"),
            *pairs(theirs + "attn.k_proj", ours + "attention.key", "weight"),
            *pairs(theirs + "attn.v_proj", ours + "attention.value", "weight"),
            *pairs(theirs + "attn.out_proj", ours + "attention.dense", "weight"),
            *pairs(theirs + "mlp.fc_in", ours + "output.dense1"),
            *pairs(theirs + "mlp.fc_out", ours + "output.dense2"),
        ),
        dropped=(theirs + "attn.bias", theirs + "attn.masked_bias"),
    )


def registration(cls: type[nn.Module]) -> Registration:
    """The registration of GPTJForCausalLM, or of GPTJModel."""
    head = cls.__name__ == "GPTJForCausalLM"

    def arguments(config: Configuration) -> dict[str, object]:
        if config.tie_word_embeddings:
            raise UnsupportedTrainingError("tie_word_embeddings is not supported")
        if config.rotary_dim is None:
            raise UnsupportedTrainingError("rotary_dim=None is not supported")
        return {
            "num_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "attention_head_size": config.n_embd // config.n_head,
            "hidden_size": config.n_embd,
            "intermediate_size": config.n_inner or 4 * config.n_embd,
            "vocab_size": config.vocab_size,
            "num_positions": 0,
            "attention_dropout_prob": config.attn_pdrop,
            "hidden_dropout_prob": config.resid_pdrop,
            "embedding_dropout_prob": config.embd_pdrop,
            "activation": activation(config.activation_function),
            "layernorm_epsilon": config.layer_norm_epsilon,
            "initializer_range": config.initializer_range,
            "use_normal_initialization": True,
            "causal_mask_size": config.n_positions,
            "rotary_dim": config.rotary_dim,
            "pre_layernorm": True,
            "post_layernorm": False,
            "parallel_attn_output": True,
            "attention_in_fp32": True,
            "use_qkv_bias": False,
            "use_attn_dense_bias": False,
            "add_lm_head": head,
            "tie_input_output_embedding": False,
            "use_lm_head_bias": True,
        }

    base = "transformer." if head else ""
    return language_model.registration(cls, arguments, lambda _: translation(base))


def translate_hf_state_dict_to_smdistributed_gptj(
    state_dict: Mapping[str, object],
) -> dict[str, object]:
    """The state of a GPTJForCausalLM, for the distributed one."""
    return states.to_ours("gptj", translation(), state_dict)


#: The same, by the names that scripts use.
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj


def translate_state_dict_to_hf_gptj(
    state_dict: Mapping[str, object], max_seq_len: int | None = None
) -> dict[str, object]:
    """The whole state of the distributed model, for a GPTJForCausalLM. ``max_seq_len`` has no effect."""
    return states.to_theirs("gptj", translation(), state_dict)
