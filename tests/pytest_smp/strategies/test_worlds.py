"""Worlds and groups: what is drawn, that hard cases are, and what they shrink to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pytest_smp.strategies import degrees, groups, placements, topologies, world_sizes
from smp_core.config import Config
from smp_core.topology import Topology

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]


def test_world_sizes_are_in_range_and_all_drawn(drawn: Drawn, minimal: Minimal) -> None:
    sizes = Counter(drawn(world_sizes(), 400))
    assert set(sizes) == set(range(1, 9))
    assert sizes[1] > 400 / 8  # more often than its share
    assert minimal(world_sizes()) == 1
    assert minimal(world_sizes(), lambda size: size > 4 and size % 2) == 5
    assert minimal(world_sizes(min_size=3, max_size=3)) == 3
    assert set(drawn(world_sizes(min_size=2, max_size=4), 100)) == {2, 3, 4}


def test_a_world_of_one_rank_is_drawn_often_beside_large_ones(drawn: Drawn) -> None:
    sizes = drawn(world_sizes(max_size=1536), 200)
    assert sizes.count(1) >= 10
    assert max(sizes) > 100


def test_placements_are_the_eight_of_the_specification(drawn: Drawn, minimal: Minimal) -> None:
    # API 4.2
    expected = {"cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"}
    assert set(drawn(placements(), 300)) == expected
    assert minimal(placements()) == "cluster"


@pytest.mark.parametrize(("size", "expected"), [(1, {1}), (6, {1, 2, 3, 6}), (7, {1, 7})])
def test_degrees_divide(size: int, expected: set[int], drawn: Drawn, minimal: Minimal) -> None:
    found = Counter(drawn(degrees(size), 100))
    assert set(found) == expected
    assert found[1] == max(found.values())
    assert minimal(degrees(size)) == 1


def test_topologies_have_every_degree_and_often_1(drawn: Drawn) -> None:
    found = drawn(topologies(), 3000)
    assert all(isinstance(each, Topology) and each.size <= 8 for each in found)
    assert all(each.sharding == 1 for each in found)
    for degree in ("pipeline", "tensor"):
        seen = Counter(getattr(each, degree) for each in found)
        assert set(seen) == set(range(1, 9))
        assert seen[1] > len(found) / 3
    assert any(each.pipeline > 1 and each.tensor > 1 and each.reduced_data > 1 for each in found)


def test_topologies_with_sharding_can_be_configured(drawn: Drawn) -> None:
    found = drawn(topologies(sharding=True, max_size=12), 1000)
    sharded = [each for each in found if each.sharding > 1]
    assert len(sharded) > 50
    assert any(each.tensor > 1 for each in sharded)
    assert any(1 < each.sharding < each.reduced_data for each in sharded)
    assert any(each.sharding == each.reduced_data for each in sharded)
    for each in found:
        Config.parse(
            {
                "pipeline_parallel_degree": each.pipeline,
                "tensor_parallel_degree": each.tensor,
                "sharded_data_parallel_degree": each.sharding,
                "placement_strategy": each.placement,
                "ddp": True,
                "prescaled_batch": True,
            }
        ).check_world(each.size)


def test_topologies_shrink_to_few_ranks(minimal: Minimal) -> None:
    assert minimal(topologies()) == Topology(1)
    assert minimal(topologies(min_size=3)) == Topology(3)
    assert minimal(topologies(), lambda t: t.tensor > 1) == Topology(2, tensor=2)
    assert minimal(topologies(), lambda t: t.tensor > 1 and t.pipeline > 1) == Topology(4, 2, 2)
    assert minimal(topologies(sharding=True), lambda t: t.sharding > 1) == Topology(2, sharding=2)
    spread = minimal(topologies(), lambda t: t.placement != "cluster")
    assert spread == Topology(1, placement="spread")


def test_groups_are_distinct_ranks_of_the_world(drawn: Drawn) -> None:
    for size, fewest, most in [(1, 1, None), (5, 2, 3), (8, 1, None), (1536, 1, 8)]:
        found = drawn(groups(size, min_size=fewest, max_size=most), 100)
        for group in found:
            assert isinstance(group, tuple)
            assert fewest <= len(group) <= (most or size)
            assert len(set(group)) == len(group)
            assert set(group) <= set(range(size))


def test_hard_groups_are_drawn_often(drawn: Drawn) -> None:
    found = drawn(groups(8), 400)
    often = len(found) / 10
    assert sum(len(group) == 1 for group in found) > often
    assert sum(len(group) == 8 for group in found) > often / 2
    assert sum(0 not in group for group in found) > often
    assert sum(list(group) != sorted(group) for group in found) > often
    assert any(0 not in group and list(group) != sorted(group) for group in found)
    assert any(
        0 not in group and len(group) > 2 and list(group) == sorted(group) for group in found
    )


def test_groups_shrink_to_few_small_ascending_ranks(minimal: Minimal) -> None:
    assert minimal(groups(8)) == (0,)
    assert minimal(groups(8, min_size=3)) == (0, 1, 2)
    assert minimal(groups(8), lambda group: 0 not in group) == (1,)
    assert minimal(groups(8), lambda group: list(group) != sorted(group)) == (1, 0)
    hard = minimal(groups(8), lambda g: 0 not in g and list(g) != sorted(g))
    assert hard == (2, 1)
