"""The routes of the tensor collectives: the tensors that go from member to member, and the values made of them.

A member's part in a call is the tensors that it brings and those that it gets (``MemberPart``). A route says
which of the brought tensors go to which member, which come from whom, and how the values of the
outputs follow; values are flat, in the order of the outputs' elements. Reductions fold the received tensors
in the order of smp_core/reduction.py, so that the bits are those of `sim`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from smp_core.reduction import reduce_tensors

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


@dataclasses.dataclass(slots=True)
class MemberPart:
    """One member's part in a call. Members are positions in the group."""

    me: int
    size: int
    brings: Tensors  # copies: flat, nobody else's
    gets: Tensors  # the outputs; only their shapes and dtypes are looked at
    op: str  # of a reduction
    root: int | None  # of a collective that has one


Goes = Callable[[MemberPart, int], Tensors | None]  # to a member; None: no message at all
Comes = Callable[[MemberPart, int], Tensors | None]  # from a member: tensors that are alike
# The values of the outputs, from the tensors of each member.
Values = Callable[[MemberPart, Sequence[Tensors]], list[Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """The route of one operation (see the module). ``values`` finds an empty list for a member that sends nothing."""

    goes: Goes
    comes: Comes
    values: Values


def _all_brings(part: MemberPart, member: int) -> Tensors | None:
    return part.brings


def _brings_from_root(part: MemberPart, member: int) -> Tensors | None:
    return part.brings if part.me == part.root else None


def _brings_to_root(part: MemberPart, member: int) -> Tensors | None:
    return part.brings if member == part.root else None


def _likewise_at_root(part: MemberPart, member: int) -> Tensors | None:
    return part.brings if part.me == part.root else None


def _its_own(part: MemberPart, member: int) -> Tensors | None:
    return part.brings[member :: part.size]


def _outputs_from_root(part: MemberPart, member: int) -> Tensors | None:
    return part.gets if member == part.root and part.gets else None


def _outputs(part: MemberPart, member: int) -> Tensors | None:
    return part.gets


def _its_outputs(part: MemberPart, member: int) -> Tensors | None:
    return part.gets[member :: part.size]


def _its_outputs_at_root(part: MemberPart, member: int) -> Tensors | None:
    return part.gets[member :: part.size] if part.me == part.root else None


def _reduced(part: MemberPart, came: Sequence[Tensors]) -> list[Tensor]:
    return [reduce_tensors(column, part.op) for column in zip(*came, strict=True)]


def _reduced_at_root(part: MemberPart, came: Sequence[Tensors]) -> list[Tensor]:
    return _reduced(part, came) if part.me == part.root else []


def _interleaved(part: MemberPart, came: Sequence[Tensors]) -> list[Tensor]:
    return [tensor for column in zip(*came, strict=True) for tensor in column]


def _joined(part: MemberPart, came: Sequence[Tensors]) -> list[Tensor]:
    columns = zip(*came, strict=True)
    return [torch.cat(column) for column in columns]


def _of_root(part: MemberPart, came: Sequence[Tensors]) -> list[Tensor]:
    if not part.gets:
        return []
    assert part.root is not None
    return list(came[part.root])


def _nothing(part: MemberPart, came: Sequence[Tensors]) -> list[Tensor]:
    return []


def _its_slices(part: MemberPart, member: int) -> Tensors | None:
    return [torch.tensor_split(tensor, part.size)[member] for tensor in part.brings]  # all equal


def _gathered_at_root(part: MemberPart, came: Sequence[Tensors]) -> list[Tensor]:
    return [tensors[0] for tensors in came] if part.me == part.root else []


def _scattered(part: MemberPart, member: int) -> Tensors | None:
    return [part.brings[member]] if part.me == part.root else None


_ALL_REDUCE = Route(_all_brings, _all_brings, _reduced)
_ALL_GATHER = Route(_all_brings, _its_outputs, _interleaved)
_ALL_GATHER_SINGLE = Route(_all_brings, _all_brings, _joined)
_REDUCE_SCATTER_SINGLE = Route(_its_slices, _outputs, _reduced)
_ALL_TO_ALL = Route(_its_own, _its_outputs, _interleaved)

ROUTES: dict[str, Route] = {
    "barrier": Route(_all_brings, _all_brings, _nothing),
    "monitored_barrier": Route(_all_brings, _all_brings, _nothing),
    "broadcast": Route(_brings_from_root, _outputs_from_root, _of_root),
    "all_reduce": _ALL_REDUCE,
    "all_reduce_coalesced": _ALL_REDUCE,
    "reduce": Route(_brings_to_root, _likewise_at_root, _reduced_at_root),
    "all_gather": _ALL_GATHER,
    "all_gather_coalesced": _ALL_GATHER,
    "all_gather_single": _ALL_GATHER_SINGLE,
    "all_gather_single_coalesced": _ALL_GATHER_SINGLE,
    "reduce_scatter": Route(_its_own, _outputs, _reduced),
    "reduce_scatter_single": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER_SINGLE,
    "scatter": Route(_scattered, _outputs_from_root, _of_root),
    "gather": Route(_brings_to_root, _its_outputs_at_root, _gathered_at_root),
    "all_to_all": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
}
