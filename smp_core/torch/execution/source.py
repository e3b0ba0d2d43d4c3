"""What module calls and saved tensors ask of a model whose parameters are not kept whole.

``sharding/gathered.py`` is such a source. It is handed to ``uses.activity``; without one every
parameter is whole, and is read as it is.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class Frame(Protocol):
    """A call in progress (uses.py)."""

    parent: Any
    module: nn.Module | None


class Kept(Protocol):
    """What a rank keeps of a parameter."""

    @property
    def name(self) -> str:
        """The parameter's first name in the wrapped module."""

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """Keep this rank's part of the whole value; gives it as the parameter's new data."""


class ParameterSource(Protocol):
    """Parameters that are whole only while somebody uses them.

    A place is a unit of parameters and an index in it; both are the source's own.
    """

    def shard(self, parameter: torch.Tensor) -> Kept | None:
        """What is kept of a parameter, None if it is whole on every rank."""

    def read(self, parameter: nn.Parameter, frame: Frame) -> torch.Tensor:
        """The whole parameter, for a call that has to be ended with :meth:`leave`."""

    def leave(self, frame: Frame, backward: bool) -> None:
        """End a call. In a backward pass its parameters wait for their gradients."""

    def expect(self, microbatch: Any, parameter: nn.Parameter) -> None:
        """Count one use of the parameter that is to bring a gradient."""

    def came(self, microbatch: Any, parameter: nn.Parameter) -> None:
        """Count one gradient that ``expect`` announced."""

    def place(self, tensor: torch.Tensor) -> tuple[Any, int] | None:
        """The place of the parameter in whose memory a tensor lies, if there is one."""

    def again(self, unit: Any, index: int, microbatch: Any) -> torch.Tensor:
        """The whole parameter at a place, for a backward pass of the microbatch."""
