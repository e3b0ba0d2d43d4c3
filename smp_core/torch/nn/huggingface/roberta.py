"""Hugging Face's RoBERTa: a RobertaEncoder is distributed, in whatever model it is (API 1.10)."""

from __future__ import annotations

from collections.abc import Mapping

from smp_core.torch.nn.huggingface import states
from smp_core.torch.nn.huggingface.encoder import TRANSLATION, registration

__all__ = [
    "registration",
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
]


def translate_hf_state_dict_to_smdistributed_roberta(
    state_dict: Mapping[str, object],
) -> dict[str, object]:
    """The state of a model of Hugging Face, for the distributed one."""
    return states.to_ours("roberta", TRANSLATION, state_dict)


def translate_state_dict_to_hf_roberta(
    state_dict: Mapping[str, object], max_seq_len: int | None = None
) -> dict[str, object]:
    """The whole state of a distributed model, for that of Hugging Face. ``max_seq_len`` has no effect."""
    return states.to_theirs("roberta", TRANSLATION, state_dict)
