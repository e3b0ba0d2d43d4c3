"""Bugs of broadcast, allgather and the barriers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import smp_core.torch as smp
from conformance.mutants.blocks import PerRun, mailbox, members, wrap
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim import objects
from pytest_smp.ranks.sim.objects import SimObjects
from smp_core.errors import RankError, VerdictError
from smp_core.transport.payload import Payload
from smp_core.transport.protocols import Group

BUGS = Bugs("collectives and layout")


class OneCopy(Payload):
    """A payload that is copied once, for all receivers."""

    def thaw(self) -> Any:
        """The one copy, which the first call makes."""
        self._data, self._atom = None, super().thaw()
        return self._atom


@BUGS.enter("COMM-BROADCAST-COPY", origin="https://github.com/NVIDIA/Megatron-LM/pull/5876")
@BUGS.enter("COMM-ALLGATHER-COPY", origin="https://github.com/NVIDIA/Megatron-LM/pull/5876")
def one_copy(patch: Patch) -> None:
    """all receivers share one copy"""
    patch.setattr(objects, "Payload", OneCopy)


class OneLargeCopy(Payload):
    """A payload that is copied once for all receivers if its pickle is large."""

    def thaw(self) -> Any:
        """A copy of a small object; for a large one, the copy that the first call made."""
        got = super().thaw()
        if self._data is not None and len(self._data) > 4096:
            self._data, self._atom = None, got
        return got


@BUGS.enter("COMM-BROADCAST-COPY")
@BUGS.enter("COMM-ALLGATHER-COPY")
def one_large_copy(patch: Patch) -> None:
    """all receivers share one copy of an object whose pickle has more than 4,096 bytes"""
    patch.setattr(objects, "Payload", OneLargeCopy)


@BUGS.enter("COMM-ALLGATHER-COPY")
def own_element_by_reference(patch: Patch) -> None:
    """allgather puts the caller's own object into the list"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        got = gather(obj, group)
        return [
            obj if rank == smp.rank() else each
            for rank, each in zip(members(group), got, strict=True)
        ]

    wrap(patch, "allgather", allgather)


@BUGS.enter("COMM-BROADCAST-SYNC")
def one_receiver_is_enough(patch: Patch) -> None:
    """broadcast returns when one receiver has come"""

    mailbox(patch, wait_for_first=True)


@BUGS.enter(
    "COMM-BROADCAST-VALUE",
    VerdictError,
    origin="https://github.com/meta-pytorch/torchrec/pull/4601",
)
def first_rank_is_the_root(patch: Patch) -> None:
    """broadcast takes the first rank of the group for the root"""

    def broadcast(self: SimObjects, obj: object, group: Group) -> None:
        call = "smp.broadcast"
        self._post(call, Payload(obj, call), set(group.ranks[1:]))

    patch.setattr(SimObjects, "broadcast", broadcast)


@BUGS.enter("COMM-BROADCAST-VALUE")
def roots_object_lost(patch: Patch) -> None:
    """receivers whose rank is above the root's receive None"""

    def recv_from(recv: Callable[..., Any], src: int, kind: smp.RankType) -> Any:
        got = recv(src, kind)
        return got if members(smp.CommGroup(kind.value))[src] > smp.rank() else None

    wrap(patch, "recv_from", recv_from)


@BUGS.enter(
    "COMM-BROADCAST-GROUP",
    *ASSERTION,
    VerdictError,
    origin="https://github.com/NVIDIA/Megatron-LM/issues/779",
)
def broadcast_to_the_world(patch: Patch) -> None:
    """broadcast goes to the world"""
    wrap(patch, "broadcast", lambda broadcast, obj, group: broadcast(obj, smp.WORLD))


@BUGS.enter("COMM-BROADCAST-ORDER")
def broadcasts_overtake(patch: Patch) -> None:
    """broadcasts overtake sends"""
    mailbox(patch, broadcast_first=True)


@BUGS.enter("COMM-BROADCAST-ALONE", RankError)
def alone_is_an_error(patch: Patch) -> None:
    """a broadcast without receivers is refused"""

    def broadcast(original: Callable[..., None], obj: object, group: smp.CommGroup) -> None:
        if len(members(group)) == 1:
            raise RankError("smp.broadcast: nobody receives")
        original(obj, group)

    wrap(patch, "broadcast", broadcast)


