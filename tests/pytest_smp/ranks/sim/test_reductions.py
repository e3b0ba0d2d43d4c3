"""The documented fold order on `sim`: a balanced tree over group rank order, 16-bit and 8-bit types
in float32 and rounded once, one division.

The trees are written out by hand, in numpy's float32 scalars, for values where another order gives
other bits (which is asserted, so that these tests can fail).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

F = np.float32
COUNT = 64  # elements: enough that other orders differ on some of each set of values


def numbers(rank: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Real values of unlike magnitude, fixed by the rank."""
    generator = np.random.Generator(np.random.PCG64(1000 + rank))
    exponents = generator.integers(-6, 7, COUNT)
    return (generator.standard_normal(COUNT) * 2.0**exponents).astype(F)


def tree(x: list[Any]) -> Any:
    """The documented order, by hand."""
    match len(x):
        case 2:
            return x[0] + x[1]
        case 3:
            return (x[0] + x[1]) + x[2]
        case 5:
            return ((x[0] + x[1]) + (x[2] + x[3])) + x[4]
        case 8:
            return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))
        case _:
            raise AssertionError("no tree by hand for this size")


def from_the_left(x: list[Any]) -> Any:
    total = x[0]
    for each in x[1:]:
        total = total + each
    return total


def from_the_right(x: list[Any]) -> Any:
    return from_the_left(x[::-1])


SIZES = [2, 3, 5, 8]


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_values_tell_orders_apart(size: int) -> None:
    """Two values have one order, since addition commutes; three and more have several."""
    x = [numbers(rank) for rank in range(size)]
    assert (tree(x) != from_the_right(x)).any()
    if size > 3:
        assert (tree(x) != from_the_left(x)).any()


