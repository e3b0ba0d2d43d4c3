"""Properties of asynchronous progress: operations complete while ranks that started them make no call.

A rank that makes no call waits for a key of the default group's store. The ranks whose work must be done first set the
key, so a backend that needs calls never ends the run. No property measures time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import given
from torch.distributed import distributed_c10d

from conformance.cases import traffic
from conformance.cases.draws import sizes
from conformance.cases.traffic import (
    PLAIN,
    GroupCall,
    GroupMessage,
    calls,
    check,
    content,
    few,
    issue_all,
)
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import same

Tensor = torch.Tensor
_c10d: Any = distributed_c10d  # its stubs lack stores

#: Numbers of elements. The last one is more than backends send before the receiver asks.
COUNTS = (1, 3, 40_000)

_runs = itertools.count()


class Signals:
    """Keys of one run in the store of the default group: a channel beside the operations of process groups.

    ``run`` is a number that no other run of the session has, because the store of warm ranks outlives a run.
    ``callbacks``: callbacks of futures give signals, too.
    """

    def __init__(self, run: int, callbacks: bool = False) -> None:
        # A callback may run on another thread while this one waits. Some stores serve one call at a time on each
        # handle, so a callback has a handle of its own. torch clones no prefix of a store that is made in Python.
        store = _c10d._get_default_store()
        stores = self._kept = [store, store.clone() if callbacks else store]
        self._own, self._callbacks = (_c10d.PrefixStore(f"signals {run}", each) for each in stores)

    def give(self, signal: str, callback: bool = False) -> None:
        """Set a key, as a callback or as the rank's thread."""
        (self._callbacks if callback else self._own).set(signal, "given")

    def await_all(self, signals: Sequence[str]) -> None:
        """Return when all these keys are set. No operation of a process group is called meanwhile."""
        if signals:
            self._own.wait(list(signals))


def idle_ranks(ranks: int) -> st.SearchStrategy[list[int]]:
    """Draw ranks that make no call: one at least, and not all."""
    order = st.permutations(range(ranks))
    return st.builds(lambda order, count: sorted(order[:count]), order, st.integers(1, ranks - 1))


# ---- Collectives and messages --------------------------------------------------------------------


def wait_or_idle(works: Sequence[Any], idle: Sequence[int], run: int) -> None:
    """Wait for each work once, on an idle rank after all others have done so, and no call was made meanwhile.

    If a wait does not end meanwhile, the run ends with a verdict, or with the time limit of the store or of the group.
    """
    signals, me = Signals(run), dist.get_rank()
    busy = [rank for rank in range(dist.get_world_size()) if rank not in idle]
    if me in idle:
        signals.await_all([f"rank {rank}" for rank in busy])
    for work in works:
        work.wait()
    if me in busy:
        signals.give(f"rank {me}")


def call_and_idle(
    program: Sequence[GroupCall], order: Sequence[int], idle: Sequence[int], run: int
) -> None:
    """Issue all calls, wait for them in an order or be idle, and check all outputs."""
    flying = issue_all(program, [None])
    wait_or_idle([flying[number].work for number in order], idle, run)
    for issued in flying.values():
        issued.look("after its wait")


