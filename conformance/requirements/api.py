"""Requirements of the API: lifecycle, configuration, groups, objects.

Each requirement's source names the section that makes the promise. Where the documents leave a choice
open, the source says INF and the reason of the decision (docs/spec/index.md).
"""

from __future__ import annotations

from conformance.requirements.registry import Capability, Level, Requirement

_RANKS = frozenset({Capability.RANKS})
_OBJECTS = frozenset({Capability.OBJECTS})
_PROCESS_GROUPS = frozenset({Capability.PROCESS_GROUPS})

_INF_INIT = "INF: the sources say that init comes first, not what happens otherwise"
_INF_ERROR = "INF: the sources name no error; accepted in silence it would go to a wrong rank"

LIFECYCLE = (
    Requirement(
        "LIFE-INITIALIZED",
        "is_initialized is False until init has run on the rank, and True from then on.",
        "API 1.2 (smp.is_initialized)",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "LIFE-INIT-BARE",
        "init needs no argument: one partition, one tensor rank, placement cluster.",
        "AWS Common API (smp.init), API 1.2, 3.1, 8.4",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "LIFE-INIT-PARAMETERS",
        "init takes the parameters as a dict, and the ranks are laid out accordingly.",
        "API 1.2, 8.13",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "LIFE-FIRST-CALL",
        "Every call but init and is_initialized is refused on a rank that has not called init.",
        f"AWS Common API (smp.init), API 1.2; {_INF_INIT}",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "LIFE-INIT-AGAIN",
        "A second call of init with the same parameters, or with none, changes nothing.",
        f"API 1.2; {_INF_INIT}",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "LIFE-INIT-OTHER",
        "A second call of init with other parameters is refused, and the first ones stay in force.",
        f"API 1.2; {_INF_INIT}",
        Level.L0,
        _RANKS,
    ),
)

_REFUSED = (
    "is refused before any rank starts, and by init on every rank, with the names of the keys."
)

CONFIGURATION = (
    Requirement(
        "CONF-VALID",
        "A configuration within the documented types, values and rules is accepted.",
        "API 3.1, 3.3, 3.5, 8.1, 8.3, 8.4, 8.6",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-PARTITIONS",
        "partitions and pipeline_parallel_degree are two names of one key; unequal values are refused.",
        "API 3.1, 8.5",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-UNKNOWN-KEY",
        f"An unknown key {_REFUSED}",
        "API 9.4; INF: a typo must not train with a default",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-VALUE",
        f"A value of the wrong type, or outside the documented range, {_REFUSED}",
        "API 3.1, 3.3, 3.4",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-WORLD-SIZE",
        f"A world that is not pipeline x tensor x reduced-data ranks {_REFUSED}",
        "API 3.5, 8.20",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-TENSOR-DDP",
        f"tensor_parallel_degree above 1 without ddp {_REFUSED}",
        "API 3.3, 3.5",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-BF16-SHARDED",
        f"bf16 without sharded data parallelism {_REFUSED}",
        "AWS Sharded Data Parallelism (BF16 training), API 3.5",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-FP16-BF16",
        f"fp16 together with bf16 {_REFUSED}",
        "API 3.5, 8.11",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-SHARDED-PIPELINE",
        f"Sharded data parallelism together with a pipeline {_REFUSED}",
        "AWS Sharded Data Parallelism (Tips and considerations), API 3.5",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-SHARDED-OPTIMIZER",
        f"Sharded data parallelism together with shard_optimizer_state {_REFUSED}",
        "AWS Sharded Data Parallelism (Tips and considerations), API 3.5",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-SHARDED-PRESCALED",
        f"Sharded data parallelism with tensor parallelism and without prescaled_batch {_REFUSED}",
        "AWS Sharded Data Parallelism (Sharded data parallelism with tensor parallelism), API 3.5",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-SHARDED-DIVIDES",
        f"A sharded degree that does not divide the reduced data parallel size {_REFUSED}",
        "AWS Sharded Data Parallelism (Example 2), API 3.5, 8.3",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-DEFAULT-PARTITION",
        f"auto_partition=False without default_partition, or with one that does not exist, {_REFUSED}",
        "API 3.1, 3.4, 3.5",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "CONF-AGREED",
        "Configurations that differ between ranks are refused by init, on every rank in the same words, "
        "with the keys, the values and the ranks.",
        "API 1.2; INF: the sources speak of one configuration, and ranks with different ones compute wrong "
        "gradients or wait for ever",
        Level.L0,
        _OBJECTS,
    ),
)

