"""Requirements of messages, asynchronous calls, process groups, lists of objects, and kinds of objects.

Sources cite the documentation of torch 2.13.
"""

from __future__ import annotations

from conformance.requirements.registry import Capability, Level, Requirement

_OBJECTS = frozenset({Capability.OBJECTS})
_PROCESS_GROUPS = frozenset({Capability.PROCESS_GROUPS})
_MESSAGES = _PROCESS_GROUPS | {Capability.POINT_TO_POINT}
#: Properties destroy their groups after a barrier of the object transport, because a barrier of a process
#: group could hide a fault of the calls under test.
_GROUPS = _PROCESS_GROUPS | {Capability.GROUPS, Capability.OBJECTS}
#: Properties check by an all_gather of objects that ranks can go on.
_GO_ON = _PROCESS_GROUPS | {Capability.ALL_GATHER}

_WRONG_RANK = (
    "INF: torch names no error; accepted in silence it would go to a wrong rank, or nowhere"
)
_REFUSED_FIRST = "INF: torch promises nothing about the group afterwards; a call is judged before it meets the others"
_FINISHED = (
    "torch.distributed docs: Point-to-point communication (wait blocks until the operation is "
    "finished)"
)
_PROGRESS = frozenset({Capability.ASYNC_PROGRESS})
_NO_CALLS = "INF: torch promises no progress between calls, so a backend may leave it unclaimed"
_REQUEST = "torch.distributed docs: Synchronous and asynchronous collective operations (wait)"

