"""Bugs of distributed transformer layers: attention, blocks, layouts of hidden states, random numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conformance.mutants.protocol import Bugs, Patch
from smp_core.torch.execution import batches
from smp_core.torch.nn import (
    attention,
    attention_scores,
    block,
    hidden_layout,
    layer_norm,
    output_layer,
    transformer,
)
from smp_core.torch.nn.attention import DistributedAttentionLayer
from smp_core.torch.nn.output_layer import DistributedTransformerOutputLayer
from smp_core.torch.nn.parallel_linear import RowParallelLinear
from smp_core.torch.nn.transformer import DistributedTransformerLayer
from smp_core.torch.tensor_parallel import exchange, random_stream
from smp_core.torch.tensor_parallel.exchange import TensorGroup

BUGS = Bugs("transformer layers")


def attending(patch: Patch, **changed: Any) -> None:
    """Have attention computed with other options."""
    original = attention_scores.attend
    patch.setattr(
        attention, "attend", lambda *args, **options: original(*args, **{**options, **changed})
    )


# ---- Attention -----------------------------------------------------------------------------------


@BUGS.enter("TP-TRANSFORMER")
def tf_scores_are_not_scaled(patch: Patch) -> None:
    """scores are not divided by the root of the size of a head"""
    attending(patch, scale=1.0)


@BUGS.enter("TP-TRANSFORMER")
def tf_attends_to_later_positions(patch: Patch) -> None:
    """causal attention sees the positions after its own"""
    attending(patch, causal=False)


@BUGS.enter("TP-TRANSFORMER")
def tf_padding_is_lost_with_a_causal_mask(patch: Patch) -> None:
    """the mask of padding is dropped where there is a causal mask"""
    original = attention_scores.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any) -> Any:
        mask = None if options.get("causal") else mask
        return original(query, key, value, mask, **options)

    patch.setattr(attention, "attend", attend)


@BUGS.enter("TP-TRANSFORMER")
def tf_masks_mark_what_is_kept(patch: Patch) -> None:
    """1 in a mask means a position that is attended to"""
    original = attention_scores.as_scores

    def as_scores(name: str, mask: Tensor, batch: int) -> Tensor:
        found = original(name, mask, batch)
        return found if found.is_floating_point() else found == 0

    patch.setattr(block, "as_scores", as_scores)


@BUGS.enter("TP-TRANSFORMER")
def tf_masks_of_the_own_batch(patch: Patch) -> None:
    """the samples of all tp ranks get the masks of the rank's own samples"""

    def whole_mask(mask: Tensor | None, group: TensorGroup | None) -> Tensor | None:
        if mask is None:
            return None
        own = group is None or group.prescaled
        return mask if own else mask.repeat(group.size, 1, 1, 1)  # type: ignore[union-attr]

    for module in (block, transformer):
        patch.setattr(module, "whole_mask", whole_mask)


@BUGS.enter("TP-TRANSFORMER")
def tf_slopes_of_the_first_heads(patch: Patch) -> None:
    """each rank takes the slopes of the first heads for its own"""
    original = DistributedAttentionLayer.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.slopes is not None:
            self.slopes = attention_scores.alibi_slopes(self.num_attention_heads)[: self.heads]

    patch.setattr(DistributedAttentionLayer, "__init__", __init__)


@BUGS.enter("TP-TRANSFORMER")
def tf_cross_attention_to_itself(patch: Patch) -> None:
    """keys and values of cross-attention are those of the hidden states"""
    original = DistributedAttentionLayer.branch

    def branch(self: Any, hidden: Tensor, cross: Any, mask: Any) -> Any:
        return original(self, hidden, cross if cross is None else hidden, mask)

    patch.setattr(DistributedAttentionLayer, "branch", branch)


# ---- Blocks --------------------------------------------------------------------------------------


@BUGS.enter("TP-TRANSFORMER")
def tf_bias_of_each_rank(patch: Patch) -> None:
    """each rank adds the bias before the sum over ranks"""

    def summed(self: Any, x: Tensor, group: TensorGroup | None) -> Any:
        partial = functional.linear(x, self.weight)
        if group is None or self.bias is None or self.layout.splits_channels:
            total = self.layout.sum(partial, group)
            return total if self.bias is None else total + self.bias
        return self.layout.sum(partial + self.bias, group)

    patch.setattr(RowParallelLinear, "summed", summed)


@BUGS.enter("TP-TRANSFORMER")
def tf_residual_of_normalised_input(patch: Patch) -> None:
    """the residual is what the layer normalisation before a block gave"""

    def normalised(self: Any, hidden: Tensor, *_: Any) -> Any:
        before = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output = before + self.branch(before)
        return output if self.layernorm is None else self.layernorm(output)

    patch.setattr(DistributedTransformerOutputLayer, "block", normalised)


@BUGS.enter("TP-TRANSFORMER")
def tf_no_activation(patch: Patch) -> None:
    """nothing is between the two linear layers"""
    names = dict.fromkeys(output_layer.ACTIVATIONS, lambda x: x)
    patch.setattr(output_layer, "ACTIVATIONS", names)


