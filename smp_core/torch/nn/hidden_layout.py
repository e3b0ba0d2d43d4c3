"""The layout of hidden states between the blocks of a transformer layer, which ``optimize`` chooses (API 3.1, 8.9).

==============  ================  ===================================================================================
layout          hidden states     a block
==============  ================  ===================================================================================
``WHOLE``       ``(B, S, H)``     computes alone: ``tensor_parallel_degree`` is 1
``LOCAL``       ``(B, S, H)``     gathers the batch, and keeps it for backward; layer normalisation is not distributed
``SLICED``      ``(G, S, H/t)``   gathers channels, in backward again, and keeps its slice; nothing is held twice
==============  ================  ===================================================================================

B is a rank's batch, G the batch of the TP group, t the degree (tensor_parallel/exchange.py). ``optimize="speed"`` takes
``LOCAL``, ``"memory"`` takes ``SLICED``. Inside of a block activations have the whole batch and this rank's heads, or
its slice of the intermediate channels, in every layout; so the weights of the linear layers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from smp_core.errors import ArgumentError
from smp_core.torch.nn.layer_norm import SlicedLayerNorm, WholeLayerNorm
from smp_core.torch.tensor_parallel import exchange, random_stream
from smp_core.torch.tensor_parallel.exchange import TensorGroup

Tensor = torch.Tensor


class Linear(Protocol):
    """A linear layer's parameters."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class HiddenLayout(Protocol):
    """One layout. ``group`` is None at ``tensor_parallel_degree`` 1."""

    #: True if each tp rank holds its channels of a layer normalisation, and of the bias of a block's last linear layer.
    splits_channels: bool

    def enter(self, local: Tensor, group: TensorGroup | None) -> Tensor:
        """This rank's samples, in this layout."""

    def leave(self, hidden: Tensor, group: TensorGroup | None) -> Tensor:
        """This rank's samples, from this layout."""

    def columns(
        self, hidden: Tensor, linears: Sequence[Linear], group: TensorGroup | None
    ) -> list[Tensor]:
        """The outputs of linear layers whose output channels are split: whole batch, this rank's channels."""

    def sum(self, partial: Tensor, group: TensorGroup | None) -> Tensor:
        """The sum over tp ranks of the outputs of a linear layer whose input channels are split, in this layout."""

    def layer_norm(self, hidden_size: int, eps: float) -> nn.Module:
        """A layer normalisation of hidden states."""

    def dropout(
        self, hidden: Tensor, probability: float, training: bool, group: TensorGroup | None
    ) -> Tensor:
        """The dropout of hidden states."""


class _Whole:
    splits_channels = False

    def enter(self, local: Tensor, group: TensorGroup | None) -> Tensor:
        return local

    def leave(self, hidden: Tensor, group: TensorGroup | None) -> Tensor:
        return hidden

    def columns(
        self, hidden: Tensor, linears: Sequence[Linear], group: TensorGroup | None
    ) -> list[Tensor]:
        return [functional.linear(hidden, each.weight, each.bias) for each in linears]

    def sum(self, partial: Tensor, group: TensorGroup | None) -> Tensor:
        return partial

    def layer_norm(self, hidden_size: int, eps: float) -> nn.Module:
        return WholeLayerNorm(hidden_size, eps)

    def dropout(
        self, hidden: Tensor, probability: float, training: bool, group: TensorGroup | None
    ) -> Tensor:
        return functional.dropout(hidden, probability, training) if probability else hidden


class _Local(_Whole):
    def columns(
        self, hidden: Tensor, linears: Sequence[Linear], group: TensorGroup | None
    ) -> list[Tensor]:
        assert group is not None
        return super().columns(exchange.gather_batch(hidden, group), linears, group)

    def sum(self, partial: Tensor, group: TensorGroup | None) -> Tensor:
        assert group is not None
        return exchange.sum_batch(partial, group)


class _Sliced:
    splits_channels = True

    def enter(self, local: Tensor, group: TensorGroup | None) -> Tensor:
        assert group is not None
        return exchange.slice_channels(local, group)

    def leave(self, hidden: Tensor, group: TensorGroup | None) -> Tensor:
        assert group is not None
        return exchange.merge_channels(hidden, group)

    def columns(
        self, hidden: Tensor, linears: Sequence[Linear], group: TensorGroup | None
    ) -> list[Tensor]:
        weights = [each.weight for each in linears]
        biases = [each.bias for each in linears]
        found = _GatheredLinears.apply(hidden, group, len(linears), *weights, *biases)  # type: ignore[no-untyped-call]
        return list(found)

    def sum(self, partial: Tensor, group: TensorGroup | None) -> Tensor:
        assert group is not None
        return exchange.sum_channels(partial, group)

    def layer_norm(self, hidden_size: int, eps: float) -> nn.Module:
        return SlicedLayerNorm(hidden_size, eps)

    def dropout(
        self, hidden: Tensor, probability: float, training: bool, group: TensorGroup | None
    ) -> Tensor:
        if not probability or not training:
            return hidden
        with random_stream.of_this_rank(group):
            return functional.dropout(hidden, probability)


class _Context(FunctionCtx):
    """The context of one call of several linear layers."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    group: TensorGroup
    biases: list[bool]


class _GatheredLinears(torch.autograd.Function):
    """Linear layers of gathered channels, which are gathered again for backward, and not kept."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(
        ctx: _Context,
        hidden: Tensor,
        group: TensorGroup,
        count: int,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(hidden, *weights)  # type: ignore[arg-type]
        ctx.group, ctx.biases = group, [each is not None for each in biases]
        full = exchange.gather_channels(hidden, group)
        return tuple(
            functional.linear(full, weight, bias)  # type: ignore[arg-type]
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        needed, group = ctx.needs_input_grad, ctx.group
        of_hidden: Tensor | None = None
        if needed[0]:
            parts = [each @ weight for each, weight in zip(gradients, weights, strict=True)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            of_hidden = exchange.sum_channels(total, group)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if any(needed[3 : 3 + len(weights)]):
            full = exchange.gather_channels(hidden, group).flatten(0, -2)
            of_weights = [
                each.flatten(0, -2).t() @ full.to(each.dtype) if need else None
                for each, need in zip(gradients, needed[3:], strict=False)
            ]
        of_biases = [
            each.flatten(0, -2).sum(0) if has and need else None
            for each, has, need in zip(
                gradients, ctx.biases, needed[3 + len(weights) :], strict=True
            )
        ]
        return of_hidden, None, None, *of_weights, *of_biases


WHOLE: HiddenLayout = _Whole()
LOCAL: HiddenLayout = _Local()
SLICED: HiddenLayout = _Sliced()

#: The layout for each value of ``optimize``.
LAYOUTS = {"speed": LOCAL, "memory": SLICED}


def layout_of(optimize: str, tp_size: int) -> HiddenLayout:
    """The layout that ``optimize`` chooses. Raises ArgumentError for another value than "speed" and "memory"."""
    if optimize not in LAYOUTS:
        raise ArgumentError(f'optimize must be "speed" or "memory", not {optimize!r}')
    return LAYOUTS[optimize] if tp_size > 1 else WHOLE
