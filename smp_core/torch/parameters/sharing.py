"""Shared memory between the parameters and buffers of a model, which one rank must own (API 1.7: modules that share a
parameter go on the same partition).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One registration of a parameter or buffer. A tensor may have several.

    Attributes:
        name: the full name, as in ``named_parameters``.
        module: the path of the registering module; "" is the root.
        owner: the registering module.
        tensor: the parameter or buffer.
        kind: "parameter" or "buffer".
    """

    name: str
    module: str
    owner: nn.Module
    tensor: torch.Tensor
    kind: str


def entries(module: nn.Module) -> Iterator[Entry]:
    """Every registration below ``module`` in the order of ``named_modules``, parameters before buffers.

    A module with several parents comes once, by its first path.
    """
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield Entry(prefix + name, path, child, parameter, "parameter")
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield Entry(prefix + name, path, child, buffer, "buffer")


def span(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """(storage, first byte, byte after the last) of the tensor's memory.

    None for an empty tensor, and where memory is unknown (meta, sparse, not yet initialised).
    """
    if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.numel() == 0:
        return None
    last: int = sum(
        int(size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = int(tensor.storage_offset()) * tensor.element_size()
    storage: int = tensor.untyped_storage()._cdata
    return storage, first, first + (last + 1) * tensor.element_size()


def shared(module: nn.Module) -> list[list[Entry]]:
    """Groups of two or more registrations that share memory, in the order of their first names.

    Two registrations share memory if they have one tensor, or tensors that overlap in one storage (as after
    ``a.weight = nn.Parameter(b.weight.data)``). Disjoint slices of one storage (a flat buffer) share none.
    """
    listed = list(entries(module))
    leader = list(range(len(listed)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    def unite(one: int, other: int) -> None:
        first, second = sorted((find(one), find(other)))
        leader[second] = first

    seen: dict[int, int] = {}
    spans: list[tuple[int, int, int, int]] = []
    for index, entry in enumerate(listed):
        known = seen.setdefault(id(entry.tensor), index)
        unite(known, index)
        where = span(entry.tensor)
        if known == index and where is not None:
            spans.append((*where, index))
    spans.sort()
    reach: tuple[int, int, int] | None = None  # storage, end, index of the last overlapping run
    for storage, first, end, index in spans:
        if reach is not None and reach[0] == storage and first < reach[1]:
            unite(reach[2], index)
            reach = (storage, max(end, reach[1]), index)
        else:
            reach = (storage, end, index)
    groups: dict[int, list[Entry]] = {}
    for index, entry in enumerate(listed):
        groups.setdefault(find(index), []).append(entry)
    return [group for group in groups.values() if len(group) > 1]
