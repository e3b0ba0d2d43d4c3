"""Bugs of the errors that the API promises: wrong calls are accepted in silence, or refused too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import smp_core.torch as smp
from conformance.mutants.blocks import members, wrap
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim import objects
from smp_core import comm
from smp_core.errors import PayloadError, RankError, VerdictError
from smp_core.transport.payload import Payload

BUGS = Bugs("errors, hangs, pickling and resources")


def lenient_peer(patch: Patch, forgive: Callable[[int, int], int]) -> None:
    """Replace a wrong rank by ``forgive(rank, size of the group)`` before it is checked."""
    peer = comm._peer

    def correct(here: Any, call: str, name: str, rank: int, kind: smp.RankType) -> int:
        return peer(here, call, name, forgive(rank, len(here.group(kind.value).ranks)), kind)

    patch.setattr(comm, "_peer", correct)


@BUGS.enter("COMM-ERROR-TYPE", *ASSERTION, VerdictError, RankError)
def bools_are_ranks(patch: Patch) -> None:
    """True is rank 1"""
    peer = comm._peer

    def number(here: Any, call: str, name: str, rank: Any, kind: Any) -> int:
        return peer(here, call, name, int(rank) if isinstance(rank, bool) else rank, kind)

    patch.setattr(comm, "_peer", number)


@BUGS.enter("COMM-ERROR-TYPE", *ASSERTION, VerdictError)
def groups_by_name(patch: Patch) -> None:
    """a group may be given as a string"""
    kind = comm._kind
    named = smp.CommGroup.__members__
    patch.setattr(
        comm,
        "_kind",
        lambda call, group: kind(call, named.get(group, group) if type(group) is str else group),
    )


@BUGS.enter("COMM-ERROR-RANK", *ASSERTION, VerdictError)
def ranks_wrap_around(patch: Patch) -> None:
    """ranks below 0 count from the end"""
    lenient_peer(patch, lambda rank, size: rank + size if rank < 0 else rank)


@BUGS.enter("COMM-ERROR-RANK", *ASSERTION, VerdictError)
def one_rank_too_many(patch: Patch) -> None:
    """the size of the group is taken for its last rank"""
    lenient_peer(patch, lambda rank, size: size - 1 if rank == size else rank)


@BUGS.enter("COMM-ERROR-SELF")
def to_myself_is_ignored(patch: Patch) -> None:
    """a send to oneself does nothing"""

    def send(original: Callable[..., None], obj: object, dest: int, kind: smp.RankType) -> None:
        if members(smp.CommGroup(kind.value))[dest] != smp.rank():
            original(obj, dest, kind)

    wrap(patch, "send", send)


class Described(Payload):
    """A payload that sends a description of an object that cannot be pickled."""

    def __init__(self, obj: object, call: str) -> None:
        try:
            super().__init__(obj, call)
        except PayloadError:
            super().__init__(repr(obj), call)


@BUGS.enter(
    "COMM-ERROR-PICKLE",
    *ASSERTION,
    VerdictError,
    origin="https://github.com/NVIDIA/TensorRT-LLM/pull/7507",
)
def unpicklable_described(patch: Patch) -> None:
    """a description of an unpicklable object is sent in its place"""
    patch.setattr(objects, "Payload", Described)


@BUGS.enter("COMM-ERROR-PICKLE", *ASSERTION, VerdictError)
def pickled_too_late(patch: Patch) -> None:
    """allgather joins before it pickles, so the failed call counts"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        try:
            return list(gather(obj, group))
        except PayloadError:
            gather(None, group)
            raise

    wrap(patch, "allgather", allgather)


@BUGS.enter("COMM-ERROR-UNPICKLE")
def unreadable_is_none(patch: Patch) -> None:
    """an object that cannot be unpickled arrives as None"""
    thaw = Payload.thaw

    def lenient(self: Payload) -> Any:
        try:
            return thaw(self)
        except PayloadError:
            return None

    patch.setattr(Payload, "thaw", lenient)


@BUGS.enter("COMM-ERROR-UNPICKLE", *ASSERTION, VerdictError)
def unreadable_is_received_again(patch: Patch) -> None:
    """an allgather that could not unpickle its results is done once more"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        try:
            return list(gather(obj, group))
        except PayloadError:
            if smp.rank() == 0:
                gather(None, group)
            raise

    wrap(patch, "allgather", allgather)
