"""The optimizer's state of sharded parameters, in full, as for the whole model.

An elementwise optimizer keeps for a parameter tensors of its shape, here of the owned range's, and others, as
Adam's ``step``, which are the same on all ranks. The former are gathered; the latter are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import ShardingError
from smp_core.torch.sharding.sharded_parameter import ShardedParameter
from smp_core.torch.sharding.sharding import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class _Shard:
    """Stands for a tensor of the size of a rank's owned range."""

    dtype: torch.dtype


_MISSING: Any = object()


def full_state(
    runtime: Runtime,
    sharding: Sharding,
    state: Mapping[object, Any],
    parameters: Mapping[int, nn.Parameter],
    keep: bool = True,
) -> dict[object, Any]:
    """The state with tensors of the size of shards gathered, of the parameters' shapes and strides.

    Every rank of the shard group calls this function, whatever state it has: a rank that owns no element of a
    parameter need not have any state of it. The ranks first tell each other which state they have.

    Args:
        state: this rank's, by the parameters' index.
        parameters: the model's, by index, the same on all ranks.
        keep: False leaves the gathered values out: for the ranks that only help others to them.

    Raises ShardingError, on every rank of the group, if one lacks elements that it owns.
    """
    known = {index: sharding.shard(each) for index, each in parameters.items()}
    shards = {index: shard for index, shard in known.items() if shard is not None}
    if not shards:
        return dict(state)
    local = {
        index: {key: _local(shard, value) for key, value in state[index].items()}
        for index, shard in shards.items()
        if isinstance(state.get(index), Mapping)
    }
    gathered = runtime.fabric.objects.allgather(local, runtime.group(GroupKind.SHARDING))
    full = {index: value for index, value in state.items() if index not in local}
    sharded: list[tuple[int, object, torch.dtype]] = []
    for index in sorted({index for each in gathered for index in each}):
        full[index] = {}
        for key, values in _by_key([each.get(index, {}) for each in gathered]):
            dtype = _checked(shards[index], index, key, values)
            full[index][key] = None  # so that keys stay in their order
            if dtype is not None:
                sharded.append((index, key, dtype))
            else:
                present = [each for each in values if each is not _MISSING]
                own = state.get(index, {})
                full[index][key] = own[key] if key in own else present[0]
    for index, key, dtype in sharded:
        own = state.get(index, {}).get(key)
        own = torch.empty(0, dtype=dtype) if own is None else own
        (value,) = sharding.full_tensors([(parameters[index], own)])
        if keep:
            full[index][key] = value
        else:
            del full[index][key]
    return {index: full[index] for index in sorted(full, key=_order)}


def _order(index: object) -> tuple[bool, object]:
    return isinstance(index, str), index


def _local(shard: ShardedParameter, value: object) -> object:
    """The form of a value for the other ranks: a copy, or a ``_Shard`` if it has the size of the owned range."""
    if isinstance(value, torch.Tensor):
        if tuple(value.shape) == (shard.owned_numel,):
            return _Shard(value.dtype)
        return value.detach().clone()  # a pickled view would drag its storage along
    return value


def _by_key(gathered: Sequence[Mapping[object, object]]) -> Iterator[tuple[object, list[Any]]]:
    """The values of the ranks, by key, in the order of the first rank that has it."""
    for key in dict.fromkeys(key for each in gathered for key in each):
        yield key, [each.get(key, _MISSING) for each in gathered]


def _checked(
    shard: ShardedParameter, index: int, key: object, values: Sequence[Any]
) -> torch.dtype | None:
    """The dtype of a value that is to be gathered; None for one that is not."""
    there = [each for each in values if each is not _MISSING]
    if not all(isinstance(each, _Shard) for each in there):
        if any(isinstance(each, _Shard) for each in there):
            raise ShardingError(
                f"optimizer.state_dict: the state {key!r} of parameter {index}, {shard.name!r}, has the size of "
                "the shard on some ranks and not on others, so there is no whole one. Use an elementwise "
                "optimizer"
            )
        return None
    lacking = [
        rank
        for rank, each in enumerate(values)
        if each is _MISSING and len(range(*shard.layout.owned_range(rank)))
    ]
    if lacking:
        having = next(rank for rank, each in enumerate(values) if each is not _MISSING)
        raise ShardingError(
            f"optimizer.state_dict: rank {having} of the shard group has a state {key!r} of parameter "
            f"{index}, {shard.name!r}, and rank {lacking[0]} has none. Step the optimizer on all ranks alike"
        )
    dtypes = {each.dtype for each in there}
    if len(dtypes) > 1:
        raise ShardingError(
            f"optimizer.state_dict: the state {key!r} of parameter {index}, {shard.name!r}, is of different "
            f"dtypes on the ranks of the shard group: {', '.join(sorted(map(str, dtypes)))}"
        )
    dtype: torch.dtype = next(iter(dtypes))
    return dtype
