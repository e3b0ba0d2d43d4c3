"""Routes: who gathers from whom, in which order the parts come, and where nodes are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from smp_core import runtime
from smp_core.config import Config
from smp_core.topology import Topology
from smp_core.torch.reduction import gather_plan
from smp_core.torch.reduction.gather_plan import GatherPlan, Hop

BETWEEN, WITHIN = "between nodes", "within nodes"


def arrived(plans: dict[int, GatherPlan]) -> dict[int, list[int]]:
    """The rank whose part each row of each rank's result has: the plans of a group, carried out."""
    rows = {rank: [rank] for rank in plans}
    for number in range(max(len(plan.hops) for plan in plans.values())):
        rows = {
            rank: [row for member in plan.hops[number].ranks for row in rows[member]]
            for rank, plan in plans.items()
        }
    return {
        rank: [rows[rank][row] for row in plan.order] if plan.order is not None else rows[rank]
        for rank, plan in plans.items()
    }


def left_a_node(plans: dict[int, GatherPlan], nodes: Sequence[int], node: int) -> int:
    """The parts that ranks of ``node`` sent to others, with each hop as a ring."""
    count, held = 0, 1
    for number in range(max(len(plan.hops) for plan in plans.values())):
        for rank, plan in plans.items():
            ring = plan.hops[number].ranks
            following = ring[(ring.index(rank) + 1) % len(ring)]
            if nodes[rank] == node != nodes[following]:
                count += held * (len(ring) - 1)
        held *= len(plans[0].hops[number].ranks)
    return count


def plans_of(strategy: str, ranks: tuple[int, ...], nodes: Sequence[int]) -> dict[int, GatherPlan]:
    return {rank: gather_plan.PLANNERS[strategy](ranks, rank, nodes) for rank in ranks}


def test_between_nodes_first_then_within_them() -> None:
    plan = gather_plan.hierarchical((0, 1, 2, 3), 2, (0, 0, 1, 1))
    assert plan == GatherPlan((Hop(BETWEEN, (0, 2)), Hop(WITHIN, (2, 3))), (0, 2, 1, 3))


LAYOUTS = {
    "two nodes of two": ((0, 1, 2, 3), (0, 0, 1, 1)),
    "three nodes of two": ((0, 1, 2, 3, 4, 5), (0, 0, 1, 1, 2, 2)),
    "two nodes of three": ((0, 1, 2, 3, 4, 5), (0, 0, 0, 1, 1, 1)),
    "in turn": ((0, 1, 2, 3, 4, 5), (0, 1, 2, 0, 1, 2)),
    "mixed": ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 1, 0, 1, 0, 0, 1)),
    "every other rank": ((1, 3, 5, 7), (0, 0, 0, 0, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_route_ends_in_the_order_of_the_group(layout: str) -> None:
    ranks, nodes = LAYOUTS[layout]
    for strategy in gather_plan.PLANNERS:
        plans = plans_of(strategy, ranks, nodes)
        assert {len(plan.hops) for plan in plans.values()} == {1 + (strategy != "flat")}
        assert arrived(plans) == {rank: list(ranks) for rank in ranks}


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        ((0,), (0, 1)),
        ((0, 1, 2, 3), (0, 0, 0, 0)),  # one node
        ((0, 1, 2, 3), (0, 1, 2, 3)),  # one rank of each
        ((0, 2), (0, 0, 1, 1)),
        ((0, 1, 2), (0, 0, 1)),  # more of one than of another
        ((0, 1, 2, 3, 4, 5), (0, 0, 0, 0, 1, 1)),
    ],
)
def test_one_hop_where_two_gain_nothing_or_do_not_fit(
    ranks: tuple[int, ...], nodes: tuple[int, ...]
) -> None:
    for rank in ranks:
        assert gather_plan.hierarchical(ranks, rank, nodes) == GatherPlan((Hop("", ranks),))


def within_first(ranks: tuple[int, ...], rank: int, nodes: Sequence[int]) -> GatherPlan:
    """The order of AWS Sharded Data Parallelism."""
    between, within = gather_plan.hierarchical(ranks, rank, nodes).hops
    return GatherPlan((within, between))


@pytest.mark.parametrize(("p", "k"), [(16, 8), (32, 8), (64, 8), (12, 3)])
def test_what_leaves_a_node_is_the_formula_of_each_order(p: int, k: int) -> None:
    ranks, nodes = tuple(range(p)), [rank // k for rank in range(p)]
    for node in range(p // k):
        assert left_a_node(plans_of("flat", ranks, nodes), nodes, node) == p - 1
        assert left_a_node(plans_of("hierarchical", ranks, nodes), nodes, node) == p - k
        plans = {rank: within_first(ranks, rank, nodes) for rank in ranks}
        assert left_a_node(plans, nodes, node) == k * (p - k)


def places(*hosts: str) -> list[tuple[int, int]]:
    """The numbers that a launcher tells ranks on these machines: the local rank, and the ranks of the machine."""
    return [
        (hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])) for rank in range(len(hosts))
    ]


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("a", (0,)),
        ("aabb", (0, 0, 1, 1)),
        ("abc", (0, 1, 2)),
        ("aaabcc", (0, 0, 0, 1, 2, 2)),
        ("abab", (0, 0, 0, 0)),  # not consecutive: where a rank is cannot be told
        ("aabbaabb", (0,) * 8),
        ("aab" + "a", (0,) * 4),
    ],
)
def test_nodes_are_found_from_local_ranks(
    hosts: str, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = places(*hosts)

    class Objects:
        def allgather(self, obj: object, group: Any) -> list[Any]:
            assert obj == told[0]
            assert group.ranks == tuple(range(len(hosts)))
            return told

    class Fabric:
        rank, size = 0, len(hosts)
        local_rank, local_size = told[0]
        objects = Objects()

    here: Any = runtime.Runtime(
        Config(),
        Topology(len(hosts)),
        Fabric(),  # type: ignore[arg-type]
    )
    assert gather_plan.nodes_of(here) == nodes


@pytest.mark.smp(ranks=5, ranks_per_node=2)
def test_the_key_says_where_nodes_are(smp: Any) -> None:
    smp.init()
    assert gather_plan.nodes_of(runtime.current("test")) == (0, 0, 1, 1, 2)
    local = [(0, 2), (1, 2), (0, 2), (1, 2), (0, 1)]
    assert (smp.local_rank(), smp.local_size()) == local[smp.rank()]


@pytest.mark.smp(ranks=3)
def test_without_the_key_the_launcher_does(smp: Any) -> None:
    assert gather_plan.nodes_of(runtime.current("test")) == (0, 0, 0)
