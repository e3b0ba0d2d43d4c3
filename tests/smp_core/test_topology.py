"""Topology: every worked table of the specification as literal data, then laws on drawn worlds.

The tables are API 4 and AWS Sharded Data Parallelism. Groups are written as there: ``02 13`` is the
groups (0, 2) and (1, 3). The laws are checked against two oracles that share nothing with the code:
groups as "all ranks that share these coordinates", and axes of a transposed numpy array.
"""

from __future__ import annotations

import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_core.errors import ConfigError, RankError
from smp_core.topology import PLACEMENTS, Coordinates, GroupKind, Topology

WORLD, MP, DP, PP, TP, RDP, SHARDING, REPLICATION = GroupKind
Groups = tuple[tuple[int, ...], ...]


def written(text: str) -> Groups:
    """``"02 13"`` -> ``((0, 2), (1, 3))``: the notation of the specification's tables."""
    return tuple(tuple(int(digit) for digit in word) for word in text.split())


# Worked tables ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "placement", "mp", "dp"),
    [  # API 4.2, first table: 8 ranks, no tensor parallelism
        (2, "cluster", "01 23 45 67", "0246 1357"),
        (2, "spread", "04 15 26 37", "0123 4567"),
        (4, "cluster", "0123 4567", "04 15 26 37"),
        (4, "spread", "0246 1357", "01 23 45 67"),
    ],
)
def test_eight_ranks_without_tensor_parallelism(
    pipeline: int, placement: str, mp: str, dp: str
) -> None:
    topology = Topology(8, pipeline=pipeline, placement=placement)
    assert topology.groups(MP) == written(mp)
    assert topology.groups(DP) == written(dp)
    # API 4.1: "With tp = 1: MP = PP, DP = RDP."
    assert topology.groups(PP) == written(mp)
    assert topology.groups(RDP) == written(dp)


# API 4.2, second table: 8 ranks, pp = tp = rdp = 2
PP_TP_RDP_DP_MP = {
    "DPT": ("02 13 46 57", "01 23 45 67", "04 15 26 37", "0145 2367", "0123 4567"),
    "TPD": ("02 13 46 57", "04 15 26 37", "01 23 45 67", "0145 2367", "0246 1357"),
    "PTD": ("04 15 26 37", "02 13 46 57", "01 23 45 67", "0123 4567", "0246 1357"),
    "DTP": ("01 23 45 67", "02 13 46 57", "04 15 26 37", "0246 1357", "0123 4567"),
    "PDT": ("04 15 26 37", "01 23 45 67", "02 13 46 57", "0123 4567", "0145 2367"),
    "TDP": ("01 23 45 67", "04 15 26 37", "02 13 46 57", "0246 1357", "0145 2367"),
}
PP_TP_RDP_DP_MP["cluster"] = PP_TP_RDP_DP_MP["DPT"]
PP_TP_RDP_DP_MP["spread"] = PP_TP_RDP_DP_MP["TPD"]


@pytest.mark.parametrize("placement", PP_TP_RDP_DP_MP)
def test_eight_ranks_with_all_three_parallelisms(placement: str) -> None:
    topology = Topology(8, pipeline=2, tensor=2, placement=placement)
    found = tuple(topology.groups(kind) for kind in (PP, TP, RDP, DP, MP))
    assert found == tuple(written(text) for text in PP_TP_RDP_DP_MP[placement])
    assert topology.groups(WORLD) == written("01234567")


def test_the_placements_are_two_names_and_six_permutations() -> None:
    assert PLACEMENTS.keys() == PP_TP_RDP_DP_MP.keys()


def test_cluster_is_the_default_placement() -> None:
    assert Topology(8, pipeline=2) == Topology(8, pipeline=2, placement="cluster")


# API 4.2: per rank (rdp, pp, tp) for cluster
CLUSTER_COORDINATES = {
    0: (0, 0, 0),
    1: (0, 0, 1),
    2: (0, 1, 0),
    3: (0, 1, 1),
    4: (1, 0, 0),
    5: (1, 0, 1),
    6: (1, 1, 0),
    7: (1, 1, 1),
}


