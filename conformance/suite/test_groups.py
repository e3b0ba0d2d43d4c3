"""Properties of groups: ranks, sizes and members."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch.distributed as dist
from hypothesis import given

import smp_core.torch as smp
from conformance.cases.draws import needs, on_ranks, sizes, worlds
from conformance.cases.layout import GROUPS, coordinates, members, parameters
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from smp_core.errors import ConfigError
from smp_core.topology import Topology

#: The getters of the lists of ranks that the documents describe, by kind of group.
LISTS = {
    smp.CommGroup.MP_GROUP: "get_mp_group",
    smp.CommGroup.DP_GROUP: "get_dp_group",
    smp.CommGroup.TP_GROUP: "get_tp_group",
}


def prefix(group: smp.CommGroup) -> str:
    """The prefix of a group's getters: ``mp_`` as in ``mp_rank``; empty for the world."""
    return "" if group is smp.CommGroup.WORLD else group.name.removesuffix("GROUP").lower()


def call(names: list[str]) -> list[Any]:
    """Make calls of the API without arguments, and return their results on this rank."""
    return [getattr(smp, name)() for name in names]


@requirement("GROUP-NAMES")
def test_names_of_groups_and_rank_types() -> None:
    words = ["MP", "DP", "PP", "TP", "RDP"]
    assert [group.name for group in smp.CommGroup if group.name != "WORLD"] == [
        f"{word}_GROUP" for word in words
    ]
    assert {each.name for each in smp.RankType} == {f"{word}_RANK" for word in ["WORLD", *words]}
    for group in smp.CommGroup:
        assert getattr(smp, group.name) is group


