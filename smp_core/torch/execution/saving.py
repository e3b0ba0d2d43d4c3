"""Autograd saves a reference (unit, parameter, view geometry) instead of an unsharded parameter.

Unsharded memory is therefore freed between forward and backward, and backward unshards the unit again. Every other
tensor is saved as by torch, with a check of its version in place of torch's, which hooks turn off.

Torch calls the innermost hooks only. Code with hooks of its own inside (recompute.py) passes the tensors that it keeps
for backward through :func:`keep` and :func:`opened`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch

from smp_core.torch.execution import counted
from smp_core.torch.execution.source import WHOLE, ParameterSource


class _Reference:
    """A view of an unsharded parameter."""

    __slots__ = (
        "conjugated",
        "dtype",
        "geometry",
        "index",
        "microbatch",
        "negated",
        "source",
        "unit",
    )

    def __init__(
        self,
        source: ParameterSource,
        place: tuple[object, int],
        tensor: torch.Tensor,
        microbatch: object,
    ) -> None:
        self.source, self.microbatch = source, microbatch
        self.unit, self.index = place
        self.geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.dtype, self.conjugated, self.negated = tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def open(self) -> torch.Tensor:
        full = self.source.unshard_for_backward(self.unit, self.index, self.microbatch)
        view = torch.empty(0, dtype=self.dtype).set_(full.untyped_storage(), *self.geometry)
        view = view.conj() if self.conjugated else view
        return torch._neg_view(view) if self.negated else view


class _Value:
    """A saved tensor that is no parameter, with its version, so that a change in place is noticed."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an output that holds itself would never be freed.
        self.tensor, self.version = tensor.detach(), tensor._version
        counted.saved(self)

    def open(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


#: The forms in which a tensor is kept until backward.
Kept: TypeAlias = torch.Tensor | _Reference | _Value


class _Thread(threading.local):
    source = WHOLE
    microbatch: object = None
    entered = False  # whether `keep` takes over the saving of every tensor


_thread = _Thread()


@contextlib.contextmanager
def entered(source: ParameterSource, microbatch: object) -> Iterator[None]:
    """While entered, autograd saves references to the source's unsharded parameters in this thread."""
    before = _thread.source, _thread.microbatch, _thread.entered
    _thread.source, _thread.microbatch, _thread.entered = source, microbatch, True
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, opened):
            yield
    finally:
        _thread.source, _thread.microbatch, _thread.entered = before


def counting() -> AbstractContextManager[object]:
    """While entered, a recorder of memory, if there is one, sees what autograd saves in this thread."""
    if counted.current.get() is None or _thread.entered:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(keep, opened)


def keep(tensor: torch.Tensor) -> Kept:
    """The tensor in the form in which it is to be kept until backward."""
    place = _thread.source.place(tensor)
    if place is not None:
        return _Reference(_thread.source, place, tensor, _thread.microbatch)
    if _thread.entered or counted.current.get() is not None:
        return _Value(tensor)
    return tensor


def opened(kept: Kept) -> torch.Tensor:
    """The tensor that ``keep`` was given, in the value that backward needs."""
    return kept if isinstance(kept, torch.Tensor) else kept.open()
