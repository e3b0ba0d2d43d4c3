"""Tensor trees: changed, listed, and taken apart into tensors and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from smp_core.containers import leaves, map_leaves

__all__ = [
    "Slot",
    "StateDict",
    "Tree",
    "detached",
    "flatten",
    "leaves",
    "map_leaves",
    "map_tensors",
    "nbytes",
    "tensors",
    "unflatten",
]

#: A state dict as torch has it: tensors, numbers and other state by name.
StateDict: TypeAlias = dict[str, Any]
#: A tensor tree, and the tree of the same structure that a function makes of it.
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor in a tree that it was taken out of: its number among the tensors.

    No named tuple, which would itself be a tree.
    """

    index: int


def map_tensors(function: Callable[[torch.Tensor], object], tree: object) -> Any:
    """The tree with ``function(tensor)`` for each tensor, at any depth; the rest is as it was."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def tensors(tree: object) -> list[torch.Tensor]:
    """The tensors of a tree, in its order: that of a dict's insertion, an arbitrary one in a set."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's values; of a sparse one, of those that it has."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._nnz() * tensor.element_size()


def detached(tree: Tree) -> Tree:
    """The tree with each tensor detached from its graph; the storage is shared."""
    changed: Tree = map_tensors(torch.Tensor.detach, tree)
    return changed


def flatten(tree: object) -> tuple[list[torch.Tensor], object]:
    """The tensors, and the tree with a :class:`Slot` in place of each.

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

    return found, map_tensors(take, tree)


def unflatten(given: Sequence[object], tree: object) -> Any:
    """The tree with ``given[slot.index]`` in place of each slot: the inverse of :func:`flatten`."""
    return map_leaves(lambda leaf: given[leaf.index] if isinstance(leaf, Slot) else leaf, tree)
