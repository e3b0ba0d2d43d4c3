"""Schedules: their tokens, what a deviation does to a run, and that a token replays it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from pytest_smp import strategies
from pytest_smp.ranks.protocols import VerdictKind
from pytest_smp.ranks.schedule import ROUND_ROBIN, Schedule
from smp_core.errors import ArgumentError


@given(st.dictionaries(st.integers(0, 10**9 - 1), st.integers(1, 10**9 - 1), max_size=4))
def test_a_token_says_everything(deviations: dict[int, int]) -> None:
    schedule = Schedule(tuple(sorted(deviations.items())))
    assert Schedule.parse(str(schedule)) == schedule
    assert eval(repr(schedule)) == schedule


def test_tokens_read_like_this() -> None:
    assert str(Schedule(((3, 1), (17, 2)))) == "3.1-17.2"
    assert str(ROUND_ROBIN) == "round-robin"
    assert Schedule.parse("round-robin") == ROUND_ROBIN


@pytest.mark.parametrize(
    "token", ["", "3", "3.0", "3.1-", "3,1", "-3.1", "3.1-2.1", "3.1-3.2", "x"]
)
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(ArgumentError, match="schedule"):
        Schedule.parse(token)


@pytest.mark.parametrize(
    "deviations",
    [
        ((0, 0),),
        ((-1, 1),),
        ((True, 1),),
        ((0, 1), (0, 1)),
        ((0, 1, 2),),
        (1, 2),
        [(0, 1)],
        None,
        "0.1",
    ],
    ids=str,
)
def test_what_are_no_deviations(deviations: Any) -> None:
    with pytest.raises(ArgumentError, match="ascending"):
        Schedule(deviations)


@pytest.mark.parametrize("schedule", ["0.1", 0, ((0, 1),)])
def test_what_is_no_schedule(smp_world: Any, schedule: Any) -> None:
    with pytest.raises(ArgumentError, match="must be a Schedule"):
        smp_world.report(arrivals, ranks=2, schedule=schedule)


def arrivals() -> list[int]:
    """In which order rank 0 hears from the others."""
    if dist.get_rank():
        dist.send(torch.zeros(1), 0)
        return []
    return [dist.recv(torch.zeros(1)) for _ in range(1, dist.get_world_size())]


def test_round_robin_is_the_order_of_ranks(smp_world: Any) -> None:
    report = smp_world.report(arrivals, ranks=4)
    assert report.values[0] == [1, 2, 3]
    assert report.schedule == ROUND_ROBIN


def test_every_order_of_arrival_has_a_schedule(smp_world: Any) -> None:
    orders = {}
    for first in range(4):
        for second in range(1, 4):
            deviations = ((first, 1 + first % 3), (first + 1, second), (first + 3, 1))
            report = smp_world.report(arrivals, ranks=4, schedule=Schedule(deviations))
            orders[tuple(report.values[0])] = report.schedule
    assert len(orders) == 6
    for order, schedule in orders.items():  # what took effect is enough to replay it
        again = smp_world.report(arrivals, ranks=4, schedule=schedule)
        assert (tuple(again.values[0]), again.schedule) == (order, schedule)


def test_deviations_that_no_decision_comes_to_have_no_effect(smp_world: Any) -> None:
    report = smp_world.report(arrivals, ranks=3, schedule=Schedule(((10**6, 1),)))
    assert report.values[0] == [1, 2]
    assert report.schedule == ROUND_ROBIN


@given(schedule=strategies.schedules(max_deviations=8, horizon=40))
def test_a_program_with_named_partners_does_not_depend_on_the_schedule(
    smp_world: Any, schedule: Schedule
) -> None:
    def body() -> list[Any]:
        rank = dist.get_rank()
        ring = torch.tensor([float(rank)])
        came = torch.zeros(1)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, ring, (rank + 1) % 3),
                dist.P2POp(dist.irecv, came, (rank - 1) % 3),
            ]
        )
        total = torch.tensor([rank + 1])
        work = dist.all_reduce(total, async_op=True)
        while not works[-1].is_completed():
            pass
        dist.barrier()
        for each in [work, *works]:
            each.wait()
        return [came.item(), total.item()]

    report = smp_world.report(body, ranks=3, schedule=schedule)
    assert report.verdict is VerdictKind.PASSED, report.error
    assert report.values == [[2, 6], [0, 6], [1, 6]]


def test_completion_is_seen_when_the_schedule_says(smp_world: Any) -> None:
    def body() -> int:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        polls = 1
        while not work.is_completed():
            polls += 1
        return polls

    assert smp_world.run(body, ranks=2) == [1, 1]
    seen = {
        tuple(smp_world.run(body, ranks=2, schedule=Schedule(((decision, 1),))))
        for decision in range(12)
    }
    assert {(2, 1), (1, 2)} <= seen


def test_any_source_takes_any_sender_and_each_senders_messages_in_order(smp_world: Any) -> None:
    def body() -> list[tuple[int, float]]:
        rank = dist.get_rank()
        if rank:
            works = [dist.isend(torch.tensor([float(n)]), 0) for n in range(2)]
            dist.barrier()
            for work in works:
                work.wait()
            return []
        dist.barrier()
        came = []
        for _ in range(4):
            tensor = torch.zeros(1)
            came.append((dist.recv(tensor), tensor.item()))
        return came

    orders = set()
    for decision in range(24):
        (came, *_) = smp_world.run(body, ranks=3, schedule=Schedule(((decision, 1),)))
        assert [number for source, number in came if source == 1] == [0, 1]
        assert [number for source, number in came if source == 2] == [0, 1]
        orders.add(tuple(source for source, _ in came))
    assert len(orders) > 2


def test_verdicts_carry_their_schedule(smp_world: Any) -> None:
    def body() -> None:
        if dist.get_rank():
            dist.send(torch.zeros(1), 0)
        elif dist.recv(torch.zeros(1)) == 2:  # a protocol that counts on who comes first
            dist.recv(torch.zeros(1), 2)
        else:
            dist.recv(torch.zeros(1), 2)

    found = [
        report
        for decision in range(6)
        for choice in (1, 2)
        if (report := smp_world.report(body, ranks=3, schedule=Schedule(((decision, choice),))))
        and report.verdict is VerdictKind.DEADLOCK
    ]
    assert found
    assert all(report.schedule for report in found)
    assert smp_world.report(body, ranks=3).verdict is VerdictKind.PASSED


@pytest.mark.parametrize("choice", range(1, 4))
def test_a_choice_counts_along_the_queue_and_leaves_its_order(smp_world: Any, choice: int) -> None:
    turns: list[int] = []

    def body() -> None:
        turns.append(dist.get_rank())

    smp_world.run(body, ranks=4, schedule=Schedule(((0, choice),)))
    assert turns == [choice, *(rank for rank in range(4) if rank != choice)]


def test_any_source_may_take_the_message_that_came_later(smp_world: Any) -> None:
    def body() -> int:
        works = []
        for sender in (1, 2):
            if dist.get_rank() == sender:
                works.append(dist.isend(torch.zeros(1), 0))
            dist.barrier()
        came = dist.recv(torch.zeros(1)) if dist.get_rank() == 0 else 0
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1))
        for work in works:
            work.wait()
        return came

    assert smp_world.run(body, ranks=3)[0] == 1
    schedules = [Schedule(((decision, 1),)) for decision in range(30)]
    assert 2 in {smp_world.run(body, ranks=3, schedule=each)[0] for each in schedules}
