"""``smp.nn.DistributedTransformerLayer`` and ``smp.nn.DistributedTransformer``, a stack of them (API 1.10)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from smp_core.errors import ArgumentError
from smp_core.torch.nn.attention import DistributedAttentionLayer
from smp_core.torch.nn.block import (
    Caller,
    added,
    check_layer_norms,
    check_length,
    checked_mask,
    hidden_states_of,
    optional,
    unpacked,
    whole_mask,
)
from smp_core.torch.nn.hidden_layout import HiddenLayout, layout_of
from smp_core.torch.nn.module import DistributedModule, configured
from smp_core.torch.nn.output_layer import DistributedTransformerOutputLayer
from smp_core.torch.parameters.registration import Undivided
from smp_core.torch.tensor_parallel.exchange import TensorGroup

Tensor = torch.Tensor
M = TypeVar("M", bound=nn.Module)


class DistributedTransformerLayer(DistributedModule, Undivided):
    """One layer: attention, with ``add_cross_attention`` cross-attention, and two linear layers.

    Args:
        num_attention_heads, attention_head_size, hidden_size, attention_dropout_prob, hidden_dropout_prob,
            layernorm_epsilon, initializer_range, use_normal_initialization, causal_mask_size, pre_layernorm,
            post_layernorm, use_alibi, alibi_bias_max, attention_in_fp32, fp32_residual_addition,
            query_key_layer_scaling, fused_softmax, fused_dropout, scale_attention_scores, scale_attn_by_layer_idx,
            layer_idx, window_size, rotary_dim, use_qkv_bias, use_attn_dense_bias, optimize: as those of
            DistributedAttentionLayer.
        intermediate_size, activation, fused_bias_gelu: as those of DistributedTransformerOutputLayer.
        add_cross_attention: attend to ``cross_states`` after the attention to hidden states.
        parallel_attn_output: feed both attention and linear layers with one normalised input, and add both outputs, as
            GPT-J does; needs ``pre_layernorm`` alone.

    The input is ``(hidden_states, attention_mask)``, or ``(hidden_states, cross_states, attention_mask, cross_mask)``,
    of the shapes that DistributedAttentionLayer takes. The output is the same tuple with the new hidden states.

    Submodules: ``attention``, ``cross_attention``, ``output``. Raises IndivisibleError, ArgumentError.
    """

    _smp_takes_tuple = True

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        query_key_layer_scaling: bool = False,
        fused_softmax: bool = True,
        fused_dropout: bool = False,
        fused_bias_gelu: bool = False,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int = 0,
        window_size: int | None = None,
        rotary_dim: int | None = None,
        use_qkv_bias: bool = True,
        use_attn_dense_bias: bool = True,
        parallel_attn_output: bool = False,
        optimize: str | None = None,
    ) -> None:
        options = given(locals())
        super().__init__()
        name = type(self).__name__
        check_layer_norms(name, pre_layernorm, post_layernorm)
        if parallel_attn_output and (post_layernorm or add_cross_attention):
            raise ArgumentError(
                f"{name}: parallel_attn_output needs pre_layernorm=True, post_layernorm=False and "
                "add_cross_attention=False"
            )
        self.layout = layout_of(configured(optimize), self.tp_size)
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.add_cross_attention, self.causal_mask_size = add_cross_attention, causal_mask_size
        self.parallel_attn_output = parallel_attn_output
        self.attention = made(DistributedAttentionLayer, options)
        if add_cross_attention:
            self.cross_attention = made(
                DistributedAttentionLayer,
                {**options, "window_size": None, "rotary_dim": None, "use_alibi": False},
                cross_attention=True,
                causal_mask_size=None,
            )
        self.output = made(DistributedTransformerOutputLayer, options)
        if parallel_attn_output:
            self.output.pre_layernorm = None  # it takes the input of attention

    def forward(self, inputs: tuple[object, ...]) -> tuple[object, ...]:
        """The inputs with the layer's output in the place of hidden states; all ranks of the TP group call it."""
        caller, taken = taken_of(self, inputs)
        if caller is not Caller.ALONE:
            hidden = self._block(taken.hidden, taken.cross, taken.mask, taken.cross_mask)
            return (hidden, *inputs[1:])
        group = self.group_or_none()
        entered = taken.entered(self.layout, group)
        found = self._block(entered.hidden, entered.cross, entered.mask, entered.cross_mask)
        return (self.layout.leave(found, group).to(taken.hidden.dtype), *inputs[1:])

    def _block(
        self,
        hidden: Tensor,
        cross: Tensor | None,
        mask: Tensor | None,
        cross_mask: Tensor | None,
    ) -> Tensor:
        # The blocks are called as modules, so that hooks and activation checkpointing of each work.
        if self.parallel_attn_output:
            assert self.attention.pre_layernorm is not None
            normalised = self.attention.pre_layernorm(hidden)
            found: Tensor = self.attention((normalised, mask, Caller.BRANCH))
            found = found + self.output((normalised, Caller.BRANCH))
            return added(hidden, found, self.output.fp32_residual_addition)
        hidden = self.attention((hidden, mask, Caller.BLOCK))
        if self.add_cross_attention:
            hidden = self.cross_attention((hidden, cross, cross_mask, Caller.BLOCK))
        output: Tensor = self.output((hidden, Caller.BLOCK))
        return output


