"""``smp.nn.DistributedTransformerOutputLayer``: the two linear layers after attention (API 1.10)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from smp_core.errors import ArgumentError
from smp_core.torch.fused import warn_options
from smp_core.torch.nn.block import (
    Caller,
    TransformerBlock,
    check_sizes,
    hidden_states_of,
    unpacked,
)
from smp_core.torch.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear

Tensor = torch.Tensor

#: The activations by name. SMP documents "gelu" and "relu"; the others are those of Hugging Face's models.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": functools.partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class DistributedTransformerOutputLayer(TransformerBlock):
    """Two linear layers with an activation between them, dropout, residual addition and layer normalisation.

    Args:
        hidden_size: the number of channels of hidden states.
        intermediate_size: the number of channels between the linear layers, which the degree divides.
        hidden_dropout_prob: the probability with which a channel of the output is dropped.
        activation: a name of ``ACTIVATIONS``.
        layernorm_epsilon, initializer_range, use_normal_initialization, pre_layernorm, post_layernorm,
            fp32_residual_addition, optimize: as those of DistributedAttentionLayer.
        fused_bias_gelu: accepted; values are the same.

    The input is ``(hidden_states,)`` or the tensor itself, ``(B, S, hidden_size)``, and so is the output.

    Raises IndivisibleError, ArgumentError.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        fused_bias_gelu: bool = False,
        optimize: str | None = None,
    ) -> None:
        super().__init__(
            hidden_size=hidden_size,
            hidden_dropout_prob=hidden_dropout_prob,
            layernorm_epsilon=layernorm_epsilon,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            fp32_residual_addition=fp32_residual_addition,
            optimize=optimize,
        )
        name = type(self).__name__
        warn_options({"fused_bias_gelu": fused_bias_gelu})
        check_sizes(name, intermediate_size=intermediate_size)
        if activation not in ACTIVATIONS:
            raise ArgumentError(
                f"{name}: activation must be one of {', '.join(sorted(ACTIVATIONS))}, not {activation!r}"
            )
        self.slice_size("intermediate_size", intermediate_size)
        self.activation = activation
        std = initializer_range if use_normal_initialization else None
        self.dense1 = ColumnParallelLinear(hidden_size, intermediate_size, True, std)
        self.dense2 = RowParallelLinear(intermediate_size, hidden_size, True, self.layout, std)

    def forward(self, inputs: Tensor | tuple[object, ...]) -> Tensor:
        """The output of this rank's samples; all ranks of the TP group call it."""
        caller, (given,) = unpacked(self, (inputs,) if isinstance(inputs, Tensor) else inputs, 1)
        hidden = hidden_states_of(self, caller, "hidden_states", given)
        if caller is not Caller.ALONE:
            return self.inside(caller, hidden)
        return self.outside(hidden)

    def branch(
        self, hidden: Tensor, cross: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The linear layers and dropout, without layer normalisation and residual; of hidden states alone."""
        group = self.group_or_none()
        (columns,) = self.layout.columns(hidden, (self.dense1,), group)
        output = self.dense2.summed(ACTIVATIONS[self.activation](columns), group)
        return self.layout.dropout(output, self.hidden_dropout_prob, self.training, group)
