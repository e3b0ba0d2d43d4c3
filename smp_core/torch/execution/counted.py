"""Notifications to the recorder of memory (memory/recorder.py). Without a recorder they do nothing.

A rank's recorder is a context variable of its thread. The threads of its activities run in copies of that context
(execution/workers.py).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

import torch

#: Kinds of memory. A storage of several kinds counts once, as the first of them.
PARAMETERS, MASTERS, OPTIMIZER, GRADIENTS = "parameters", "masters", "optimizer", "gradients"
GATHERED, ACTIVATIONS, EXCHANGED = "gathered", "activations", "exchanged"
KINDS = (PARAMETERS, MASTERS, OPTIMIZER, GRADIENTS, GATHERED, ACTIVATIONS, EXCHANGED)


class Saved(Protocol):
    """The form in which autograd keeps a tensor until backward."""

    @property
    def tensor(self) -> torch.Tensor:
        """The kept tensor."""


class Counter(Protocol):
    """The protocol of ``memory.recorder.Recorder``."""

    def holds(self, kind: str, tensor: torch.Tensor) -> None:
        """Count a tensor's memory as of this kind, until the memory is freed."""

    def saved(self, value: Saved) -> None:
        """Count ``value.tensor`` as an activation while autograd keeps ``value``."""

    def sample(self, event: str, what: str = "") -> object:
        """Count the bytes of each kind after an event."""


current: ContextVar[Counter | None] = ContextVar("smp memory", default=None)


def holds(kind: str, tensor: torch.Tensor) -> None:
    """Count a tensor's memory as of this kind, until the memory is freed."""
    counter = current.get()
    if counter is not None:
        counter.holds(kind, tensor)


def saved(value: Saved) -> None:
    """Count ``value.tensor`` as an activation while autograd keeps ``value``."""
    counter = current.get()
    if counter is not None:
        counter.saved(value)


def happened(event: str, what: str = "") -> None:
    """Count the bytes of each kind after an event."""
    counter = current.get()
    if counter is not None:
        counter.sample(event, what)
