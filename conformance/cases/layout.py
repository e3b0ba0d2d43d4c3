"""The coordinates, groups and positions of a world, straight from the text of API 4.

The properties compare ranks with this module, so this module uses no code that they test. Of a
:class:`~smp_core.topology.Topology` only the fields that say what was asked for are read: size,
pipeline, tensor and placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import smp_core.torch as smp
from smp_core.topology import Topology

GROUPS = tuple(smp.CommGroup)

#: The coordinates that the members of a group share (API 4.1).
SHARED: Mapping[smp.CommGroup, str] = {
    smp.CommGroup.WORLD: "",
    smp.CommGroup.MP_GROUP: "D",
    smp.CommGroup.DP_GROUP: "P",
    smp.CommGroup.PP_GROUP: "TD",
    smp.CommGroup.TP_GROUP: "PD",
    smp.CommGroup.RDP_GROUP: "PT",
}

#: The rank type that reads a number as a position in a group of this kind (API 1.5).
RANK_TYPES: Mapping[smp.CommGroup, smp.RankType] = {
    smp.CommGroup.WORLD: smp.RankType.WORLD_RANK,
    smp.CommGroup.MP_GROUP: smp.RankType.MP_RANK,
    smp.CommGroup.DP_GROUP: smp.RankType.DP_RANK,
    smp.CommGroup.PP_GROUP: smp.RankType.PP_RANK,
    smp.CommGroup.TP_GROUP: smp.RankType.TP_RANK,
    smp.CommGroup.RDP_GROUP: smp.RankType.RDP_RANK,
}


def degrees(world: Topology) -> dict[str, int]:
    """The number of values of each coordinate, by its letter."""
    return {
        "D": world.size // (world.pipeline * world.tensor),
        "P": world.pipeline,
        "T": world.tensor,
    }


def coordinates(world: Topology, rank: int) -> dict[str, int]:
    """The coordinates of a rank, by letter; the right-most letter varies fastest (API 4.2)."""
    letters = {"cluster": "DPT", "spread": "TPD"}.get(world.placement, world.placement)
    at: dict[str, int] = {}
    for letter in reversed(letters):
        rank, at[letter] = divmod(rank, degrees(world)[letter])
    return at


def members(world: Topology, group: smp.CommGroup, rank: int) -> list[int]:
    """The world ranks of the group of this kind that ``rank`` is in, ascending (API 4.1, 4.2)."""
    own = coordinates(world, rank)
    everyone = ((each, coordinates(world, each)) for each in range(world.size))
    return [each for each, at in everyone if all(at[c] == own[c] for c in SHARED[group])]


def groups(world: Topology, group: smp.CommGroup) -> list[list[int]]:
    """All groups of this kind, ordered by their first ranks."""
    found = (members(world, group, rank) for rank in range(world.size))
    return [list(each) for each in dict.fromkeys(map(tuple, found))]


def parameters(world: Topology) -> dict[str, Any]:
    """The parameters of smp.init that ask for this world."""
    return {
        "pipeline_parallel_degree": world.pipeline,
        "tensor_parallel_degree": world.tensor,
        "placement_strategy": world.placement,
        "ddp": world.tensor > 1,  # API 3.5: tensor parallelism needs ddp
    }