class DistributedTransformer(DistributedModule):
    """A stack of ``num_layers`` layers, ``seq_layers``.

    Args:
        num_layers: the number of layers.
        window_sizes: the ``window_size`` of each layer; None for ``window_size`` of all.
        Others: as those of DistributedTransformerLayer.

    Input and output are as those of DistributedTransformerLayer. Hidden states are brought into the layout of
    ``optimize`` once, before the first layer, and back after the last; so are masks. The stack calls the
    layers with these; a layer that a script calls takes and gives local hidden states.

    Raises IndivisibleError, ArgumentError.
    """

    _smp_takes_tuple = True

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        query_key_layer_scaling: bool = False,
        fused_softmax: bool = True,
        fused_dropout: bool = False,
        fused_bias_gelu: bool = False,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        window_size: int | None = None,
        window_sizes: tuple[int | None, ...] | None = None,
        rotary_dim: int | None = None,
        use_qkv_bias: bool = True,
        use_attn_dense_bias: bool = True,
        parallel_attn_output: bool = False,
        optimize: str | None = None,
    ) -> None:
        options = given(locals())
        super().__init__()
        self.layout = layout_of(configured(optimize), self.tp_size)
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.add_cross_attention, self.causal_mask_size = add_cross_attention, causal_mask_size
        windows = window_sizes if window_sizes is not None else (window_size,) * num_layers
        if len(windows) != num_layers:
            raise ArgumentError(
                f"{type(self).__name__}: window_sizes has {len(windows)} values for {num_layers} layers"
            )
        layers = [
            made(DistributedTransformerLayer, options, layer_idx=number, window_size=window)
            for number, window in enumerate(windows)
        ]
        self.seq_layers = nn.Sequential(*layers)

    def forward(self, inputs: tuple[object, ...]) -> tuple[object, ...]:
        """The inputs with the last layer's output in the place of hidden states; all ranks of the TP group call it."""
        _, taken = taken_of(self, inputs)
        group = self.group_or_none()
        entered = taken.entered(self.layout, group)
        passed: tuple[object, ...] = (entered.hidden, entered.mask, Caller.BLOCK)
        if self.add_cross_attention:
            passed = (entered.hidden, entered.cross, entered.mask, entered.cross_mask, Caller.BLOCK)
        last: Tensor = self.seq_layers(passed)[0]
        return (self.layout.leave(last, group).to(taken.hidden.dtype), *inputs[1:])


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInputs:
    """The parts of a layer's input."""

    hidden: Tensor
    cross: Tensor | None
    mask: Tensor | None
    cross_mask: Tensor | None

    def entered(self, layout: HiddenLayout, group: TensorGroup | None) -> LayerInputs:
        """The same in the layout of hidden states, with masks for the whole batch."""
        return LayerInputs(
            layout.enter(self.hidden, group),
            None if self.cross is None else layout.enter(self.cross, group),
            whole_mask(self.mask, group),
            whole_mask(self.cross_mask, group),
        )


def taken_of(
    module: DistributedTransformerLayer | DistributedTransformer, inputs: tuple[object, ...]
) -> tuple[Caller, LayerInputs]:
    """The caller and the parts of a module's input. Raises ArgumentError for parts of other shapes."""
    cross, cross_mask = None, None
    if module.add_cross_attention:
        caller, (given, other, mask, cross_mask) = unpacked(module, inputs, 4)
        cross = hidden_states_of(module, caller, "cross_states", other)
    else:
        caller, (given, mask) = unpacked(module, inputs, 2)
    hidden = hidden_states_of(module, caller, "hidden_states", given)
    if caller is not Caller.ALONE:
        own = optional(module, "attention_mask", mask)
        return caller, LayerInputs(hidden, cross, own, optional(module, "cross_mask", cross_mask))
    check_length(module, hidden.shape[1], module.causal_mask_size)
    heads = module.num_attention_heads
    own = checked_mask(module, "attention_mask", mask, hidden, hidden.shape[1], heads)
    others = None
    if cross is not None:
        others = checked_mask(module, "cross_mask", cross_mask, hidden, cross.shape[1], heads)
    return caller, LayerInputs(hidden, cross, own, others)


def given(values: Mapping[str, object]) -> dict[str, object]:
    """The arguments of an ``__init__``, from its local names."""
    return {name: value for name, value in values.items() if name not in ("self", "__class__")}


def made(cls: type[M], options: Mapping[str, object], **changed: object) -> M:
    """A module of a class, with those of the options that the class takes."""
    names = inspect.signature(cls.__init__).parameters
    chosen = {name: value for name, value in options.items() if name in names}
    return cls(**{**chosen, **changed})
