"""torch's norms of gradients, in ``clip_grad_norm_`` and ``get_total_norm``, count whole gradients of a sharded model,
and of distributed modules.

Each rank has its own shard of most gradients, or its slice of some. With the norm of that alone, ranks would multiply
the gradients that they have in common by different numbers. So for shards torch takes the norm over the shard group,
for slices over the TP group: every rank of the groups calls, for the same parameters, and gets the same bits.

Both names lead to one private function of torch, ``_get_total_norm`` of ``torch.nn.utils.clip_grad``, which calls the
function in its decorator's closure. This module replaces that function when it is imported: however and whenever a
script has imported either name, it gets this project's. Gradients that are no shards of the rank's model go to torch's
own. Checked with torch 2.13. Where torch has no such function nothing is replaced. If ranks then multiply gradients
that all of them hold by different numbers, ``optimizer.step()`` finds the difference and raises ReplicaDriftError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch.nn.utils import clip_grad

from smp_core import runtime
from smp_core.errors import ArgumentError
from smp_core.runtime import Runtime
from smp_core.torch.parameters.split import split_of
from smp_core.torch.sharding.whole_model import WHOLE_MODEL


def _install() -> None:
    """Put this module's norm before the function that torch's decorator calls."""
    decorated = getattr(clip_grad, "_get_total_norm", None)
    code, cells = getattr(decorated, "__code__", None), getattr(decorated, "__closure__", None)
    if code is not None and cells and "func" in code.co_freevars:
        cell = cells[code.co_freevars.index("func")]
        # Torch's own is kept in a closure: where this module is loaded again, the second stands before the first.
        cell.cell_contents = _over(cell.cell_contents)


def _over(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        sharding, sliced = _current(), _of_slices(given)
        if not sharding.has_shards(given) and not sliced:
            return original(given, norm_type, error_if_nonfinite, foreach)
        norm = float(norm_type)
        if not norm > 0:
            raise ArgumentError(
                f"clip_grad_norm_: norm_type={norm_type!r}: the norm of a sharded gradient is of an order above 0, "
                "or inf"
            )
        with torch.no_grad():
            total = _total(sharding, given, sliced, norm)
        if error_if_nonfinite and not math.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm} for the gradients of a sharded model is non-finite, so it cannot be "
                "clipped. To multiply the gradients by it all the same, set `error_if_nonfinite=False`"
            )
        real = given[0].real if given[0].is_complex() else given[0]
        return torch.tensor(total, dtype=real.dtype)

    return total_norm


def _current() -> Any:
    """The sharding of this rank's model."""
    if not runtime.is_initialized():
        return WHOLE_MODEL
    session = runtime.current("clip_grad_norm_").training
    model = None if session is None else session.model
    return WHOLE_MODEL if model is None else model.sharding


def _of_slices(given: Sequence[torch.Tensor]) -> set[int]:
    """The ids of those gradients that are of slices of distributed modules."""
    session = runtime.current("clip_grad_norm_").training if runtime.is_initialized() else None
    if session is None or session.tensor_group is None or session.model is None:
        return set()
    model, ids = session.model, {id(each) for each in given}
    found: set[int] = set()
    for parameter in model.get_module().parameters():
        if split_of(parameter) is not None:
            target = parameter if model.masters is None else model.masters.made(parameter)
            found.update(id(each.grad) for each in (parameter, target) if each.grad is not None)
    return found & ids


def _total(sharding: Any, given: Sequence[torch.Tensor], sliced: Set[int], order: float) -> float:
    """The norm of the whole gradients: of slices over the TP group, each other gradient once."""
    norm = sharding.total_norm if sharding.has_shards(given) else norm_of
    if not sliced:
        return float(norm(given, order))
    norms = [
        norm([each for each in given if (id(each) in sliced) is on], order) for on in (False, True)
    ]
    current = runtime.current("clip_grad_norm_")
    return norm_of_values([norms[0], *over_tensor_group(current, norms[1])], order)


def over_tensor_group(current: Runtime, value: float) -> list[float]:
    """The values of all tp ranks, in their order; this rank's alone where no module is distributed."""
    group = None if current.training is None else current.training.tensor_group
    return [value] if group is None else group.all_gather_values(value)


def norm_of_values(values: Sequence[float], order: float) -> float:
    """The norm of parts whose norms these are."""
    return norm_of([torch.tensor(values, dtype=torch.float64)], order)


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


_install()
