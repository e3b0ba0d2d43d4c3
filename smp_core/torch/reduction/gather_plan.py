"""Gather plans: the hops by which the shards of a tensor are all-gathered on the ranks of a group, as data.

A *gather plan* is a list of hops; in each, some ranks all-gather everything that they have so far. Where the
shards then lie in another order than the group's, the plan says so, and they are put right: the result
of every plan is the same, byte for byte.

``flat``
    One hop over the group.
``hierarchical``
    Between nodes first: rank ``l`` of each node with rank ``l`` of every other. Then within each node.
    The gathered shards lie by ``[place in the node, node, shard]`` and are reordered to ``[node, place, shard]``.
    A test with equal shards would not notice that the reordering is missing, since the sizes are right.

AWS Sharded Data Parallelism (sdp_hierarchical_allgather) says that the gather works "within each node first, and then
across nodes"; the published algorithm (MiCS) goes between nodes first. The values are the same, but the bytes that
leave a node are not. For a tensor of size M, over p ranks with k on each node (ENGINES 1.3):

======================== ============= =========== ===========
order                    leaves a node p=16, k=8   p=64, k=8
======================== ============= =========== ===========
flat, as a ring          (p - 1) / p M 0.94        0.98
between nodes first      (p - k) / p M 0.50        0.88
within nodes first       k (p - k) / p M 4.0       7.0
======================== ============= =========== ===========

Within nodes first sends more than a flat gather. So the plan here is between nodes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind


class Hop(NamedTuple):
    """An all-gather of this rank and others, who give each other all that they have."""

    name: str  #: of the hop, for messages and counters; empty where there is only one
    ranks: tuple[int, ...]  #: world ranks, this one among them, in the order of the result


class GatherPlan(NamedTuple):
    """The way in which this rank gets the shards of all ranks."""

    hops: tuple[Hop, ...]
    #: For each member of the group the row of the last hop's result that has its shard; None: in order.
    order: tuple[int, ...] | None = None


def nodes_of(runtime: Runtime) -> tuple[int, ...]:
    """The number of the node that each world rank is on; all ranks call it.

    By the key ``ranks_per_node``, or else by the launcher's local ranks and sizes. Those say where a
    rank is only if each node has consecutive ranks; if any has not, all count as one node.
    """
    per_node = runtime.config.ranks_per_node
    if per_node is not None:
        return tuple(rank // per_node for rank in range(runtime.size))
    fabric = runtime.fabric
    if fabric.local_size == runtime.size:
        return (0,) * runtime.size
    places = fabric.objects.allgather(
        (fabric.local_rank, fabric.local_size), runtime.group(GroupKind.WORLD)
    )
    return _by_places(places)


def _by_places(places: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Each rank's node from its local rank and local size."""
    nodes: list[int] = []
    while len(nodes) < len(places):
        size = places[len(nodes)][1]
        if list(places[len(nodes) : len(nodes) + size]) != [(each, size) for each in range(size)]:
            return (0,) * len(places)
        nodes += [nodes[-1] + 1 if nodes else 0] * size
    return tuple(nodes)


def flat(ranks: tuple[int, ...], rank: int, nodes: Sequence[int]) -> GatherPlan:
    """The plan of one hop over the whole group."""
    return GatherPlan((Hop("", ranks),))


def hierarchical(ranks: tuple[int, ...], rank: int, nodes: Sequence[int]) -> GatherPlan:
    """Between nodes, then within them. Flat, if the group has one node, or one rank of each, or more
    of one than of another.
    """
    by_node: dict[int, list[int]] = {}
    for member in ranks:
        by_node.setdefault(nodes[member], []).append(member)
    here = by_node[nodes[rank]]
    if len(by_node) == 1 or len(here) == 1 or len({len(each) for each in by_node.values()}) > 1:
        return flat(ranks, rank, nodes)
    place = here.index(rank)
    peers = tuple(members[place] for members in by_node.values())
    row = {
        member: place * len(by_node) + number
        for number, members in enumerate(by_node.values())
        for place, member in enumerate(members)
    }
    return GatherPlan(
        (Hop("between nodes", peers), Hop("within nodes", tuple(here))),
        tuple(row[member] for member in ranks),
    )


#: From the group's world ranks, this rank, and the node of every world rank.
Planner = Callable[[tuple[int, ...], int, Sequence[int]], GatherPlan]

PLANNERS: Mapping[str, Planner] = {"flat": flat, "hierarchical": hierarchical}
