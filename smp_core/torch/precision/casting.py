"""Conversion of a model to 16 bits: its parameters and buffers, and the inputs and outputs of its calls
(API 1.8).

The module is converted in place when it is wrapped: the ``nn.Parameter`` objects stay, so that an
optimizer made before still holds them. Delayed parameters are converted on the tape, and get their
memory in 16 bits. Memory that several tensors share is converted once, and stays shared.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from smp_core.config import Config
from smp_core.errors import ArgumentTypeError
from smp_core.torch import tensor_tree
from smp_core.torch.parameters import creation, sharing
from smp_core.torch.session import TrainingSession
from smp_core.torch.tensor_tree import Tree

HALF = (torch.float16, torch.bfloat16)


def dtype_of(config: Config) -> torch.dtype | None:
    """The 16-bit dtype of a run, or None."""
    return torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None


def convert(session: TrainingSession, module: nn.Module, dtype: torch.dtype) -> None:
    """Make float32 parameters and all floating-point buffers of a module tree ``dtype``, in place, as
    ``Module.half`` does. Tensors that are ``dtype`` already, or are not floating-point, stay.
    Gradients that parameters have are dropped.

    Raises ArgumentTypeError, before anything is changed, for a parameter of another floating-point or
    complex dtype (API 1.8).
    """
    listed = list(sharing.entries(module))
    for entry in listed:
        kind = entry.tensor.dtype
        numeric = kind.is_floating_point or kind.is_complex
        if entry.kind == "parameter" and numeric and kind not in (torch.float32, dtype):
            raise ArgumentTypeError(
                f"smp.DistributedModel: parameter {entry.name!r} is {kind}; with "
                f"{'fp16' if dtype is torch.float16 else 'bf16'} parameters must be torch.float32 or {dtype}. "
                "Create the model in torch.float32"
            )
    tape = session.tape
    with torch.no_grad(), contextlib.nullcontext() if tape is None else creation.recording(tape):
        done: set[int] = set()
        for group in sharing.shared(module):
            done.update(id(entry.tensor) for entry in group)
            _convert_shared([entry.tensor for entry in group], dtype)
        for entry in listed:
            if id(entry.tensor) not in done:
                done.add(id(entry.tensor))
                _convert(entry.tensor, dtype)


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if not tensor.dtype.is_floating_point or tensor.dtype == dtype:
        return
    tensor.grad = None
    tensor.data = tensor.data.to(dtype)


def _convert_shared(tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Tensors whose memory overlaps, or one tensor several times: all of it once, and views of that."""
    distinct = list({id(each): each for each in tensors}.values())
    if len(distinct) == 1:
        _convert(distinct[0], dtype)
        return
    first = distinct[0].dtype
    if first == dtype or not first.is_floating_point:
        return
    storage = distinct[0].untyped_storage()
    size = storage.nbytes() // distinct[0].element_size()
    whole = torch.empty(0, dtype=first).set_(storage, 0, (size,), (1,)).to(dtype)
    for tensor in distinct:
        tensor.grad = None
        tensor.data = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def inputs(tree: Tree, dtype: torch.dtype) -> Tree:
    """A tree of arguments with its float32 tensors in ``dtype``; the rest, other floating-point dtypes
    too, as it is. One tensor given twice is one tensor still.
    """
    changed: Tree = _cast(tree, (torch.float32,), dtype)
    return changed


def outputs(tree: Tree) -> Tree:
    """A tree of results with its 16-bit tensors in float32."""
    changed: Tree = _cast(tree, HALF, torch.float32)
    return changed


def _cast(tree: Any, given: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(to) if tree.dtype in given else tree
    if not any(tensor.dtype in given for tensor in tensor_tree.tensors(tree)):
        return tree
    found, rest = tensor_tree.flatten(tree)
    return tensor_tree.unflatten([_cast(tensor, given, to) for tensor in found], rest)
