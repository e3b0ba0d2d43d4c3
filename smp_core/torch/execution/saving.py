"""What autograd saves of gathered parameters is kept as a reference, and gathered again in backward.

Everything else is saved as torch would; since torch leaves the check to whoever takes over the saving, a
tensor that was modified in place in between is noticed here.

torch asks the innermost hooks only. Whoever puts its own inside (recompute.py) passes what it keeps for
backward through :func:`keep` and :func:`opened`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from smp_core.torch.execution import counted
from smp_core.torch.execution.source import ParameterSource


class _Reference:
    """A view of a gathered parameter."""

    __slots__ = (
        "conjugated",
        "dtype",
        "gathered",
        "geometry",
        "index",
        "microbatch",
        "negated",
        "unit",
    )

    def __init__(
        self,
        gathered: ParameterSource,
        place: tuple[Any, int],
        tensor: torch.Tensor,
        microbatch: Any,
    ) -> None:
        self.gathered, self.microbatch = gathered, microbatch
        self.unit, self.index = place
        self.geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.dtype, self.conjugated, self.negated = tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def open(self) -> torch.Tensor:
        whole = self.gathered.again(self.unit, self.index, self.microbatch)
        view = torch.empty(0, dtype=self.dtype).set_(whole.untyped_storage(), *self.geometry)
        view = view.conj() if self.conjugated else view
        return torch._neg_view(view) if self.negated else view


class _Value:
    """Any other tensor."""

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


class _Thread(threading.local):
    gathered: ParameterSource | None = None
    microbatch: Any = None


_thread = _Thread()


@contextlib.contextmanager
def entered(gathered: ParameterSource, microbatch: Any) -> Iterator[None]:
    """While entered, what autograd saves in this thread refers to gathered parameters."""
    before = _thread.gathered, _thread.microbatch
    _thread.gathered, _thread.microbatch = gathered, microbatch
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, opened):
            yield
    finally:
        _thread.gathered, _thread.microbatch = before


def counting() -> AbstractContextManager[Any]:
    """While entered, a recorder of memory, if there is one, sees what autograd saves in this thread."""
    if counted.current.get() is None or _thread.gathered is not None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(keep, opened)


def keep(tensor: torch.Tensor) -> Any:
    """The tensor in the form in which it is to be kept until backward."""
    gathered = _thread.gathered
    if gathered is None:
        return tensor if counted.current.get() is None else _Value(tensor)
    place = gathered.place(tensor)
    if place is None:
        return _Value(tensor)
    return _Reference(gathered, place, tensor, _thread.microbatch)


def opened(kept: Any) -> torch.Tensor:
    """The tensor again."""
    return kept if isinstance(kept, torch.Tensor) else kept.open()
