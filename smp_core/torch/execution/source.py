"""The source from which module calls and saved tensors get the model's parameters.

``sharding/unsharding.py`` is the source of a sharded model. ``WHOLE`` is the source of every other model: each
parameter of a rank is whole there, and is read as it is.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from torch import nn


class Frame(Protocol):
    """A call in progress (uses.py)."""

    @property
    def parent(self) -> Self | None:
        """The calling frame; None for an activity's outermost one."""

    @property
    def module(self) -> nn.Module | None:
        """The called module; None for the body of a microbatch."""


class KeptShard(Protocol):
    """The shard that a rank keeps of a parameter."""

    @property
    def name(self) -> str:
        """The parameter's first name in the wrapped module."""

    def copy_from_full(self, value: torch.Tensor) -> torch.Tensor:
        """Copy this rank's elements of a full tensor into the shard; gives the parameter's new data."""


class ParameterSource(Protocol):
    """Gives module calls the full parameters, for as long as they use them.

    A place is a unit of parameters and an index in it; both are the source's own.
    """

    def shard(self, parameter: torch.Tensor) -> KeptShard | None:
        """The shard of a parameter; None if the parameter is whole on every rank."""

    def read(self, parameter: nn.Parameter, frame: Frame) -> torch.Tensor:
        """The full parameter, for a call that has to be ended with :meth:`leave`."""

    def leave(self, frame: Frame, backward: bool) -> None:
        """End a call. In a backward pass its parameters wait for their gradients."""

    def expect(self, microbatch: object, parameter: nn.Parameter) -> None:
        """Announce one gradient: a use of the parameter is to bring it."""

    def on_grad(self, microbatch: object, parameter: nn.Parameter) -> None:
        """Count one gradient announced by ``expect``."""

    def end_backward(self, microbatch: object) -> None:
        """End a backward pass of the microbatch: gradients that have not come are not waited for any more."""

    def saved_tensor_hooks(self, microbatch: object) -> AbstractContextManager[object]:
        """While entered, autograd saves references to full parameters instead of the tensors."""

    def place(self, tensor: torch.Tensor) -> tuple[Any, int] | None:
        """The place of the parameter in whose memory a tensor lies, if there is one."""

    def unshard_for_backward(self, unit: Any, index: int, microbatch: object) -> torch.Tensor:
        """The full parameter at a place, for a backward pass of the microbatch."""


class WholeParameters:
    """The source of a model that is not sharded: nothing is gathered, counted or freed."""

    def shard(self, parameter: torch.Tensor) -> KeptShard | None:
        return None

    def read(self, parameter: nn.Parameter, frame: Frame) -> torch.Tensor:
        return parameter.detach()

    def leave(self, frame: Frame, backward: bool) -> None:
        """Do nothing, since nothing is held for a call."""

    def expect(self, microbatch: object, parameter: nn.Parameter) -> None:
        """Do nothing, since nothing waits for a gradient."""

    def on_grad(self, microbatch: object, parameter: nn.Parameter) -> None:
        """Do nothing, since nothing waits for a gradient."""

    def end_backward(self, microbatch: object) -> None:
        """Do nothing, since nothing waits for a gradient."""

    def saved_tensor_hooks(self, microbatch: object) -> AbstractContextManager[object]:
        return _NO_HOOKS

    def place(self, tensor: torch.Tensor) -> tuple[Any, int] | None:
        return None

    def unshard_for_backward(self, unit: Any, index: int, microbatch: object) -> torch.Tensor:
        raise AssertionError("autograd saves no reference to a whole parameter")


_NO_HOOKS: AbstractContextManager[None] = contextlib.nullcontext()

#: The only instance: it has no state, so all models without shards share it.
WHOLE: ParameterSource = WholeParameters()