@requirement("GROUP-WORLD")
@given(data=st.data())
@on_ranks
def test_ranks_count_from_0(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    seen = smp_world.run(call, ["rank", "size"], ranks=world.size, config=parameters(world))
    assert seen == [[rank, world.size] for rank in range(world.size)]


@requirement("GROUP-LOCAL")
@given(data=st.data())
@on_ranks
def test_local_ranks_count_from_0_on_every_node(smp_world: SmpWorld, data: st.DataObject) -> None:
    # The executor decides which ranks share a node. Every node of n ranks has local ranks 0 to n - 1, so
    # these occur equally often among all ranks with local_size n.
    ranks = data.draw(sizes(smp_world), "ranks")
    seen = Counter(map(tuple, smp_world.run(call, ["local_rank", "local_size"], ranks=ranks)))
    for (rank, size), count in seen.items():
        assert 0 <= rank < size <= ranks
        assert all(seen[each, size] == count for each in range(size))


@requirement("GROUP-SIZES")
@given(data=st.data())
@on_ranks
def test_sizes(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    names = ["pp_size", "tp_size", "rdp_size", "mp_size", "dp_size"]
    for pp, tp, rdp, mp, dp in smp_world.run(
        call, names, ranks=world.size, config=parameters(world)
    ):
        assert (pp, tp, pp * tp * rdp) == (world.pipeline, world.tensor, world.size)
        assert (mp, dp) == (pp * tp, rdp * tp)


@requirement("GROUP-PLACEMENT")
@given(data=st.data())
@on_ranks
def test_coordinates(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    names = ["rdp_rank", "pp_rank", "tp_rank"]
    seen = smp_world.run(call, names, ranks=world.size, config=parameters(world))
    assert [dict(zip("DPT", each, strict=True)) for each in seen] == [
        coordinates(world, rank) for rank in range(world.size)
    ]


#: The worked tables of API 4.2: world size, degrees and placement, and the groups.
TABLES: list[tuple[Topology, dict[str, str]]] = [
    (Topology(8, 2, 1), {"MP": "01 23 45 67", "DP": "0246 1357"}),
    (Topology(8, 2, 1, placement="spread"), {"MP": "04 15 26 37", "DP": "0123 4567"}),
    (Topology(8, 4, 1), {"MP": "0123 4567", "DP": "04 15 26 37"}),
    (Topology(8, 4, 1, placement="spread"), {"MP": "0246 1357", "DP": "01 23 45 67"}),
    *(
        (
            Topology(8, 2, 2, placement=placement),
            dict(zip(["PP", "TP", "RDP", "DP", "MP"], row.split(" | "), strict=True)),
        )
        for placements, row in {
            "DPT cluster": "02 13 46 57 | 01 23 45 67 | 04 15 26 37 | 0145 2367 | 0123 4567",
            "TPD spread": "02 13 46 57 | 04 15 26 37 | 01 23 45 67 | 0145 2367 | 0246 1357",
            "PTD": "04 15 26 37 | 02 13 46 57 | 01 23 45 67 | 0123 4567 | 0246 1357",
            "DTP": "01 23 45 67 | 02 13 46 57 | 04 15 26 37 | 0246 1357 | 0123 4567",
            "PDT": "04 15 26 37 | 01 23 45 67 | 02 13 46 57 | 0123 4567 | 0145 2367",
            "TDP": "01 23 45 67 | 04 15 26 37 | 02 13 46 57 | 0246 1357 | 0145 2367",
        }.items()
        for placement in placements.split()
    ),
]


def meet(group: smp.CommGroup) -> str:
    """Gather the ranks of this rank's group, in the notation of the tables."""
    return "".join(map(str, smp.allgather(smp.rank(), group)))


@requirement("GROUP-TABLES")
@pytest.mark.parametrize(
    ("world", "table"),
    [
        pytest.param(world, table, id=f"{world.placement}-pp{world.pipeline}-tp{world.tensor}")
        for world, table in TABLES
    ],
)
def test_worked_tables(smp_world: SmpWorld, world: Topology, table: dict[str, str]) -> None:
    needs(smp_world, world.size)
    for word, row in table.items():
        group = smp.CommGroup[f"{word}_GROUP"]
        seen = smp_world.run(meet, group, ranks=world.size, config=parameters(world))
        assert " ".join(dict.fromkeys(seen)) == row
        assert all(str(rank) in ranks for rank, ranks in enumerate(seen))


@requirement("GROUP-MEMBERS")
@given(data=st.data())
@on_ranks
def test_lists_of_members(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    seen = smp_world.run(call, list(LISTS.values()), ranks=world.size, config=parameters(world))
    for index, group in enumerate(LISTS):
        lists = [each[index] for each in seen]
        for rank, ranks in enumerate(lists):
            assert sorted(ranks) == members(world, group, rank)  # the group of the definition
            assert all(lists[each] == ranks for each in ranks)  # the same list on each of its ranks


@requirement("GROUP-POSITION")
@given(data=st.data())
@on_ranks
def test_positions_in_groups(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    names = [f"{prefix(group)}rank" for group in GROUPS]
    for rank, seen in enumerate(
        smp_world.run(call, names, ranks=world.size, config=parameters(world))
    ):
        assert seen == [members(world, group, rank).index(rank) for group in GROUPS]


@requirement("GROUP-POSITION")
@given(data=st.data())
@on_ranks
def test_lists_ascend(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    for lists in smp_world.run(
        call, list(LISTS.values()), ranks=world.size, config=parameters(world)
    ):
        assert lists == [sorted(ranks) for ranks in lists]


def process_group_ranks(name: str) -> tuple[list[int], int]:
    """The world ranks of a process group, and this rank's position in it."""
    process_group = getattr(smp, name)()
    return dist.get_process_group_ranks(process_group), dist.get_rank(process_group)


@requirement("GROUP-PROCESS-GROUPS")
@given(data=st.data(), group=st.sampled_from(GROUPS))
@on_ranks
def test_process_groups(smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup) -> None:
    world = data.draw(worlds(smp_world), "world")
    config = {**parameters(world), "ddp": True}
    name = f"get_{prefix(group) or 'world_'}process_group"
    seen = smp_world.run(process_group_ranks, name, ranks=world.size, config=config)
    for rank, (ranks, position) in enumerate(seen):
        assert ranks == members(world, group, rank)
        assert ranks[position] == rank


def is_refused(name: str) -> bool:
    """Return whether the call raises ConfigError."""
    try:
        getattr(smp, name)()
    except ConfigError:
        return True
    return False


@requirement("GROUP-PROCESS-GROUPS-DDP")
@given(data=st.data(), group=st.sampled_from(GROUPS[:3]), ddp=st.sampled_from([False, None]))
@on_ranks
def test_process_groups_need_ddp(
    smp_world: SmpWorld, data: st.DataObject, group: smp.CommGroup, ddp: bool | None
) -> None:
    world = data.draw(worlds(smp_world).filter(lambda each: each.tensor == 1), "world")
    config = parameters(world)
    del config["ddp"]
    if ddp is not None:
        config["ddp"] = ddp
    name = f"get_{prefix(group) or 'world_'}process_group"
    assert all(smp_world.run(is_refused, name, ranks=world.size, config=config))
