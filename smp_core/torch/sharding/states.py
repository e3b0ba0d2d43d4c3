"""What an optimizer keeps for split parameters: whole, as for the whole model.

An elementwise optimizer keeps for a parameter tensors of its shape, here of the shard's, and others, as
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
from smp_core.torch.sharding.shards import Shard
from smp_core.torch.sharding.state import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Stands for a tensor of the size of a rank's shard."""

    dtype: torch.dtype


_MISSING: Any = object()


def wholes(
    runtime: Runtime,
    sharding: Sharding,
    state: Mapping[Any, Any],
    parameters: Mapping[int, nn.Parameter],
    keep: bool = True,
) -> dict[Any, Any]:
    """The state with tensors of the size of shards gathered, of the parameters' shapes and strides.

    Every rank of the sharding group calls it, whatever state it has: who owns no element of a parameter
    need not have any of it. What ranks have of state they tell each other first.

    Args:
        state: this rank's, by the parameters' index.
        parameters: the model's, by index, the same on all ranks.
        keep: False leaves out what was gathered: for the ranks that only help others to it.

    Raises ShardingError, on every rank of the group, if one lacks elements that it owns.
    """
    known = {index: sharding.shard(each) for index, each in parameters.items()}
    shards = {index: shard for index, shard in known.items() if shard is not None}
    mine = {
        index: {key: _said(shard, value) for key, value in state[index].items()}
        for index, shard in shards.items()
        if isinstance(state.get(index), Mapping)
    }
    told = runtime.fabric.objects.allgather(mine, runtime.group(GroupKind.SHARDING))
    whole = {index: value for index, value in state.items() if index not in mine}
    gathered: list[tuple[int, Any, torch.dtype]] = []
    for index in sorted({index for each in told for index in each}):
        whole[index] = {}
        for key, said in _by_key([each.get(index, {}) for each in told]):
            dtype = _checked(shards[index], index, key, said)
            whole[index][key] = None  # so that keys stay in their order
            if dtype is not None:
                gathered.append((index, key, dtype))
            else:
                values = [each for each in said if each is not _MISSING]
                own = state.get(index, {})
                whole[index][key] = own[key] if key in own else values[0]
    for index, key, dtype in gathered:
        own = state.get(index, {}).get(key)
        own = torch.empty(0, dtype=dtype) if own is None else own
        (value,) = sharding.wholes([(parameters[index], own)])
        if keep:
            whole[index][key] = value
        else:
            del whole[index][key]
    return whole


def _said(shard: Shard, value: Any) -> Any:
    """What the other ranks are told of a value: all of it, unless it is a part."""
    if isinstance(value, torch.Tensor):
        if tuple(value.shape) == (shard.owned,):
            return _Part(value.dtype)
        return value.detach().clone()  # a pickled view would drag its storage along
    return value


def _by_key(told: Sequence[Mapping[Any, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    """What the ranks said, by key, in the order of the first that has it."""
    for key in dict.fromkeys(key for each in told for key in each):
        yield key, [each.get(key, _MISSING) for each in told]


def _checked(shard: Shard, index: int, key: Any, said: Sequence[Any]) -> torch.dtype | None:
    """The dtype of what is to be gathered; None for what is not."""
    there = [each for each in said if each is not _MISSING]
    if not all(isinstance(each, _Part) for each in there):
        if any(isinstance(each, _Part) for each in there):
            raise ShardingError(
                f"optimizer.state_dict: the state {key!r} of parameter {index}, {shard.name!r}, has the size of "
                "the shard on some ranks and not on others, so there is no whole one. Use an elementwise "
                "optimizer"
            )
        return None
    lacking = [
        rank
        for rank, each in enumerate(said)
        if each is _MISSING and len(range(*shard.layout.own(rank)))
    ]
    if lacking:
        having = next(rank for rank, each in enumerate(said) if each is not _MISSING)
        raise ShardingError(
            f"optimizer.state_dict: rank {having} of the sharding group has a state {key!r} of parameter "
            f"{index}, {shard.name!r}, and rank {lacking[0]} has none. Step the optimizer on all ranks alike"
        )
    dtypes = {each.dtype for each in there}
    if len(dtypes) > 1:
        raise ShardingError(
            f"optimizer.state_dict: the state {key!r} of parameter {index}, {shard.name!r}, is of different "
            f"dtypes on the ranks of the sharding group: {', '.join(sorted(map(str, dtypes)))}"
        )
    dtype: torch.dtype = next(iter(dtypes))
    return dtype