@BUGS.enter("TP-TRANSFORMER")
def tf_parallel_blocks_one_after_the_other(patch: Patch) -> None:
    """with parallel_attn_output the linear layers get the output of attention"""
    original = DistributedTransformerLayer._block

    def _block(self: Any, hidden: Tensor, cross: Any, mask: Any, cross_mask: Any) -> Any:
        if not self.parallel_attn_output:
            return original(self, hidden, cross, mask, cross_mask)
        first = self.attention.pre_layernorm
        hidden = hidden + self.attention.branch(first(hidden), None, mask)
        return hidden + self.output.branch(first(hidden))

    patch.setattr(DistributedTransformerLayer, "_block", _block)


# ---- Layouts -------------------------------------------------------------------------------------


@BUGS.enter("TP-TRANSFORMER")
def tf_norm_of_a_slice(patch: Patch) -> None:
    """each rank normalises its slice of the channels by itself"""

    class Alone:
        def __init__(self, group: TensorGroup) -> None:
            self.size = group.size

        def all_gather(self, value: Tensor) -> Tensor:
            return torch.stack([value] * self.size)

        def all_reduce(self, value: Tensor) -> Tensor:
            return value * self.size

    original = layer_norm.SlicedLayerNorm.group
    patch.setattr(layer_norm.SlicedLayerNorm, "group", lambda self: Alone(original(self)))


@BUGS.enter("TP-TRANSFORMER")
def tf_norm_gradient_of_a_slice(patch: Patch) -> None:
    """the gradient of the layer normalisation sums over the rank's own channels"""

    class Alone:
        def __init__(self, group: TensorGroup) -> None:
            self.all_gather = group.all_gather

        def all_reduce(self, value: Tensor) -> Tensor:
            return value

    original = layer_norm.SlicedLayerNorm.group
    patch.setattr(layer_norm.SlicedLayerNorm, "group", lambda self: Alone(original(self)))


@BUGS.enter("TP-TRANSFORMER")
def tf_channels_gathered_in_reverse(patch: Patch) -> None:
    """gathered channels lie in the reverse order of tp ranks"""

    def reverse(group: TensorGroup, x: Tensor) -> Tensor:
        return torch.cat(list(group.all_gather(x.contiguous()))[::-1], dim=-1)

    patch.setattr(exchange, "_gather_channels", reverse)


@BUGS.enter("TP-TRANSFORMER")
def tf_sums_of_channels_stay_partial(patch: Patch) -> None:
    """a rank's channels of a block's output are its own summand"""
    patch.setattr(
        exchange, "_sum_channels", lambda group, x: x.chunk(group.size, -1)[group.rank].clone()
    )


@BUGS.enter("TP-TRANSFORMER", origin="B010")
def tf_gradients_of_gathered_batches_stay_partial(patch: Patch) -> None:
    """the gradient of a block's input has the summand of the rank's own heads"""

    def own(group: TensorGroup, x: Tensor) -> Tensor:
        return x.clone() if group.prescaled else x.chunk(group.size)[group.rank].clone()

    patch.setattr(
        exchange,
        "gather_batch",
        lambda x, group: exchange._changed(x, group, exchange._gather_batch, own),
    )


@BUGS.enter("TP-TRANSFORMER")
def tf_gradients_of_a_bias_of_one_row(patch: Patch) -> None:
    """the bias of a split linear layer gets the gradient of the first sample"""
    original = hidden_layout._GatheredLinears.backward

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = list(original(ctx, *gradients))
        for number, gradient in enumerate(gradients):
            place = len(found) - len(gradients) + number
            if found[place] is not None:
                found[place] = gradient[0].flatten(0, -2).sum(0)
        return tuple(found)

    patch.setattr(hidden_layout._GatheredLinears, "backward", staticmethod(backward))


@BUGS.enter("TP-OPTIMIZE")
def tf_memory_is_speed(patch: Patch) -> None:
    """optimize="memory" does what "speed" does"""
    patch.setattr(hidden_layout, "LAYOUTS", dict.fromkeys(("speed", "memory"), hidden_layout.LOCAL))


@BUGS.enter("TP-OPTIMIZE")
def tf_gathered_channels_are_kept(patch: Patch) -> None:
    """optimize="memory" keeps the gathered channels for backward"""

    def columns(self: Any, hidden: Tensor, linears: Sequence[Any], group: Any) -> list[Tensor]:
        full = exchange.gather_channels(hidden, group)
        return [functional.linear(full, each.weight, each.bias) for each in linears]

    patch.setattr(hidden_layout._Sliced, "columns", columns)


# ---- Random numbers ------------------------------------------------------------------------------


@BUGS.enter("TP-DROPOUT")
def tf_channels_are_dropped_alike(patch: Patch) -> None:
    """tp ranks draw the same numbers for their own channels"""
    patch.setattr(random_stream, "of_this_rank", lambda group: contextlib.nullcontext())


@BUGS.enter("TP-DROPOUT")
def tf_each_rank_has_its_seed(patch: Patch) -> None:
    """the ranks of a TP group that share a batch draw by their own seeds"""
    original = batches.compared

    def compared(runtime: Any, split: Any, seed: int) -> Any:
        return original(runtime, split, seed)[0], seed

    patch.setattr(batches, "compared", compared)
