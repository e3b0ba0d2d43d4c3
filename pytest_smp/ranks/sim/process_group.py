"""The process group of `sim`: what torch.distributed, DDP and FSDP2 call, on a rank thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BarrierOptions

from pytest_smp.ranks.sim import collectives
from pytest_smp.ranks.sim.mailbox import Mailbox, Post
from pytest_smp.ranks.sim.matching import Call, Channel, Complete
from pytest_smp.ranks.sim.rank_context import RankContext
from pytest_smp.ranks.sim.work import SimWork
from smp_core.errors import ArgumentError, NotInitializedError
from smp_core.transport.call_lines import line_of
from smp_core.transport.checked_group import CheckedGroup, Collective
from smp_core.transport.ddp_calls import ddp_tensor
from smp_core.transport.memory import InFlightBuffer
from smp_core.transport.peers import Source
from smp_core.transport.protocols import Group
from smp_core.transport.stack_frames import Place, caller_place

Tensor = torch.Tensor


class SharedGroup:
    """The state that the members' process groups of one group share."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.channel = Channel(group)
        self.mailbox = Mailbox(len(group.ranks))
        self.rank_map = {rank: index for index, rank in enumerate(group.ranks)}


# The functions that complete collectives, by reduce op and root. Looked up when a call is issued.
_COMPLETE: dict[str, Callable[[str, Any], Complete]] = {
    "barrier": lambda op, root: collectives.barrier,
    "monitored_barrier": lambda op, root: collectives.barrier,
    "broadcast": lambda op, root: collectives.broadcast(root),
    "all_reduce": lambda op, root: collectives.all_reduce(op),
    "all_reduce_coalesced": lambda op, root: collectives.all_reduce(op),
    "reduce": lambda op, root: collectives.reduce(op, root),
    "all_gather": lambda op, root: collectives.all_gather,
    "all_gather_coalesced": lambda op, root: collectives.all_gather,
    "all_gather_single": lambda op, root: collectives.all_gather_single,
    "all_gather_single_coalesced": lambda op, root: collectives.all_gather_single,
    "reduce_scatter": lambda op, root: collectives.reduce_scatter(op),
    "reduce_scatter_single": lambda op, root: collectives.reduce_scatter_single(op),
    "reduce_scatter_single_coalesced": lambda op, root: collectives.reduce_scatter_single(op),
    "scatter": lambda op, root: collectives.scatter(root),
    "gather": lambda op, root: collectives.gather(root),
    "all_to_all": lambda op, root: collectives.all_to_all,
    "all_to_all_single": lambda op, root: collectives.all_to_all_single,
}


def _users(place: Place | None) -> bool:
    """Return whether the user's own line issued a call, rather than torch's code on its own account."""
    return place is None or place.direct