POINT_TO_POINT = (
    Requirement(
        "P2P-VALUE",
        "A receive fills its tensor with the sent elements, bit for bit, for every shape and claimed dtype; "
        "the sent tensor does not change.",
        "torch.distributed docs: send (tensor), recv (Tensor to fill with received data)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-ZERO-SIZE",
        "A message without elements is sent and received like any other, and never matches another "
        "message's receive.",
        "torch.distributed docs: send, recv: nothing says that a tensor must have elements",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-OFFSET",
        "Only the part of a storage that is in the tensor is sent, and only this part is written.",
        "torch.distributed docs: recv (Tensor to fill with received data)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-NON-CONTIGUOUS",
        "A view that is not contiguous is sent and received by its elements, in row-major order.",
        "INF: send and recv take a Tensor, and name no layout; Gloo refuses these",
        Level.L1,
        _MESSAGES | {Capability.MESSAGE_LAYOUTS},
    ),
    Requirement(
        "P2P-LARGE",
        "Messages of thousands, of tens of thousands and of a million elements arrive whole, also in both "
        "directions at once.",
        "torch.distributed docs: send, recv: nothing limits the size of a tensor",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-ORDER",
        "Messages of one sender, receiver and tag are received in the order of sending, for any number of "
        "messages in flight and any sizes.",
        "torch.distributed docs: batch_isend_irecv (operations between the same pair of ranks "
        "in the same direction)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-TAG",
        "A receive gets the message of its tag, also if messages of other tags come before.",
        "torch.distributed docs: send, recv (tag: to match send with remote recv); MPI standard: "
        "MPI_TAG_UB is at least 32767",
        Level.L1,
        _MESSAGES | {Capability.TAGS},
    ),
    Requirement(
        "P2P-PEER",
        "A receive gets the message of the named rank, also if other ranks have sent before.",
        "torch.distributed docs: recv (src)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-BOTH-WAYS",
        "Two ranks that send to each other with one tag each receive the other's message.",
        "torch.distributed docs: isend, irecv: the direction is in the call",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-REUSE",
        "After a send has returned, or was waited for, its tensor may be changed: the receiver gets the "
        "elements from before.",
        "torch.distributed docs: send (synchronously), isend (modifying before the request "
        "completes is undefined)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-SEPARATE",
        "A received tensor is the receiver's own: a later message does not change it.",
        "torch.distributed docs: recv (Tensor to fill with received data)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-WAIT-OWN",
        "The wait for one operation does not wait for operations issued before or after it.",
        _FINISHED,
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-COMPLETED",
        "is_completed is True for a send or receive that was waited for.",
        "torch.distributed docs: Point-to-point communication (is_completed is guaranteed)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-SELF",
        "A rank may send to itself by isend and irecv, whichever is called first.",
        "torch.distributed docs: isend, irecv (allows src == dst rank, i.e. send to self)",
        Level.L1,
        _MESSAGES | {Capability.MESSAGES_TO_ONESELF},
    ),
    Requirement(
        "P2P-SOURCE",
        "recv returns the world rank of the sender.",
        "torch.distributed docs: recv (Returns)",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "P2P-GROUP",
        "On a group, dst and src are world ranks.",
        "torch.distributed docs: send (dst), recv (src): regardless of the group argument",
        Level.L1,
        _MESSAGES | _GROUPS,
    ),
    Requirement(
        "P2P-GROUP-RANK",
        "group_dst and group_src are positions in the group.",
        "torch.distributed docs: send (group_dst), recv (group_src)",
        Level.L1,
        _MESSAGES | _GROUPS,
    ),
    Requirement(
        "P2P-GROUP-ASYNC",
        "On a group of any ranks in any order, messages match by sender, receiver, tag and order as in the "
        "world, for any number of messages in flight.",
        "torch.distributed docs: isend, irecv (group, tag)",
        Level.L1,
        _MESSAGES | _GROUPS,
    ),
    Requirement(
        "P2P-GROUP-APART",
        "Messages of different groups do not mix, even between the same ranks and with one tag.",
        "torch.distributed docs: send (group: the process group to work on)",
        Level.L1,
        _MESSAGES | _GROUPS,
    ),
    Requirement(
        "P2P-ANY-SOURCE",
        "Receives without a source take each message once, of every claimed dtype; recv returns the rank of "
        "the sender.",
        "torch.distributed docs: recv (src: will receive from any process if unspecified; Returns)",
        Level.L1,
        _MESSAGES | {Capability.ANY_SOURCE},
    ),
    Requirement(
        "P2P-ANY-SOURCE-GROUP",
        "A receive without a source on a group takes messages of this group, and returns world ranks.",
        "torch.distributed docs: recv (group; Returns)",
        Level.L1,
        _MESSAGES | _GROUPS | {Capability.ANY_SOURCE},
    ),
    Requirement(
        "P2P-ANY-SOURCE-ORDER",
        "Receives without a source take the messages of one sender in the order of sending.",
        "torch.distributed docs: recv; INF: as where the source is named",
        Level.L1,
        _MESSAGES | {Capability.ANY_SOURCE},
    ),
    Requirement(
        "P2P-ANY-SOURCE-TAG",
        "A receive without a source takes messages of its tag only.",
        "torch.distributed docs: recv (tag)",
        Level.L1,
        _MESSAGES | {Capability.ANY_SOURCE, Capability.TAGS},
    ),
    Requirement(
        "P2P-BATCH",
        "batch_isend_irecv exchanges with several partners at once, in any order of its list, also if all "
        "ranks list their sends first.",
        "torch.distributed docs: batch_isend_irecv (the relative ordering of sends vs. "
        "receives does not matter)",
        Level.L1,
        _MESSAGES | {Capability.COALESCING},
    ),
    Requirement(
        "P2P-BATCH-ORDER",
        "In a batch, operations between the same ranks in the same direction match in their order.",
        "torch.distributed docs: batch_isend_irecv (the ordering does matter)",
        Level.L1,
        _MESSAGES | {Capability.COALESCING},
    ),
    Requirement(
        "P2P-BATCH-WAIT",
        "The requests of a batch may be waited for in any order; after all waits every message has been "
        "received.",
        "torch.distributed docs: batch_isend_irecv (Returns)",
        Level.L1,
        _MESSAGES | {Capability.COALESCING},
    ),
    Requirement(
        "P2P-BATCH-GROUP",
        "A batch on a group of any ranks in any order exchanges among these ranks; peer is a world rank, and "
        "group_peer a position in the group.",
        "torch.distributed docs: batch_isend_irecv, P2POp (peer, group, group_peer)",
        Level.L1,
        _MESSAGES | _GROUPS | {Capability.COALESCING},
    ),
    Requirement(
        "P2P-ERROR-SELF",
        "A blocking send to oneself is an error.",
        "torch.distributed docs: send (dst: should not be the same as the rank of the current "
        "process)",
        Level.L2,
        _MESSAGES,
    ),
    Requirement(
        "P2P-ERROR-RANK",
        "A partner beyond the last rank of the world is an error in the calling rank, which can go on.",
        f"torch.distributed docs: send (dst), recv (src); {_WRONG_RANK}",
        Level.L2,
        _MESSAGES,
    ),
    Requirement(
        "P2P-ERROR-NEGATIVE",
        "A negative partner is an error in the calling rank, which can go on; negative numbers neither count "
        "from the last rank nor stand for any source.",
        f"torch.distributed docs: send (dst), recv (src: any process if unspecified); {_WRONG_RANK}",
        Level.L2,
        _MESSAGES,
    ),
    Requirement(
        "P2P-ERROR-MEMBER",
        "A partner outside the group is an error in the calling rank, which can go on.",
        "torch.distributed docs: get_group_rank (must be part of group, otherwise this raises)",
        Level.L2,
        _MESSAGES | _GROUPS,
    ),
    Requirement(
        "P2P-ERROR-BOTH",
        "A partner given both as world rank and as position in the group is an error.",
        "torch.distributed docs: send (invalid to specify both dst and group_dst), recv",
        Level.L2,
        _MESSAGES,
    ),
    Requirement(
        "P2P-NON-MEMBER",
        "On a rank outside the group isend and irecv return None, and recv returns -1.",
        "torch.distributed docs: isend, irecv, recv (Returns)",
        Level.L2,
        _MESSAGES | _GROUPS,
    ),
)

