"""Equality of two objects to the last bit, as a transport must keep it."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection
from typing import Any

import numpy as np
import torch


def same(a: object, b: object) -> bool:
    """Return whether ``a`` and ``b`` cannot be told apart by type, structure and values.

    Stricter than ``==``, and defined where ``==`` is not: 1, 1.0 and True differ; 0.0 and -0.0
    differ; a nan is the same as a nan of equal bits; dicts must have the same order; the elements
    of tensors and arrays are compared by their bytes, after dtype, shape and ``requires_grad``.
    Strides do not count, because a copy need not keep them.

    Containers are followed: tuple (also named), list, dict, set, frozenset and dataclasses. Objects
    of any other type are compared by ``==``. Containers must not contain themselves.
    """
    if type(a) is not type(b):
        return False
    match a:
        case torch.Tensor():
            return _same_tensor(a, b)  # type: ignore[arg-type]  # of one type
        case np.ndarray() | np.generic():
            return _same_array(a, b)
        case float():
            return struct.pack("d", a) == struct.pack("d", b)
        case complex():
            return same(a.real, b.real) and same(a.imag, b.imag)  # type: ignore[attr-defined]
        case tuple() | list():
            return _all_same(a, b)  # type: ignore[arg-type]
        case dict():
            return _all_same(a.items(), b.items())  # type: ignore[attr-defined]
        case set() | frozenset():
            return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)  # type: ignore[arg-type, attr-defined]
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        names = [field.name for field in dataclasses.fields(a)]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as bytes: uint8, 1-D, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.bool:
        plain = plain.view(torch.uint8)  # a copy of a bool would turn every byte into 0 or 1
    # Not by `contiguous`: to torch a side of 1 is contiguous whatever its stride, and such a tensor
    # has no view as bytes.
    dense = torch.empty(plain.numel(), dtype=plain.dtype)
    dense.view(plain.shape).copy_(plain)
    return dense.view(torch.uint8)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.requires_grad == b.requires_grad
        and torch.equal(tensor_bytes(a), tensor_bytes(b))
    )


def _same_array(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _all_same(a: Collection[object], b: Collection[object]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))
