"""Functional collectives on `sim`: ``_functional_collectives`` and ``torch.distributed.nn.functional``
give values and gradients.

The expected gradient is that of the sum over all ranks of <weights of the rank, its outputs>, by hand
from the definition: an input element's gradient is the sum of the weights of the places that it went
to.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch import distributed as dist

SIZE = 3
RANKS = range(SIZE)
Row = list[float]


def numbers(rank: int, slot: int = 0) -> Row:
    return [1.0 + 10 * slot + 100 * rank, 2.0 + 10 * slot + 100 * rank]


def tensor(rank: int, slot: int = 0) -> torch.Tensor:
    return torch.tensor(numbers(rank, slot))


def total(rows: list[Row]) -> Row:
    return [sum(column) for column in zip(*rows, strict=True)]


# torch.distributed._functional_collectives


def test_functional_collectives_by_group_and_by_name(smp_world: Any) -> None:
    def body() -> list[Any]:
        rank = dist.get_rank()
        world: Any = dist.group.WORLD
        results = []
        for group in (world, world.group_name):
            stacked = torch.stack([tensor(rank, slot) for slot in RANKS])
            results += [
                funcol.all_reduce(tensor(rank), "sum", group).tolist(),
                funcol.all_reduce(tensor(rank), "max", group).tolist(),
                funcol.broadcast(tensor(rank), 2, group).tolist(),
                funcol.all_gather_single(tensor(rank), 0, group).tolist(),
                funcol.all_gather_single(tensor(rank).view(2, 1), 1, group).tolist(),
                funcol.reduce_scatter_single(stacked, "sum", 0, group).tolist(),
                funcol.all_to_all_single(stacked, None, None, group).tolist(),
            ]
        return results

    everyone = [numbers(rank) for rank in RANKS]
    for rank, got in enumerate(smp_world.run(body, ranks=SIZE)):
        once = [
            total(everyone),
            everyone[2],
            everyone[2],
            [*chain(*everyone)],
            [list(column) for column in zip(*everyone, strict=True)],
            [total([numbers(other, rank) for other in RANKS])],
            [numbers(other, rank) for other in RANKS],
        ]
        assert got == 2 * once


def test_functional_coalesced(smp_world: Any) -> None:
    def body() -> list[list[Row]]:
        rank = dist.get_rank()
        world: Any = dist.group.WORLD
        mine = [tensor(rank), tensor(rank, 1)]
        both = [torch.stack([tensor(rank, slot) for slot in RANKS]), torch.ones(SIZE) * rank]
        return [
            [each.tolist() for each in funcol.all_reduce_coalesced(mine, "sum", world)],
            [each.tolist() for each in funcol.all_gather_single_coalesced(mine, world)],
            [
                each.tolist()
                for each in funcol.reduce_scatter_single_coalesced(
                    both, "sum", scatter_dim=[0, 0], group=world
                )
            ],
        ]

    for rank, got in enumerate(smp_world.run(body, ranks=SIZE)):
        rows = [[numbers(other, slot) for other in RANKS] for slot in range(2)]
        assert got == [
            [total(rows[0]), total(rows[1])],
            [[*chain(*rows[0])], [*chain(*rows[1])]],
            [[total([numbers(other, rank) for other in RANKS])], [3.0]],
        ]


def test_functional_all_to_all_with_uneven_splits(smp_world: Any) -> None:
    def body() -> Row:
        rank = dist.get_rank()
        world: Any = dist.group.WORLD
        sent = [(rank + 2 * target) % 3 for target in RANKS]
        received = [(source + 2 * rank) % 3 for source in RANKS]
        mine = torch.arange(float(sum(sent))) + 10 * rank
        result: Row = funcol.all_to_all_single(mine, received, sent, world).tolist()
        return result

    for rank, got in enumerate(smp_world.run(body, ranks=SIZE)):
        expected: Row = []
        for source in RANKS:
            sent = [(source + 2 * target) % 3 for target in RANKS]
            start = sum(sent[:rank])
            expected += [10.0 * source + index for index in range(start, start + sent[rank])]
        assert got == expected


def test_functional_of_a_transposed_input(smp_world: Any) -> None:
    """B005."""

    def body() -> tuple[Any, ...]:
        rank = dist.get_rank()
        world: Any = dist.group.WORLD
        mine = (torch.arange(6.0).view(2, 3) + 10 * rank).t()  # (3, 2)
        scattered = funcol.reduce_scatter_single(mine, "sum", 0, world)
        gathered = funcol.all_gather_single(mine, 0, world)
        return scattered.tolist(), gathered.tolist(), funcol.all_reduce(mine, "sum", world).tolist()

    def rows(rank: int) -> list[Row]:
        return [[float(i + 10 * rank), float(i + 3 + 10 * rank)] for i in range(3)]

    summed = [[float(3 * i + 30), float(3 * i + 39)] for i in range(3)]
    for rank, got in enumerate(smp_world.run(body, ranks=SIZE)):
        assert got == ([summed[rank]], [*chain(*(rows(other) for other in RANKS))], summed)


def test_functional_results_are_waited_for_when_used(smp_world: Any) -> None:
    """The result is a tensor that waits at its first use; the input may change before that."""

    def body() -> Row:
        mine = tensor(dist.get_rank())
        world: Any = dist.group.WORLD
        summed = funcol.all_reduce(mine, "sum", world)
        other = funcol.all_reduce(2 * mine, "sum", world)
        difference: Row = (other - summed).tolist()
        return difference

    assert smp_world.run(body, ranks=SIZE) == [total([numbers(rank) for rank in RANKS])] * SIZE


@pytest.mark.parametrize("form", ["all_gather", "reduce_scatter", "all_to_all"])
def test_functional_gradients(smp_world: Any, form: str) -> None:
    def body() -> Any:
        rank = dist.get_rank()
        world: Any = dist.group.WORLD
        if form == "all_gather":
            leaf = tensor(rank).requires_grad_()
            output = funcol.all_gather_single_autograd(leaf, 0, world)
            weights = torch.cat([tensor(rank, slot) for slot in RANKS])
        elif form == "reduce_scatter":
            leaf = torch.stack([tensor(rank, slot) for slot in RANKS]).requires_grad_()
            output = funcol.reduce_scatter_single_autograd(leaf, "sum", 0, world)
            weights = tensor(rank).view(1, 2)
        else:
            leaf = torch.stack([tensor(rank, slot) for slot in RANKS]).requires_grad_()
            output = funcol.all_to_all_single_autograd(leaf, [1] * SIZE, [1] * SIZE, world)
            weights = torch.stack([tensor(rank, slot) for slot in RANKS])
        (output * weights).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    for rank, got in enumerate(smp_world.run(body, ranks=SIZE)):
        assert (
            got
            == {
                "all_gather": total([numbers(other, rank) for other in RANKS]),
                "reduce_scatter": [numbers(other) for other in RANKS],
                "all_to_all": [numbers(other, rank) for other in RANKS],
            }[form]
        )


# torch.distributed.nn.functional: with group=None its default, captured at import, would be used.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")


def leaves(rank: int) -> list[torch.Tensor]:
    return [tensor(rank, slot).requires_grad_() for slot in RANKS]


def _broadcast(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [differentiable.broadcast(mine[0], 1)]


def _all_reduce(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [differentiable.all_reduce(mine[0])]


def _reduce(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    output = differentiable.reduce(mine[0], 2)
    return [output if rank == 2 else 0 * output]


def _all_gather(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(differentiable.all_gather(mine[0]))


def _gather(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = differentiable.gather(mine[0], 1)
    return [output if rank == 1 else 0 * output for output in outputs]


def _scatter(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [differentiable.scatter(mine, 1)]


def _reduce_scatter(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return [differentiable.reduce_scatter(torch.zeros(2), mine)]


def _all_to_all(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(differentiable.all_to_all([torch.zeros(2) for _ in RANKS], mine))


def _all_to_all_single(rank: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    output = differentiable.all_to_all_single(torch.zeros(SIZE, 2), torch.stack(mine))
    return list(output.unbind())


# For each: where an output (rank, index) gets its parts from, as input (rank, index).
FROM: dict[Any, Any] = {
    _broadcast: lambda rank: [[(1, 0)]],
    _all_reduce: lambda rank: [[(other, 0) for other in RANKS]],
    _reduce: lambda rank: [[(other, 0) for other in RANKS] if rank == 2 else []],
    _all_gather: lambda rank: [[(other, 0)] for other in RANKS],
    _gather: lambda rank: [[(other, 0)] if rank == 1 else [] for other in RANKS],
    _scatter: lambda rank: [[(1, rank)]],
    _reduce_scatter: lambda rank: [[(other, rank) for other in RANKS]],
    _all_to_all: lambda rank: [[(other, rank)] for other in RANKS],
    _all_to_all_single: lambda rank: [[(other, rank)] for other in RANKS],
}


@pytest.mark.parametrize("call", FROM, ids=lambda call: call.__name__.strip("_"))
def test_differentiable_collectives(smp_world: Any, call: Any) -> None:
    def weight(rank: int, index: int) -> float:
        return float(1 + index + 7 * rank)

    def body() -> tuple[list[Row], list[Row]]:
        rank = dist.get_rank()
        mine = leaves(rank)
        outputs = call(rank, mine)
        loss = sum((weight(rank, i) * output.sum() for i, output in enumerate(outputs)), 0.0)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        gradients = [[0.0, 0.0] if leaf.grad is None else leaf.grad.tolist() for leaf in mine]
        return [output.tolist() for output in outputs], gradients

    values, gradients = zip(*smp_world.run(body, ranks=SIZE), strict=True)
    wanted = [[[0.0, 0.0] for _ in RANKS] for _ in RANKS]
    for rank in RANKS:
        for index, parts in enumerate(FROM[call](rank)):
            zero = [[0.0, 0.0]]
            assert values[rank][index] == total(zero + [numbers(*part) for part in parts])
            for source, slot in parts:
                wanted[source][slot] = [g + weight(rank, index) for g in wanted[source][slot]]
    assert list(gradients) == wanted


def test_differentiable_broadcast_in_a_group_of_one(smp_world: Any) -> None:
    """G7, pytorch#130515: torch compares the group's rank with the world's root and zeroes
    the gradient, on every backend. The forward pass is right."""

    def body() -> Row | None:
        group = dist.new_group([1])
        if dist.get_rank() == 0:
            return None
        output = differentiable.broadcast(tensor(1), 1, group=group)
        dist.destroy_process_group(group)
        result: Row = output.tolist()
        return result

    assert smp_world.run(body, ranks=2) == [None, numbers(1)]


@pytest.mark.parametrize("call", [dist.all_reduce, lambda each: dist.broadcast(each, src=0)])
def test_a_saved_tensor_may_be_communicated(smp_world: Any, call: Any) -> None:
    """As on other backends: autograd's version counter does not see the write."""

    def body() -> list[float]:
        weight = torch.ones(2, requires_grad=True)
        result = (weight * 2).exp()
        before = result._version
        call(result.detach())
        assert result._version == before
        result.sum().backward()
        assert weight.grad is not None
        return weight.grad.tolist()

    smp_world.run(body, ranks=2)
