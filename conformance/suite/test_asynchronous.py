"""Properties of asynchronous collectives: handles in any order, on one group and on several.

Outputs are read only after their own wait, and inputs are not changed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch.distributed as dist
from hypothesis import given

from conformance.cases import traffic
from conformance.cases.draws import be_late, on_ranks, pairs, sizes, some
from conformance.cases.traffic import (
    PLAIN,
    GroupCall,
    GroupExchange,
    Ranks,
    calls,
    check,
    few,
    is_member,
    issue,
    issue_all,
    new_groups,
    once,
    overlapping_groups,
    programs,
)
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld, TmpPath
from pytest_smp.strategies import TensorSpec

CallOrders = list[list[int]]  # the numbers of all calls, in an order for each rank


def orders(data: st.DataObject, ranks: int, count: int, name: str) -> CallOrders:
    """Draw an order of so many calls for each rank."""
    permutations = st.permutations(range(count))
    return [list(data.draw(permutations, f"{name} of rank {rank}")) for rank in range(ranks)]


# ---- One call ------------------------------------------------------------------------------------


def call_and_wait(call: GroupCall, times: int) -> None:
    """Issue one call, wait for it several times, and check its outputs after each wait."""
    issued = issue(call, 0, 1, None)
    for _ in range(times):
        issued.finish()


@requirement("ASYNC-VALUE")
@given(data=st.data())
@on_ranks
def test_values_after_the_wait(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    call = data.draw(calls(smp_world, [ranks]), "call")
    smp_world.run(call_and_wait, call, 1, ranks=ranks)


@requirement("ASYNC-WAIT-AGAIN")
@given(data=st.data(), times=st.integers(2, 4))
@few
def test_waits_again(smp_world: SmpWorld, data: st.DataObject, times: int) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    call = data.draw(calls(smp_world, [ranks]), "call")
    smp_world.run(call_and_wait, call, times, ranks=ranks)


def call_both_ways(call: GroupCall) -> None:
    """Check that an asynchronous call returns a handle with wait and is_completed, and a synchronous one None."""
    issued = issue(call, 0, 2, None)
    for method in ("wait", "is_completed"):
        has = callable(getattr(issued.work, method, None))
        check(has, True, f"whether the handle of an asynchronous {call.kind} has {method}")
    issued.finish()
    issued = issue(call, 1, 2, None, asynchronous=False)
    check(issued.work, None, f"what a synchronous {call.kind} returned")
    issued.look("when it has returned")


@requirement("ASYNC-RETURN")
@given(data=st.data())
@few
def test_what_calls_return(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    smp_world.run(call_both_ways, data.draw(calls(smp_world, [ranks]), "call"), ranks=ranks)


def ask_and_wait(program: Sequence[GroupCall], asks: int) -> None:
    """Poll is_completed of each call, and check its outputs once it is True, and after the wait."""
    flying = issue_all(program, [None])
    for issued in flying.values():
        for _ in range(asks):
            if issued.work.is_completed():
                issued.look("completed, as it says")
        issued.finish()
        what = f"is_completed of {issued.side.call.kind}, after its wait"
        check(issued.work.is_completed(), True, what)


@requirement("ASYNC-COMPLETED")
@pytest.mark.parametrize("kind", traffic.COLLECTIVES)
@given(data=st.data(), asks=st.integers(0, 2))
@once
def test_completed_work(smp_world: SmpWorld, data: st.DataObject, kind: str, asks: int) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    call = data.draw(calls(smp_world, [ranks], kind=kind), "call")
    others = data.draw(programs(smp_world, [ranks], least=0, most=2), "others")
    smp_world.run(ask_and_wait, [call, *others], asks, ranks=ranks)


def wait_for_futures(
    program: Sequence[GroupCall], waits: CallOrders, reduced: bool = False
) -> None:
    """Issue calls, wait for their futures in these orders, check the outputs, and wait for the handles.

    Args:
        program: the calls.
        waits: the order of waits for each rank.
        reduced: whether to check that each future's value is the reduced tensor.
    """
    me, flying = dist.get_rank(), issue_all(program, [None])
    futures = {number: issued.work.get_future() for number, issued in flying.items()}
    for number in waits[me]:
        value = futures[number].wait()
        if reduced:
            (tensor,) = value if isinstance(value, list) else [value]
            check(tensor, flying[number].expected[0], f"the future of call {number}")
        flying[number].look("when its future is done")
        what = f"done of the future of call {number}, {program[number].kind}, after its wait"
        check(futures[number].done(), True, what)
    for issued in flying.values():
        issued.finish()


@requirement("ASYNC-FUTURE")
@pytest.mark.parametrize("kind", [name for name in traffic.COLLECTIVES if name != "barrier"])
@given(data=st.data())
@once
def test_futures(smp_world: SmpWorld, data: st.DataObject, kind: str) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    call = data.draw(calls(smp_world, [ranks], moving=True, kind=kind), "call")
    others = data.draw(st.lists(calls(smp_world, [ranks], moving=True), max_size=2), "others")
    program = [call, *others]
    waits = orders(data, ranks, len(program), "waits")
    # The futures are made in the program's order, because torch lets a backend wait in get_future.
    smp_world.run(wait_for_futures, program, waits, ranks=ranks)


@requirement("ASYNC-FUTURE-VALUE")
@given(data=st.data(), counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
@few
def test_futures_of_reductions(smp_world: SmpWorld, data: st.DataObject, counts: list[int]) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    program = [GroupCall("all_reduce", PLAIN, count) for count in counts]
    waits = orders(data, ranks, len(program), "waits")
    smp_world.run(wait_for_futures, program, waits, True, ranks=ranks)


# ---- Several calls of one group ------------------------------------------------------------------


def fly(
    groups: Sequence[Ranks | None],
    program: Sequence[GroupCall],
    issues: CallOrders | None,
    waits: CallOrders,
) -> None:
    """Issue all calls, in the program's order or in the rank's own, and wait for them in another order.

    Every output is checked after its wait, and again after the last handle is gone.
    """
    me = dist.get_rank()
    with new_groups(groups) as handles:
        if issues is None:
            flying = issue_all(program, handles)
        else:
            flying = {
                number: issue(program[number], number, len(program), handles[program[number].group])
                for number in issues[me]
                if is_member(handles[program[number].group])
            }
        done = []
        for number in waits[me]:
            if number in flying:
                flying[number].finish()
                done.append(flying.pop(number)._replace(work=None))
        for issued in done:
            issued.look("at the end")


@requirement("ASYNC-WAIT-ORDER")
@given(data=st.data())
@few
def test_waits_in_any_order(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    program = data.draw(programs(smp_world, [ranks]), "program")
    waits = orders(data, ranks, len(program), "waits")
    smp_world.run(fly, [None], program, None, waits, ranks=ranks)


@requirement("ASYNC-KEPT")
@given(data=st.data(), count=st.integers(2, 6))
@few
def test_outputs_stay(smp_world: SmpWorld, data: st.DataObject, count: int) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    call = data.draw(calls(smp_world, [ranks], moving=True), "call")
    waits = [list(range(count))] * ranks
    smp_world.run(fly, [None], [call] * count, None, waits, ranks=ranks)


def call_between(flying: Sequence[GroupCall], call: GroupCall) -> None:
    """Make a synchronous call while others are in flight, and check all outputs."""
    program = [*flying, call]
    issued = issue_all(flying, [None])
    number = len(flying)
    issue(call, number, len(program), None, asynchronous=False).look("when it has returned")
    for each in issued.values():
        each.finish()


@requirement("ASYNC-THEN-SYNC")
@given(data=st.data())
@few
def test_synchronous_calls_between(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    flying = data.draw(programs(smp_world, [ranks], least=1, most=3), "flying")
    call = data.draw(calls(smp_world, [ranks], moving=True), "call")
    smp_world.run(call_between, flying, call, ranks=ranks)


def gather_again(spec: TensorSpec, rounds: int) -> None:
    """Gather with the same tensors in every round; inputs and outputs change right after each wait."""
    me, world = dist.get_rank(), dist.get_world_size()
    own, outputs = spec.blank(), [spec.blank() for _ in range(world)]
    for number in range(rounds):
        values = [spec.make(number * world + rank, rounds * world + 1) for rank in range(world)]
        own.copy_(values[me])
        work = dist.all_gather(outputs, own, async_op=True)
        assert work is not None
        work.wait()
        own.copy_(spec.make(rounds * world, rounds * world + 1))
        for rank, (output, value) in enumerate(zip(outputs, values, strict=True)):
            what = f"all_gather of {spec.dtype} on the default group, round {number} of {rounds}"
            check(output, value, f"{what}: the part of rank {rank}")
        for output in outputs:
            output.copy_(own)


@requirement("ASYNC-REUSE")
@given(data=st.data(), rounds=st.integers(1, 4))
@few
def test_tensors_are_used_again(smp_world: SmpWorld, data: st.DataObject, rounds: int) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    smp_world.run(gather_again, TensorSpec((3,), PLAIN), rounds, ranks=ranks)


def mix(program: Sequence[GroupCall], exchange: GroupExchange) -> None:
    """Issue half of the calls, exchange messages, issue the other half, and check everything."""
    half = len(program) // 2
    first = {n: issue(program[n], n, len(program), None) for n in range(half)}
    traffic.take_part(exchange, None)
    rest = {n: issue(program[n], n, len(program), None) for n in range(half, len(program))}
    for issued in [*rest.values(), *first.values()]:
        issued.finish()


@requirement("ASYNC-MIXED")
@given(data=st.data())
@few
def test_messages_between_calls(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    program = data.draw(programs(smp_world, [ranks], most=4), "program")
    # Ranks have different numbers of messages: a message counted as a collective would shift the matching.
    message = pairs(ranks).map(lambda pair: traffic.GroupMessage(*pair, 0, 2))
    messages = st.lists(message, min_size=1, max_size=4)
    drawn = traffic.exchanges(ranks, messages, traffic.dtypes(smp_world))
    smp_world.run(mix, program, data.draw(drawn, "exchange"), ranks=ranks)


# ---- Several groups ------------------------------------------------------------------------------


def check_groups(smp_world: SmpWorld, data: st.DataObject, one_order: bool) -> None:
    """Draw calls on overlapping groups and the world, and check their outputs.

    With ``one_order`` all ranks issue the calls in the program's order, otherwise each in its own.
    """
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    made = data.draw(overlapping_groups(smp_world, ranks), "groups")
    groups: list[Ranks | None] = [None, *made]
    program = data.draw(programs(smp_world, [ranks, *map(len, made)], most=8), "program")
    waits = orders(data, ranks, len(program), "waits")
    issues = None
    if not one_order:
        # Calls of one group must keep the program's order on every rank, since they match by number.
        issues = []
        for drawn in orders(data, ranks, len(program), "issues"):
            own = [program[number].group for number in drawn]
            left = {g: [n for n, c in enumerate(program) if c.group == g] for g in set(own)}
            issues.append([left[group].pop(0) for group in own])
    smp_world.run(fly, groups, program, issues, waits, ranks=ranks)


@requirement("ASYNC-GROUPS")
@given(data=st.data())
@few
def test_groups_in_flight(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_groups(smp_world, data, one_order=True)


@requirement("ASYNC-GROUPS-ORDER")
@given(data=st.data())
@few
def test_groups_in_another_order_on_each_rank(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_groups(smp_world, data, one_order=False)


# ---- Barriers ------------------------------------------------------------------------------------


def meet_later(rounds: int, late: list[int], folder: Path) -> list[list[int]]:
    """Issue barriers and wait for each; return the ranks that were missing after each wait."""
    me, world, missing = dist.get_rank(), dist.get_world_size(), []
    for number in range(rounds):
        if me in late:
            be_late(late)
        (folder / f"{me} at {number}").touch()
        work = dist.barrier(async_op=True)
        assert work is not None
        work.wait()
        missing.append([r for r in range(world) if not (folder / f"{r} at {number}").exists()])
    return missing


@requirement("ASYNC-BARRIER")
@given(data=st.data(), rounds=st.integers(1, 3))
@few
def test_a_barrier_that_was_waited_for(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject, rounds: int
) -> None:
    """Files show which ranks have entered, as in test_barriers."""
    ranks = data.draw(sizes(smp_world), "ranks")
    late = data.draw(some(range(ranks)), "late")
    seen = smp_world.run(meet_later, rounds, late, smp_tmp_path.fresh(), ranks=ranks)
    for rank, barriers in enumerate(seen):
        for number, missing in enumerate(barriers):
            what = f"ranks that had not come when the wait for barrier {number} was over"
            check(missing, [], what, rank)
