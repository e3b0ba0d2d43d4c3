"""Reads of a distributed module's slices by other modules, which raise an error if the reader computes with them.

Such a module has this tp rank's slice where it expects the whole parameter: its shapes do not fit, or, worse, they do.
The use that it reads (execution/uses.py) has the class here. Queries, such as of ``dtype``, work as on any tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from smp_core.torch.exceptions import TensorParallelError
from smp_core.torch.parameters import foreign
from smp_core.torch.parameters.split import split_of


class HoldsSlices:
    """The base of distributed modules, which compute with slices."""


class SliceRead(nn.Parameter):
    """A use of a slice outside of the calls of distributed modules, refused in any computation."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = foreign.operation(func)
        if name not in foreign.ASKING:
            refuse(_first((args, kwargs)), name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def refuse(read: SliceRead, operation: str) -> None:
    """Raise TensorParallelError with the name of the parameter, its slice, its reader and the remedy."""
    found = split_of(read)
    assert found is not None  # a read has the attributes of its parameter
    path, name = _name(read)
    raise TensorParallelError(
        f"{foreign.reader()} reads parameter {name!r} of the distributed module {path!r} ({operation}), of which tp "
        f"rank {found.rank} has the slice {list(found.local_shape)} of {list(found.shape)}. Call module {path!r} "
        f"instead of reading its {name}, or leave it whole by smp.set_tensor_parallelism(module, enabled=False)"
    )


def _name(read: SliceRead) -> tuple[str, str]:
    """The path of the module of a parameter, and the name that it has there."""
    parameter: torch.Tensor = read._smp_parameter  # type: ignore[attr-defined]
    for path, module in foreign.model_modules():
        for name, each in dict.items(module._parameters):  # past the dict's own reads
            if each is parameter:
                return path, name
    return "?", "?"


def _first(tree: object) -> SliceRead:
    """The first read of a slice in the arguments of an operation, which has one."""
    if isinstance(tree, SliceRead):
        return tree
    parts = tree.values() if isinstance(tree, dict) else tree
    for part in parts if isinstance(parts, list | tuple | type({}.values())) else ():
        try:
            return _first(part)
        except LookupError:
            continue
    raise LookupError("no slice")
