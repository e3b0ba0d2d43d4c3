"""Nests of tensors: changed, listed, and taken apart into tensors and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smp_core.nests import leaves, map_leaves

__all__ = [
    "Slot",
    "detached",
    "flatten",
    "leaves",
    "map_leaves",
    "map_tensors",
    "nbytes",
    "tensors",
    "unflatten",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor in a nest that it was taken out of: its number among the tensors.

    No named tuple, which would itself be a nest.
    """

    index: int


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """The nest with ``function(tensor)`` for each tensor, at any depth; the rest is as it was."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, nest)


def tensors(nest: Any) -> list[torch.Tensor]:
    """The tensors of a nest, in its order: that of a dict's insertion, an arbitrary one in a set."""
    return [leaf for leaf in leaves(nest) if isinstance(leaf, torch.Tensor)]


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's values; of a sparse one, of those that it has."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._nnz() * tensor.element_size()


def detached(nest: Any) -> Any:
    """The nest with each tensor detached from its graph; the storage is shared."""
    return map_tensors(torch.Tensor.detach, nest)


def flatten(nest: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors, and the nest with a :class:`Slot` in place of each.

    A tensor that occurs twice is listed once and has two slots, so that it is one tensor again after
    :func:`unflatten`.
    """
    found: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def take(tensor: torch.Tensor) -> Slot:
        number = numbers.setdefault(id(tensor), len(found))
        if number == len(found):
            found.append(tensor)
        return Slot(number)

    return found, map_tensors(take, nest)


def unflatten(given: Sequence[Any], nest: Any) -> Any:
    """The nest with ``given[slot.index]`` in place of each slot: the inverse of :func:`flatten`."""
    return map_leaves(lambda leaf: given[leaf.index] if isinstance(leaf, Slot) else leaf, nest)
