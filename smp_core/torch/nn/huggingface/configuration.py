"""The configurations of Hugging Face's models, from which the arguments of distributed modules are read."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.nn.output_layer import ACTIVATIONS


class Configuration(Protocol):
    """A configuration of Transformers: its attributes have the names that its class documents."""

    def __getattr__(self, name: str) -> Any:
        """The value of an attribute."""


def activation(name: object) -> str:
    """The name of an activation, checked. Raises UnsupportedTrainingError for one that there is not."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedTrainingError(
            f"activation {name!r} is not supported: there is {', '.join(sorted(ACTIVATIONS))}"
        )
    return name


def of_config(module: nn.Module) -> tuple[tuple[object, ...], dict[str, object]]:
    """The argument with which a module of Transformers was made: its configuration."""
    return (module.config,), {}


def is_tied(module: nn.Module) -> bool:
    """Return whether the head of a module of Transformers has the weight of its word embedding."""
    config: Configuration = module.config  # type: ignore[assignment]
    return bool(config.tie_word_embeddings)