@pytest.mark.parametrize(("rank", "coordinates"), CLUSTER_COORDINATES.items())
def test_coordinates_of_cluster(rank: int, coordinates: tuple[int, int, int]) -> None:
    topology = Topology(8, pipeline=2, tensor=2)
    assert topology.coordinates(rank) == coordinates
    assert topology.rank_of(*coordinates) == rank


def test_coordinates_carry_their_names() -> None:
    # Three different degrees, so that no two names can be exchanged unnoticed. 17 = 1*12 + 1*4 + 1
    # in the order D, P, T with degrees 2, 3, 4; 23 is the last rank.
    topology = Topology(24, pipeline=3, tensor=4)
    assert topology.coordinates(17) == Coordinates(rdp_rank=1, pp_rank=1, tp_rank=1)
    assert topology.coordinates(23) == Coordinates(rdp_rank=1, pp_rank=2, tp_rank=3)
    assert topology.rank_of(rdp_rank=0, pp_rank=2, tp_rank=1) == 9


def test_the_developer_guides_table_is_dtp_and_not_the_default() -> None:
    """API 4.2, 8.7: "pp fastest: PP pairs 01 23 45 67, TP pairs 02 13 46 57"."""
    guide = Topology(8, pipeline=2, tensor=2, placement="DTP")
    assert guide.groups(PP) == written("01 23 45 67")
    assert guide.groups(TP) == written("02 13 46 57")
    default = Topology(8, pipeline=2, tensor=2)
    assert default.groups(PP) != guide.groups(PP)
    assert default.groups(TP) != guide.groups(TP)


def test_the_guides_table_fits_both_readings_of_mp_rank_and_dp_rank() -> None:
    """API 4.2: under ``DTP`` (a) sorted position and (b) arithmetic agree."""
    topology = Topology(8, pipeline=2, tensor=2, placement="DTP")
    for rank in range(8):
        d, p, t = topology.coordinates(rank)
        assert topology.position(MP, rank) == t * 2 + p
        assert topology.position(DP, rank) == d * 2 + t


@pytest.mark.parametrize(("kind", "placement"), [(MP, "DPT"), (DP, "TPD")])
def test_elsewhere_mp_rank_and_dp_rank_are_the_sorted_position(
    kind: GroupKind, placement: str
) -> None:
    """API 4.2: rank 1 is at 1 by the recommended reading (a), and at 2 by (b)."""
    assert Topology(8, pipeline=2, tensor=2, placement=placement).position(kind, 1) == 1


@pytest.mark.parametrize(
    ("sharding", "shards", "replicas"),
    [  # API 4.3: 8 ranks, tp 1
        (2, "01 23 45 67", "0246 1357"),
        (4, "0123 4567", "04 15 26 37"),
        (8, "01234567", "0 1 2 3 4 5 6 7"),
        # Not in the table: no sharding at all is one shard per rank and one group of replicas.
        (1, "0 1 2 3 4 5 6 7", "01234567"),
    ],
)
def test_sharding_of_eight_ranks(sharding: int, shards: str, replicas: str) -> None:
    topology = Topology(8, sharding=sharding)
    assert topology.groups(SHARDING) == written(shards)
    assert topology.groups(REPLICATION) == written(replicas)


SEED_EXAMPLE_2 = Topology(32, tensor=4, sharding=4)


