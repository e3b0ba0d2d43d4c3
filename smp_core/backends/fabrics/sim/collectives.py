"""What each tensor collective does to the members' tensors, once all of them have called.

Each function gets the members' calls in group order. Inputs are read into new tensors before any
output is written: an output may share memory with an input of its own rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smp_core.backends.fabrics.sim.matching import Call
from smp_core.errors import CollectiveMismatchError
from smp_core.reduction import reduce_tensors

Tensor = torch.Tensor


def _write(target: Tensor, value: Tensor) -> None:
    """Copy into the caller's tensor as other backends do: autograd does not see it, its version
    counter neither.
    """
    target.data.copy_(value.view(target.shape) if value.shape != target.shape else value)


def _write_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if any(target.shape != value.shape for target, value in zip(targets, values, strict=True)):
        values = [
            value.reshape(target.shape) for target, value in zip(targets, values, strict=True)
        ]
    torch._foreach_copy_([target.data for target in targets], list(values))


def _snapshot(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' values, in one new block of memory."""
    sizes = [tensor.numel() for tensor in tensors]
    block = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return [
        part.view(tensor.shape)
        for part, tensor in zip(torch.split(block, sizes), tensors, strict=True)
    ]


def barrier(calls: list[Call]) -> None:
    """Nothing moves."""


def all_reduce(op: str) -> Callable[[list[Call]], None]:
    """data: list of tensors, reduced one by one, in place."""

    def complete(calls: list[Call]) -> None:
        with torch.no_grad():
            for tensors in zip(*(call.data for call in calls), strict=True):
                result = reduce_tensors(tensors, op)
                for tensor in tensors:
                    _write(tensor, result)

    return complete


def reduce(op: str, root: int) -> Callable[[list[Call]], None]:
    """data: list of tensors; only the root's are written."""

    def complete(calls: list[Call]) -> None:
        with torch.no_grad():
            for tensors in zip(*(call.data for call in calls), strict=True):
                _write(tensors[root], reduce_tensors(tensors, op))

    return complete


def broadcast(root: int) -> Callable[[list[Call]], None]:
    """data: list of tensors; all but the root's are written."""

    def complete(calls: list[Call]) -> None:
        with torch.no_grad():
            for index, call in enumerate(calls):
                if index != root:
                    for target, value in zip(call.data, calls[root].data, strict=True):
                        _write(target, value.detach())

    return complete


def all_gather(calls: list[Call]) -> None:
    """data: list of (outputs, input), gathered one by one; one output per member."""
    with torch.no_grad():
        for parts in zip(*(call.data for call in calls), strict=True):
            values = _snapshot([value for _, value in parts])
            for outputs, _ in parts:
                _write_all(outputs, values)


def all_gather_single(calls: list[Call]) -> None:
    """data: list of (output, input); the output is the members' inputs, one behind the other."""
    with torch.no_grad():
        for parts in zip(*(call.data for call in calls), strict=True):
            block = torch.cat([value.detach().reshape(-1) for _, value in parts])
            for output, _ in parts:
                _write(output, block)


def reduce_scatter(op: str) -> Callable[[list[Call]], None]:
    """data: list of (output, inputs); member i gets the reduction of everybody's i-th input."""

    def complete(calls: list[Call]) -> None:
        with torch.no_grad():
            for parts in zip(*(call.data for call in calls), strict=True):
                results = [
                    reduce_tensors([inputs[index] for _, inputs in parts], op)
                    for index in range(len(parts))
                ]
                for (output, _), result in zip(parts, results, strict=True):
                    _write(output, result)

    return complete


def scatter(root: int) -> Callable[[list[Call]], None]:
    """data: (output, inputs); member i gets the root's i-th input."""

    def complete(calls: list[Call]) -> None:
        with torch.no_grad():
            values = _snapshot(calls[root].data[1])
            for call, value in zip(calls, values, strict=True):
                _write(call.data[0], value)

    return complete


def gather(root: int) -> Callable[[list[Call]], None]:
    """data: (outputs, input); the root's i-th output gets member i's input."""

    def complete(calls: list[Call]) -> None:
        with torch.no_grad():
            _write_all(calls[root].data[0], _snapshot([call.data[1] for call in calls]))

    return complete


def all_to_all(calls: list[Call]) -> None:
    """data: (outputs, inputs); member i's j-th input goes to member j's i-th output.

    Raises CollectiveMismatchError if a pair of members disagrees on the number of elements.
    """
    for (sender, source), (receiver, target) in itertools.product(enumerate(calls), repeat=2):
        sent, expected = source.data[1][receiver].numel(), target.data[0][sender].numel()
        if sent != expected:
            raise CollectiveMismatchError(
                f"mismatch: {source.operation} differs in element count\n"
                f"  rank {source.rank} sends {sent} elements to rank {target.rank}"
                f"{_at(source.place)}\n"
                f"  rank {target.rank} expects {expected} elements from rank {source.rank}"
                f"{_at(target.place)}"
            )
    with torch.no_grad():
        values = [_snapshot(call.data[1]) for call in calls]
        for index, call in enumerate(calls):
            _write_all(call.data[0], [value[index] for value in values])


def _at(place: object) -> str:
    return "" if place is None else f"\n      {place}"


def shape_text(tensors: Sequence[Any]) -> str:
    """Shapes for a message: ``[2, 3]`` for one tensor, ``[2, 3] [4]`` for two."""
    return " ".join(str(list(tensor.shape)) for tensor in tensors)


def dtype_text(tensors: Sequence[Any]) -> str:
    """Dtypes for a message, each once."""
    return " ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
