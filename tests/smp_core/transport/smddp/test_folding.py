"""Rows of shared memory are folded to the bits of smp_core/reduction.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytest_smp.ranks.capabilities import REDUCTIONS
from smp_core.reduction import reduce_tensors
from smp_core.transport.smddp.folding import fold_rows

CASES = [(op, dtype) for op, dtypes in REDUCTIONS.items() for dtype in sorted(dtypes)]


def values(rows: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + count)
    numbers = torch.randn(rows, count, generator=generator, dtype=torch.float64) * 3
    if dtype is torch.bool:
        return numbers > 0
    if dtype.is_complex:
        return torch.complex(numbers, numbers.flip(1)).to(dtype)
    if dtype.is_floating_point:
        return numbers.to(dtype)
    return numbers.mul(20).abs().to(dtype)


@pytest.mark.parametrize(("op", "name"), CASES)
def test_the_bits_are_those_of_the_published_order(op: str, name: str) -> None:
    dtype = getattr(torch, name)
    for rows in range(1, 14):
        for count in (1, 16, 333):
            tensor = values(rows, count, dtype)
            target = np.empty(count * dtype.itemsize, np.uint8)
            fold_rows(tensor.view(torch.uint8).numpy(), dtype, op, target)
            expected = reduce_tensors(tensor.unbind(0), op).view(torch.uint8)
            assert target.tobytes() == expected.numpy().tobytes(), (rows, count)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_special_numbers_are_values_and_no_warnings(op: str) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, 3e38, float("inf"), float("-inf"), float("nan")])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.cartesian_prod(special, special).t().contiguous().to(dtype)
        target = np.empty(tensor[0].numel() * dtype.itemsize, np.uint8)
        fold_rows(tensor.view(torch.uint8).numpy(), dtype, op, target)
        got = torch.from_numpy(target).view(dtype)
        expected = reduce_tensors(tensor.unbind(0), op)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(7).signbit(), expected.nan_to_num(7).signbit())
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
