"""``torch.nn.utils.clip_grad_norm_`` sees the norm of the whole gradient of a sharded model.

Each rank has its own part of most gradients, and by the norm of that part alone ranks would multiply what they hold in
common by different numbers. So while there is a sharded model, torch's function takes the norm over the sharding group:
every rank of it calls, for the same parameters, and gets the same bits.

This replaces a private function, ``_get_total_norm`` of ``torch.nn.utils.clip_grad``, which is looked up at each call:
however a script has imported ``clip_grad_norm_``, it is found. Checked with torch 2.13. Where torch has no such
function nothing is replaced, and ``optimizer.step()`` raises ReplicaDriftError.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from smp_core import runtime
from smp_core.errors import ArgumentError

if TYPE_CHECKING:
    from smp_core.torch.sharding.state import Sharding

_NAME = "_get_total_norm"


class _Replaced:
    """torch's function, while it is replaced; ranks that are threads share one."""

    lock = threading.Lock()
    users = 0
    original: Callable[..., torch.Tensor] | None = None


def install(sharding: Sharding) -> None:
    """Replace torch's function for as long as ``sharding`` lives."""
    with _Replaced.lock:
        _Replaced.users += 1
        if _Replaced.users == 1 and hasattr(clip_grad, _NAME):
            _Replaced.original = getattr(clip_grad, _NAME)
            setattr(clip_grad, _NAME, _total_norm)
    weakref.finalize(sharding, _gone)


def _gone() -> None:
    with _Replaced.lock:
        _Replaced.users -= 1
        # What somebody put on top of it stays, and passes everything on.
        if not _Replaced.users and getattr(clip_grad, _NAME, None) is _total_norm:
            setattr(clip_grad, _NAME, _Replaced.original)


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    sharding = _current()
    if sharding is None or not sharding.has_parts(given):
        assert _Replaced.original is not None
        return _Replaced.original(given, norm_type, error_if_nonfinite, foreach)
    norm = float(norm_type)
    if not norm > 0:
        raise ArgumentError(
            f"clip_grad_norm_: norm_type={norm_type!r}: the norm of a sharded gradient is of an order above 0, or inf"
        )
    with torch.no_grad():
        total = sharding.total_norm(given, norm)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm} for the gradients of a sharded model is non-finite, so it cannot be "
            "clipped. To multiply the gradients by it all the same, set `error_if_nonfinite=False`"
        )
    real = given[0].real if given[0].is_complex() else given[0]
    return torch.tensor(total, dtype=real.dtype)


def _current() -> Any:
    """What is split on this rank, if anything is."""
    if not runtime.is_initialized():
        return None
    session = runtime.current("clip_grad_norm_").training
    model = None if session is None else session.model
    return None if model is None else model.sharding


def norm_of(parts: Iterable[torch.Tensor], order: float) -> float:
    """The norm of these tensors together, in float64."""
    norms = [
        torch.linalg.vector_norm(
            part, order, dtype=torch.complex128 if part.is_complex() else torch.float64
        )
        for part in parts
        if part.numel()
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms), order)) if norms else 0.0
