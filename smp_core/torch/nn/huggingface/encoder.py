"""Encoders of Hugging Face's BERT and RoBERTa: their calls, arguments and states, for a DistributedTransformer."""

from __future__ import annotations

import torch
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.nn.huggingface import calls
from smp_core.torch.nn.huggingface.configuration import Configuration, activation, of_config
from smp_core.torch.nn.transformer import DistributedTransformer
from smp_core.torch.tensor_parallel.registry import Registration
from smp_core.torch.tensor_parallel.translation import Translation, pairs

#: Arguments of forward that change nothing in an encoder: a model around it passes them.
_WITHOUT_EFFECT = frozenset({"cache_position", "position_ids", "use_cache"})


class Encoder(DistributedTransformer):
    """A DistributedTransformer that is called as Hugging Face's encoders are, and returns what they return.

    Attributes:
        config: the configuration of Hugging Face's model.
    """

    config: Configuration

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        return_dict: bool | None = True,
        **options: object,
    ) -> object:
        """The hidden states after the last layer; all ranks of the TP group call it.

        Raises UnsupportedTrainingError for an argument that is not supported: cross states, caches, masks of heads, and
        requests for attentions and hidden states, also those of the configuration.
        """
        calls.check_nothing_else(type(self).__name__, self.config, options, _WITHOUT_EFFECT)
        hidden = super().forward((hidden_states, calls.masked(attention_mask)))[0]
        assert isinstance(hidden, torch.Tensor)
        return calls.hidden_states(self.config, hidden, return_dict)


_THEIRS, _OURS = "layer.{}.", "seq_layers.{}."

TRANSLATION = Translation(
    (
        *pairs(_THEIRS + "attention.self.query", _OURS + "attention.query"),
        *pairs(_THEIRS + "attention.self.key", _OURS + "attention.key"),
        *pairs(_THEIRS + "attention.self.value", _OURS + "attention.value"),
        *pairs(_THEIRS + "attention.output.dense", _OURS + "attention.dense"),
        *pairs(_THEIRS + "attention.output.LayerNorm", _OURS + "attention.layernorm"),
        *pairs(_THEIRS + "intermediate.dense", _OURS + "output.dense1"),
        *pairs(_THEIRS + "output.dense", _OURS + "output.dense2"),
        *pairs(_THEIRS + "output.LayerNorm", _OURS + "output.layernorm"),
    )
)


def arguments(config: Configuration) -> tuple[tuple[()], dict[str, object]]:
    """The arguments of a DistributedTransformer for an encoder with this configuration.

    Raises UnsupportedTrainingError for a decoder, and for relative positions.
    """
    if config.is_decoder or config.add_cross_attention:
        raise UnsupportedTrainingError("is_decoder and add_cross_attention are not supported")
    if getattr(config, "position_embedding_type", "absolute") not in ("absolute", None):
        raise UnsupportedTrainingError(
            f"position_embedding_type={config.position_embedding_type!r} is not supported"
        )
    return (), {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
    }


def registration(cls: type[nn.Module]) -> Registration:
    """The registration of an encoder's class."""
    return Registration(
        cls,
        Encoder,
        init_hook=arguments,
        forward_hook=calls.by_name(cls),
        arguments=of_config,
        keeps=("config",),
        translation=lambda _: TRANSLATION,
    )
