"""Bugs of send and recv_from: values, order, rank types, copies, and the moment at which send returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import smp_core.torch as smp
from conformance.mutants.blocks import PerRun, mailbox, wrap
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim import objects
from smp_core import comm
from smp_core.errors import RankError, VerdictError
from smp_core.transport.payload import Payload

BUGS = Bugs("point-to-point")


def received(patch: Patch, change: Callable[[Any], Any]) -> None:
    """Apply ``change`` to each received object and to every part of it."""

    def deep(obj: Any) -> Any:
        if type(obj) in (list, tuple):
            return change(type(obj)(map(deep, obj)))
        if type(obj) is dict:
            return {key: deep(value) for key, value in obj.items()}
        return change(obj)

    wrap(patch, "recv_from", lambda recv, *args: deep(recv(*args)))


@BUGS.enter("COMM-SEND-VALUE")
def tuples_become_lists(patch: Patch) -> None:
    """tuples arrive as lists, as through JSON"""
    received(patch, lambda obj: list(obj) if type(obj) is tuple else obj)


@BUGS.enter("COMM-SEND-VALUE")
def true_is_1(patch: Patch) -> None:
    """True arrives as 1"""
    received(patch, lambda obj: 1 if obj is True else obj)


@BUGS.enter("COMM-SEND-VALUE", origin="https://github.com/pytorch/pytorch/issues/85234")
def zero_size_is_flat(patch: Patch) -> None:
    """tensors without elements lose their shape"""

    def flat(obj: Any) -> Any:
        return obj.reshape(-1) if isinstance(obj, torch.Tensor) and obj.numel() == 0 else obj

    received(patch, flat)


@BUGS.enter("COMM-SEND-ORDER")
def newest_first(patch: Patch) -> None:
    """the last object of a sender is received first"""
    mailbox(patch, take=-1)


@BUGS.enter("COMM-SEND-ORDER", origin="https://github.com/pytorch/pytorch/pull/176259")
def stale_receive(patch: Patch) -> None:
    """the receive buffer of a pair is filled once"""
    first = PerRun(dict)

    def recv_from(recv: Callable[..., Any], *args: Any) -> Any:
        got = recv(*args)
        return first().setdefault((smp.rank(), *args), got)

    wrap(patch, "recv_from", recv_from)


@BUGS.enter("COMM-RECV-SOURCE")
def from_anybody(patch: Patch) -> None:
    """recv_from takes what came first, from any source"""
    mailbox(patch, any_source=True)


def rank_type_read_as(
    patch: Patch, of: Callable[[smp.RankType], smp.RankType], *names: str
) -> None:
    """Make the named calls read each rank type as ``of(rank type)``."""
    peer = comm._peer

    def read(here: Any, call: str, name: str, rank: object, kind: smp.RankType) -> int:
        return peer(here, call, name, rank, of(kind) if call in names else kind)

    patch.setattr(comm, "_peer", read)


@BUGS.enter(
    "COMM-RANK-TYPE",
    *ASSERTION,
    RankError,
    VerdictError,
    origin="https://github.com/flashinfer-ai/flashinfer/pull/3418",
)
def all_ranks_are_world_ranks(patch: Patch) -> None:
    """rank_type is ignored"""
    world = smp.RankType.WORLD_RANK
    rank_type_read_as(patch, lambda kind: world, "smp.send", "smp.recv_from")


@BUGS.enter(
    "COMM-RANK-TYPE",
    *ASSERTION,
    RankError,
    VerdictError,
    origin="https://github.com/pmodels/mpich/issues/1940",
)
def pp_rank_read_as_mp_rank(patch: Patch) -> None:
    """recv_from reads PP_RANK as MP_RANK"""
    other = {smp.RankType.PP_RANK: smp.RankType.MP_RANK}
    rank_type_read_as(patch, lambda kind: other.get(kind, kind), "smp.recv_from")


@BUGS.enter("COMM-RANK-TYPE-MIXED", *ASSERTION, VerdictError)
def rank_types_match(patch: Patch) -> None:
    """recv_from waits for a send of the same rank type"""

    def recv_from(recv: Callable[..., Any], src: int, kind: smp.RankType) -> Any:
        sent_as, got = recv(src, kind)
        return got if sent_as is kind else recv(src, kind)

    wrap(patch, "send", lambda send, obj, dest, kind: send((kind, obj), dest, kind))
    wrap(patch, "recv_from", recv_from)


class ByReference(Payload):
    """A payload that gives the sender's object to the receiver, without a copy."""

    def __init__(self, obj: object, call: str) -> None:
        self._data, self._atom = None, obj


@BUGS.enter("COMM-SEND-COPY")
@BUGS.enter("COMM-BROADCAST-COPY", kind="collectives and layout")
@BUGS.enter("COMM-ALLGATHER-COPY", kind="collectives and layout")
def by_reference(patch: Patch) -> None:
    """objects are shared between ranks"""
    patch.setattr(objects, "Payload", ByReference)


class LargeByReference(Payload):
    """A payload that gives the sender's object to the receiver if its pickle is large."""

    def __init__(self, obj: object, call: str) -> None:
        super().__init__(obj, call)
        if self._data is not None and len(self._data) > 4096:
            self._data, self._atom = None, obj


@BUGS.enter("COMM-SEND-COPY")
@BUGS.enter("COMM-BROADCAST-COPY", kind="collectives and layout")
@BUGS.enter("COMM-ALLGATHER-COPY", kind="collectives and layout")
def large_by_reference(patch: Patch) -> None:
    """objects whose pickles have more than 4,096 bytes are shared between ranks"""
    patch.setattr(objects, "Payload", LargeByReference)


@BUGS.enter("COMM-SEND-SYNC", origin="https://github.com/ROCm/aiter/pull/4082")
@BUGS.enter(
    "COMM-BROADCAST-SYNC",
    origin="https://github.com/ROCm/aiter/pull/4082",
    kind="collectives and layout",
)
def nobody_waits(patch: Patch) -> None:
    """send and broadcast return at once"""
    mailbox(patch)


@BUGS.enter("COMM-KEYWORDS", TypeError)
def other_keyword(patch: Patch) -> None:
    """send calls its argument dest"""
    send = smp.send
    patch.setattr(smp, "send", lambda obj, dest, rank_type: send(obj, dest, rank_type))


@BUGS.enter("COMM-KEYWORDS", TypeError)
def keywords_only(patch: Patch) -> None:
    """barrier takes its group by keyword only"""
    barrier = smp.barrier
    patch.setattr(smp, "barrier", lambda *, group=smp.WORLD: barrier(group))