@requirement("ASYNC-PROGRESS")
@given(data=st.data())
@few
def test_others_wait_for_a_rank_that_makes_no_call(
    smp_world: SmpWorld, data: st.DataObject
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    idle = data.draw(idle_ranks(ranks), "idle")
    each = st.builds(
        lambda call, count: call._replace(numel=count),
        calls(smp_world, [ranks]),
        st.sampled_from(COUNTS),
    )
    program = data.draw(st.lists(each, min_size=1, max_size=3), "program")
    order = data.draw(st.permutations(range(len(program))), "order of waits")
    smp_world.run(call_and_idle, program, order, idle, next(_runs), ranks=ranks)


def send_and_idle(
    messages: Sequence[GroupMessage], dtype: torch.dtype, idle: Sequence[int], run: int
) -> None:
    """Post this rank's messages, wait for them or be idle, and check what was received."""
    me, posted = dist.get_rank(), []
    for number, message in enumerate(messages):
        if me in message[:2]:
            value = content(message, number, len(messages), dtype)
            tensor = value.clone() if me == message.src else value.new_zeros(value.shape)
            work = traffic.post(message, me, tensor, None)
            posted.append((work, tensor, value, f"message {number} of {len(messages)}, {message}"))
    wait_or_idle([work for work, *_ in posted], idle, run)
    for _, tensor, value, what in posted:
        check(tensor, value, f"{what}, after its wait")


@requirement("ASYNC-PROGRESS-MESSAGE")
@given(data=st.data())
@few
def test_a_partner_waits_for_a_rank_that_makes_no_call(
    smp_world: SmpWorld, data: st.DataObject
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    idle = data.draw(idle_ranks(ranks), "idle")
    busy = [rank for rank in range(ranks) if rank not in idle]
    ends = st.tuples(st.sampled_from(idle), st.sampled_from(busy))
    ends |= ends.map(lambda pair: (pair[1], pair[0]))
    message = st.builds(
        lambda pair, count: GroupMessage(pair[0], pair[1], numel=count),
        ends,
        st.sampled_from(COUNTS),
    )
    messages = data.draw(st.lists(message, min_size=1, max_size=4), "messages")
    dtype = data.draw(traffic.dtypes(smp_world), "dtype")
    smp_world.run(send_and_idle, messages, dtype, idle, next(_runs), ranks=ranks)


# ---- Futures -------------------------------------------------------------------------------------


def note(future: Any, signal: str, signals: Signals, expected: Tensor, right: list[bool]) -> None:
    """Let a callback of the future compare its value with the expected tensor, and give the signal."""

    def callback(done: Any) -> None:
        try:
            value = done.value()
            (tensor,) = value if isinstance(value, list) else [value]
            right.append(same(tensor, expected))
        except Exception:
            right.append(False)
        signals.give(signal, callback=True)

    future.then(callback)


def call_back(program: Sequence[GroupCall], run: int) -> None:
    """Issue all calls, make no call until the callbacks of all ranks have run, and check futures and outputs."""
    me, signals, right = dist.get_rank(), Signals(run, callbacks=True), list[bool]()
    flying = issue_all(program, [None])
    futures = [issued.work.get_future() for issued in flying.values()]
    for number, future in enumerate(futures):
        note(future, f"{number} on {me}", signals, flying[number].expected[0], right)
    everywhere = itertools.product(flying, range(dist.get_world_size()))
    signals.await_all([f"{number} on {rank}" for number, rank in everywhere])
    check(right, [True] * len(program), "callbacks that have seen the reduced tensor")
    check([each.done() for each in futures], [True] * len(program), "futures that are done")
    for issued in flying.values():
        issued.look("when its callback has run")
        issued.finish()


@requirement("ASYNC-PROGRESS-FUTURE")
@given(data=st.data())
@few
def test_callbacks_run_while_no_rank_makes_a_call(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    counts = data.draw(st.lists(st.sampled_from(COUNTS), min_size=1, max_size=4), "elements")
    program = [GroupCall("all_reduce", PLAIN, count) for count in counts]
    smp_world.run(call_back, program, next(_runs), ranks=ranks)


# ---- The backward pass ---------------------------------------------------------------------------

#: The numbers of elements of each bucket's parameters, in the order of the backward pass.
Buckets = list[list[int]]


class GradientBucket:
    """Parameters whose gradients are summed over all ranks in one call, once the last of them is complete."""

    def __init__(self, number: int, parameters: Sequence[Tensor]) -> None:
        self.number, self.parameters = number, parameters
        self.left = len(parameters)
        self.work: Any = None
        self.future: Any = None
        self.sums: Tensor | None = None


def backward_pass(buckets: Buckets, awaited: Sequence[Sequence[int]], run: int) -> list[int]:
    """Reduce buckets in hooks of a backward pass. Return how many of them had completed in the hook of each bucket.

    Before the hook of a bucket ends, all ranks have seen the callbacks of the buckets in its row of ``awaited``.
    """
    me, world, signals = dist.get_rank(), dist.get_world_size(), Signals(run, callbacks=True)
    made = [
        GradientBucket(number, [torch.ones(count, requires_grad=True) for count in counts])
        for number, counts in enumerate(buckets)
    ]
    seen, right = [], list[bool]()

    def on_gradient(bucket: GradientBucket, _: Tensor) -> None:
        bucket.left -= 1
        if bucket.left:
            return
        number = bucket.number
        bucket.sums = torch.cat([each.grad for each in bucket.parameters if each.grad is not None])
        bucket.work = dist.all_reduce(bucket.sums, async_op=True)
        bucket.future = bucket.work.get_future()
        note(bucket.future, f"{number} on {me}", signals, whole(bucket), right)
        everywhere = itertools.product(awaited[number], range(world))
        signals.await_all([f"{before} on {rank}" for before, rank in everywhere])
        seen.append(sum(made[before].future.done() for before in awaited[number]))

    def whole(bucket: GradientBucket) -> Tensor:
        assert bucket.sums is not None
        gradients = [float((bucket.number + 1) * (rank + 1)) for rank in range(world)]
        return torch.full_like(bucket.sums, sum(gradients))

    for bucket in made:
        for parameter in bucket.parameters:
            hook = functools.partial(on_gradient, bucket)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    total = torch.zeros(())
    for bucket in reversed(made):  # the backward pass begins with what comes last
        for parameter in reversed(bucket.parameters):
            total = total + (parameter * float((bucket.number + 1) * (me + 1))).sum()
    total.backward()  # type: ignore[no-untyped-call]
    signals.await_all([f"{bucket.number} on {me}" for bucket in made])
    check(right, [True] * len(made), "callbacks that have seen the sums")
    for bucket in made:
        bucket.work.wait()
        check(bucket.sums, whole(bucket), f"the sums of bucket {bucket.number}, after its wait")
    return seen


@requirement("ASYNC-PROGRESS-BUCKET")
@given(data=st.data())
@few
def test_buckets_complete_before_the_backward_pass_ends(
    smp_world: SmpWorld, data: st.DataObject
) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    counts = st.lists(st.sampled_from(COUNTS), min_size=1, max_size=3)
    buckets = data.draw(st.lists(counts, min_size=2, max_size=4), "buckets")
    awaited = [
        sorted(data.draw(st.sets(st.integers(0, number - 1)), f"awaited in bucket {number}"))
        if number
        else []
        for number in range(len(buckets))
    ]
    awaited[-1] = awaited[-1] or [len(buckets) - 2]
    seen = smp_world.run(backward_pass, buckets, awaited, next(_runs), ranks=ranks)
    expected = [len(each) for each in awaited]
    traffic.check_ranks(seen, [expected] * ranks, "buckets that had completed in each hook")
