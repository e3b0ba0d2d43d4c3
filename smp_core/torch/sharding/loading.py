"""The copy of loaded values into shards.

torch's ``load_state_dict`` knows nothing of shards. So while it runs each sharded parameter is replaced by
one of the full shape (parameters/stand_ins.py); values that were loaded into that are then copied to the shard.
"""

from __future__ import annotations

import torch

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.parameters.stand_ins import StandIn
from smp_core.torch.sharding.sharded_parameter import ShardedParameter


def copy_to_shard(stand_in: StandIn, shard: ShardedParameter, look: bool) -> None:
    """Copy the loaded values to the shard. ``look``: also values written past torch's version counter,
    as into ``weight.data``; then the full parameter had its true values before.

    Raises ShardingError for values of another shape.
    """
    full = stand_in.full
    if tuple(full.shape) != shard.shape:
        raise ShardingError(
            f"model.load_state_dict: parameter {shard.name!r} was given the shape {list(full.shape)} "
            f"while its module loaded it, and each rank keeps its part of {list(shard.shape)}. Build the "
            "module in the shape of the state"
        )
    changed = stand_in.changed
    if not changed and look:
        own = shard.owned_slice(full.detach().reshape(-1))
        changed = not torch.equal(own, shard.padded[: shard.owned_numel])
    if changed:
        shard.copy_from_full(full)
        torch.autograd.graph.increment_version(stand_in.parameter)  # masters go by it
