"""``smp.nn.DistributedAttentionLayer``: attention whose heads are split over the TP group (API 1.10)."""

from __future__ import annotations

import contextlib
import enum
from typing import Protocol

import torch
from torch import nn

from smp_core.errors import ArgumentError
from smp_core.torch.nn import hidden_states
from smp_core.torch.nn.attention_scores import alibi_slopes, as_scores, attend, rotated
from smp_core.torch.nn.module import DistributedModule, configured
from smp_core.torch.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from smp_core.torch.parameters.registration import Undivided
from smp_core.torch.tensor_parallel import exchange, random_stream
from smp_core.torch.tensor_parallel.exchange import TensorGroup

Tensor = torch.Tensor


class DistributedAttentionLayer(DistributedModule, Undivided):
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
        super().__init__()
        name = type(self).__name__
        check_layer_norms(name, pre_layernorm, post_layernorm)
        check_probability(name, "attention_dropout_prob", attention_dropout_prob)
        check_probability(name, "hidden_dropout_prob", hidden_dropout_prob)
        check_sizes(
            name,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
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
        self.layout = hidden_states.layout_of(configured(optimize), self.tp_size)
        self.heads = self.slice_size("num_attention_heads", num_attention_heads)
        if self.layout.splits_channels:
            self.slice_size("hidden_size", hidden_size)
        self.hidden_size = hidden_size
        self.num_attention_heads, self.attention_head_size = (
            num_attention_heads,
            attention_head_size,
        )
        self.attention_dropout_prob, self.hidden_dropout_prob = (
            attention_dropout_prob,
            hidden_dropout_prob,
        )
        self.cross_attention, self.causal_mask_size = cross_attention, causal_mask_size
        self.attention_in_fp32, self.fp32_residual_addition = (
            attention_in_fp32,
            fp32_residual_addition,
        )
        self.window_size, self.rotary_dim = window_size, rotary_dim
        scale = attention_head_size**-0.5 if scale_attention_scores else 1.0
        self.scale = scale / (layer_idx + 1) if scale_attn_by_layer_idx else scale
        self.slopes: Tensor | None = None
        if use_alibi:
            slopes = alibi_slopes(num_attention_heads, alibi_bias_max)
            self.slopes = slopes[self.tp_rank * self.heads :][: self.heads]
        std = initializer_range if use_normal_initialization else None
        channels = num_attention_heads * attention_head_size
        norms = [
            self.layout.layer_norm(hidden_size, layernorm_epsilon) if has else None
            for has in (pre_layernorm, post_layernorm)
        ]
        self.pre_layernorm, self.layernorm = norms
        self.query = ColumnParallelLinear(hidden_size, channels, use_qkv_bias, std)
        self.key = ColumnParallelLinear(hidden_size, channels, use_qkv_bias, std)
        self.value = ColumnParallelLinear(hidden_size, channels, use_qkv_bias, std)
        self.dense = RowParallelLinear(channels, hidden_size, use_attn_dense_bias, self.layout, std)

    def forward(self, inputs: tuple[object, ...]) -> Tensor:
        """The output of this rank's samples; all ranks of the TP group call it."""
        count = 3 if self.cross_attention else 2
        caller, (given, *rest) = unpacked(self, inputs, count)
        other, given_mask = rest if self.cross_attention else (None, rest[0])
        hidden = hidden_states_of(self, caller, "hidden_states", given)
        cross = None
        if self.cross_attention:
            cross = hidden_states_of(self, caller, "cross_states", other)
        if caller is Caller.BRANCH:
            return self.attended(hidden, cross, mask_of(given_mask))
        if caller is Caller.BLOCK:
            return self.block(hidden, cross, mask_of(given_mask))
        keys = hidden.shape[1] if cross is None else cross.shape[1]
        mask = checked_mask(self, given_mask, hidden, keys, self.num_attention_heads)
        self._check_length(hidden.shape[1])
        group = self.group() if self.tp_size > 1 else None
        mask = whole_mask(mask, group)
        entered = self.layout.enter(hidden, group)
        cross = None if cross is None else self.layout.enter(cross, group)
        return self.layout.leave(self.block(entered, cross, mask), group).to(hidden.dtype)

    def block(self, hidden: Tensor, cross: Tensor | None, mask: Tensor | None) -> Tensor:
        """The layer in the layout of its hidden states, with a mask for the whole batch."""
        before = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output = added(hidden, self.attended(before, cross, mask), self.fp32_residual_addition)
        if self.layernorm is not None:
            output = self.layernorm(output)
        return output

    def attended(self, hidden: Tensor, cross: Tensor | None, mask: Tensor | None) -> Tensor:
        """Attention, linear layer and dropout, without residual."""
        group = self.group() if self.tp_size > 1 else None
        if cross is None:
            columns = self.layout.columns(hidden, (self.query, self.key, self.value), group)
        else:
            columns = self.layout.columns(hidden, (self.query,), group)
            columns += self.layout.columns(cross, (self.key, self.value), group)
        query, key, value = (self._by_head(each) for each in columns)
        self._check_length(query.shape[-2])
        if self.rotary_dim is not None:
            query, key = rotated(query, self.rotary_dim), rotated(key, self.rotary_dim)
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

    def _check_length(self, length: int) -> None:
        if self.causal_mask_size is not None and length > self.causal_mask_size:
            raise ArgumentError(
                f"{type(self).__name__}: a sequence of {length} is longer than causal_mask_size = "
                f"{self.causal_mask_size}"
            )


def whole_mask(mask: Tensor | None, group: TensorGroup | None) -> Tensor | None:
    """A mask of this rank's samples with four axes (``checked_mask``), for those of the whole TP group."""
    if mask is None or group is None:
        return mask
    return exchange.gather_batch(mask, group)


class HoldsHiddenStates(Protocol):
    """A module that takes hidden states."""

    hidden_size: int
    tp_size: int
    layout: hidden_states.HiddenLayout


class Caller(enum.Enum):
    """The caller of a block, who says so by a last element of the block's input."""

    ALONE = "alone"
    """A script: hidden states and masks are of this rank's samples."""

    BLOCK = "block"
    """A layer, or a stack: hidden states are in their layout, masks for the whole batch."""

    BRANCH = "branch"
    """A layer with ``parallel_attn_output``: as ``BLOCK``, without layer normalisation and residual."""


def unpacked(module: nn.Module, inputs: object, count: int) -> tuple[Caller, tuple[object, ...]]:
    """The caller and the parts of a module's input. Raises ArgumentError if it is no tuple of so many."""
    parts = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    caller = Caller.ALONE
    if parts and isinstance(parts[-1], Caller):
        caller, parts = parts[-1], parts[:-1]
    if not isinstance(inputs, tuple | list) or len(parts) != count:
        found = f"{len(parts)} values" if isinstance(inputs, tuple | list) else "one value"
        raise ArgumentError(
            f"{type(module).__name__}: the input is a tuple of {count}, not {found}"
        )
    return caller, parts


def hidden_states_of(module: HoldsHiddenStates, caller: Caller, what: str, value: object) -> Tensor:
    """Hidden states as a module takes them from this caller. Raises ArgumentError if they have another shape."""
    name, width = type(module).__name__, module.hidden_size
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name}: {what} is {type(value).__name__}, not a tensor")
    if caller is not Caller.ALONE and module.layout.splits_channels:
        width //= module.tp_size
    if value.dim() != 3 or value.shape[-1] != width:
        raise ArgumentError(
            f"{name}: {what} is {list(value.shape)}: it must be (B, S, hidden_size), and hidden_size is {width}"
        )
    return value


