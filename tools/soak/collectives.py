"""Steps of the soak's programs: torch's collectives of tensors and of objects, each of which checks
what it got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import smp_core.torch as smp

Names = tuple[str, ...]


def expect(got: object, expected: object) -> None:
    """Raises AssertionError, with both, unless they are equal."""
    assert got == expected, f"got {got!r}, expected {expected!r}"


def _root(number: int) -> int:
    return number % smp.size()


def _pair(number: int, rank: int) -> torch.Tensor:
    return torch.tensor([number, rank])


def _empty() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64)


def _all() -> range:
    return range(smp.size())


def _all_gather(number: int) -> None:
    parts = [_empty() for _ in _all()]
    work: Any = dist.all_gather(parts, _pair(number, smp.rank()), async_op=True)
    work.wait()
    expect([part.tolist() for part in parts], [[number, rank] for rank in _all()])


def _all_reduce(number: int) -> None:
    tensor = torch.arange(5) * (smp.rank() + number)
    dist.all_reduce(tensor)
    factor = sum(_all()) + smp.size() * number
    expect(tensor.tolist(), [factor * element for element in range(5)])


def _all_to_all(number: int) -> None:
    parts = torch.zeros(smp.size(), dtype=torch.int64)
    dist.all_to_all_single(parts, torch.tensor([number * smp.rank() + to for to in _all()]))
    expect(parts.tolist(), [number * source + smp.rank() for source in _all()])


def _broadcast(number: int) -> None:
    tensor = _pair(number, smp.rank())
    dist.broadcast(tensor, _root(number))
    expect(tensor.tolist(), [number, _root(number)])


def _gather(number: int) -> None:
    root = smp.rank() == _root(number)
    parts = [_empty() for _ in _all()] if root else None
    dist.gather(_pair(number, smp.rank()), parts, _root(number))
    if parts is not None:
        expect([part.tolist() for part in parts], [[number, rank] for rank in _all()])


def _reduce(number: int) -> None:
    tensor = _pair(number, smp.rank())
    dist.reduce(tensor, _root(number))
    if smp.rank() == _root(number):
        expect(tensor.tolist(), [number * smp.size(), sum(_all())])


def _reduce_scatter(number: int) -> None:
    tensor = _empty()
    dist.reduce_scatter(tensor, [_pair(number, to) for to in _all()])
    expect(tensor.tolist(), [number * smp.size(), smp.rank() * smp.size()])


def _scatter(number: int) -> None:
    root = smp.rank() == _root(number)
    tensor = _empty()
    dist.scatter(tensor, [_pair(number, to) for to in _all()] if root else None, _root(number))
    expect(tensor.tolist(), [number, smp.rank()])


def _all_gather_object(number: int) -> None:
    objects: list[Any] = [None for _ in _all()]
    dist.all_gather_object(objects, (number, smp.rank()))
    expect(objects, [(number, rank) for rank in _all()])


def _broadcast_object(number: int) -> None:
    objects = [(number, smp.rank())]
    dist.broadcast_object_list(objects, _root(number))
    expect(objects, [(number, _root(number))])


def _gather_object(number: int) -> None:
    root = smp.rank() == _root(number)
    objects: list[Any] | None = [None for _ in _all()] if root else None
    dist.gather_object((number, smp.rank()), objects, _root(number))
    if root:
        expect(objects, [(number, rank) for rank in _all()])


def _scatter_object(number: int) -> None:
    root = smp.rank() == _root(number)
    objects: list[Any] = [None]
    given = [(number, to) for to in _all()] if root else None
    dist.scatter_object_list(objects, given, _root(number))
    expect(objects, [(number, smp.rank())])


def _barrier(number: int) -> None:
    dist.barrier()


def _step(does: Callable[[int], None], *names: str) -> Any:
    def step(number: int, folder: str) -> Names:
        does(number)
        return names

    def calls(number: int, rank: int, size: int) -> Names:
        return names

    return step, calls


#: By kind: what a rank does, and which calls it makes of those that a fault can name. Torch's
#: collectives of objects are several calls, in none of which a drawn fault strikes.
TORCH: dict[str, Any] = {
    "all_gather": _step(_all_gather, "dist.all_gather"),
    "all_gather_object": _step(_all_gather_object),
    "all_reduce": _step(_all_reduce, "dist.all_reduce"),
    "all_to_all": _step(_all_to_all, "dist.all_to_all_single"),
    "broadcast_object": _step(_broadcast_object),
    "gather": _step(_gather, "dist.gather"),
    "gather_object": _step(_gather_object),
    "reduce": _step(_reduce, "dist.reduce"),
    "reduce_scatter": _step(_reduce_scatter, "dist.reduce_scatter"),
    "scatter": _step(_scatter, "dist.scatter"),
    "scatter_object": _step(_scatter_object),
    "tensor_barrier": _step(_barrier, "dist.barrier"),
    "tensor_broadcast": _step(_broadcast, "dist.broadcast"),
}
