"""Whole parameters that stand in the tree while modules give or take their state, and what shards take of them.

torch's ``load_state_dict`` knows nothing of shards. So for its time each sharded parameter is replaced by
one of the true shape; what was loaded into it then goes to the shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.sharding.shards import Shard

#: These copy values into parameters, all of each, and do nothing else to them.
_COMMON = {nn.Module._load_from_state_dict, nn.modules.batchnorm._NormBase._load_from_state_dict}


def is_special(module: nn.Module) -> bool:
    """Whether any module of the tree loads its state in a way of its own, or has hooks that see it loaded."""
    return type(module).load_state_dict is not nn.Module.load_state_dict or any(
        getattr(each._load_from_state_dict, "__func__", None) not in _COMMON
        or each._load_state_dict_pre_hooks
        or each._load_state_dict_post_hooks
        for each in module.modules()
    )


@dataclasses.dataclass(eq=False, slots=True)
class StandIn:
    """A whole parameter in the place of a sharded one."""

    parameter: nn.Parameter
    shard: Shard
    whole: nn.Parameter
    version: int

    def take(self, look: bool) -> None:
        """Let the shard have what was loaded. ``look``: also what was written past torch's version counter,
        as into ``weight.data``; then the whole had its true values before.

        Raises ShardingError for values of another shape.
        """
        if tuple(self.whole.shape) != self.shard.shape:
            raise ShardingError(
                f"model.load_state_dict: parameter {self.shard.name!r} was given the shape {list(self.whole.shape)} "
                f"while its module loaded it, and each rank keeps its part of {list(self.shard.shape)}. Build the "
                "module in the shape of the state"
            )
        changed = self.whole._version != self.version
        if not changed and look:
            own = self.shard.slice_of(self.whole.detach().reshape(-1))
            changed = not torch.equal(own, self.shard.part[: self.shard.owned])
        if changed:
            self.shard.take(self.whole)
            torch.autograd.graph.increment_version(self.parameter)  # masters go by it


@contextlib.contextmanager
def standing(
    module: nn.Module,
    shard_of: Callable[[torch.Tensor], Shard | None],
    value: Callable[[nn.Parameter, Shard], torch.Tensor],
) -> Iterator[Sequence[StandIn]]:
    """While entered, each sharded parameter of the tree is replaced by a whole one, with what ``value`` gives;
    afterwards, by itself again. A parameter that somebody puts into its place meanwhile is the whole one then.
    """
    stand_ins: dict[int, StandIn] = {}
    registries: list[tuple[Any, str, StandIn]] = []
    for child in module.modules():
        for name, parameter in dict.items(child._parameters):
            shard = None if parameter is None else shard_of(parameter)
            if parameter is None or shard is None:
                continue
            known = stand_ins.get(id(parameter))
            if known is None:
                whole = nn.Parameter(value(parameter, shard), parameter.requires_grad)
                known = stand_ins[id(parameter)] = StandIn(parameter, shard, whole, whole._version)
            registries.append((child._parameters, name, known))
            dict.__setitem__(child._parameters, name, known.whole)
    originals = [(each, each.whole) for each in stand_ins.values()]
    try:
        yield list(stand_ins.values())
    finally:
        before = {id(each): whole for each, whole in originals}
        for registry, name, each in registries:
            found = dict.get(registry, name)
            if isinstance(found, nn.Parameter) and found is not before[id(each)]:
                each.whole, each.version = found, -1
            dict.__setitem__(registry, name, each.parameter)