def mask_of(value: object) -> Tensor | None:
    """A mask, or None. Raises ArgumentError for another value."""
    if value is not None and not isinstance(value, Tensor):
        raise ArgumentError(f"attention_mask is {type(value).__name__}, not a tensor")
    return value


def checked_mask(
    module: nn.Module, value: object, hidden: Tensor, keys: int, heads: int
) -> Tensor | None:
    """A mask with four axes. Raises ArgumentError for one that does not fit the positions, keys and heads."""
    mask = mask_of(value)
    if mask is None:
        return None
    shape, name = list(mask.shape), type(module).__name__
    mask = as_scores(mask, hidden.shape[0])
    if mask.shape[1] not in (1, heads):
        raise ArgumentError(
            f"{name}: attention_mask is for {mask.shape[1]} heads, and there are {heads}"
        )
    if mask.shape[2] not in (1, hidden.shape[1]) or mask.shape[3] not in (1, keys):
        raise ArgumentError(
            f"{name}: attention_mask is {shape}, for {hidden.shape[1]} positions that attend to {keys}"
        )
    return mask


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    """While entered, attention is computed in the dtype of its arguments."""
    return torch.autocast("cpu", enabled=False)


def added(residual: Tensor, output: Tensor, in_float32: bool) -> Tensor:
    """The residual added to a block's output; ``in_float32``: 16-bit values as float32 ones."""
    if in_float32:
        dtype = torch.promote_types(residual.dtype, torch.float32)
        return residual.to(dtype) + output.to(dtype)
    return residual + output


def check_sizes(name: str, **sizes: int | None) -> None:
    """Raise ArgumentError for a size below 1; None is no size."""
    for what, size in sizes.items():
        if size is not None and size < 1:
            raise ArgumentError(f"{name}: {what} must be at least 1, not {size!r}")


def check_layer_norms(name: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raise ArgumentError if a block has no layer normalisation."""
    if not (pre_layernorm or post_layernorm):
        raise ArgumentError(
            f"{name}: at least one of pre_layernorm and post_layernorm must be True"
        )


def check_probability(name: str, what: str, value: float) -> None:
    """Raise ArgumentError for a probability of dropout that is none."""
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name}: {what} must be from 0 to 1, not {value!r}")
