"""Routes: who gathers from whom, in which order the parts come, and where nodes are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from smp_core import runtime
from smp_core.config import Config
from smp_core.topology import Topology
from smp_core.torch.sharding import gathering
from smp_core.torch.sharding.gathering import Hop, Route

BETWEEN, WITHIN = "between nodes", "within nodes"


def arrived(routes: dict[int, Route]) -> dict[int, list[int]]:
    """Whose part each row of each rank's result has: the routes of a group, carried out."""
    rows = {rank: [rank] for rank in routes}
    for number in range(max(len(route.hops) for route in routes.values())):
        rows = {
            rank: [row for member in route.hops[number].ranks for row in rows[member]]
            for rank, route in routes.items()
        }
    return {
        rank: [rows[rank][row] for row in route.order] if route.order is not None else rows[rank]
        for rank, route in routes.items()
    }


def left_a_node(routes: dict[int, Route], nodes: Sequence[int], node: int) -> int:
    """The parts that ranks of ``node`` sent to others, with each hop as a ring."""
    count, held = 0, 1
    for number in range(max(len(route.hops) for route in routes.values())):
        for rank, route in routes.items():
            ring = route.hops[number].ranks
            following = ring[(ring.index(rank) + 1) % len(ring)]
            if nodes[rank] == node != nodes[following]:
                count += held * (len(ring) - 1)
        held *= len(routes[0].hops[number].ranks)
    return count


def routes_of(strategy: str, ranks: tuple[int, ...], nodes: Sequence[int]) -> dict[int, Route]:
    return {rank: gathering.STRATEGIES[strategy](ranks, rank, nodes) for rank in ranks}


def test_between_nodes_first_then_within_them() -> None:
    route = gathering.hierarchical((0, 1, 2, 3), 2, (0, 0, 1, 1))
    assert route == Route((Hop(BETWEEN, (0, 2)), Hop(WITHIN, (2, 3))), (0, 2, 1, 3))


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
    for strategy in gathering.STRATEGIES:
        routes = routes_of(strategy, ranks, nodes)
        assert {len(route.hops) for route in routes.values()} == {1 + (strategy != "flat")}
        assert arrived(routes) == {rank: list(ranks) for rank in ranks}


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
        assert gathering.hierarchical(ranks, rank, nodes) == Route((Hop("", ranks),))


def within_first(ranks: tuple[int, ...], rank: int, nodes: Sequence[int]) -> Route:
    """The order of AWS Sharded Data Parallelism."""
    between, within = gathering.hierarchical(ranks, rank, nodes).hops
    return Route((within, between))


@pytest.mark.parametrize(("p", "k"), [(16, 8), (32, 8), (64, 8), (12, 3)])
def test_what_leaves_a_node_is_the_formula_of_each_order(p: int, k: int) -> None:
    ranks, nodes = tuple(range(p)), [rank // k for rank in range(p)]
    for node in range(p // k):
        assert left_a_node(routes_of("flat", ranks, nodes), nodes, node) == p - 1
        assert left_a_node(routes_of("hierarchical", ranks, nodes), nodes, node) == p - k
        routes = {rank: within_first(ranks, rank, nodes) for rank in ranks}
        assert left_a_node(routes, nodes, node) == k * (p - k)


def places(*hosts: str) -> list[tuple[int, int]]:
    """What a launcher tells ranks on these hosts."""
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
    assert gathering.nodes_of(here) == nodes


@pytest.mark.smp(ranks=5, ranks_per_node=2)
def test_the_key_says_where_nodes_are(smp: Any) -> None:
    smp.init()
    assert gathering.nodes_of(runtime.current("test")) == (0, 0, 1, 1, 2)


@pytest.mark.smp(ranks=3)
def test_without_the_key_the_launcher_does(smp: Any) -> None:
    assert gathering.nodes_of(runtime.current("test")) == (0, 0, 0)
