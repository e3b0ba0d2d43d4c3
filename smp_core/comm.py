"""Object communication between ranks, and the getters of ranks, sizes and groups (API 1.5,
1.6; AWS Common API).

All calls are synchronous, and take any picklable object. Each receiver gets a copy of its own.
"""

from __future__ import annotations

import enum
import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

from smp_core.errors import ArgumentTypeError, ConfigError, RankError
from smp_core.runtime import Runtime, current
from smp_core.topology import GroupKind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CommGroup(enum.Enum):
    """The group of the calling rank that a call is about.

    All six kinds are members, though AWS Common API lists three (API 8.8).
    """

    WORLD = GroupKind.WORLD
    MP_GROUP = GroupKind.MP
    DP_GROUP = GroupKind.DP
    PP_GROUP = GroupKind.PP
    TP_GROUP = GroupKind.TP
    RDP_GROUP = GroupKind.RDP


class RankType(enum.Enum):
    """The group of the calling rank in which a rank number is a position (API
    1.5, 8.8).
    """

    WORLD_RANK = GroupKind.WORLD
    MP_RANK = GroupKind.MP
    DP_RANK = GroupKind.DP
    PP_RANK = GroupKind.PP
    TP_RANK = GroupKind.TP
    RDP_RANK = GroupKind.RDP


def broadcast(obj: object, group: CommGroup) -> None:
    """Send ``obj`` to every other rank of ``group``. Called by the root alone; the receivers call
    ``recv_from``.

    Returns after every receiver's matching ``recv_from``. Any rank may be the root. In a group of
    one it returns at once. Raises PayloadError, before anything is sent, if ``obj`` cannot be
    pickled. (API 1.6)
    """
    runtime = current("smp.broadcast")
    runtime.fabric.objects.broadcast(obj, runtime.group(_kind("smp.broadcast", group)))


def send(obj: object, dest_rank: int, rank_type: RankType) -> None:
    """Send ``obj`` to one rank; returns after its matching ``recv_from``.

    ``dest_rank`` is read in the space of ``rank_type`` within the caller's own group. Raises
    RankError if it is out of range or the caller itself, PayloadError if ``obj`` cannot be pickled.
    (API 1.6)
    """
    runtime = current("smp.send")
    runtime.fabric.objects.send(obj, _peer(runtime, "smp.send", "dest_rank", dest_rank, rank_type))


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive the next object that ``src_rank`` sends or broadcasts to this rank, in the order of
    its calls.

    ``src_rank`` is read in the space of ``rank_type`` within the caller's own group. Raises
    RankError if it is out of range or the caller itself. (API 1.6)
    """
    runtime = current("smp.recv_from")
    return runtime.fabric.objects.recv_from(
        _peer(runtime, "smp.recv_from", "src_rank", src_rank, rank_type)
    )


def allgather(obj: object, group: CommGroup) -> list[Any]:
    """Gather one object from each rank of ``group``; element i is the object of the i-th rank, on
    every member.

    Returns after all members have joined. Raises PayloadError if ``obj`` cannot be pickled.
    (API 1.6)
    """
    runtime = current("smp.allgather")
    return runtime.fabric.objects.allgather(obj, runtime.group(_kind("smp.allgather", group)))


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until every rank of ``group`` has called.

    Ranks of other groups are not waited for. (API 1.6)
    """
    _barrier("smp.barrier", group)