def test_seed_004_example_2() -> None:
    assert SEED_EXAMPLE_2.groups(TP) == (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
        (16, 17, 18, 19),
        (20, 21, 22, 23),
        (24, 25, 26, 27),
        (28, 29, 30, 31),
    )
    assert SEED_EXAMPLE_2.group(RDP, 0) == (0, 4, 8, 12, 16, 20, 24, 28)
    assert SEED_EXAMPLE_2.group(SHARDING, 0) == (0, 4, 8, 12)
    assert SEED_EXAMPLE_2.group(SHARDING, 16) == (16, 20, 24, 28)
    assert SEED_EXAMPLE_2.group_size(REPLICATION) == 2  # "a replication degree of 2"
    # API 4.3: the other tensor parallel ranks the same, shifted by 1, 2 and 3.
    assert SEED_EXAMPLE_2.groups(SHARDING) == (
        (0, 4, 8, 12),
        (1, 5, 9, 13),
        (2, 6, 10, 14),
        (3, 7, 11, 15),
        (16, 20, 24, 28),
        (17, 21, 25, 29),
        (18, 22, 26, 30),
        (19, 23, 27, 31),
    )
    for offset in range(4):
        for first, second in ((0, 16), (4, 20), (8, 24), (12, 28)):
            pair = (first + offset, second + offset)
            assert SEED_EXAMPLE_2.group(REPLICATION, pair[0]) == pair
            assert SEED_EXAMPLE_2.group(REPLICATION, pair[1]) == pair


@pytest.mark.parametrize("kind", [TP, SHARDING], ids=["figure 1: TPG", "figure 2: SDPG"])
@pytest.mark.parametrize("i", range(4))
def test_seed_004_figures_group_i_replicates_with_group_i_plus_4(kind: GroupKind, i: int) -> None:
    one, other = SEED_EXAMPLE_2.groups(kind)[i], SEED_EXAMPLE_2.groups(kind)[i + 4]
    partners = [SEED_EXAMPLE_2.group(REPLICATION, rank) for rank in one]
    assert partners == list(zip(one, other, strict=True))


# Batches ------------------------------------------------------------------------------------------


def test_seed_004_example_1_without_tensor_parallelism() -> None:
    topology = Topology(1536, sharding=32)
    assert topology.reduced_data == 1536  # "there are 1536 model replicas"
    batch = topology.global_batch(1, prescaled=False)
    assert batch == 1536
    assert batch * 4096 == 6_291_456  # tokens


def test_seed_004_example_1_with_tensor_parallelism() -> None:
    topology = Topology(1536, tensor=8, sharding=32)
    assert len(topology.groups(TP)) == 192  # "192 tensor parallel groups or 192 model replicas"
    assert topology.reduced_data == 192
    batch = topology.global_batch(4, prescaled=True)
    assert batch == 768
    assert batch * 4096 == 3_145_728  # tokens


@pytest.mark.parametrize(
    ("nodes", "global_batch", "mini_batch", "sharding", "tensor"),
    [  # AWS Sharded Data Parallelism (Reference configurations); nodes of 8 GPUs
        (2, 64, 4, 16, 1),
        (8, 768, 12, 32, 1),
        (64, 512, 8, 16, 8),
        (64, 512, 2, 64, 2),
    ],
)
def test_seed_004_reference_configurations(
    nodes: int, global_batch: int, mini_batch: int, sharding: int, tensor: int
) -> None:
    topology = Topology(nodes * 8, tensor=tensor, sharding=sharding)
    assert topology.global_batch(mini_batch, prescaled=True) == global_batch


def test_only_without_prescaling_does_every_tensor_parallel_rank_bring_its_own_batch() -> None:
    """API 4.4: ``dp_size`` batches against ``rdp_size``; 24 ranks, so dp 8 and rdp 2."""
    topology = Topology(24, pipeline=3, tensor=4)
    assert topology.global_batch(5, prescaled=False) == 40
    assert topology.global_batch(5, prescaled=True) == 10


# Laws ---------------------------------------------------------------------------------------------


