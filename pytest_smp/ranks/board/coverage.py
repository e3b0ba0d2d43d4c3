"""The parts of torch.distributed that the board sees, and those that it does not: data, for the documentation.

Each entry was seen with torch 2.13 on Gloo, or read in its source.
"""

from __future__ import annotations

from typing import NamedTuple


class Covered(NamedTuple):
    """A covered part: its name, whether its calls are compared and its waits are known, and a note."""

    what: str
    calls: bool
    waits: bool
    note: str = ""


COVERED: tuple[Covered, ...] = (
    Covered("collectives of torch.distributed, synchronous and asynchronous", True, True),
    Covered("object collectives of torch.distributed", True, True, "as the tensors that they send"),
    Covered("send, recv, isend, irecv, batch_isend_irecv", True, True),
    Covered(
        "recv from any source",
        False,
        True,
        "from the first one on, messages to that rank with that tag are counted, not compared",
    ),
    Covered("_coalescing_manager", True, True),
    Covered("methods of a process group, torch's own or a Python subclass", True, True),
    Covered(
        "new_group, and what calls it: new_subgroups, DeviceMesh",
        True,
        True,
        "with use_local_synchronization neither calls nor waits",
    ),
    Covered("FSDP2 (fully_shard)", True, True),
    Covered("DTensor and functional collectives", True, True, "but for the reduce op"),
    Covered(
        "DDP's reducer",
        True,
        True,
        "but for the reduce op; its wait at the end of the backward pass, by a callback before it",
    ),
    Covered(
        "DDP's constructor", True, True, "waits: in the check of parameters with which it begins"
    ),
    Covered("DDP's broadcast of buffers, and its regrouping of buckets", True, False),
    Covered(
        "DDP's communication hooks in Python", True, False, "DDP waits for their futures in C++"
    ),
    Covered("monitored_barrier", True, True),
    Covered(
        "Future.wait of a work's future, and of those that then and collect_all make of it",
        True,
        True,
    ),
    Covered("waits for keys of the world's Store: get, wait, multi_get", False, True),
    Covered("the object transport of smp", True, True),
)

NOT_COVERED: tuple[tuple[str, str], ...] = (
    (
        "init_process_group of other ranks than the run's, split_group, shrink_group",
        "they meet in a store, in C++",
    ),
    (
        "waits on a Store that is not the world's, or with a time limit below torch's default",
        "other processes may set the key; an error is expected",
    ),
    ("polling Work.is_completed", "a rank that polls runs"),
    ("methods of a Backend object", "it belongs to no process group that names its ranks"),
    ("process groups that torch.distributed was never told of", "their world ranks are not known"),
    ("RPC, symmetric memory, NVSHMEM", "they pass no process group"),
    (
        "deadlocks of bodies with threads of their own",
        "another Python thread could help a rank that waits; mismatches are found",
    ),
    (
        "threads that C++ started",
        "calls of theirs are recorded, and then there is no deadlock verdict",
    ),
    ("changes of memory in flight", "races are found on the sim backend"),
)
