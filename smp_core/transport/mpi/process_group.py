"""The process group of `mpi`: checked calls, with messages behind them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from smp_core.errors import ArgumentError, NotInitializedError
from smp_core.transport.checked_group import CheckedGroup, Collective, Fields
from smp_core.transport.memory import InFlightBuffer
from smp_core.transport.mpi.exchange import (
    LARGE,
    CollectiveOperation,
    LargeAllReduce,
    ReceiveOperation,
    SendOperation,
    bytes_of,
    flat_copies,
    tensor_note,
    to_bytes,
)
from smp_core.transport.mpi.matching import Meetings, MpiMailbox
from smp_core.transport.mpi.routes import ROUTES, MemberPart
from smp_core.transport.mpi.work import MpiWork, RankSide
from smp_core.transport.peers import ANY, Source
from smp_core.transport.protocols import Group

BACKEND = "smp_mpi"  # its name in torch
Tensor = torch.Tensor


class MpiProcessGroup(CheckedGroup):
    """One rank's handle on a group."""

    def __init__(self, fabric: RankSide, group: Group, name: str) -> None:
        super().__init__(group.ranks.index(fabric.rank), len(group.ranks), name)
        self._fabric, self._group = fabric, group
        self.open()

    def open(self) -> None:
        """Begin a run: its calls and messages count from the first."""
        channel = self._fabric.channel(self._group)
        self._meetings = Meetings(self._fabric.messenger, f"calls {channel}")
        self._mailbox = MpiMailbox(self._fabric.messenger, f"messages {channel}")
        self._coalesced = None

    # Issuing.

    def _check(self, call: str) -> None:
        if self._destroyed:
            raise NotInitializedError(f"{call}: process group {self._name} has been destroyed")

    def _collective(self, call: Collective, opts: Any) -> MpiWork:
        """Issue a collective along its route in ROUTES. See CheckedGroup."""
        self._check(call.operation)
        in_flight = InFlightBuffer(call.brings, call.gets)
        if in_flight.outputs_meet():
            raise ArgumentError(
                f"{call.operation}: two outputs share memory: one value would overwrite the other"
            )
        with torch.no_grad():
            brought = flat_copies(call.brings)
            part = MemberPart(self._position, self._size, brought, call.gets, call.op, call.root)
            issued = self._issue(call.operation, part, _text(call.operation, call.fields))
        return self._handle(issued, in_flight, call.outputs, call.operation)

    def _issue(
        self, operation: str, part: MemberPart, note: str
    ) -> CollectiveOperation | LargeAllReduce:
        number, group = self._meetings.number(), self._group
        if ROUTES[operation] is ROUTES["all_reduce"] and bytes_of(part.brings) > LARGE:
            large = LargeAllReduce(group, self._meetings, number, part, note)
            self._fabric.messenger.step(large, large.step)
            return large
        return CollectiveOperation(group, self._meetings, number, ROUTES[operation], part, note)

    def _post(self, verb: str, tensors: list[Tensor], peer: Source, tag: int) -> MpiWork:
        self._check(verb)
        (tensor,) = tensors
        peer = self._check_message(verb, tensors, peer)
        rank = peer if peer is ANY else self._group.ranks[peer]
        if verb == "send":
            assert rank is not ANY
            payload = to_bytes(flat_copies(tensors))
            outgoing = self._mailbox.send(rank, tag, payload, tensor_note(tensor))
            return self._handle(
                SendOperation(outgoing, payload), InFlightBuffer(tensors, ()), tensors, verb
            )
        receive = self._mailbox.receive(rank, tag)
        received = ReceiveOperation(self._group, self._position, receive, tensor)
        return self._handle(received, InFlightBuffer((), tensors), tensors, verb)

    def _handle(
        self, operation: Any, in_flight: InFlightBuffer, outputs: Any, name: str
    ) -> MpiWork:
        work = MpiWork(self._fabric, operation, in_flight, outputs, name)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Life cycle, and torch's questions to a group about itself.

    def new_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> MpiProcessGroup | None:
        """The hook of torch's ``new_group``: members get their handle, and nothing is sent."""
        self._check("new_group")
        if self._fabric.rank not in ranks:
            return None
        group = MpiProcessGroup(
            self._fabric, Group(_shared_name(str(group_name)), tuple(ranks)), str(group_name)
        )
        if group_desc is not None:
            group._set_group_desc(group_desc)
        return group

    def shutdown(self) -> None:
        """Refuse further calls. Operations in flight go on: their works may still be waited for."""
        self._destroyed = True

    abort = shutdown

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    _get_backend_name = getBackendName

    def __repr__(self) -> str:
        return f"MpiProcessGroup(rank {self._fabric.rank}, group {self._name} of ranks {self._group.ranks})"


def _shared_name(name: str) -> str:
    """The part of torch's name for a group that is the same on all members.

    With local synchronisation the name depends on how many groups the rank has, which may differ.
    """
    return name if name.isdecimal() else "local"


def _text(operation: str, fields: Fields) -> str:
    return f"{operation}({', '.join(f'{name}={value}' for name, value in fields)})"
