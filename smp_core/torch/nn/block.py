"""The blocks of a transformer layer: their base class, and what a layer and a stack share with them.

These are the caller of a block, and the checks of inputs and arguments, whose errors name the class and the argument.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch
from torch import nn

from smp_core.errors import ArgumentError
from smp_core.torch.nn.attention_scores import as_scores
from smp_core.torch.nn.hidden_layout import HiddenLayout, layout_of
from smp_core.torch.nn.module import DistributedModule, configured
from smp_core.torch.parameters.registration import Undivided
from smp_core.torch.tensor_parallel import exchange
from smp_core.torch.tensor_parallel.exchange import TensorGroup

Tensor = torch.Tensor


class Caller(enum.Enum):
    """The caller of a block, who says so by a last element of the block's input."""

    ALONE = "alone"
    """A script: hidden states and masks are of this rank's samples."""

    BLOCK = "block"
    """A layer, or a stack: hidden states are in their layout, masks for the whole batch."""

    BRANCH = "branch"
    """A layer with ``parallel_attn_output``: as ``BLOCK``, without layer normalisation and residual."""


class TransformerBlock(DistributedModule, Undivided):
    """A layer normalisation, a branch of linear layers with dropout, residual addition, a layer normalisation.

    Args:
        hidden_size: the number of channels of hidden states.
        hidden_dropout_prob: the probability with which a channel of the output is dropped.
        layernorm_epsilon: added to variances.
        pre_layernorm, post_layernorm: normalise the input, and the sum of input and output. At least one is True.
        fp32_residual_addition: add the residual in float32.
        optimize: "speed" or "memory"; None for the configuration's.

    A subclass defines ``branch``. A block that attends takes cross states and a mask beside hidden states.

    Raises IndivisibleError, ArgumentError.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        hidden_dropout_prob: float,
        layernorm_epsilon: float,
        pre_layernorm: bool,
        post_layernorm: bool,
        fp32_residual_addition: bool,
        optimize: str | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_layer_norms(name, pre_layernorm, post_layernorm)
        check_probability(name, "hidden_dropout_prob", hidden_dropout_prob)
        check_sizes(name, hidden_size=hidden_size)
        self.layout = layout_of(configured(optimize), self.tp_size)
        if self.layout.splits_channels:
            self.slice_size("hidden_size", hidden_size)
        self.hidden_size, self.hidden_dropout_prob = hidden_size, hidden_dropout_prob
        self.fp32_residual_addition = fp32_residual_addition
        norms = [
            self.layout.layer_norm(hidden_size, layernorm_epsilon) if has else None
            for has in (pre_layernorm, post_layernorm)
        ]
        self.pre_layernorm, self.layernorm = norms

    def branch(
        self, hidden: Tensor, cross: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The linear layers and dropout, without layer normalisation and residual."""
        raise NotImplementedError

    def block(
        self, hidden: Tensor, cross: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The block in the layout of its hidden states, with a mask for the whole batch."""
        before = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output = added(hidden, self.branch(before, cross, mask), self.fp32_residual_addition)
        if self.layernorm is not None:
            output = self.layernorm(output)
        return output

    def inside(
        self,
        caller: Caller,
        hidden: Tensor,
        cross: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The output for a layer, which calls for the block or for its branch."""
        if caller is Caller.BRANCH:
            return self.branch(hidden, cross, mask)
        return self.block(hidden, cross, mask)

    def outside(
        self, hidden: Tensor, cross: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The output for a script: all arguments are of this rank's samples, and so is the output."""
        group = self.group_or_none()
        mask = whole_mask(mask, group)
        entered = self.layout.enter(hidden, group)
        cross = None if cross is None else self.layout.enter(cross, group)
        return self.layout.leave(self.block(entered, cross, mask), group).to(hidden.dtype)


def added(residual: Tensor, output: Tensor, in_float32: bool) -> Tensor:
    """The residual added to a block's output; ``in_float32``: 16-bit values as float32 ones."""
    if in_float32:
        dtype = torch.promote_types(residual.dtype, torch.float32)
        return residual.to(dtype) + output.to(dtype)
    return residual + output


# ---- Inputs --------------------------------------------------------------------------------------


class HoldsHiddenStates(Protocol):
    """A module that takes hidden states."""

    hidden_size: int
    tp_size: int
    layout: HiddenLayout


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


def optional(module: nn.Module, what: str, value: object) -> Tensor | None:
    """A module's argument ``what`` that may be None. Raises ArgumentError if it is no tensor either."""
    if value is not None and not isinstance(value, Tensor):
        raise ArgumentError(
            f"{type(module).__name__}: {what} is {type(value).__name__}, not a tensor"
        )
    return value


def checked_mask(
    module: nn.Module, what: str, value: object, hidden: Tensor, keys: int, heads: int
) -> Tensor | None:
    """A module's mask ``what``, with four axes. Raises ArgumentError if it does not fit positions, keys and heads."""
    given = optional(module, what, value)
    if given is None:
        return None
    name = f"{type(module).__name__}: {what}"
    mask = as_scores(name, given, hidden.shape[0])
    if mask.shape[1] not in (1, heads):
        raise ArgumentError(f"{name} is for {mask.shape[1]} heads, and there are {heads}")
    if mask.shape[2] not in (1, hidden.shape[1]) or mask.shape[3] not in (1, keys):
        raise ArgumentError(
            f"{name} is {list(given.shape)}, for {hidden.shape[1]} positions that attend to {keys}"
        )
    return mask


def whole_mask(mask: Tensor | None, group: TensorGroup | None) -> Tensor | None:
    """A mask of this rank's samples with four axes (``checked_mask``), for those of the whole TP group."""
    if mask is None or group is None:
        return mask
    return exchange.gather_batch(mask, group)


def check_length(module: nn.Module, length: int, causal_mask_size: int | None) -> None:
    """Raise ArgumentError for a sequence that is longer than the causal mask."""
    if causal_mask_size is not None and length > causal_mask_size:
        raise ArgumentError(
            f"{type(module).__name__}: a sequence of {length} is longer than causal_mask_size = {causal_mask_size}"
        )


# ---- Arguments -----------------------------------------------------------------------------------


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
