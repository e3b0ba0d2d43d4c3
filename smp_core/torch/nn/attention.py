"""``smp.nn.DistributedAttentionLayer``: attention whose heads are split over the TP group (API 1.10)."""

from __future__ import annotations

import contextlib

import torch

from smp_core.errors import ArgumentError
from smp_core.torch.fused import warn_options
from smp_core.torch.nn.attention_scores import alibi_slopes, attend, rotated, rotation
from smp_core.torch.nn.block import (
    Caller,
    TransformerBlock,
    check_length,
    check_probability,
    check_sizes,
    checked_mask,
    hidden_states_of,
    optional,
    unpacked,
)
from smp_core.torch.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from smp_core.torch.tensor_parallel import random_stream

Tensor = torch.Tensor


class DistributedAttentionLayer(TransformerBlock):
    """Attention, its output's linear layer, dropout, residual addition and layer normalisation.

    Args:
        num_attention_heads, attention_head_size: the number of heads, which the degree divides, and their size.
        hidden_size: the number of channels of hidden states.
        attention_dropout_prob: the probability with which an attention weight is dropped.
        hidden_dropout_prob: the probability with which a channel of the output is dropped.
        layernorm_epsilon: added to variances.
        initializer_range: the standard deviation of initial weights, with ``use_normal_initialization``.
        use_normal_initialization: draw weights from a normal distribution, with biases of zero; else as
            ``torch.nn.Linear`` does.
        cross_attention: keys and values are of ``cross_states``.
        causal_mask_size: the longest sequence, of which each position attends to those before it; None: to all.
        pre_layernorm, post_layernorm: normalise the input, and the sum of input and output. At least one is True.
        use_alibi, alibi_bias_max: add ALiBi's bias to the scores.
        attention_in_fp32: compute attention in float32.
        fp32_residual_addition: add the residual in float32.
        query_key_layer_scaling, fused_softmax, fused_dropout: accepted; values are the same.
        scale_attention_scores: divide scores by the square root of the heads' size.
        scale_attn_by_layer_idx, layer_idx: divide scores by ``layer_idx + 1``.
        window_size: attend to the last ``window_size`` positions only; needs ``causal_mask_size``.
        rotary_dim: rotate so many channels of queries and keys by their positions.
        use_qkv_bias, use_attn_dense_bias: whether the linear layers have biases.
        optimize: "speed" or "memory"; None for the configuration's.

    The input is ``(hidden_states, attention_mask)``, or ``(hidden_states, cross_states, attention_mask)``; shapes are
    ``(B, S, hidden_size)`` and ``(B, T, hidden_size)``. The mask may be None, ``(B, T)``, ``(B, S, T)`` or
    ``(B, heads or 1, S or 1, T)``: floating-point values are added to scores, and 1 masks a position in a mask of
    integers or booleans. The output is ``(B, S, hidden_size)``.

    Raises IndivisibleError, ArgumentError; a call raises ArgumentError for inputs of other shapes, and for a sequence
    that is longer than ``causal_mask_size``.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        query_key_layer_scaling: bool = False,
        fused_softmax: bool = True,
        fused_dropout: bool = False,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int = 0,
        window_size: int | None = None,
        rotary_dim: int | None = None,
        use_qkv_bias: bool = True,
        use_attn_dense_bias: bool = True,
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
        warn_options({"fused_dropout": fused_dropout})  # fused_softmax is True by default
        check_probability(name, "attention_dropout_prob", attention_dropout_prob)
        check_sizes(
            name,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            causal_mask_size=causal_mask_size,
            window_size=window_size,
            **{"layer_idx + 1": layer_idx + 1},
        )
        if rotary_dim is not None and (rotary_dim % 2 or not 0 < rotary_dim <= attention_head_size):
            raise ArgumentError(
                f"{name}: rotary_dim must be even, and from 2 to attention_head_size = {attention_head_size}, not "
                f"{rotary_dim}"
            )
        if cross_attention and (causal_mask_size or use_alibi or rotary_dim):
            raise ArgumentError(
                f"{name}: causal_mask_size, use_alibi and rotary_dim are of attention to the same sequence. Leave them "
                "out with cross_attention=True"
            )
        if window_size is not None and causal_mask_size is None:
            raise ArgumentError(
                f"{name}: window_size = {window_size} is of causal attention. Pass causal_mask_size, too"
            )
        self.heads = self.slice_size("num_attention_heads", num_attention_heads)
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = attention_head_size
        self.attention_dropout_prob, self.attention_in_fp32 = (
            attention_dropout_prob,
            attention_in_fp32,
        )
        self.cross_attention, self.causal_mask_size = cross_attention, causal_mask_size
        self.window_size, self.rotary_dim = window_size, rotary_dim
        scale = attention_head_size**-0.5 if scale_attention_scores else 1.0
        self.scale = scale / (layer_idx + 1) if scale_attn_by_layer_idx else scale
        self.slopes: Tensor | None = None
        if use_alibi:
            slopes = alibi_slopes(num_attention_heads, alibi_bias_max)
            self.slopes = slopes[self.tp_rank * self.heads :][: self.heads]
        std = initializer_range if use_normal_initialization else None
        channels = num_attention_heads * attention_head_size
        self.query = ColumnParallelLinear(hidden_size, channels, use_qkv_bias, std)
        self.key = ColumnParallelLinear(hidden_size, channels, use_qkv_bias, std)
        self.value = ColumnParallelLinear(hidden_size, channels, use_qkv_bias, std)
        self.dense = RowParallelLinear(channels, hidden_size, use_attn_dense_bias, self.layout, std)

    def forward(self, inputs: tuple[object, ...]) -> Tensor:
        """The output of this rank's samples; all ranks of the TP group call it."""
        count, what = 3 if self.cross_attention else 2, "attention_mask"
        caller, (given, *rest) = unpacked(self, inputs, count)
        other, given_mask = rest if self.cross_attention else (None, rest[0])
        hidden = hidden_states_of(self, caller, "hidden_states", given)
        cross = None
        if self.cross_attention:
            cross = hidden_states_of(self, caller, "cross_states", other)
        if caller is not Caller.ALONE:
            return self.inside(caller, hidden, cross, optional(self, what, given_mask))
        keys = hidden.shape[1] if cross is None else cross.shape[1]
        mask = checked_mask(self, what, given_mask, hidden, keys, self.num_attention_heads)
        check_length(self, hidden.shape[1], self.causal_mask_size)
        return self.outside(hidden, cross, mask)

    def branch(
        self, hidden: Tensor, cross: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Attention, linear layer and dropout, without layer normalisation and residual."""
        group = self.group_or_none()
        if cross is None:
            columns = self.layout.columns(hidden, (self.query, self.key, self.value), group)
        else:
            columns = self.layout.columns(hidden, (self.query,), group)
            columns += self.layout.columns(cross, (self.key, self.value), group)
        query, key, value = (self._by_head(each) for each in columns)
        check_length(self, query.shape[-2], self.causal_mask_size)
        if self.rotary_dim is not None:
            by = rotation(query, self.rotary_dim)
            query, key = rotated(query, by), rotated(key, by)
        dtype = value.dtype
        if self.attention_in_fp32 and dtype in (torch.float16, torch.bfloat16):
            query, key, value = query.float(), key.float(), value.float()
        dropout = self.attention_dropout_prob if self.training else 0.0
        with (
            random_stream.of_this_rank(group) if dropout else contextlib.nullcontext(),
            _without_autocast() if self.attention_in_fp32 else contextlib.nullcontext(),
        ):
            found = attend(
                query,
                key,
                value,
                self._own_heads(mask),
                causal=self.causal_mask_size is not None,
                window=self.window_size,
                slopes=self.slopes,
                scale=self.scale,
                dropout=dropout,
            ).to(dtype)
        context = found.transpose(1, 2).flatten(2)
        output = self.dense.summed(context, group)
        return self.layout.dropout(output, self.hidden_dropout_prob, self.training, group)

    def _by_head(self, columns: Tensor) -> Tensor:
        """(G, S, heads size) as (G, heads, S, size)."""
        return columns.view(*columns.shape[:2], self.heads, self.attention_head_size).transpose(
            1, 2
        )

    def _own_heads(self, mask: Tensor | None) -> Tensor | None:
        """The mask of this rank's heads."""
        if mask is None or mask.shape[1] == 1:
            return mask
        return mask[:, self.tp_rank * self.heads :][:, : self.heads]


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    """While entered, attention is computed in the dtype of its arguments."""
    return torch.autocast("cpu", enabled=False)
