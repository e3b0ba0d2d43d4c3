"""The calls of Hugging Face's models: arguments by name, masks, and the values that calls return."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.nn.huggingface.configuration import Configuration
from smp_core.torch.tensor_parallel.registry import Arguments

#: Values that a configuration asks for.
_ASKED = ("output_attentions", "output_hidden_states")


def by_name(cls: type[nn.Module]) -> Callable[..., Arguments]:
    """A hook that gives each argument of a class's ``forward`` its name: positions differ between versions."""
    return functools.partial(_by_name, inspect.signature(cls.forward))


def _by_name(signature: inspect.Signature, *args: object, **kwargs: object) -> Arguments:
    bound = signature.bind_partial(None, *args)  # None for self
    names = list(bound.arguments)[1:]
    twice = sorted(set(names) & set(kwargs))
    if twice:
        raise TypeError(f"forward() got multiple values for argument {twice[0]!r}")
    return (), {**{name: bound.arguments[name] for name in names}, **kwargs}


def check_nothing_else(
    name: str, config: Configuration, arguments: Mapping[str, object], ignored: frozenset[str]
) -> None:
    """Raise UnsupportedTrainingError for arguments, and values that the configuration asks for, that a distributed
    module does not support.
    """
    for what, value in arguments.items():
        if isinstance(value, list) and not any(each is not None for each in value):
            continue  # a head_mask with a None for each layer
        if value is not None and value is not False and what not in ignored:
            raise UnsupportedTrainingError(
                f"{name}: {what} is not supported with tensor parallelism. Leave it out"
            )
    for what in _ASKED:
        if arguments.get(what) is None and getattr(config, what, False):
            raise UnsupportedTrainingError(
                f"{name}: config.{what}=True is not supported with tensor parallelism. Set it to False"
            )


def masked(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask in which 1 masks a position, of one in which 1 attends to it; floating-point scores as they are.

    A mask of ``(B, S)`` marks positions, of whatever dtype.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2 or not attention_mask.is_floating_point():
        return attention_mask == 0
    return attention_mask


def scores(
    config: Configuration, loss: torch.Tensor | None, logits: torch.Tensor, return_dict: bool | None
) -> object:
    """The value of a language model."""
    if not _as_dict(config, return_dict):
        return (logits,) if loss is None else (loss, logits)
    return _class("CausalLMOutputWithCrossAttentions")(loss=loss, logits=logits)


def hidden_states(config: Configuration, hidden: torch.Tensor, return_dict: bool | None) -> object:
    """The value of a model without a head, or of an encoder."""
    if not _as_dict(config, return_dict):
        return (hidden,)
    return _class("BaseModelOutputWithPastAndCrossAttentions")(last_hidden_state=hidden)


def _as_dict(config: Configuration, return_dict: bool | None) -> bool:
    if return_dict is not None:
        return return_dict
    return bool(getattr(config, "use_return_dict", getattr(config, "return_dict", True)))


def _class(name: str) -> Callable[..., object]:
    found: Callable[..., object] = getattr(
        importlib.import_module("transformers.modeling_outputs"), name
    )
    return found