GROUPS = (
    Requirement(
        "GROUP-NAMES",
        "CommGroup and RankType have all six members, and smp.WORLD, smp.MP_GROUP, ... are the members "
        "of CommGroup.",
        "AWS Common API (CommGroup, RankType), API 1.5, 8.8; smp.RDP_GROUP is INF, for symmetry",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-WORLD",
        "size is the number of ranks, and rank numbers them from 0 to size - 1.",
        "AWS Common API (MPI Basics)",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-LOCAL",
        "On every node local_rank runs from 0 to local_size - 1.",
        "AWS Common API (MPI Basics)",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-SIZES",
        "pp_size and tp_size are the configured degrees; pp x tp x rdp = size, mp = pp x tp, "
        "dp = rdp x tp.",
        "API 4.1",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-PLACEMENT",
        "The right-most letter of placement_strategy varies fastest with the rank; cluster is DPT, "
        "spread is TPD.",
        "API 4.2",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-TABLES",
        "Eight ranks form the groups of the worked tables, for cluster, spread and all six permutations.",
        "API 4.2 (tables)",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-MEMBERS",
        "get_mp_group, get_dp_group and get_tp_group list the world ranks of the defined group, and "
        "return the same list on each of its ranks.",
        "AWS Common API (MPI Basics), API 1.5, 4.1",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-POSITION",
        "The world ranks of a group ascend, and mp_rank, dp_rank, pp_rank, tp_rank and rdp_rank are "
        "positions in this order.",
        "AWS Common API (MPI Basics); INF, API 4.2: the order where tp > 1, as after an MPI "
        "communicator split",
        Level.L0,
        _RANKS,
    ),
    Requirement(
        "GROUP-PROCESS-GROUPS",
        "get_world_process_group and its five siblings return torch process groups with the ranks of the "
        "group, in the group's order.",
        "AWS Common API (MPI Basics), API 1.5; the order is INF, as in GROUP-POSITION",
        Level.L0,
        _PROCESS_GROUPS | {Capability.GROUPS},
    ),
    Requirement(
        "GROUP-PROCESS-GROUPS-DDP",
        "Without ddp, requests for the process groups of world, MP and DP are refused.",
        "API 1.5; INF: that the refusal is an error",
        Level.L0,
        _PROCESS_GROUPS,
    ),
)

SEND_RECV = (
    Requirement(
        "COMM-SEND-VALUE",
        "recv_from returns an object equal to the sent one: in types, in structure, and in the dtype, shape "
        "and bits of tensors.",
        "AWS Common API (smp.send, smp.recv_from), API 1.6",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-SEND-ORDER",
        "Objects from one rank to another arrive in the order of the send calls.",
        "API 1.6: calls are synchronous, so a later send begins after the earlier was received",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-RECV-SOURCE",
        "recv_from receives from the named rank, even if other ranks have sent before.",
        "AWS Common API (smp.recv_from)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-RANK-TYPE",
        "dest_rank and src_rank are positions in the caller's own group of the kind that rank_type names, "
        "for all six rank types.",
        "AWS Common API (RankType, smp.send, smp.recv_from), API 1.5, 8.8",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-RANK-TYPE-MIXED",
        "Sends to one world rank keep their order and match its calls of recv_from, even if the two sides use "
        "different rank types.",
        "AWS Common API (RankType: how a rank is read); INF: and nothing more",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-SEND-COPY",
        "The receiver gets a copy of the object as it was at the call of send; later changes on either side "
        "do not reach the other.",
        "AWS Common API (Communication API: a picklable object is sent), API 1.6",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-SEND-SYNC",
        "send returns only after the destination has called the matching recv_from.",
        "AWS Common API (smp.send)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-KEYWORDS",
        "Arguments are accepted by position and by the documented keywords.",
        "AWS Common API, API 1.6 (argument style)",
        Level.L1,
        _OBJECTS,
    ),
)

