"""Causal language models of Hugging Face: their calls and their registration, for a DistributedTransformerLMHead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.nn.huggingface import calls
from smp_core.torch.nn.huggingface.configuration import Configuration, of_config
from smp_core.torch.nn.lm_head import DistributedTransformerLMHead
from smp_core.torch.tensor_parallel.registry import Registration
from smp_core.torch.tensor_parallel.translation import Translation

#: Arguments of forward that change nothing while a model is trained.
_WITHOUT_EFFECT = frozenset({"cache_position"})


class CausalLanguageModel(DistributedTransformerLMHead):
    """A DistributedTransformerLMHead that is called as Hugging Face's models are, and returns what they return.

    Attributes:
        config: the configuration of Hugging Face's model.
    """

    config: Configuration

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **options: object,
    ) -> object:
        """Scores, or hidden states, of this rank's samples; all ranks of the TP group call it.

        Raises UnsupportedTrainingError for an argument that is not supported: caches, embeddings in the place of ids,
        token types, masks of heads, and requests for attentions and hidden states, also those of the configuration.
        ``use_cache`` of the configuration has no effect. With ``logits_to_keep`` scores are cut, and there is no loss.
        """
        name = type(self).__name__
        calls.check_nothing_else(name, self.config, options, _WITHOUT_EFFECT)
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None and not keeps_all:
            raise UnsupportedTrainingError(
                f"{name}: labels with logits_to_keep are not supported. Leave one of them out"
            )
        if input_ids is None:
            raise UnsupportedTrainingError(f"{name}: input_ids are missing")
        mask = calls.masked(attention_mask)
        taken = self._taken(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, labels=labels
        )
        found = self._output(taken)
        loss = None
        if taken.labels is not None:
            if num_items_in_batch is None:
                loss = self._loss(found, taken.labels)
            else:  # the number of labels in the whole batch, which a microbatch does not know
                loss = self._loss(found, taken.labels, reduction="sum") / num_items_in_batch
        if not keeps_all:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            found = found[:, kept]
        if self.add_lm_head:
            return calls.scores(self.config, loss, found, return_dict)
        return calls.hidden_states(self.config, found, return_dict)


def registration(
    cls: type[nn.Module],
    arguments: Callable[[Configuration], dict[str, object]],
    translation: Callable[[nn.Module], Translation],
) -> Registration:
    """The registration of a class of causal language models.

    ``arguments`` gives those of a DistributedTransformerLMHead for a configuration, ``translation`` that of a module's
    state.
    """
    return Registration(
        cls,
        CausalLanguageModel,
        init_hook=lambda config: ((), arguments(config)),
        forward_hook=calls.by_name(cls),
        arguments=of_config,
        keeps=("config",),
        translation=translation,
    )
