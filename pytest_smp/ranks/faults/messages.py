"""Losing and damaging tensors on their way, in the process groups that are ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_smp.ranks.faults import Corrupt, Drop
from pytest_smp.ranks.faults.striking import Strikes
from smp_core.errors import ArgumentTypeError
from smp_core.transport.checked_group import CheckedGroup
from smp_core.transport.combined_work import CombinedWork


@contextlib.contextmanager
def struck(strikes_of: Callable[[Any], Strikes | None]) -> Iterator[None]:
    """While entered, the faults of ``strikes_of(group)`` hit the sends of a process group."""
    original = vars(CheckedGroup)["send"]  # of `sim` and `mpi`

    def send(self: Any, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Any:
        strikes = strikes_of(self)
        for hit in () if strikes is None else strikes.message("dist.send"):
            if isinstance(hit, Drop):
                return CombinedWork([])
            tensors = [_damaged(tensor, hit) for tensor in tensors]
        return original(self, tensors, dstRank, tag)

    setattr(CheckedGroup, "send", send)  # noqa: B010  a type checker sees another signature
    try:
        yield
    finally:
        setattr(CheckedGroup, "send", original)  # noqa: B010


def _damaged(tensor: torch.Tensor, fault: Corrupt) -> torch.Tensor:
    with torch.no_grad():
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if fault.how is not None:
            changed = fault.how(copy)
            if not isinstance(changed, torch.Tensor):
                raise ArgumentTypeError(
                    f"corrupt: how made {changed!r} of a tensor: return a tensor"
                )
            return changed
        first = copy.reshape(-1)[:1]
        if copy.dtype is torch.bool:
            first.logical_not_()
        elif first.numel():
            first.view(torch.uint8).bitwise_not_()
        return copy