@BUGS.enter("COMM-ALLGATHER-ORDER")
def own_element_first(patch: Patch) -> None:
    """allgather's list begins with the caller's object"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        got, own = gather(obj, group), members(group).index(smp.rank())
        return [*got[own:], *got[:own]]

    wrap(patch, "allgather", allgather)


@BUGS.enter("COMM-ALLGATHER-ORDER")
def gathered_sorted(patch: Patch) -> None:
    """allgather's list is sorted by value"""
    wrap(patch, "allgather", lambda gather, obj, group: sorted(gather(obj, group)))


@BUGS.enter("COMM-ALLGATHER-VALUE", origin="https://github.com/facebookresearch/ParlAI/pull/3291")
def fixed_buffer(patch: Patch) -> None:
    """objects are cut off at 64 KiB"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        return [each[:65536] if type(each) is bytes else each for each in gather(obj, group)]

    wrap(patch, "allgather", allgather)


@BUGS.enter("COMM-ALLGATHER-VALUE", origin="https://github.com/ALPSCore/ALPSCore/issues/258")
def none_brings_nothing(patch: Patch) -> None:
    """a rank that brings None is left out"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        return [each for each in gather(obj, group) if each is not None]

    wrap(patch, "allgather", allgather)


def remember(patch: Patch, key: Callable[[smp.CommGroup, int], Any]) -> None:
    """Make allgather return the result of the earlier call with the same ``key``.

    Args:
        patch: undoes the change at the end of the trial.
        key: a function of the kind of group and the number of the call on it.
    """
    memory = PerRun(lambda: (defaultdict(int), {}))

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        counts, results = memory()
        counts[smp.rank(), group] += 1
        got = gather(obj, group)
        found: list[Any] = results.setdefault(
            (smp.rank(), key(group, counts[smp.rank(), group])), got
        )
        return found

    wrap(patch, "allgather", allgather)


@BUGS.enter("COMM-ALLGATHER-REPEATED", origin="https://github.com/pytorch/pytorch/pull/176259")
def stale_gather(patch: Patch) -> None:
    """a group's second allgather returns the list of its first"""
    remember(patch, lambda group, number: group)


@BUGS.enter("COMM-ALLGATHER-KINDS", origin="https://github.com/awslabs/palace/issues/838")
def kinds_share_results(patch: Patch) -> None:
    """the n-th allgather of two kinds is one if their members are the same"""
    remember(patch, lambda group, number: (members(group), number))


@BUGS.enter("COMM-ALLGATHER-GROUP", VerdictError)
def gather_waits_for_the_world(patch: Patch) -> None:
    """an allgather waits for all groups of its kind"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        smp.barrier()
        return list(gather(obj, group))

    wrap(patch, "allgather", allgather)


@BUGS.enter("COMM-BARRIER-ALL")
@BUGS.enter("COMM-BARRIER-DEFAULT")
def barrier_does_nothing(patch: Patch) -> None:
    """a barrier waits for nobody"""
    patch.setattr(smp, "barrier", lambda group=smp.WORLD: None)


@BUGS.enter("COMM-BARRIER-ALL")
def barrier_waits_for_the_first(patch: Patch) -> None:
    """a barrier waits for the first rank of the group only"""

    def barrier(original: Callable[..., None], group: smp.CommGroup = smp.WORLD) -> None:
        here, ranks = smp.rank(), members(group)
        if here != ranks[0]:
            smp.recv_from(ranks[0], smp.RankType.WORLD_RANK)
        for each in ranks[1:] if here == ranks[0] else []:
            smp.send("go", each, smp.RankType.WORLD_RANK)

    wrap(patch, "barrier", barrier)


@BUGS.enter("COMM-BARRIER-GROUP", VerdictError)
def barrier_of_the_world(patch: Patch) -> None:
    """a barrier is always one of the world"""
    wrap(patch, "barrier", lambda barrier, group=smp.WORLD: barrier(smp.WORLD))


@BUGS.enter("COMM-BARRIER-DEFAULT", *ASSERTION, VerdictError)
def barrier_default_is_mp(patch: Patch) -> None:
    """barrier() is of the MP group"""
    wrap(patch, "barrier", lambda barrier, group=smp.MP_GROUP: barrier(group))


@BUGS.enter("COMM-BARRIER-MP-DP", *ASSERTION, VerdictError)
def mp_barrier_of_pp(patch: Patch) -> None:
    """mp_barrier is one of the PP group"""
    patch.setattr(smp, "mp_barrier", lambda: smp.barrier(smp.PP_GROUP))


@BUGS.enter("COMM-BARRIER-MP-DP", *ASSERTION, VerdictError)
def dp_barrier_of_the_world(patch: Patch) -> None:
    """dp_barrier is one of the world"""
    patch.setattr(smp, "dp_barrier", smp.barrier)