def layout_of(topology: Topology) -> list[dict[str, int]]:
    """Every rank's coordinates by letter: the loop that API 4.2 prints."""
    letters = {"cluster": "DPT", "spread": "TPD"}.get(topology.placement, topology.placement)
    replica = topology.pipeline * topology.tensor
    size = {"D": topology.size // replica, "P": topology.pipeline, "T": topology.tensor}
    coordinates = []
    for rank in range(topology.size):
        rest, at = rank, {}
        for letter in reversed(letters):
            at[letter] = rest % size[letter]
            rest //= size[letter]
        coordinates.append(at)
    return coordinates


# API 4.1, the column "members share"
MEMBERS_SHARE = {WORLD: "", MP: "D", DP: "P", PP: "TD", TP: "PD", RDP: "PT"}


def group_by_definition(topology: Topology, kind: GroupKind, rank: int) -> list[int]:
    if kind in MEMBERS_SHARE:
        at = layout_of(topology)
        return [
            other
            for other in range(topology.size)
            if all(at[other][letter] == at[rank][letter] for letter in MEMBERS_SHARE[kind])
        ]
    # API 4.3: the RDP group, in order, in consecutive blocks; same offset in every block.
    rdp = group_by_definition(topology, RDP, rank)
    blocks = [rdp[i : i + topology.sharding] for i in range(0, len(rdp), topology.sharding)]
    (block,) = [block for block in blocks if rank in block]
    return block if kind is SHARDING else [other[block.index(rank)] for other in blocks]


@st.composite
def topologies(draw: st.DrawFn, largest_degree: int = 4) -> Topology:
    degree = st.integers(1, largest_degree)
    pipeline, tensor, sharding, replication = draw(st.tuples(degree, degree, degree, degree))
    placements = ["cluster", "spread", *map("".join, permutations("DPT"))]
    return Topology(
        size=pipeline * tensor * sharding * replication,
        pipeline=pipeline,
        tensor=tensor,
        sharding=sharding,
        placement=draw(st.sampled_from(placements)),
    )


# The oracle is quadratic in the size of the world, and the machine may be busy: no deadline.
laws = settings(deadline=None)


@laws
@given(topology=topologies(), kind=st.sampled_from(GroupKind), data=st.data())
def test_a_group_is_what_its_definition_says(
    topology: Topology, kind: GroupKind, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, topology.size - 1), label="rank")
    expected = group_by_definition(topology, kind, rank)
    assert topology.group(kind, rank) == tuple(expected)
    assert topology.position(kind, rank) == expected.index(rank)
    assert topology.group_size(kind) == len(expected)


