"""Bugs of asynchronous work: waits, completion, futures, buffers, groups in flight."""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from conformance.cases.traffic import COLLECTIVES
from conformance.mutants.blocks import PerRun
from conformance.mutants.point_to_point import EITHER, FinishedWork, landing_twice, wrap_dist
from conformance.mutants.protocol import Bugs, Patch
from pytest_smp.ranks.sim import collectives
from pytest_smp.ranks.sim.matching import Call
from pytest_smp.ranks.sim.process_group import SharedGroup, SimProcessGroup
from pytest_smp.ranks.sim.work import SimWork
from smp_core.errors import VerdictError
from smp_core.transport.memory import InFlightBuffer

BUGS = Bugs("asynchronous work")


@BUGS.enter("ASYNC-VALUE", origin="B026")
def wait_returns_early(patch: Patch) -> None:
    """wait returns before the data is there"""
    patch.setattr(SimWork, "wait", lambda self, timeout=None: True)


@BUGS.enter("ASYNC-RETURN")
def synchronous_calls_return_true(patch: Patch) -> None:
    """a synchronous collective returns True"""

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        return True if work is None else work

    for name in COLLECTIVES:
        wrap_dist(patch, name, call)


@BUGS.enter("ASYNC-WAIT-ORDER", origin="B056", kind="point-to-point")
@BUGS.enter("ASYNC-THEN-SYNC", origin="B056", kind="point-to-point")
@BUGS.enter("ASYNC-MIXED", *EITHER, origin="B056", kind="point-to-point")
def wait_ends_the_oldest(patch: Patch) -> None:
    """a wait ends the oldest operation of the rank, whichever it is called for"""
    wait = SimWork.wait

    def oldest(self: SimWork, timeout: Any = None) -> bool:
        return wait(next(iter(self._context.fabric.unwaited.values()), self))

    patch.setattr(SimWork, "wait", oldest)


@BUGS.enter("ASYNC-WAIT-AGAIN")
def second_wait_clears(patch: Patch) -> None:
    """a second wait clears the outputs"""
    wait = SimWork.wait

    def clear(self: SimWork, timeout: Any = None) -> bool:
        if id(self) not in self._context.fabric.unwaited:
            for tensor in self.in_flight.outputs:
                tensor.data.zero_()
        return wait(self)

    patch.setattr(SimWork, "wait", clear)


@BUGS.enter("ASYNC-COMPLETED")
def never_completed(patch: Patch) -> None:
    """is_completed is False, waited for or not"""
    patch.setattr(SimWork, "is_completed", lambda self: False)


@BUGS.enter("ASYNC-COMPLETED")
def completed_at_once(patch: Patch) -> None:
    """is_completed is True before the data is there"""
    patch.setattr(SimWork, "is_completed", lambda self: True)


@BUGS.enter("ASYNC-FUTURE-VALUE", origin="B100")
def future_before_the_reduction(patch: Patch) -> None:
    """the future of an all_reduce holds what this rank brought"""

    def get_future(self: SimWork) -> Future[Any]:
        brought = [tensor.clone() for tensor in self.in_flight.inputs]
        self.wait()
        future: Future[Any] = Future()
        future.set_result(brought)
        return future

    patch.setattr(SimWork, "get_future", get_future)


@BUGS.enter("ASYNC-FUTURE", origin="B100")
def futures_of_others_are_early(patch: Patch) -> None:
    """the futures of all calls but all_reduce are complete before the outputs are there"""
    get_future = SimWork.get_future

    def early(self: SimWork) -> Future[Any]:
        if self.name == "all_reduce":
            return get_future(self)
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    patch.setattr(SimWork, "get_future", early)


@BUGS.enter("ASYNC-KEPT", origin="B118", kind="point-to-point")
def one_result_buffer(patch: Patch) -> None:
    """a result is written into the outputs of the call before, too"""
    landing_twice(patch)


@BUGS.enter("ASYNC-REUSE", origin="B026")
def inputs_read_late(patch: Patch) -> None:
    """all_gather reads the others' inputs when a rank waits, not before they are let go"""
    take_off = InFlightBuffer.take_off

    def keep(self: InFlightBuffer, name: str) -> None:
        originals = self.inputs
        take_off(self, name)
        self.inputs = originals

    def by_reference(calls: list[Call]) -> list[list[torch.Tensor]]:
        return [[call.data[0][0] for call in calls] for _ in calls]

    patch.setattr(InFlightBuffer, "take_off", keep)
    patch.setattr(collectives, "all_gather", by_reference)


@BUGS.enter("ASYNC-GROUPS", *EITHER, origin="B043", kind="groups, roots and rank mapping")
def groups_count_as_one(patch: Patch) -> None:
    """calls are numbered over all groups of a rank"""
    join = SimProcessGroup._collective

    def count(self: SimProcessGroup, *args: Any, **kwargs: Any) -> Any:
        work = join(self, *args, **kwargs)
        for other in self._context.fabric.torch_world().pg_map:
            if other is not self and other._position is not None:
                other._shared.channel._counts[other._position] += 1
        return work

    patch.setattr(SimProcessGroup, "_collective", count)


@BUGS.enter("ASYNC-GROUPS-ORDER", VerdictError, kind="point-to-point")
def one_group_at_a_time(patch: Patch) -> None:
    """a call on a group waits until the rank's calls on other groups are done"""
    join = SimProcessGroup._collective

    def queue(self: SimProcessGroup, *args: Any, **kwargs: Any) -> Any:
        context = self._context
        for work in list(context.fabric.unwaited.values()):
            channel = getattr(work._operation, "channel", self._shared.channel)
            if channel is not self._shared.channel:
                context.scheduler.wait(context.thread_state, work._operation)
        return join(self, *args, **kwargs)

    patch.setattr(SimProcessGroup, "_collective", queue)


@BUGS.enter("ASYNC-GROUPS-ORDER", *EITHER, kind="groups, roots and rank mapping")
def channel_of_the_members(patch: Patch) -> None:
    """groups of the same ranks, in any order, share their calls"""
    init = SharedGroup.__init__
    channels = PerRun(dict)

    def shared(self: SharedGroup, group: Any) -> None:
        init(self, group)
        if len(group.ranks) > 1:
            self.channel = channels().setdefault(frozenset(group.ranks), self.channel)

    patch.setattr(SharedGroup, "__init__", shared)


@BUGS.enter("ASYNC-MIXED", VerdictError, kind="point-to-point")
def messages_count_as_calls(patch: Patch) -> None:
    """a message takes a number among the collective calls of its group"""
    post = SimProcessGroup._post

    def count(self: SimProcessGroup, *args: Any) -> Any:
        self._shared.channel._counts[self._position] += 1
        return post(self, *args)

    patch.setattr(SimProcessGroup, "_post", count)


@BUGS.enter("ASYNC-BARRIER")
def asynchronous_barrier_does_nothing(patch: Patch) -> None:
    """an asynchronous barrier waits for nobody"""
    barrier = SimProcessGroup.barrier

    def nothing(self: SimProcessGroup, opts: Any = None) -> Any:
        return FinishedWork() if getattr(opts, "asyncOp", False) else barrier(self, opts)

    patch.setattr(SimProcessGroup, "barrier", nothing)
