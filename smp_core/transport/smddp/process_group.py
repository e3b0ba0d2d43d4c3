"""The process group of `smddp`: checked calls, with shared memory behind them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from smp_core.errors import ArgumentError, BackendError, NotInitializedError
from smp_core.transport import messages, native_calls
from smp_core.transport.checked_group import CheckedGroup, Collective
from smp_core.transport.memory import InFlightBuffer
from smp_core.transport.peers import ANY, Source
from smp_core.transport.smddp import futex
from smp_core.transport.smddp.collectives import sizes_of_call, transfer_of
from smp_core.transport.smddp.inter_machine import InterMachineTransport
from smp_core.transport.smddp.point_to_point import InboundMessage, OutboundMessage, PointToPoint
from smp_core.transport.smddp.progress import PROGRESS, Blockers
from smp_core.transport.smddp.rounds import Rounds, RoundsOperation
from smp_core.transport.smddp.segment import LEFT, SharedSegment
from smp_core.transport.smddp.work import PendingOperation, SmddpWork
from smp_core.transport.unseen import hide

BACKEND = "smddp"  # its name in torch
Tensor = torch.Tensor


class SmddpProcessGroup(CheckedGroup):
    """One rank's handle on a group. ``ranks`` are the members' world ranks; none for the default group."""

    def __init__(
        self,
        store: Any,
        position: int,
        size: int,
        ranks: tuple[int, ...],
        name: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(position, size, name)
        self.timeout = timeout
        self._ranks = ranks or tuple(range(size))
        self._is_default = not ranks
        self._pid = os.getpid()
        self._segment = SharedSegment(store, position, size, name)
        self._inter_machine: InterMachineTransport | None = None
        try:
            self.machines = self._find_machines()
            if len(set(self.machines)) > 1:
                self._segment.open_on_machines(self.machines, timeout)
                self._inter_machine = InterMachineTransport(self._segment, self.machines, timeout)
                self._segment.release()
            else:
                self._segment.open(timeout)
                self._segment.wait_for_all(timeout)
        except BaseException:
            self._segment.release()
            raise
        arguments = self._segment, self.text(), self._ranks, self._inter_machine
        self._channels = Rounds(*arguments), PointToPoint(*arguments)
        PROGRESS.enter(self._segment)

    def _find_machines(self) -> list[str]:
        """The machines of the members: the default group knows them."""
        world = None if self._is_default else distributed_c10d._world.default_pg
        if isinstance(world, SmddpProcessGroup) and max(self._ranks) < len(world.machines):
            return [world.machines[rank] for rank in self._ranks]
        return self._segment.machines(self.timeout)

    def text(self) -> str:
        """The group in messages."""
        return messages.group_text("WORLD" if self._is_default else self._name, self._ranks)

    def check_process(self, call: str) -> None:
        """Refuse a child of fork: it has the parent's place in the group."""
        if os.getpid() != self._pid:
            raise BackendError(
                f"{call}: process {os.getpid()} is a fork of a rank, and group {self._name} belongs to process "
                f"{self._pid}. Fork before init_process_group, or spawn"
            )

    def _check(self, call: str) -> tuple[Rounds, PointToPoint]:
        self.check_process(call)
        if self._destroyed:
            raise NotInitializedError(f"{call}: process group {self._name} has been destroyed")
        return self._channels

    def _collective(self, call: Collective, opts: Any) -> SmddpWork:
        """See CheckedGroup."""
        rounds, _ = self._check(call.operation)
        several = len(call.gets) > 1 and call.whole is None  # of one tensor the rows lie apart
        if several and InFlightBuffer((), call.gets).outputs_meet():
            raise ArgumentError(
                f"{call.operation}: two outputs share memory: one value would overwrite the other"
            )
        sizes = sizes_of_call(call)
        transfer = transfer_of(rounds, call, sizes)
        operation = RoundsOperation(call.operation, call.fields, transfer, sizes)
        with PROGRESS.lock:
            rounds.begin(operation)
            blockers = PROGRESS.begin(rounds, waits=not getattr(opts, "asyncOp", True))
        return self._issued(operation, call.outputs, call.operation, blockers)

    def _post(self, verb: str, tensors: list[Tensor], peer: Source, tag: int) -> SmddpWork:
        """See CheckedGroup."""
        _, point_to_point = self._check(verb)
        (tensor,) = tensors
        peer = self._check_message(verb, tensors, peer)
        if not -(2**63) <= tag < 2**63:
            raise ArgumentError(f"{verb}: tag {tag} is no integer of 64 bits")
        operation: OutboundMessage | InboundMessage
        with PROGRESS.lock:
            if verb == "send":
                assert peer is not ANY
                operation = OutboundMessage(peer, tag, tensor)
                point_to_point.send(operation)
            else:
                operation = InboundMessage(peer, tag, tensor)
                point_to_point.receive(operation)
            PROGRESS.begin(point_to_point)
        return self._issued(operation, tensors, verb)

    def _issued(
        self, operation: PendingOperation, outputs: Any, name: str, blockers: Blockers | None = None
    ) -> SmddpWork:
        work = SmddpWork(self, operation, outputs, name, blockers)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that waits ``timeout``, that of the group if there is none. The error names all ranks that have not
        come, with either value of ``wait_all_ranks``.
        """
        work = self._collective(Collective("monitored_barrier"), None)
        work.wait(timeout)

    def missing(self, operation: Any) -> str:
        """The members that an operation waits for, in words."""
        if not isinstance(operation, RoundsOperation):
            return ""
        absent = self._channels[0].missing()
        return f": {absent}" if absent else ""

    def shutdown(self) -> None:
        """Refuse further calls, and announce to the other members that this one has left."""
        if not self._destroyed:
            self._destroyed = True
            if os.getpid() == self._pid:
                self._segment.leave()
                PROGRESS.leave(self._segment)
                if self._inter_machine is not None:
                    try:
                        self._inter_machine.wait_connected()
                    finally:  # after Ctrl-C as well
                        self._inter_machine.announce(LEFT)
                        self._inter_machine.leave()

    abort = shutdown

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    _get_backend_name = getBackendName

    def __repr__(self) -> str:
        return f"SmddpProcessGroup(rank {self._position}, group {self.text()})"


hide(SmddpProcessGroup, ("monitored_barrier",))


def _create(options: Any, backend_options: Any) -> SmddpProcessGroup:
    """A group, as ``init_process_group("smddp")`` and ``new_group`` ask for one."""
    futex.require()
    return SmddpProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        tuple(options.global_ranks_in_group),
        str(options.group_id),
        options.timeout,
    )


def trouble() -> str:
    """The reason why this process can be in no group of `smddp`; empty if it can."""
    try:
        futex.require()
    except BackendError as error:
        return str(error)
    return ""


def register_backend() -> None:
    """Make ``smddp`` a backend name that torch knows. Does not change which backend a device gets by default."""
    native_calls.install()
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