@laws
@given(topology=topologies(), kind=st.sampled_from(GroupKind))
def test_the_groups_of_a_kind_partition_the_world_in_order(
    topology: Topology, kind: GroupKind
) -> None:
    groups = topology.groups(kind)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.size))
    assert all(list(group) == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert {len(group) for group in groups} == {topology.group_size(kind)}
    for group in groups:
        for position, rank in enumerate(group):
            assert topology.group(kind, rank) == group
            assert topology.position(kind, rank) == position


@laws
@given(topology=topologies())
def test_coordinates_follow_the_loop_and_rank_of_is_their_inverse(topology: Topology) -> None:
    for rank, at in enumerate(layout_of(topology)):
        assert topology.coordinates(rank) == (at["D"], at["P"], at["T"])
        assert topology.rank_of(at["D"], at["P"], at["T"]) == rank


@laws
@given(topology=topologies())
def test_a_coordinate_is_the_position_in_its_group(topology: Topology) -> None:
    """API 1.5: ``pp_rank()`` is both; so are ``tp_rank()`` and ``rdp_rank()``."""
    for rank in range(topology.size):
        positions = tuple(topology.position(kind, rank) for kind in (RDP, PP, TP))
        assert topology.coordinates(rank) == positions
        assert topology.position(WORLD, rank) == rank


@laws
@given(topology=topologies())
def test_identities_of_sizes(topology: Topology) -> None:
    """API 4.1 and 4.3."""
    size = topology.group_size
    assert size(WORLD) == topology.size
    assert (size(PP), size(TP)) == (topology.pipeline, topology.tensor)
    assert size(RDP) == topology.reduced_data
    assert size(MP) * size(RDP) == topology.size
    assert size(PP) * size(DP) == topology.size
    assert size(PP) * size(TP) * size(RDP) == topology.size
    # TP lies inside both MP and DP.
    assert size(DP) == size(RDP) * size(TP)
    assert size(MP) == size(PP) * size(TP)
    assert (size(MP) * size(DP) == topology.size) == (topology.tensor == 1)
    assert size(SHARDING) == topology.sharding
    assert size(SHARDING) * size(REPLICATION) == size(RDP)


@laws
@given(topology=topologies())
def test_kinds_that_coincide_when_a_degree_is_one(topology: Topology) -> None:
    """API 4.1: tp = 1: MP = PP, DP = RDP. pp = 1: MP = TP."""
    groups = topology.groups
    if topology.tensor == 1:
        assert groups(MP) == groups(PP)
        assert groups(DP) == groups(RDP)
    if topology.pipeline == 1:
        assert groups(MP) == groups(TP)
        assert groups(DP) == groups(WORLD)
    if topology.sharding == 1:
        assert groups(REPLICATION) == groups(RDP)
    if topology.sharding == topology.reduced_data:
        assert groups(SHARDING) == groups(RDP)


@laws
@given(topology=topologies())
def test_a_sharding_group_never_mixes_tensor_or_pipeline_ranks(topology: Topology) -> None:
    """ENGINES 1.1: blocks of consecutive *world* ranks would, as soon as tp > 1."""
    for group in topology.groups(SHARDING):
        assert len({topology.coordinates(rank)[1:] for rank in group}) == 1


@laws
@given(topology=topologies())
def test_a_name_and_its_permutation_place_alike(topology: Topology) -> None:
    def placed(placement: str) -> Topology:
        return Topology(
            topology.size, topology.pipeline, topology.tensor, topology.sharding, placement
        )

    for kind in GroupKind:
        assert placed("cluster").groups(kind) == placed("DPT").groups(kind)
        assert placed("spread").groups(kind) == placed("TPD").groups(kind)


@laws
@given(topology=topologies())
def test_a_topology_is_a_value(topology: Topology) -> None:
    fresh = pickle.dumps(topology)
    topology.groups(MP)  # fills what is cached, which must not take part
    assert pickle.dumps(topology) == fresh
    twin = pickle.loads(fresh)
    assert twin == topology
    assert hash(twin) == hash(topology)
    assert eval(repr(topology)) == topology  # prints as code that can be pasted
    with pytest.raises(AttributeError):
        topology.size = 1  # type: ignore[misc]


# A large world ------------------------------------------------------------------------------------

# The axes of one group in an array of world ranks whose axes are (block, offset, pp, tp).
GROUP_AXES = {
    WORLD: (0, 1, 2, 3),
    MP: (2, 3),
    DP: (0, 1, 3),
    PP: (2,),
    TP: (3,),
    RDP: (0, 1),
    SHARDING: (1,),
    REPLICATION: (0,),
}


def groups_by_numpy(topology: Topology, kind: GroupKind) -> Groups:
    letters = {"cluster": "DPT", "spread": "TPD"}.get(topology.placement, topology.placement)
    rdp = topology.size // (topology.pipeline * topology.tensor)
    degree = {"D": rdp, "P": topology.pipeline, "T": topology.tensor}
    ranks = np.arange(topology.size).reshape([degree[letter] for letter in letters])
    ranks = ranks.transpose([letters.index(letter) for letter in "DPT"])
    ranks = ranks.reshape(-1, topology.sharding, topology.pipeline, topology.tensor)
    inside = GROUP_AXES[kind]
    outside = [axis for axis in range(4) if axis not in inside]
    width = int(np.prod([ranks.shape[axis] for axis in inside]))
    table = np.sort(ranks.transpose([*outside, *inside]).reshape(-1, width), axis=1)
    return tuple(sorted(tuple(row) for row in table.tolist()))


@pytest.mark.parametrize("placement", ["cluster", "spread", "DTP", "PDT", "PTD", "TDP"])
@pytest.mark.parametrize(
    ("pipeline", "tensor", "sharding"), [(1, 1, 32), (1, 8, 32), (4, 8, 16), (3, 1, 1)]
)
def test_all_groups_of_1536_ranks(
    pipeline: int, tensor: int, sharding: int, placement: str
) -> None:
    topology = Topology(1536, pipeline, tensor, sharding, placement)
    for kind in GroupKind:
        expected = groups_by_numpy(topology, kind)
        assert topology.groups(kind) == expected
        for group in expected:
            for position, rank in enumerate(group):
                assert topology.group(kind, rank) == group
                assert topology.position(kind, rank) == position


def test_a_large_world_is_laid_out_once_for_all_its_ranks() -> None:
    """Each of 1,536 ranks makes its own topology; unshared, that would be 1,536 of each table."""
    topologies = [Topology(1536, pipeline=4, tensor=8, sharding=16) for _ in range(1536)]
    for kind in GroupKind:
        assert len({id(topology.groups(kind)) for topology in topologies}) == 1
        seen = {id(topology.group(kind, rank)) for rank, topology in enumerate(topologies)}
        assert len(seen) == len(topologies[0].groups(kind))


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"size": 0}, ["world size = 0", "at least 1"]),
        ({"size": True}, ["world size = True", "at least 1"]),
        ({"size": 8, "pipeline": -2}, ["pipeline_parallel_degree = -2", "at least 1"]),
        ({"size": 8, "tensor": 2.0}, ["tensor_parallel_degree = 2.0", "must be an int"]),
        ({"size": 8, "sharding": 0}, ["sharded_data_parallel_degree = 0", "at least 1"]),
        ({"size": 8, "pipeline": 3}, ["world size = 8", "multiple", "3 * 1 = 3"]),
        ({"size": 8, "pipeline": 2, "tensor": 3}, ["world size = 8", "2 * 3 = 6"]),
        ({"size": 4, "pipeline": 2, "tensor": 4}, ["world size = 4", "2 * 4 = 8"]),
        ({"size": 8, "sharding": 3}, ["sharded_data_parallel_degree = 3", "divide", "8"]),
        ({"size": 8, "sharding": 16}, ["sharded_data_parallel_degree = 16", "divide", "8"]),
        ({"size": 8, "placement": "dpt"}, ["placement_strategy = 'dpt'", "cluster, spread, DPT"]),
        ({"size": 8, "placement": "DP"}, ["placement_strategy = 'DP'", "cluster, spread, DPT"]),
        ({"size": 8, "placement": "DDT"}, ["placement_strategy = 'DDT'", "TPD"]),
        ({"size": 8, "placement": ["D", "P", "T"]}, ["placement_strategy = ['D', 'P', 'T']"]),
    ],
    ids=str,
)
def test_bad_degrees_are_refused_with_key_value_and_rule(
    arguments: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        Topology(**arguments)
    for words in said:
        assert words in str(refused.value)


def test_sharding_must_divide_the_reduced_size_and_not_the_data_parallel_size() -> None:
    """API 8.3: 32 ranks with tp 4 have dp 32 and rdp 8; 16 divides only the first."""
    with pytest.raises(ConfigError, match="must divide the reduced data parallel size, 8 "):
        Topology(32, tensor=4, sharding=16)
    # API 8.1: equality is allowed.
    assert Topology(32, tensor=4, sharding=8).group_size(REPLICATION) == 1


@pytest.mark.parametrize("rank", [-1, 8, 1536])
def test_a_rank_outside_the_world_is_refused_with_the_valid_range(rank: int) -> None:
    topology = Topology(8, pipeline=2)
    message = f"rank {rank} is out of range.*from 0 to 7"
    with pytest.raises(RankError, match=message):
        topology.coordinates(rank)
    for kind in GroupKind:
        with pytest.raises(RankError, match=message):
            topology.group(kind, rank)
        with pytest.raises(RankError, match=message):
            topology.position(kind, rank)


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        ((2, 0, 0), "rdp_rank 2 is out of range.*from 0 to 1"),
        ((0, 3, 0), "pp_rank 3 is out of range.*from 0 to 2"),
        ((0, 0, 4), "tp_rank 4 is out of range.*from 0 to 3"),
        ((0, -1, 0), "pp_rank -1 is out of range.*from 0 to 2"),
    ],
)
def test_coordinates_outside_the_world_are_refused(
    coordinates: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(RankError, match=message):
        Topology(24, pipeline=3, tensor=4).rank_of(*coordinates)