def _all_reduce(mine: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(mine, group=group)
    return mine


def _asynchronous(mine: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(mine, group=group, async_op=True).wait()
    return mine


def _coalesced(mine: torch.Tensor, group: Any) -> torch.Tensor:
    other = torch.ones(3, dtype=mine.dtype)
    with dist.distributed_c10d._coalescing_manager(group=group):
        dist.all_reduce(other, group=group)
        dist.all_reduce(mine, group=group)
    return mine


def _reduce(mine: torch.Tensor, group: Any) -> torch.Tensor:
    """To every root in turn; each keeps its own."""
    for root in range(dist.get_world_size(group)):
        copy = mine.clone()
        dist.reduce(copy, group=group, group_dst=root)
        if root == dist.get_rank(group):
            result = copy
    return result


def _reduce_scatter(mine: torch.Tensor, group: Any) -> torch.Tensor:
    """Every member gets a copy of the whole, as one of the inputs."""
    output = torch.empty_like(mine)
    size = dist.get_world_size(group)
    dist.reduce_scatter(output, [mine.clone() for _ in range(size)], group=group)
    return output


def _reduce_scatter_single(mine: torch.Tensor, group: Any) -> torch.Tensor:
    output = torch.empty_like(mine)
    dist.reduce_scatter_single(output, mine.repeat(dist.get_world_size(group)), group=group)
    return output


FORMS: list[Callable[[torch.Tensor, Any], torch.Tensor]] = [
    _all_reduce,
    _asynchronous,
    _coalesced,
    _reduce,
    _reduce_scatter,
    _reduce_scatter_single,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize("size", SIZES)
def test_float32_is_folded_along_the_tree(smp_world: Any, size: int, form: Any) -> None:
    def body() -> torch.Tensor:
        result: torch.Tensor = form(torch.from_numpy(numbers(dist.get_rank())), None)
        return result

    expected = torch.from_numpy(tree([numbers(rank) for rank in range(size)]))
    for got in smp_world.run(body, ranks=size):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
def test_the_order_is_that_of_the_group(smp_world: Any, form: Any) -> None:
    members = [6, 2, 7, 0, 3]

    def body() -> torch.Tensor | None:
        rank = dist.get_rank()
        group = dist.new_group(members, sort_ranks=False)
        if rank not in members:
            return None
        result: torch.Tensor = form(torch.from_numpy(numbers(rank)), group)
        dist.destroy_process_group(group)
        return result

    expected = tree([numbers(rank) for rank in members])
    assert (expected != tree([numbers(rank) for rank in sorted(members)])).any()
    for rank, got in enumerate(smp_world.run(body, ranks=8)):
        if rank in members:
            assert torch.equal(got, torch.from_numpy(expected))


def test_blocks_of_a_power_of_two_are_subtrees(smp_world: Any) -> None:
    """Folding inside four blocks of two and then over the blocks gives the bits of one fold."""

    def body() -> torch.Tensor:
        rank = dist.get_rank()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)]
        across = [dist.new_group([parity, parity + 2, parity + 4, parity + 6]) for parity in (0, 1)]
        mine = torch.from_numpy(numbers(rank))
        dist.all_reduce(mine, group=pairs[rank // 2])
        dist.all_reduce(mine, group=across[rank % 2])
        dist.destroy_process_group(pairs[rank // 2])
        dist.destroy_process_group(across[rank % 2])
        return mine

    expected = torch.from_numpy(tree([numbers(rank) for rank in range(8)]))
    for got in smp_world.run(body, ranks=8):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)], ids=str
)
def test_16_bits_are_folded_in_float32_and_rounded_once(
    smp_world: Any, dtype: torch.dtype, large: float, form: Any
) -> None:
    """At ``large`` the type's step is 2: large + 1 rounds back to large, so three sums in 16 bits
    give large, and one rounding of large + 1 + 1 (+ 0) gives large + 2. Negated in the second
    element."""
    columns = [[large, -large], [1.0, -1.0], [1.0, -1.0]]

    def body() -> list[float]:
        mine = torch.tensor(columns[dist.get_rank()], dtype=dtype)
        result: torch.Tensor = form(mine, None)
        assert result.dtype is dtype
        values: list[float] = result.tolist()
        return values

    step = torch.tensor(large, dtype=dtype) + torch.tensor(1.0, dtype=dtype)
    assert step.item() == large  # the type cannot hold it
    assert smp_world.run(body, ranks=3) == [[large + 2, -large - 2]] * 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bits_are_folded_in_float32_and_rounded_once(smp_world: Any, dtype: torch.dtype) -> None:
    large = {torch.float8_e4m3fn: 16.0, torch.float8_e5m2: 8.0}[dtype]  # where the step is 2

    def body() -> float:
        mine = torch.tensor([large if dist.get_rank() == 0 else 1.0]).to(dtype)
        dist.all_reduce(mine)
        return mine.float().item()

    assert (torch.tensor(large) + 1).to(dtype).float().item() == large
    assert smp_world.run(body, ranks=3) == [large + 2] * 3


def test_16_bits_do_not_overflow_on_the_way(smp_world: Any) -> None:
    """B029: 60000 + 60000 is more than float16 holds; with -60000 after it, the sum is not."""

    def body() -> float:
        mine = torch.tensor([[60000.0], [60000.0], [-60000.0]][dist.get_rank()]).half()
        dist.all_reduce(mine)
        return mine.item()

    assert torch.tensor(60000.0).half().item() == 60000.0
    assert smp_world.run(body, ranks=3) == [60000.0] * 3


@pytest.mark.parametrize("size", SIZES)
def test_an_average_is_the_sum_with_one_division(smp_world: Any, size: int) -> None:
    def body() -> torch.Tensor:
        mine = torch.from_numpy(numbers(dist.get_rank()))
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        return mine

    x = [numbers(rank) for rank in range(size)]
    expected = tree(x) / F(size)
    if size in (3, 5):  # dividing first gives other bits
        assert (expected != tree([each / F(size) for each in x])).any()
    for got in smp_world.run(body, ranks=size):
        assert torch.equal(got, torch.from_numpy(expected))


def test_a_16_bit_average_is_divided_in_float32(smp_world: Any) -> None:
    """(2048 + 1 + 3) / 3 = 684. Rounded to float16 before the division it would be 2052 / 3 = 684
    too, so take (2048 + 1 + 0) / 3 = 683: a sum rounded first is 2048, and 2048 / 3 is 682.5."""

    def body() -> float:
        mine = torch.tensor([[2048.0], [1.0], [0.0]][dist.get_rank()]).half()
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        return mine.item()

    rounded_first = (torch.tensor(2049.0).half() / 3).item()
    assert rounded_first != 683.0
    assert smp_world.run(body, ranks=3) == [683.0] * 3
