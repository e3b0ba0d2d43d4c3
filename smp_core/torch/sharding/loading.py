"""Full parameters that stand in the tree while modules give or load their state, and the copy into the shards.

torch's ``load_state_dict`` knows nothing of shards. So while it runs each sharded parameter is replaced by
one of the full shape; values that were loaded into that are then copied to the shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.sharding.sharded_parameter import ShardedParameter

#: These copy values into parameters, all of each, and do nothing else to them.
_COMMON = {nn.Module._load_from_state_dict, nn.modules.batchnorm._NormBase._load_from_state_dict}


def is_special(module: nn.Module) -> bool:
    """Return whether any module of the tree loads its state in a way of its own, or has hooks that see the load."""
    return type(module).load_state_dict is not nn.Module.load_state_dict or any(
        getattr(each._load_from_state_dict, "__func__", None) not in _COMMON
        or each._load_state_dict_pre_hooks
        or each._load_state_dict_post_hooks
        for each in module.modules()
    )


@dataclasses.dataclass(eq=False, slots=True)
class StandIn:
    """A full parameter in the place of a sharded one."""

    parameter: nn.Parameter
    shard: ShardedParameter
    full: nn.Parameter
    version: int

    def copy_to_shard(self, look: bool) -> None:
        """Copy the loaded values to the shard. ``look``: also values written past torch's version counter,
        as into ``weight.data``; then the full parameter had its true values before.

        Raises ShardingError for values of another shape.
        """
        if tuple(self.full.shape) != self.shard.shape:
            raise ShardingError(
                f"model.load_state_dict: parameter {self.shard.name!r} was given the shape {list(self.full.shape)} "
                f"while its module loaded it, and each rank keeps its part of {list(self.shard.shape)}. Build the "
                "module in the shape of the state"
            )
        changed = self.full._version != self.version
        if not changed and look:
            own = self.shard.owned_slice(self.full.detach().reshape(-1))
            changed = not torch.equal(own, self.shard.padded[: self.shard.owned_numel])
        if changed:
            self.shard.copy_from_full(self.full)
            torch.autograd.graph.increment_version(self.parameter)  # masters go by it


@contextlib.contextmanager
def standing(
    module: nn.Module,
    shard_of: Callable[[torch.Tensor], ShardedParameter | None],
    value: Callable[[nn.Parameter, ShardedParameter], torch.Tensor],
) -> Iterator[Sequence[StandIn]]:
    """While entered, each sharded parameter of the tree is replaced by a full one, with the values of ``value``;
    afterwards, by itself again. A parameter that somebody puts into its place meanwhile is the full one then.
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
                full = nn.Parameter(value(parameter, shard), parameter.requires_grad)
                known = stand_ins[id(parameter)] = StandIn(parameter, shard, full, full._version)
            registries.append((child._parameters, name, known))
            dict.__setitem__(child._parameters, name, known.full)
    originals = [(each, each.full) for each in stand_ins.values()]
    try:
        yield list(stand_ins.values())
    finally:
        before = {id(each): full for each, full in originals}
        for registry, name, each in registries:
            found = dict.get(registry, name)
            if isinstance(found, nn.Parameter) and found is not before[id(each)]:
                each.full, each.version = found, -1
            dict.__setitem__(registry, name, each.parameter)
