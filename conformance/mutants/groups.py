"""Bugs of ranks, sizes, groups and process groups."""

from __future__ import annotations

from typing import Any

import smp_core.torch as smp
from conformance.mutants.blocks import wrap
from conformance.mutants.protocol import Bugs, Patch
from smp_core import comm, runtime, topology

BUGS = Bugs("groups, roots and rank mapping")


@BUGS.enter("GROUP-NAMES")
def wrong_short_name(patch: Patch) -> None:
    """smp.RDP_GROUP is DP_GROUP"""
    patch.setattr(smp, "RDP_GROUP", smp.CommGroup.DP_GROUP)


@BUGS.enter("GROUP-NAMES")
def three_rank_types(patch: Patch) -> None:
    """RankType has the three members of AWS Common API only (API 8.8)"""
    documented = [smp.RankType.WORLD_RANK, smp.RankType.MP_RANK, smp.RankType.DP_RANK]
    patch.setattr(smp, "RankType", documented)


@BUGS.enter("GROUP-WORLD")
def ranks_backwards(patch: Patch) -> None:
    """rank counts from the end"""
    wrap(patch, "rank", lambda rank: smp.size() - 1 - rank())


@BUGS.enter("GROUP-WORLD")
def size_is_last_rank(patch: Patch) -> None:
    """size is the largest rank"""
    wrap(patch, "size", lambda size: size() - 1)


@BUGS.enter("GROUP-LOCAL")
def local_rank_from_1(patch: Patch) -> None:
    """local_rank counts from 1"""
    wrap(patch, "local_rank", lambda local_rank: local_rank() + 1)


@BUGS.enter("GROUP-LOCAL")
def local_rank_0(patch: Patch) -> None:
    """local_rank is 0 everywhere"""
    patch.setattr(smp, "local_rank", lambda: 0)


@BUGS.enter("GROUP-SIZES")
def mp_without_tp(patch: Patch) -> None:
    """mp_size leaves out tensor parallelism"""
    patch.setattr(smp, "mp_size", smp.pp_size)


@BUGS.enter("GROUP-SIZES", origin="https://github.com/verl-project/verl/issues/5983")
def dp_without_tp(patch: Patch) -> None:
    """dp_size leaves out tensor parallelism, so that mp x dp = size"""
    patch.setattr(smp, "dp_size", smp.rdp_size)


@BUGS.enter("GROUP-PLACEMENT")
@BUGS.enter("GROUP-TABLES")
def left_varies_fastest(patch: Patch) -> None:
    """the left-most letter varies fastest"""
    turned = {name: letters[::-1] for name, letters in topology.PLACEMENTS.items()}
    patch.setattr(topology, "PLACEMENTS", turned)


@BUGS.enter("GROUP-PLACEMENT")
@BUGS.enter("GROUP-TABLES")
def guide_is_the_default(patch: Patch) -> None:
    """cluster is DTP, as the guide's example suggests (API 8.7)"""
    patch.setattr(topology, "PLACEMENTS", {**topology.PLACEMENTS, "cluster": "DTP"})


@BUGS.enter("GROUP-MEMBERS")
def dp_list_is_rdp(patch: Patch) -> None:
    """get_dp_group leaves out tensor parallelism"""
    patch.setattr(smp, "get_dp_group", smp.get_rdp_group)


@BUGS.enter("GROUP-MEMBERS")
def mp_shares_the_wrong_coordinate(patch: Patch) -> None:
    """the members of an MP group share pp_rank"""
    shared = {**topology._SHARED, topology.GroupKind.MP: topology._SHARED[topology.GroupKind.DP]}
    patch.setattr(topology, "_SHARED", shared)


@BUGS.enter("GROUP-POSITION")
def dp_rank_by_formula(patch: Patch) -> None:
    """dp_rank = rdp_rank * tp_size + tp_rank (API 4.2, reading b)"""
    patch.setattr(smp, "dp_rank", lambda: smp.rdp_rank() * smp.tp_size() + smp.tp_rank())


@BUGS.enter("GROUP-POSITION")
def own_rank_first(patch: Patch) -> None:
    """get_mp_group lists the caller first"""
    wrap(patch, "get_mp_group", lambda get: sorted(get(), key=lambda rank: rank != smp.rank()))


@BUGS.enter("GROUP-PROCESS-GROUPS")
def swapped_process_groups(patch: Patch) -> None:
    """get_tp_process_group gives the PP group"""
    patch.setattr(smp, "get_tp_process_group", smp.get_pp_process_group)


@BUGS.enter("GROUP-PROCESS-GROUPS", origin="https://github.com/NVIDIA/Megatron-LM/issues/779")
def process_group_of_the_world(patch: Patch) -> None:
    """get_rdp_process_group gives the world"""
    patch.setattr(smp, "get_rdp_process_group", smp.get_world_process_group)


@BUGS.enter("GROUP-PROCESS-GROUPS-DDP")
def process_groups_without_ddp(patch: Patch) -> None:
    """process groups are there without ddp"""

    def give(call: str, kind: topology.GroupKind) -> Any:
        here = runtime.current(call)
        return here.fabric.process_group(here.group(kind))

    patch.setattr(comm, "_process_group", give)