BROADCAST = (
    Requirement(
        "COMM-BROADCAST-VALUE",
        "Every other rank of the group receives an object equal to the root's by recv_from, for every "
        "kind of group and every root.",
        "AWS Common API (smp.broadcast), API 1.6",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BROADCAST-GROUP",
        "A broadcast reaches the ranks of the root's group and no other rank.",
        "AWS Common API (smp.broadcast)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BROADCAST-ORDER",
        "Broadcasts and sends of one rank arrive in the order of its calls.",
        "API 1.6 (consequence for testing; recv_from matches either)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BROADCAST-COPY",
        "Each receiver of a broadcast holds an object of its own, for small and for large objects.",
        "AWS Common API (Communication API: a picklable object is sent), API 1.6",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BROADCAST-SYNC",
        "broadcast returns only after every receiver has called the matching recv_from.",
        "AWS Common API (smp.broadcast)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BROADCAST-ALONE",
        "In a group of one rank broadcast has no receiver and returns.",
        "API 1.6; INF: there is nobody to wait for",
        Level.L1,
        _OBJECTS,
    ),
)

ALLGATHER = (
    Requirement(
        "COMM-ALLGATHER-ORDER",
        "Element i is the object of the i-th rank of the group, on every member, for every kind of "
        "group.",
        "AWS Common API (smp.allgather), API 1.6",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ALLGATHER-VALUE",
        "Objects of any types and sizes arrive equal, also None, empty and large ones.",
        "AWS Common API (smp.allgather: any picklable objects)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ALLGATHER-REPEATED",
        "The n-th allgather of one member matches the n-th of every other, after any earlier calls.",
        "AWS Common API (smp.allgather: matching calls), API 1.6",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ALLGATHER-GROUP",
        "Groups of one kind do not wait for each other, and need not make the same number of calls.",
        "AWS Common API (smp.allgather: the ranks in the specified group)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ALLGATHER-KINDS",
        "Calls on groups of different kinds do not mix, even if the groups have the same members.",
        "AWS Common API (CommGroup), API 1.6, 4.1",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ALLGATHER-COPY",
        "Every element of the result is a copy, also the caller's own object.",
        "AWS Common API (Communication API: a picklable object is gathered); INF for the own element",
        Level.L1,
        _OBJECTS,
    ),
)

BARRIERS = (
    Requirement(
        "COMM-BARRIER-ALL",
        "No rank leaves a barrier before every rank of the group has come to it.",
        "AWS Common API (smp.barrier)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BARRIER-GROUP",
        "A barrier waits for the ranks of the caller's own group and for no other rank.",
        "AWS Common API (smp.barrier: MP groups)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BARRIER-DEFAULT",
        "barrier() does the same as barrier(smp.WORLD).",
        "AWS Common API (smp.barrier)",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-BARRIER-MP-DP",
        "mp_barrier() does the same as barrier(smp.MP_GROUP), and dp_barrier() as barrier(smp.DP_GROUP).",
        "AWS Common API (smp.dp_barrier, smp.mp_barrier)",
        Level.L1,
        _OBJECTS,
    ),
)

ERRORS = (
    Requirement(
        "COMM-ERROR-RANK",
        "A rank below 0, or not below the size of the group, is an error in the calling rank, which "
        "can go on.",
        f"API 1.6; {_INF_ERROR}",
        Level.L2,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ERROR-SELF",
        "A send to oneself, or a recv_from oneself, is an error, because neither could ever return.",
        "AWS Common API (Communication API: both calls are synchronous); INF: the sources name no error",
        Level.L2,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ERROR-TYPE",
        "A group that is no CommGroup, a rank type that is no RankType, and a rank that is no int or is a "
        "bool, are errors in the calling rank, which can go on.",
        f"AWS Common API (Communication API: the types of the arguments), API 1.6; {_INF_ERROR}",
        Level.L2,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ERROR-PICKLE",
        "An object that cannot be pickled is an error in the sending rank; nothing is sent, and the rank's "
        "next call works as if the failed call had not been made.",
        "AWS Common API (Communication API: any picklable object); INF: the sources name no error",
        Level.L2,
        _OBJECTS,
    ),
    Requirement(
        "COMM-ERROR-UNPICKLE",
        "An object whose pickle cannot be read is an error in each rank that receives it from another rank; "
        "the message is consumed, and the rank's next call works.",
        "AWS Common API (Communication API: any picklable object); INF: the sources name no error",
        Level.L2,
        _OBJECTS,
    ),
)

API = (
    *LIFECYCLE,
    *CONFIGURATION,
    *GROUPS,
    *SEND_RECV,
    *BROADCAST,
    *ALLGATHER,
    *BARRIERS,
    *ERRORS,
)
