"""Parameters and buffers of another pipeline rank, which raise an error that names their owner if they are read.

After placement the tensor object stays in the module tree, emptied, and its class becomes one of the two classes here.
Operations that query, move or store the tensor (``model.to``, ``repr``, ``pickle``, ``zero_grad``) work as on any empty
tensor. Operations that compute with it raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import nn

from smp_core.torch import session as sessions
from smp_core.torch.exceptions import PartitionError

#: Operations that ask a tensor for something else than its values.
ASKING = {
    "__get__", "__set__", "__delete__",  # properties: data, grad, shape, requires_grad, ...
    "__repr__", "__hash__", "__format__", "__deepcopy__", "__reduce_ex__", "__len__", "__dir__",
    "_is_view", "backward_hooks", "data_ptr", "dim", "element_size", "get_device", "is_complex",
    "is_contiguous", "is_floating_point", "is_pinned", "is_shared", "layout", "nelement", "numel",
    "ndimension", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
    "share_memory_", "size", "storage_offset", "stride", "untyped_storage", "detach", "detach_",
    "is_same_size", "_has_compatible_shallow_copy_type", "_typed_storage", "storage",
    "_reduce_ex_internal", "_rev_view_func_unsafe", "is_inference", "is_nonzero_static",
}  # fmt: skip
#: Allowed, with a foreign result: ``Module.to``, initialisation.
_MOVING = {
    "to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "clone", "contiguous",
    "zero_", "fill_", "copy_", "normal_", "uniform_", "set_", "empty_like",
}  # fmt: skip

#: Properties that are views of a tensor's values: reading one is a computation.
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}


class _Foreign:
    """The base of the two classes. ``_smp_foreign`` is (full name, kind, owner, own pp rank)."""

    _smp_foreign: tuple[str, str, int, int]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = operation(func)
        if name not in ASKING and name not in _MOVING:
            found = _first((args, kwargs))
            assert found is not None  # torch calls this for an argument of the class
            refuse(found, name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name in _MOVING and type(result) is torch.Tensor and isinstance(args[0], _Foreign):
            mark(result, *args[0]._smp_foreign)
        return result


class ForeignParameter(_Foreign, nn.Parameter):
    """An ``nn.Parameter`` of another pipeline rank: empty, and refused in any computation."""


class ForeignBuffer(_Foreign, torch.Tensor):
    """A buffer of another pipeline rank: empty, and refused in any computation."""


def mark(tensor: torch.Tensor, name: str, kind: str, owner: int, here: int) -> None:
    """Make ``tensor``, already emptied, refuse computations from now on."""
    # A subclass stays as it is: a computation with it fails by its empty shape.
    if type(tensor) is nn.Parameter:
        tensor.__class__ = ForeignParameter
    elif type(tensor) is torch.Tensor:
        tensor.__class__ = ForeignBuffer
    else:
        return
    tensor._smp_foreign = (name, kind, owner, here)  # type: ignore[attr-defined]


def unmark(tensor: torch.Tensor) -> None:
    """Undo ``mark``, so that the tensor can be given values and read again."""
    before = {ForeignParameter: nn.Parameter, ForeignBuffer: torch.Tensor}.get(type(tensor))
    if before is not None:
        vars(tensor).pop("_smp_foreign", None)
        tensor.__class__ = before  # type: ignore[assignment]


def operation(func: Callable[..., object]) -> str:
    """The name of a function of torch; of a property that is a view, such as ``T``, the name of the property."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        read: str = getattr(getattr(func, "__self__", None), "__name__", "")
        return read if read in _VIEWS else name
    return name


def is_foreign(tensor: object) -> bool:
    """Return whether ``mark`` has made the tensor refuse computations."""
    return isinstance(tensor, _Foreign)


def refuse(tensor: _Foreign, operation: str) -> None:
    """Raise PartitionError with the name of the parameter, its owner, its reader and the remedy."""
    name, kind, owner, here = tensor._smp_foreign
    path, _, _ = name.rpartition(".")
    raise PartitionError(
        f"{kind} {name!r} of module {path!r} belongs to pp_rank {owner}, and {reader()} on pp_rank {here} "
        f"reads it ({operation}). Call module {path!r} instead of reading its {kind}, or put both modules "
        f"on one partition (smp.partition, smp.set_partition)"
    )


def reader() -> str:
    """The innermost module among the callers, in words for an error message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            for path, each in model_modules():
                if each is module:
                    return f"module {path!r} ({type(module).__name__})"
            return f"a {type(module).__name__}"
        frame = frame.f_back
    return "code outside of any module"


def model_modules() -> list[tuple[str, nn.Module]]:
    model = sessions.current("model").model
    return [] if model is None else list(model.get_module().named_modules())


def _first(tree: object) -> _Foreign | None:
    """The first foreign tensor in the arguments of an operation."""
    if isinstance(tree, _Foreign):
        return tree
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for part in tree:
            found = _first(part)
            if found is not None:
                return found
    return None
