"""Tensors as bytes: the memory that an operation reads, and the memory that it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
Bytes = Any  # a flat array of uint8


def _plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bare(tensor: Tensor) -> Tensor:
    """The tensor without the methods that a subclass overrides, such as those of a parameter."""
    return tensor if type(tensor) is Tensor else tensor.detach()


class _Memory:
    """The memory of a contiguous tensor, as numpy asks for it. ``Tensor.numpy`` would forbid for good to resize the
    storage, which FSDP does.
    """

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, tensor: Tensor, count: int) -> None:
        # Not the tensor: its owner may give it another storage before the operation is done.
        self._storage = tensor.untyped_storage()
        place = tensor.data_ptr(), False
        self.__array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": place,
            "version": 3,
        }


def _joined(tensors: Sequence[Tensor]) -> Bytes:
    """The memory of plain tensors that are adjacent, or of one."""
    count = sum(each.numel() * each.itemsize for each in tensors)
    first = next((each for each in tensors if each.numel()), None)
    return np.empty(0, np.uint8) if first is None else np.asarray(_Memory(_bare(first), count))


def address(array: Bytes) -> int:
    """The place of an array's first byte."""
    return int(array.__array_interface__["data"][0])


def read(tensors: Sequence[Tensor]) -> Bytes:
    """The bytes of tensors, one behind the other; their own memory, if that is one."""
    if len(tensors) == 1:
        tensor = _bare(tensors[0])
        if not _plain(tensor):
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        return _joined([tensor])
    if _adjacent(tensors):
        return _joined(tensors)
    return np.concatenate([read([tensor]) for tensor in tensors])


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors lie in one storage, one behind the other."""
    storage, at = None, None
    for tensor in map(_bare, tensors):
        if not _plain(tensor):
            return False
        if not tensor.numel():
            continue
        # Not its address: two storages may follow each other by chance, or begin at the same place.
        if storage not in (None, tensor.untyped_storage()._cdata):
            return False
        if at not in (None, tensor.data_ptr()):
            return False
        storage = tensor.untyped_storage()._cdata
        at = tensor.data_ptr() + tensor.numel() * tensor.itemsize
    return True


class Target:
    """The memory that an operation writes the elements of some tensors to, one behind the other.

    ``bytes`` are the tensors' own, if those are one; ``finish`` copies otherwise.
    """

    __slots__ = ("_tensors", "bytes")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: Sequence[Tensor] = ()
        # The first condition is the second one for one tensor, and is known sooner.
        if _plain(tensors[0]) if len(tensors) == 1 else _adjacent(tensors):
            self.bytes: Bytes = _joined(tensors)
        else:
            self._tensors = tensors
            self.bytes = np.empty(sum(each.numel() * each.itemsize for each in tensors), np.uint8)

    @property
    def copies(self) -> bool:
        """True if ``finish`` has anything to copy."""
        return bool(self._tensors)

    def finish(self) -> None:
        """Write the tensors: autograd does not see it, the version counter neither."""
        at = 0
        for tensor in self._tensors:
            end = at + tensor.numel() * tensor.itemsize
            value = torch.from_numpy(self.bytes[at:end]).view(tensor.dtype)
            tensor.data.copy_(value.view(tensor.shape))
            at = end


def copied_if_shared(
    source: Bytes, targets: Sequence[Bytes], same: Callable[[Bytes], bool]
) -> Bytes:
    """The source, copied if it shares memory with a target that is not the ``same`` place."""
    for target in targets:
        if np.may_share_memory(source, target) and not same(target):
            return source.copy()
    return source
