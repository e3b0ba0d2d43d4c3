"""Full parameters in the place of slices, while modules give or load their state.

Hooks of modules that rename or cast the entries of a state, and modules that load in ways of their own, see the plain
module's parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import TensorParallelError
from smp_core.torch.parameters import foreign
from smp_core.torch.parameters.split import Split, split_of
from smp_core.torch.parameters.stand_ins import StandIn, is_special, standing

_CHUNK = 32 << 20  # bytes of slices that travel at a time


@contextlib.contextmanager
def full_tree(runtime: Runtime, module: nn.Module, *, to_rank0: bool = False) -> Iterator[None]:
    """While entered, full parameters with their values stand in the tree for this rank's slices. Every rank of the TP
    group calls it alike.

    With ``to_rank0`` only the ranks of world rank 0's PP group get values, which is where rank 0 gathers from. Others
    have zeros that take no memory.
    """
    values = {id(each): full for each, full in gathered(runtime, module, to_rank0=to_rank0)}

    def value(parameter: nn.Parameter) -> torch.Tensor | None:
        split = own_split(parameter)
        if split is None:
            return None
        full = values.pop(id(parameter), None)
        return parameter.new_zeros(()).expand(split.shape) if full is None else full

    with standing(module, value) as stand_ins:
        yield
    for each in stand_ins:
        _copy_to_slice(module, each, look=False)


@contextlib.contextmanager
def loading_tree(runtime: Runtime, module: nn.Module) -> Iterator[None]:
    """While entered, full parameters stand in the tree for ``load_state_dict``; afterwards each slice has its part of
    the loaded values.

    If modules load in ways of their own, full parameters have their true values, and every rank of the TP group calls
    this alike. Otherwise values are unspecified, and nothing is exchanged.
    """
    special = is_special(module)
    values = {id(each): full for each, full in gathered(runtime, module)} if special else {}

    def value(parameter: nn.Parameter) -> torch.Tensor | None:
        split = own_split(parameter)
        if split is None:
            return None
        return values[id(parameter)] if special else parameter.detach().new_empty(split.shape)

    with standing(module, value) as stand_ins:
        yield
    for each in stand_ins:
        _copy_to_slice(module, each, look=special)


def own_split(parameter: torch.Tensor) -> Split | None:
    """The split of a parameter of which this rank holds a slice; None of one that is whole, or another pp rank's."""
    return None if foreign.is_foreign(parameter) else split_of(parameter)


def gathered(
    runtime: Runtime, module: nn.Module, *, to_rank0: bool = False
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The pairs of a slice and the full parameter's values, in memory of their own. Collective over the TP group.

    With ``to_rank0`` the ranks of world rank 0's PP group get them; the other ranks of its MP group only send.
    """
    named = [(each, split) for each in module.parameters() if (split := own_split(each))]
    receivers = runtime.group(GroupKind.TP).ranks
    if to_rank0:
        inside = 0 in runtime.group(GroupKind.MP).ranks
        receivers = receivers[:1] if inside else ()  # tp rank 0, in rank 0's PP group
    while named and receivers:
        chunk: list[tuple[nn.Parameter, Split]] = []
        size = 0
        while named and size < _CHUNK:
            chunk.append(named.pop(0))
            size += chunk[-1][0].nbytes
        rows = _exchanged(runtime, receivers, [each.detach().clone() for each, _ in chunk])
        if runtime.rank in receivers:
            for number, (parameter, split) in enumerate(chunk):
                yield parameter, split.full([row[number] for row in rows])


def _exchanged(
    runtime: Runtime, receivers: tuple[int, ...], slices: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """The slices of all tp ranks, on those that receive them."""
    group, objects = runtime.group(GroupKind.TP), runtime.fabric.objects
    if receivers == group.ranks:
        rows: list[list[torch.Tensor]] = objects.allgather(slices, group)
        return rows
    if runtime.rank not in receivers:
        for rank in receivers:
            objects.send(slices, rank)
        return []
    return [slices if rank == runtime.rank else objects.recv_from(rank) for rank in group.ranks]


def _copy_to_slice(module: nn.Module, stand_in: StandIn, look: bool) -> None:
    """Copy values that were loaded to the slice. ``look``: also those written past torch's version counter.

    Raises TensorParallelError for values of another shape.
    """
    split = split_of(stand_in.parameter)
    assert split is not None
    if tuple(stand_in.full.shape) != split.shape:
        name = next(name for name, each in module.named_parameters() if each is stand_in.parameter)
        raise TensorParallelError(
            f"model.load_state_dict: parameter {name!r} was given the shape {list(stand_in.full.shape)} while its "
            f"module loaded it, and each tp rank keeps its slice of {list(split.shape)}. Build the module in the shape "
            "of the state"
        )
    own = split.slice_of(stand_in.full.detach())
    if stand_in.changed or (look and not torch.equal(own, stand_in.parameter.detach())):
        with torch.no_grad():
            stand_in.parameter.copy_(own)
