"""The results of each tensor collective for each member, once all of them have called.

Each function gets the members' calls in group order; a call's data are the tensors that the member
brings, in a list. The function returns a list per member: the values of that member's outputs, in new
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pytest_smp.ranks.sim.matching import Call
from smp_core.reduction import reduce_tensors
from smp_core.transport import messages
from smp_core.transport.memory import copy

Tensor = torch.Tensor
Values = list[list[Tensor]]
Complete = Callable[[list[Call]], Values]


def _snapshot(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' values, in one new block of memory."""
    sizes = [tensor.numel() for tensor in tensors]
    block = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return [
        part.view(tensor.shape)
        for part, tensor in zip(torch.split(block, sizes), tensors, strict=True)
    ]


def barrier(calls: list[Call]) -> Values:
    """No member brings or gets anything."""
    return [[] for _ in calls]


def all_reduce(op: str) -> Complete:
    """Each member brings the same number of tensors, and gets them reduced one by one."""

    def complete(calls: list[Call]) -> Values:
        columns = zip(*(call.data for call in calls), strict=True)
        results = [reduce_tensors(column, op) for column in columns]
        return [results for _ in calls]

    return complete


def reduce(op: str, root: int) -> Complete:
    """Each member brings the same number of tensors; the root gets them reduced one by one."""

    def complete(calls: list[Call]) -> Values:
        columns = zip(*(call.data for call in calls), strict=True)
        results = [reduce_tensors(column, op) for column in columns]
        return [results if index == root else [] for index in range(len(calls))]

    return complete


def broadcast(root: int) -> Complete:
    """The root brings tensors; the others get them."""

    def complete(calls: list[Call]) -> Values:
        values = [copy(tensor) for tensor in calls[root].data]
        return [[] if index == root else values for index in range(len(calls))]

    return complete


def all_gather(calls: list[Call]) -> Values:
    """Each member brings (tensors, sizes), and gets for each of its tensors those of all members.

    ``sizes`` are the sizes that the member expects, tensor by tensor. Members' tensors may differ in size.

    Raises CollectiveMismatchError if a member brings another size than another member expects.
    """
    columns = [*zip(*(call.data[0] for call in calls), strict=True)]
    _check_pairs(calls)
    values = [value for column in columns for value in _snapshot(column)]
    return [values for _ in calls]


def all_gather_single(calls: list[Call]) -> Values:
    """Each member brings tensors, and gets for each of them those of all members, joined end to end."""
    columns = zip(*(call.data for call in calls), strict=True)
    values = [torch.cat([tensor.detach().reshape(-1) for tensor in column]) for column in columns]
    return [values for _ in calls]


def reduce_scatter(op: str) -> Complete:
    """Each member brings one tensor per member, once or several times; member i gets the reductions of
    all members' i-th tensors.
    """

    def complete(calls: list[Call]) -> Values:
        columns = zip(*(call.data for call in calls), strict=True)
        results = [reduce_tensors(column, op) for column in columns]
        return [results[index :: len(calls)] for index in range(len(calls))]

    return complete


def reduce_scatter_single(op: str) -> Complete:
    """Each member brings tensors; member i gets the i-th part of each reduction."""

    def complete(calls: list[Call]) -> Values:
        columns = zip(*(call.data for call in calls), strict=True)
        results = [reduce_tensors(column, op).reshape(-1) for column in columns]
        parts = [torch.split(result, result.numel() // len(calls) or 1) for result in results]
        return [
            [part[index] if part[0].numel() else part[0] for part in parts]
            for index in range(len(calls))
        ]

    return complete


def scatter(root: int) -> Complete:
    """The root brings one tensor per member; each member gets its own."""

    def complete(calls: list[Call]) -> Values:
        return [[value] for value in _snapshot(calls[root].data)]

    return complete


def gather(root: int) -> Complete:
    """Each member brings a tensor; the root gets all of them."""

    def complete(calls: list[Call]) -> Values:
        values = _snapshot([call.data[0] for call in calls])
        return [values if index == root else [] for index in range(len(calls))]

    return complete


def all_to_all(calls: list[Call]) -> Values:
    """Each member brings (tensors, sizes): one tensor for each member, and the size of the tensor that it
    expects of each.

    Raises CollectiveMismatchError if a pair of members disagrees on that size.
    """
    _check_pairs(calls)
    values = [_snapshot(call.data[0]) for call in calls]
    return [[value[index] for value in values] for index in range(len(calls))]


def all_to_all_single(calls: list[Call]) -> Values:
    """Like all_to_all, but each member gets one tensor: the members' tensors for it, joined end to end."""
    _check_pairs(calls)
    return [
        [torch.cat([call.data[0][index].detach().reshape(-1) for call in calls])]
        for index in range(len(calls))
    ]


def _check_pairs(calls: list[Call]) -> None:
    places = {call.rank: call.place for call in calls}
    sent = [[tuple(tensor.shape) for tensor in call.data[0]] for call in calls]
    expected = [call.data[1] for call in calls]
    mismatch = messages.pair_mismatch(calls[0].operation, places, sent, expected)
    if mismatch is not None:
        raise mismatch[0]