ASYNCHRONOUS = (
    Requirement(
        "ASYNC-VALUE",
        "After the wait for its handle an asynchronous collective has the results of the synchronous one.",
        _REQUEST,
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-RETURN",
        "A collective returns a handle with async_op=True, and None without.",
        "torch.distributed docs: all_reduce and its siblings (Returns)",
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-WAIT-ORDER",
        "Handles of one group may be waited for in any order, and in a different order on each rank.",
        _REQUEST,
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-WAIT-AGAIN",
        "A handle may be waited for again, and the outputs do not change.",
        f"{_REQUEST}; INF: nothing says that a second wait differs",
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-COMPLETED",
        "is_completed is True after wait; once is_completed is True, the outputs are written.",
        "torch.distributed docs: Synchronous and asynchronous collective operations (is_completed)",
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-FUTURE",
        "get_future returns, for every collective, a future that completes when the outputs are written.",
        "torch.distributed docs: Work.get_future (associated with the completion of the Work)",
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-FUTURE-VALUE",
        "The future of an all_reduce holds the reduced tensor.",
        "torch.distributed docs: Work.get_future (example), register_comm_hook",
        Level.L1,
        _PROCESS_GROUPS | {Capability.ALL_REDUCE},
    ),
    Requirement(
        "ASYNC-THEN-SYNC",
        "A synchronous call may follow an asynchronous call whose wait comes later.",
        _REQUEST,
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-KEPT",
        "Later calls do not change outputs, and handles may be dropped in any order.",
        _REQUEST,
        Level.L1,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "ASYNC-REUSE",
        "After the wait inputs and outputs may be changed and used again: the other ranks get the elements "
        "from before.",
        _REQUEST,
        Level.L1,
        _PROCESS_GROUPS | {Capability.ALL_GATHER},
    ),
    Requirement(
        "ASYNC-GROUPS",
        "Calls in flight on several groups do not mix, for any overlap of the groups and any number of calls.",
        "torch.distributed docs: new_group (a handle that can be given to collective calls)",
        Level.L1,
        _GROUPS,
    ),
    Requirement(
        "ASYNC-GROUPS-ORDER",
        "Asynchronous calls on different groups may be issued in a different order on each rank.",
        "torch.distributed docs: new_group (Safe concurrent usage: one order is demanded with "
        "NCCL); INF: with NCCL only",
        Level.L1,
        _GROUPS,
    ),
    Requirement(
        "ASYNC-MIXED",
        "Messages and collective calls in flight on one group do not mix.",
        f"{_REQUEST}; {_FINISHED}",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "ASYNC-BARRIER",
        "The wait for an asynchronous barrier returns only after every rank of the group has entered.",
        "torch.distributed docs: barrier (blocks ... if async work handle is called on wait())",
        Level.L1,
        _PROCESS_GROUPS | {Capability.BARRIER, Capability.OBJECTS},
    ),
    Requirement(
        "ASYNC-PROGRESS",
        "Once all ranks have started asynchronous collectives, the waits of some ranks end while the others "
        "make no call.",
        f"{_REQUEST}; {_NO_CALLS}",
        Level.L1,
        _PROCESS_GROUPS | _PROGRESS,
    ),
    Requirement(
        "ASYNC-PROGRESS-FUTURE",
        "Once all ranks have their futures of an asynchronous all_reduce, the futures complete with the reduced "
        "tensor, and run their callbacks, while no rank makes a call.",
        f"torch.distributed docs: Work.get_future (completion of the Work, then); {_NO_CALLS}",
        Level.L1,
        _PROCESS_GROUPS | _PROGRESS | {Capability.ALL_REDUCE},
    ),
    Requirement(
        "ASYNC-PROGRESS-MESSAGE",
        "Once both ranks have posted a message, the wait of one of them ends while the other makes no call.",
        f"{_FINISHED}; {_NO_CALLS}",
        Level.L1,
        _MESSAGES | _PROGRESS,
    ),
    Requirement(
        "ASYNC-PROGRESS-BUCKET",
        "The all_reduce of a gradient bucket that a hook of the backward pass started, and asked for its future, "
        "completes on all ranks before the backward pass ends.",
        f"torch.distributed docs: register_comm_hook, Work.get_future; {_NO_CALLS}",
        Level.L1,
        _PROCESS_GROUPS | _PROGRESS | {Capability.ALL_REDUCE},
    ),
)

