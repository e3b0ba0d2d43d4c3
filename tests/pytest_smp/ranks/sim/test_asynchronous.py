"""Asynchronous operations on `sim`: works can be waited for late, in any order, and in every way."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Work

RANKS = range(3)


def numbers(rank: int, slot: int) -> list[float]:
    return [float(1 + index + 10 * slot + 100 * rank) for index in range(4)]


def tensor(rank: int, slot: int) -> torch.Tensor:
    return torch.tensor(numbers(rank, slot))


def every_form(rank: int) -> tuple[list[Work], list[list[torch.Tensor]]]:
    """One asynchronous call of each collective, and the tensors that each writes."""
    size = len(RANKS)
    works: list[Any] = []
    outputs: list[list[torch.Tensor]] = []

    def empty(count: int = 4) -> torch.Tensor:
        return torch.full((count,), -1.0)

    def issued(work: Any, written: list[torch.Tensor]) -> None:
        works.append(work)
        outputs.append(written)

    mine = tensor(rank, 0)
    issued(dist.broadcast(mine, src=2, async_op=True), [mine])
    mine = tensor(rank, 1)
    issued(dist.all_reduce(mine, async_op=True), [mine])
    mine = tensor(rank, 2)
    issued(dist.reduce(mine, dst=1, async_op=True), [mine] if rank == 1 else [])
    many = [empty() for _ in RANKS]
    issued(dist.all_gather(many, tensor(rank, 3), async_op=True), many)
    one = empty(4 * size)
    issued(dist.all_gather_single(one, tensor(rank, 4), async_op=True), [one])
    one = empty()
    inputs = [tensor(rank, 5 + slot) for slot in RANKS]
    issued(dist.reduce_scatter(one, inputs, async_op=True), [one])
    one = empty()
    issued(dist.reduce_scatter_single(one, torch.cat(inputs), async_op=True), [one])
    one = empty()
    issued(dist.scatter(one, inputs if rank == 1 else None, src=1, async_op=True), [one])
    many = [empty() for _ in RANKS] if rank == 1 else []
    issued(dist.gather(tensor(rank, 3), many or None, dst=1, async_op=True), many)
    many = [empty() for _ in RANKS]
    issued(dist.all_to_all(many, inputs, async_op=True), many)
    one = empty(4 * size)
    issued(dist.all_to_all_single(one, torch.cat(inputs), async_op=True), [one])
    issued(dist.barrier(async_op=True), [])
    return works, outputs


def expected(rank: int) -> list[list[list[float]]]:
    """The values that `every_form` writes, from the definition of each collective."""

    def total(slot: int) -> list[float]:
        return [sum(column) for column in zip(*(numbers(r, slot) for r in RANKS), strict=True)]

    dealt = [numbers(other, 5 + rank) for other in RANKS]
    return [
        [numbers(2, 0)],
        [total(1)],
        [total(2)] if rank == 1 else [],
        [numbers(other, 3) for other in RANKS],
        [[*chain(*(numbers(other, 4) for other in RANKS))]],
        [total(5 + rank)],
        [total(5 + rank)],
        [dealt[1]],
        [numbers(other, 3) for other in RANKS] if rank == 1 else [],
        dealt,
        [[*chain(*dealt)]],
        [],
    ]


def test_works_are_waited_for_in_another_order_on_every_rank(smp_world: Any) -> None:
    def body() -> list[list[list[float]]]:
        rank = dist.get_rank()
        works, outputs = every_form(rank)
        order = list(range(len(works)))
        for index in [order[::-1], order, order[1::2] + order[::2]][rank]:
            assert works[index].wait()
        return [[each.tolist() for each in written] for written in outputs]

    assert smp_world.run(body, ranks=len(RANKS)) == [expected(rank) for rank in RANKS]


@pytest.mark.parametrize("how", ["get_future", "synchronize", "result", "is_completed"])
def test_every_way_of_waiting_gives_the_values(smp_world: Any, how: str) -> None:
    def body() -> list[list[list[float]]]:
        works, outputs = every_form(dist.get_rank())
        for work, written in zip(works, outputs, strict=True):
            if how == "get_future":
                future = work.get_future()
                assert future.done()
                _check_holds(future.value(), written)
            elif how == "is_completed":
                while not work.is_completed():
                    pass
                assert work.is_success()
            else:
                getattr(work, how)()
        return [[each.tolist() for each in written] for written in outputs]

    assert smp_world.run(body, ranks=len(RANKS)) == [expected(rank) for rank in RANKS]


def _check_holds(value: Any, written: list[torch.Tensor]) -> None:
    """The future's value is the tensors that the call writes, however deep in lists."""
    if not written:
        return
    flat = list(value)
    while flat and isinstance(flat[0], list):
        flat = list(chain.from_iterable(flat))
    assert all(a is b for a, b in zip(flat, written, strict=True))


@pytest.mark.parametrize("ask", ["is_completed", "is_success"])
def test_a_work_is_not_done_before_all_have_called(smp_world: Any, ask: str) -> None:
    def body() -> list[float]:
        mine = tensor(dist.get_rank(), 0)
        if dist.get_rank() == 0:
            work = dist.all_reduce(mine, async_op=True)
            assert not getattr(work, ask)()
            dist.send(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)
            work = dist.all_reduce(mine, async_op=True)
        while not getattr(work, ask)():
            pass
        return mine.tolist()  # type: ignore[no-any-return]

    total = [sum(column) for column in zip(*(numbers(r, 0) for r in range(2)), strict=True)]
    assert smp_world.run(body, ranks=2) == [total, total]


def test_waiting_twice_is_allowed(smp_world: Any) -> None:
    def body() -> list[float]:
        mine = tensor(dist.get_rank(), 0)
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
        mine += 1
        work.wait()
        result: list[float] = mine.tolist()
        return result

    total = [1 + sum(column) for column in zip(*(numbers(r, 0) for r in RANKS), strict=True)]
    assert smp_world.run(body, ranks=3) == [total] * 3


def test_then_on_a_future_runs_with_the_result(smp_world: Any) -> None:
    """How DDP's communication hooks chain work."""

    def body() -> list[float]:
        work = dist.all_reduce(tensor(dist.get_rank(), 0), async_op=True)
        halved = work.get_future().then(lambda future: future.value()[0] / 2)
        result: list[float] = halved.wait().tolist()
        return result

    total = [sum(column) / 2 for column in zip(*(numbers(r, 0) for r in RANKS), strict=True)]
    assert smp_world.run(body, ranks=3) == [total] * 3
