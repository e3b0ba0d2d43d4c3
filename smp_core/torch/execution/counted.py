"""What a recorder of memory (memory.py) is told by those that hold some: nothing, where there is none.

The recorder of a rank is that of its thread, and of the threads of its activities, which have a copy of
its context (execution/workers.py).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch

#: Kinds of memory. What lies in one storage counts once, as the first of these that it is.
PARAMETERS, MASTERS, OPTIMIZER, GRADIENTS = "parameters", "masters", "optimizer", "gradients"
GATHERED, ACTIVATIONS, EXCHANGED = "gathered", "activations", "exchanged"
KINDS = (PARAMETERS, MASTERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, EXCHANGED)


class Counter(Protocol):
    """memory.Recorder."""

    def holds(self, kind: str, tensor: torch.Tensor) -> None:
        """This tensor's memory is of a kind, for as long as it lives."""

    def saved(self, value: Any) -> None:
        """Autograd keeps ``value``, and by that ``value.tensor``."""

    def sample(self, event: str, what: str = "") -> Any:
        """Something has happened: count."""


current: ContextVar[Counter | None] = ContextVar("smp memory", default=None)


def holds(kind: str, tensor: torch.Tensor) -> None:
    """This tensor's memory is of a kind, for as long as it lives."""
    counter = current.get()
    if counter is not None:
        counter.holds(kind, tensor)


def saved(value: Any) -> None:
    """Autograd keeps ``value``, and by that ``value.tensor``."""
    counter = current.get()
    if counter is not None:
        counter.saved(value)


def happened(event: str, what: str = "") -> None:
    """Count, if there is somebody to do it."""
    counter = current.get()
    if counter is not None:
        counter.sample(event, what)