PROCESS_GROUPS = (
    Requirement(
        "PG-WORLD",
        "The default group holds every rank, at the position of the rank's number.",
        "torch.distributed docs: get_rank, get_world_size, get_process_group_ranks",
        Level.L0,
        _PROCESS_GROUPS,
    ),
    Requirement(
        "PG-RANKS",
        "A new group holds the given ranks, ascending, or in the given order with sort_ranks=False; without "
        "given ranks all ranks; and each member knows its position.",
        "torch.distributed docs: new_group (ranks, sort_ranks), get_process_group_ranks, "
        "get_rank, get_world_size",
        Level.L0,
        _PROCESS_GROUPS | {Capability.GROUPS},
    ),
    Requirement(
        "PG-NON-MEMBER",
        "A rank outside a new group gets GroupMember.NON_GROUP_MEMBER, whose rank and size are -1.",
        "torch.distributed docs: new_group, get_rank, get_world_size (Returns)",
        Level.L0,
        _GROUPS,
    ),
    Requirement(
        "PG-TRANSLATE",
        "get_group_rank and get_global_rank translate between world ranks and positions.",
        "torch.distributed docs: get_group_rank, get_global_rank",
        Level.L0,
        _GROUPS,
    ),
    Requirement(
        "PG-SAME-MEMBERS",
        "Two groups of the same ranks are independent: destroying one does not affect the other.",
        "torch.distributed docs: new_group (create a new distributed group)",
        Level.L0,
        _GROUPS,
    ),
    Requirement(
        "PG-DESTROY",
        "After a group is destroyed, every other group still works, also the default group.",
        "torch.distributed docs: destroy_process_group (a given process group)",
        Level.L0,
        _GROUPS,
    ),
    Requirement(
        "PG-AGAIN",
        "Groups of the same ranks can be made and destroyed many times, and each works.",
        "torch.distributed docs: new_group, destroy_process_group",
        Level.L0,
        _GROUPS,
    ),
    Requirement(
        "PG-SUBGROUPS",
        "new_subgroups and new_subgroups_by_enumeration divide the world as documented, and return the "
        "caller's own group and all groups.",
        "torch.distributed docs: new_subgroups, new_subgroups_by_enumeration (Returns)",
        Level.L0,
        _GROUPS | _GO_ON,
    ),
    Requirement(
        "PG-LOCAL",
        "With use_local_synchronization only the members call new_group.",
        "torch.distributed docs: new_group (use_local_synchronization; not with MPI)",
        Level.L0,
        _GROUPS | {Capability.LOCAL_GROUPS},
    ),
    Requirement(
        "PG-DESTROYED",
        "A collective call on a destroyed group of several ranks is an error, and so is a second destroy.",
        "torch.distributed docs: destroy_process_group; INF: torch names no error; a call that "
        "worked would keep the group alive",
        Level.L2,
        _GROUPS | _GO_ON,
    ),
    Requirement(
        "PG-ERROR-TRANSLATE",
        "Translating a rank that is not in the group is an error.",
        "torch.distributed docs: get_group_rank, get_global_rank (must be part of group, "
        "otherwise this raises)",
        Level.L2,
        _GROUPS,
    ),
    Requirement(
        "PG-ERROR-RANKS",
        "new_group with a rank twice, or with a rank that the world does not have, is an error on every rank.",
        "torch.distributed docs: new_group (ranks: List of ranks of group members); INF: that "
        "it is an error",
        Level.L2,
        _GO_ON | {Capability.GROUPS},
    ),
    Requirement(
        "PG-ERROR-LENGTH",
        "all_gather into a list of the wrong length is an error in the calling rank.",
        "torch.distributed docs: all_gather (tensor_list: correctly-sized); INF: that it is an "
        "error",
        Level.L2,
        _PROCESS_GROUPS | {Capability.ALL_GATHER},
    ),
    Requirement(
        "PG-ERROR-LENGTH-THEN",
        "After an all_gather that was refused for the length of its list, the next call works: a refused call "
        "does not count.",
        _REFUSED_FIRST,
        Level.L2,
        _PROCESS_GROUPS | {Capability.ALL_GATHER},
    ),
    Requirement(
        "PG-ERROR-SPLITS",
        "Split sizes that do not add up to the rows of the tensor are an error in the calling rank.",
        "torch.distributed docs: all_to_all_single (split sizes); INF: that it is an error",
        Level.L2,
        _PROCESS_GROUPS | {Capability.ALL_TO_ALL_SINGLE},
    ),
    Requirement(
        "PG-ERROR-SPLITS-THEN",
        "After an all_to_all_single that was refused for its split sizes, the next call works: a refused call "
        "does not count.",
        _REFUSED_FIRST,
        Level.L2,
        _GO_ON | {Capability.ALL_TO_ALL_SINGLE},
    ),
)

