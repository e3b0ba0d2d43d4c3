"""Bugs of asynchronous work: waits, completion, futures, buffers, groups in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from conformance.cases.traffic import COLLECTIVES
from conformance.mutants.blocks import PerRun
from conformance.mutants.point_to_point import EITHER, FinishedWork, landing_twice, wrap_dist
from conformance.mutants.protocol import Bugs, Patch
from pytest_smp.ranks.sim import collectives
from pytest_smp.ranks.sim.mailbox import Mailbox, Post
from pytest_smp.ranks.sim.matching import Call, Meeting
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


# ---- Progress ------------------------------------------------------------------------------------


class _Attention:
    """The wait of a meeting's members for those of them that must be waiting, too. An Operation of the scheduler."""

    def __init__(self, meeting: Meeting, needed: Sequence[int]) -> None:
        self.meeting, self.left, self.done = meeting, set(needed), False

    def describe(self, rank: int) -> str:
        return self.meeting.describe(rank)

    def missing(self, rank: int) -> Sequence[int]:
        return sorted(self.left)

    def come(self, work: SimWork) -> None:
        """Note that a member waits, and return when all that are needed have waited."""
        context = work._context
        self.left.discard(context.rank)
        if not self.left and not self.done:
            self.done = True
            for rank in self.meeting.channel.group.ranks:
                context.scheduler.wake(rank, self)
        context.scheduler.wait(context.thread_state, self)


def _moved_by_waits(patch: Patch, needed: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
    """Let a collective end only when certain members of its group have waited for it."""
    wait, found = SimWork._wait, PerRun(dict)

    def attentive(self: SimWork, *timeout: Any) -> None:
        meeting = self._operation
        if isinstance(meeting, Meeting):
            ranks = meeting.channel.group.ranks
            # By the meeting itself, which the table keeps: no other one gets its id.
            attention = found().setdefault(id(meeting), _Attention(meeting, needed(ranks)))
            attention.come(self)
        wait(self, *timeout)

    patch.setattr(SimWork, "_wait", attentive)


@BUGS.enter("ASYNC-PROGRESS", VerdictError)
def moved_by_the_waits_of_all(patch: Patch) -> None:
    """a collective goes on only while all members wait for it"""
    _moved_by_waits(patch, lambda ranks: ranks)


@BUGS.enter("ASYNC-PROGRESS", VerdictError)
def moved_by_the_first_rank(patch: Patch) -> None:
    """the first rank of the group moves the data of a collective while it waits"""
    _moved_by_waits(patch, lambda ranks: ranks[:1])


def _posted_by_waits(patch: Patch, verb: str) -> None:
    """Let a send, or a receive, begin when its rank waits for it."""
    post, wait, late = Mailbox.post, SimWork._wait, PerRun(dict)

    def later(self: Mailbox, new: Post) -> None:
        if new.verb == verb:
            late()[id(new)] = self, new
        else:
            post(self, new)

    def begin(self: SimWork, *timeout: Any) -> None:
        mailbox, new = late().pop(id(self._operation), (None, None))
        if mailbox is not None:
            post(mailbox, new)
        wait(self, *timeout)

    patch.setattr(Mailbox, "post", later)
    patch.setattr(SimWork, "_wait", begin)


@BUGS.enter("ASYNC-PROGRESS-MESSAGE", VerdictError, kind="point-to-point")
def sent_by_the_wait(patch: Patch) -> None:
    """an asynchronous send leaves when its rank waits for it"""
    _posted_by_waits(patch, "send")


@BUGS.enter("ASYNC-PROGRESS-MESSAGE", VerdictError, kind="point-to-point")
def received_by_the_wait(patch: Patch) -> None:
    """an asynchronous receive takes its message when its rank waits for it"""
    _posted_by_waits(patch, "recv")


@BUGS.enter("ASYNC-PROGRESS-FUTURE", VerdictError)
@BUGS.enter("ASYNC-PROGRESS-BUCKET", VerdictError)
def futures_end_with_the_wait(patch: Patch) -> None:
    """a future completes when its rank waits for the work"""
    wait, futures = SimWork._wait, PerRun(dict)

    def get_future(self: SimWork) -> Future[Any]:
        future: Future[Any] = Future()
        futures()[id(self)] = self, future
        return future

    def complete(self: SimWork, *timeout: Any) -> None:
        wait(self, *timeout)
        _, future = futures().pop(id(self), (None, None))
        if future is not None:
            future.set_result(self._outputs)

    patch.setattr(SimWork, "get_future", get_future)
    patch.setattr(SimWork, "_wait", complete)


@BUGS.enter("ASYNC-PROGRESS-FUTURE", VerdictError)
@BUGS.enter("ASYNC-PROGRESS-BUCKET", VerdictError)
def futures_end_with_the_next_call(patch: Patch) -> None:
    """the future of a call completes when the rank makes its next call"""
    get_future, collective, last = SimWork.get_future, SimProcessGroup._collective, PerRun(dict)

    def later(self: SimWork) -> Future[Any]:
        future: Future[Any] = Future()
        last()[self._context.rank] = self, future
        return future

    def then_end(self: SimProcessGroup, *args: Any, **kwargs: Any) -> Any:
        work = collective(self, *args, **kwargs)
        before, future = last().pop(self._context.rank, (None, None))
        if before is not None:
            future.set_result(get_future(before).value())
        return work

    patch.setattr(SimWork, "get_future", later)
    patch.setattr(SimProcessGroup, "_collective", then_end)


@BUGS.enter("ASYNC-PROGRESS-FUTURE")
@BUGS.enter("ASYNC-PROGRESS-BUCKET")
def callbacks_see_what_was_brought(patch: Patch) -> None:
    """a future completes before the reduction, with the tensors that this rank brought"""

    def get_future(self: SimWork) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result([tensor.clone() for tensor in self.in_flight.inputs])
        return future

    patch.setattr(SimWork, "get_future", get_future)
