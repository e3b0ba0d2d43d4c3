"""``smp.nn.DistributedTransformerLMHead``: embeddings, a stack of layers, and a language model's head (API 1.10)."""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn
from torch.nn import functional

from smp_core.errors import ArgumentError
from smp_core.torch import session as sessions
from smp_core.torch.nn.block import optional, unpacked
from smp_core.torch.nn.embedding import DistributedEmbedding
from smp_core.torch.nn.layer_norm import WholeLayerNorm
from smp_core.torch.nn.linear import DistributedLinear
from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.nn.transformer import DistributedTransformer, given, made
from smp_core.torch.tensor_parallel import exchange

Tensor = torch.Tensor

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LMHeadInputs:
    """The inputs of a language model by name, of which all but the ids may be None."""

    input_ids: Tensor
    attention_mask: Tensor | None = None
    token_type_ids: Tensor | None = None
    position_ids: Tensor | None = None
    cross_states: Tensor | None = None
    cross_mask: Tensor | None = None
    labels: Tensor | None = None


#: The inputs in the order in which a script gives them.
_INPUTS = tuple(each.name for each in dataclasses.fields(LMHeadInputs))
#: Those of a model with ``add_cross_attention`` alone.
_CROSS_INPUTS = ("cross_states", "cross_mask")


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a DistributedTransformer, and a linear layer to the vocabulary whose weight is the word embedding's.

    Args:
        vocab_size: the number of words.
        num_positions: the number of positions with an embedding; 0 for none.
        num_token_types: the number of token types with an embedding; 0 for none.
        causal_mask_size: as that of DistributedTransformerLayer; with labels, also the shift of the loss.
        add_lm_head: whether the output are scores of the vocabulary; else hidden states.
        tie_input_output_embedding: whether the head's weight is the word embedding's; else it is its own.
        use_lm_head_bias: whether the head has a bias.
        final_layernorm: normalise the last hidden states; None: if layers have ``pre_layernorm`` alone.
        embedding_dropout_prob: the probability with which a channel of the embeddings is dropped; None for
            ``hidden_dropout_prob``.
        distribute_embedding: split the embeddings along ``hidden_size`` over the TP group; True with sharded data
            parallelism at a ``tensor_parallel_degree`` above 1, whatever is given.
        Others: as those of DistributedTransformer.

    The input is ``(input_ids, attention_mask, token_type_ids, position_ids, labels)``, each ``(B, S)``, or with
    ``add_cross_attention`` ``(input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask,
    labels)``. All but the ids may be None. In ``attention_mask`` 1 masks a position, or floating-point values are added
    to scores. Positions are counted from 0 if they are None.

    The output is ``(B, S, vocab_size)``, or ``(B, S, hidden_size)`` without head; with labels, ``(loss, output)``: the
    loss is the mean cross-entropy, of each label with the scores of the position before it if layers are causal.
    Labels of -100 do not count.

    Submodules: ``word_embedding``, ``position_embedding``, ``token_type_embedding``, ``transformer``, ``layernorm``,
    ``lm_head``. Raises IndivisibleError, ArgumentError.
    """

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
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
        tie_input_output_embedding: bool = True,
        use_lm_head_bias: bool = False,
        final_layernorm: bool | None = None,
        embedding_dropout_prob: float | None = None,
        distribute_embedding: bool = False,
        optimize: str | None = None,
    ) -> None:
        options = given(locals())
        super().__init__()
        self.add_cross_attention, self.causal_mask_size = add_cross_attention, causal_mask_size
        self.hidden_size, self.rotary_dim = hidden_size, rotary_dim
        self.embedding_dropout_prob = (
            hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        )
        config = sessions.current("smp.nn.DistributedTransformerLMHead").runtime.config
        forced = config.sharded_data_parallel_degree > 1
        self.distribute_embedding = (distribute_embedding or forced) and self.tp_size > 1
        if self.distribute_embedding and not distribute_embedding:
            log.info(
                "tensor parallelism: the embeddings are distributed: with sharded data parallelism "
                "distribute_embedding is True, whatever is given"
            )
        self.word_embedding = self._embedding(vocab_size, initializer_range)
        embeddings = [
            self._embedding(count, initializer_range) if count else None
            for count in (num_positions, num_token_types)
        ]
        self.position_embedding, self.token_type_embedding = embeddings
        self.transformer = made(DistributedTransformer, options)
        if final_layernorm is None:
            final_layernorm = pre_layernorm and not post_layernorm
        self.layernorm = WholeLayerNorm(hidden_size, layernorm_epsilon) if final_layernorm else None
        self.add_lm_head = add_lm_head
        self.tied = tie_input_output_embedding
        if add_lm_head and not tie_input_output_embedding:
            self.lm_head = self._head(vocab_size, use_lm_head_bias, initializer_range)
        elif add_lm_head and use_lm_head_bias:
            self.lm_head_bias = nn.Parameter(torch.zeros(vocab_size))

    def _embedding(self, count: int, std: float) -> nn.Module:
        plain = nn.Embedding(count, self.hidden_size)
        nn.init.normal_(plain.weight, std=std)
        if not self.distribute_embedding:
            return plain
        # Of the same random numbers, so that weights are the same at every degree.
        return DistributedEmbedding(count, self.hidden_size, _weight=plain.weight.detach())

    def _head(self, vocab_size: int, bias: bool, std: float) -> nn.Module:
        plain = nn.Linear(self.hidden_size, vocab_size, bias)
        nn.init.normal_(plain.weight, std=std)
        if bias:
            nn.init.zeros_(plain.bias)
        if not self.distribute_embedding:
            return plain
        return DistributedLinear.of(plain)

    def forward(self, inputs: tuple[object, ...]) -> object:
        """Scores or hidden states of this rank's samples; all ranks of the TP group call it."""
        names = [each for each in _INPUTS if self.add_cross_attention or each not in _CROSS_INPUTS]
        _, parts = unpacked(self, inputs, len(names))
        taken = self._taken(**dict(zip(names, parts, strict=True)))
        output = self._output(taken)
        return output if taken.labels is None else (self._loss(output, taken.labels), output)

    def _taken(self, *, input_ids: object, **others: object) -> LMHeadInputs:
        """The inputs, checked. Raises ArgumentError, which names one that is no tensor, and ids of another shape."""
        ids = optional(self, "input_ids", input_ids)
        if ids is None or ids.dim() != 2:
            shape = None if ids is None else list(ids.shape)
            raise ArgumentError(f"{type(self).__name__}: input_ids is {shape}: it must be (B, S)")
        given = {name: optional(self, name, value) for name, value in others.items()}
        return LMHeadInputs(input_ids=ids, **given)

    def _output(self, taken: LMHeadInputs) -> Tensor:
        """Scores or hidden states."""
        hidden = self._embedded(taken)
        passed: tuple[Tensor | None, ...] = (hidden, taken.attention_mask)
        if self.add_cross_attention:
            passed = (hidden, taken.cross_states, taken.attention_mask, taken.cross_mask)
        hidden = self.transformer(passed)[0]
        output = hidden if self.layernorm is None else self.layernorm(hidden)
        return self._scores(output) if self.add_lm_head else output

    def _embedded(self, taken: LMHeadInputs) -> Tensor:
        name = type(self).__name__
        ids, types, positions = taken.input_ids, taken.token_type_ids, taken.position_ids
        hidden: Tensor = self.word_embedding(ids)
        if self.position_embedding is not None:
            if positions is None:
                positions = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
            hidden = hidden + self.position_embedding(positions.expand_as(ids))
        elif positions is not None:
            counted = torch.arange(ids.shape[-1], device=ids.device)
            if not bool((positions == counted).all()):
                raise ArgumentError(
                    f"{name}: position_ids: without position embeddings positions are counted from 0. Leave them out"
                )
        if types is not None:
            if self.token_type_embedding is None:
                raise ArgumentError(f"{name}: token_type_ids are given, and num_token_types is 0")
            hidden = hidden + self.token_type_embedding(types)
        return functional.dropout(hidden, self.embedding_dropout_prob, self.training)

    def _scores(self, hidden: Tensor) -> Tensor:
        if not self.tied:
            scores: Tensor = self.lm_head(hidden)
            return scores
        weight: Tensor = self.word_embedding.weight  # type: ignore[assignment]
        if self.distribute_embedding:
            group = self.group()
            sliced = exchange.slice_channels(hidden, group, type(self).__name__)
            scores = exchange.sum_batch(functional.linear(sliced, weight), group)
        else:
            scores = functional.linear(hidden, weight)
        bias: Tensor | None = self._parameters.get("lm_head_bias")
        return scores if bias is None else scores + bias

    def _loss(self, scores: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """The cross-entropy of labels, of which those of -100 do not count; ``reduction`` is torch's."""
        if not self.add_lm_head:
            raise ArgumentError(
                f"{type(self).__name__}: labels are given, and there is no head (add_lm_head)"
            )
        if self.causal_mask_size is not None:
            scores, labels = scores[..., :-1, :], labels[..., 1:]
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return functional.cross_entropy(
            scores.flatten(0, -2), labels.flatten(), reduction=reduction
        )