OBJECT_LISTS = (
    Requirement(
        "PG-OBJECTS-ALL-GATHER",
        "all_gather_object puts the object of the i-th rank of the group at i, for objects of any sizes.",
        "torch.distributed docs: all_gather_object",
        Level.L1,
        _PROCESS_GROUPS | {Capability.ALL_GATHER},
    ),
    Requirement(
        "PG-OBJECTS-GATHER",
        "gather_object puts the object of the i-th rank of the group at i of the root's list.",
        "torch.distributed docs: gather_object",
        Level.L1,
        _PROCESS_GROUPS | {Capability.ALL_GATHER, Capability.GATHER},
    ),
    Requirement(
        "PG-OBJECTS-BROADCAST",
        "broadcast_object_list fills every rank's list with the root's objects.",
        "torch.distributed docs: broadcast_object_list",
        Level.L1,
        _PROCESS_GROUPS | {Capability.BROADCAST},
    ),
    Requirement(
        "PG-OBJECTS-SCATTER",
        "scatter_object_list gives each rank the root's object at its position.",
        "torch.distributed docs: scatter_object_list",
        Level.L1,
        _PROCESS_GROUPS | {Capability.BROADCAST, Capability.SCATTER},
    ),
    Requirement(
        "PG-OBJECTS-SEND",
        "recv_object_list fills the list with the objects of send_object_list, and returns the sender's rank.",
        "torch.distributed docs: send_object_list, recv_object_list",
        Level.L1,
        _MESSAGES,
    ),
    Requirement(
        "PG-OBJECTS-OUTSIDER",
        "On a rank outside the group the calls of lists of objects leave the list alone.",
        "torch.distributed docs: all_gather_object (Returns: the object_list will be unmodified)",
        Level.L2,
        _GROUPS,
    ),
)

_PICKLABLE = "AWS Common API (Communication API: any picklable object), API 1.6"

PAYLOADS = (
    Requirement(
        "COMM-PAYLOAD-LARGE",
        "Objects of a million bytes and of a hundred thousand parts arrive whole.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-EDGE",
        "Objects of every size arrive whole, also of sizes just below and above powers of two.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-SIZES",
        "Objects of different sizes arrive whole one after the other, also a small one after a large one.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-MANY",
        "Hundreds of small objects in a row each arrive once, in order.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-NESTED",
        "Containers of a hundred levels arrive with their structure.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-SHARED",
        "A part that occurs at two places of an object, also in a cycle, is one part in the copy; two equal "
        "parts stay two.",
        f"{_PICKLABLE}: pickle keeps it so",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-DISTINCT",
        "Two calls give two copies, also of equal objects or of the same object.",
        "AWS Common API (Communication API: a picklable object is sent), API 1.6",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-CLASSES",
        "Instances, named tuples, enum members, functions, classes and exceptions arrive with their types "
        "and contents.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-ARRAYS",
        "numpy arrays and scalars of any layout keep dtype, shape and every element.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-TENSORS",
        "Tensors of any layout within an object keep dtype, shape, elements and requires_grad, and "
        "parameters stay parameters, through every call.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-DTYPES",
        "Tensors of every claimed dtype can be sent as objects and keep requires_grad, also if torch's own "
        "pickle cannot read the dtype back.",
        "AWS Common API (Communication API: any picklable object); INF: torch 2.13 pickles them and fails to unpickle",
        Level.L1,
        _OBJECTS,
    ),
    Requirement(
        "COMM-PAYLOAD-MODULES",
        "A module arrives with its state and its mode, and shared parameters stay shared.",
        _PICKLABLE,
        Level.L1,
        _OBJECTS,
    ),
)

TRAFFIC = (*POINT_TO_POINT, *ASYNCHRONOUS, *PROCESS_GROUPS, *OBJECT_LISTS, *PAYLOADS)