def mp_barrier() -> None:
    """``barrier`` on the MP group. (API 1.6)"""
    _barrier("smp.mp_barrier", CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """``barrier`` on the DP group. (API 1.6)"""
    _barrier("smp.dp_barrier", CommGroup.DP_GROUP)


def _barrier(call: str, group: CommGroup) -> None:
    runtime = current(call)
    runtime.fabric.objects.barrier(runtime.group(_kind(call, group)))


def _kind(call: str, group: object) -> GroupKind:
    if not isinstance(group, CommGroup):
        names = ", ".join(f"smp.CommGroup.{each.name}" for each in CommGroup)
        raise ArgumentTypeError(f"{call}: group must be one of {names}, not {group!r}")
    kind: GroupKind = group.value
    return kind


def _peer(runtime: Runtime, call: str, name: str, rank: object, rank_type: object) -> int:
    """The world rank of a partner that is not the caller."""
    if not isinstance(rank_type, RankType):
        names = ", ".join(f"smp.RankType.{each.name}" for each in RankType)
        raise ArgumentTypeError(f"{call}: rank_type must be one of {names}, not {rank_type!r}")
    if isinstance(rank, bool) or not isinstance(rank, SupportsIndex):
        raise ArgumentTypeError(f"{call}: {name} must be an int, not {rank!r}")
    position, kind = operator.index(rank), rank_type.value
    ranks = runtime.group(kind).ranks
    here = f"on world rank {runtime.rank}"
    if not 0 <= position < len(ranks):
        raise RankError(
            f"{call}: {name}={position} is out of range {here}: {rank_type.name} runs from 0 to {len(ranks) - 1}"
        )
    if ranks[position] == runtime.rank:
        raise RankError(
            f"{call}: {name}={position} ({rank_type.name}) is the caller itself {here}; "
            "a rank cannot send to or receive from itself"
        )
    return ranks[position]


# The calling rank's numbers, and the sizes of its groups. No function takes an argument (API 1.5).


def rank() -> int:
    """The world rank."""
    return current("smp.rank").rank


def size() -> int:
    """The number of ranks of the world."""
    return current("smp.size").size


def local_rank() -> int:
    """The rank among the ranks of this node: the launcher's, or the ``ranks_per_node`` ranks that count as one."""
    runtime = current("smp.local_rank")
    per_node = runtime.config.ranks_per_node
    return runtime.fabric.local_rank if per_node is None else runtime.rank % per_node


def local_size() -> int:
    """The number of ranks of this node; the last of nodes of ``ranks_per_node`` ranks may have fewer."""
    runtime = current("smp.local_size")
    per_node = runtime.config.ranks_per_node
    if per_node is None:
        return runtime.fabric.local_size
    return min(per_node, runtime.size - runtime.rank // per_node * per_node)


def mp_rank() -> int:
    """The position in the MP group."""
    return current("smp.mp_rank").position(GroupKind.MP)


def mp_size() -> int:
    """The size of the MP group: pipeline x tensor degree."""
    return current("smp.mp_size").topology.group_size(GroupKind.MP)


def dp_rank() -> int:
    """The position in the DP group."""
    return current("smp.dp_rank").position(GroupKind.DP)


def dp_size() -> int:
    """The size of the DP group: reduced-data x tensor degree."""
    return current("smp.dp_size").topology.group_size(GroupKind.DP)


def pp_rank() -> int:
    """The position in the PP group."""
    return current("smp.pp_rank").position(GroupKind.PP)


def pp_size() -> int:
    """The pipeline degree."""
    return current("smp.pp_size").topology.group_size(GroupKind.PP)


def tp_rank() -> int:
    """The position in the TP group."""
    return current("smp.tp_rank").position(GroupKind.TP)


def tp_size() -> int:
    """The tensor degree."""
    return current("smp.tp_size").topology.group_size(GroupKind.TP)


def rdp_rank() -> int:
    """The position in the RDP group."""
    return current("smp.rdp_rank").position(GroupKind.RDP)


def rdp_size() -> int:
    """The reduced-data degree."""
    return current("smp.rdp_size").topology.group_size(GroupKind.RDP)


def get_mp_group() -> list[int]:
    """The world ranks of the MP group, in order."""
    return list(current("smp.get_mp_group").group(GroupKind.MP).ranks)


def get_dp_group() -> list[int]:
    """The world ranks of the DP group, in order."""
    return list(current("smp.get_dp_group").group(GroupKind.DP).ranks)


def get_pp_group() -> list[int]:
    """The world ranks of the PP group, in order. Not seen in scripts; here for symmetry."""
    return list(current("smp.get_pp_group").group(GroupKind.PP).ranks)


def get_tp_group() -> list[int]:
    """The world ranks of the TP group, in order."""
    return list(current("smp.get_tp_group").group(GroupKind.TP).ranks)


def get_rdp_group() -> list[int]:
    """The world ranks of the RDP group, in order. Not seen in scripts; here for symmetry."""
    return list(current("smp.get_rdp_group").group(GroupKind.RDP).ranks)


def get_world_process_group() -> ProcessGroup:
    """The ``torch.distributed`` process group of the world. Needs ``ddp: True``."""
    return _process_group("smp.get_world_process_group", GroupKind.WORLD)


def get_mp_process_group() -> ProcessGroup:
    """The ``torch.distributed`` process group of the MP group. Needs ``ddp: True``."""
    return _process_group("smp.get_mp_process_group", GroupKind.MP)


def get_dp_process_group() -> ProcessGroup:
    """The ``torch.distributed`` process group of the DP group. Needs ``ddp: True``."""
    return _process_group("smp.get_dp_process_group", GroupKind.DP)


def get_pp_process_group() -> ProcessGroup:
    """The ``torch.distributed`` process group of the PP group. Needs ``ddp: True``."""
    return _process_group("smp.get_pp_process_group", GroupKind.PP)


def get_tp_process_group() -> ProcessGroup:
    """The ``torch.distributed`` process group of the TP group. Needs ``ddp: True``."""
    return _process_group("smp.get_tp_process_group", GroupKind.TP)


def get_rdp_process_group() -> ProcessGroup:
    """The ``torch.distributed`` process group of the RDP group. Needs ``ddp: True``."""
    return _process_group("smp.get_rdp_process_group", GroupKind.RDP)


def _process_group(call: str, kind: GroupKind) -> ProcessGroup:
    runtime = current(call)
    if not runtime.config.ddp:
        raise ConfigError(
            f"{call}: ddp=False: process groups need the configuration ddp=True. See docs/spec/api.md#1.5"
        )
    return runtime.fabric.process_group(runtime.group(kind))