class SimProcessGroup(CheckedGroup):
    """One rank's handle on a group. Belongs to the rank's own thread."""

    def __init__(self, context: RankContext, shared: SharedGroup, name: str) -> None:
        group = shared.group
        super().__init__(shared.rank_map[context.rank], len(group.ranks), name)
        self._context, self._shared = context, shared

    # Issuing.

    def _enter(self, call: str) -> RankContext:
        context = self._context
        context.check(call, "process group")
        if self._destroyed:
            raise NotInitializedError(f"{call}: process group {self._name} has been destroyed")
        return context

    def _collective(self, call: Collective, opts: Any) -> SimWork:
        """See CheckedGroup."""
        context = self._enter(call.operation)
        place, told = caller_place(), call.told
        tensors = call.brings or call.gets
        if place is not None and not place.direct and tensors:
            tensor = ddp_tensor(sys._getframe(1), call.operation, tensors[0].dtype)
            told = (*told, ("tensor", tensor)) if tensor else told
        made = Call(call.operation, call.fields, None, place, told=told)
        whole = call.whole
        if context.job.records_calls:
            tensors = whole[:1] if whole is not None else call.brings or call.gets
            if call.operation == "scatter":
                tensors = call.gets
            specs = [(tensor.dtype, tensor.shape) for tensor in tensors]
            context.record_call(call.operation, self._shared.group.ranks, specs)
        in_flight = InFlightBuffer(
            *((call.brings, call.gets) if whole is None else (whole[:1], whole[1:]))
        )
        self._take_off(in_flight, call.operation, asynchronous=getattr(opts, "asyncOp", True))
        inputs = in_flight.inputs
        if whole is not None and whole[0].dim():
            inputs = torch.split_with_sizes(inputs[0], [row.size(0) for row in call.brings])
        made.data = inputs if call.sizes is None else (inputs, call.sizes)
        complete = _COMPLETE[call.operation](call.op, call.root)

        def completed(calls: list[Call]) -> Any:
            with torch.no_grad():
                return complete(calls)

        meeting = self._shared.channel.join(context, made, completed)
        work = SimWork(context, meeting, in_flight, call.outputs, call.operation, made.place)
        return self._issued(work)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See CheckedGroup; with --smp-timeouts=simulated the time-out names a rank that does not come."""
        options = BarrierOptions()
        options.asyncOp = False
        self._collective(Collective("monitored_barrier"), options).wait(timeout)

    def _take_off(
        self,
        in_flight: InFlightBuffer,
        call: str,
        *,
        asynchronous: bool,
        forgives: Callable[[SimWork], bool] | None = None,
    ) -> None:
        """The tensors of a call may not be those of another one in flight, but for those that
        ``forgives`` is true of.
        """
        if in_flight.outputs_meet():
            raise ArgumentError(
                f"{call}: two outputs share memory: one value would overwrite the other"
            )
        work = self._context.fabric.overlap_table.conflict(in_flight, forgives)
        if work is not None:
            work.race(f"{call} uses memory of {work.name}, which is still in flight")
        if asynchronous:
            in_flight.take_off(call)

    def _issued(self, work: SimWork) -> SimWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _post(self, verb: str, tensors: list[Tensor], peer: Source, tag: int) -> SimWork:
        context = self._enter(verb)
        (tensor,) = tensors
        peer = self._check_message(verb, tensors, peer)
        # torch issues its synchronous send and recv in the same way, so each is in flight.
        sends, place = verb == "send", caller_place()
        context.scheduler.call_lines.called(context.rank, line_of(place))
        if context.job.records_calls:
            context.record_call(verb, self._shared.group.ranks, [(tensor.dtype, tensor.shape)])
        in_flight = InFlightBuffer(tensors if sends else (), () if sends else tensors)
        post = Post(
            context, self._shared.group, verb, self._position, peer, tag, tensor, in_flight, place
        )
        dummies: list[SimWork] = []

        def is_dummy(work: SimWork) -> bool:
            """torch's pipelines receive what nobody reads into one buffer, several times at once."""
            if sends or _users(place) or _users(work.place) or not work.receives:
                return False
            dummies.append(work)
            return True

        self._take_off(in_flight, post.text(), asynchronous=True, forgives=is_dummy)
        if dummies:
            for each in (in_flight, *(work.in_flight for work in dummies)):
                each.unwatch()
        self._shared.mailbox.post(post)
        return self._issued(SimWork(context, post, in_flight, tensors, post.text(), place))

    # Life cycle, and attributes by which torch asks a group about itself.

    def new_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> SimProcessGroup | None:
        """The hook of torch's ``new_group``: every rank of the world calls it, members get their
        handle.
        """
        context = self._enter("new_group")
        group: SimProcessGroup | None = context.fabric.new_group(
            tuple(ranks), group_name, group_desc
        )
        return group

    def shutdown(self) -> None:
        if not self._destroyed:
            self._destroyed = True

    abort = shutdown

    @property
    def alive(self) -> bool:
        """True until the group is destroyed."""
        return not self._destroyed

    @property
    def members(self) -> tuple[int, ...]:
        """The world ranks, in the group's order."""
        return self._shared.group.ranks

    def name(self) -> str:
        return "sim"

    def getBackendName(self) -> str:
        return "sim"

    _get_backend_name = getBackendName

    def __repr__(self) -> str:
        return f"SimProcessGroup(rank {self._context.rank}, group {self._name} of ranks {self._shared.group.ranks})"
