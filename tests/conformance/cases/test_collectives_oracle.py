"""The values that the properties of tensor collectives expect, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from conformance.cases.tensor_oracle import WHOLE, exact_bound, reduced, specials, wrapped
from conformance.cases.tensors import COLLECTIVES, Case
from pytest_smp.strategies.numbers import ALL, KINDS


def tensors(rows: list[list[float]], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=dtype) for row in rows]


@pytest.mark.parametrize(
    ("op", "dtype", "rows", "wanted"),
    [
        ("SUM", torch.uint8, [[200, 1], [200, 2]], [144, 3]),
        ("SUM", torch.int8, [[127], [1]], [-128]),
        ("SUM", torch.int64, [[2**63 - 1], [1]], [-(2**63)]),
        ("SUM", torch.bool, [[True, True, False], [True, False, False]], [True, True, False]),
        ("PRODUCT", torch.bool, [[True, True, False], [True, False, False]], [True, False, False]),
        ("PRODUCT", torch.uint16, [[300], [300]], [24464]),
        ("PRODUCT", torch.float32, [[3, -2], [5, 7]], [15, -14]),
        ("AVG", torch.float16, [[1, -3], [2, 5]], [1.5, 1]),
        ("MIN", torch.uint64, [[2**64 - 1], [1]], [1]),
        ("MAX", torch.int8, [[-128], [-1]], [-1]),
        ("BAND", torch.int16, [[-1, 12], [6, 10]], [6, 8]),
        ("BOR", torch.int16, [[-8, 12], [6, 10]], [-2, 14]),
        ("BXOR", torch.int16, [[-1, 12], [6, 10]], [-7, 6]),
        ("SUM", torch.complex64, [[1 + 2j], [3 - 5j]], [4 - 3j]),
    ],
)
def test_reductions(
    op: str, dtype: torch.dtype, rows: list[list[float]], wanted: list[float]
) -> None:
    got = reduced(tensors(rows, dtype), op)
    assert got.dtype is dtype
    assert got.tolist() == wanted


def test_integers_wrap_by_their_width() -> None:
    assert wrapped(256, torch.uint8) == 0
    assert wrapped(128, torch.int8) == -128
    assert wrapped(-129, torch.int8) == 127
    assert wrapped(2**64 + 5, torch.uint64) == 5


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype is not torch.bool], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_sums_of_cases_are_exact(dtype: torch.dtype, size: int) -> None:
    """In any order, because the sum of all magnitudes, in a wider type, is in the dtype."""
    case = Case("all_reduce", tuple(range(size)), dtype, (4, 5), op="SUM")
    values = [case.values(rank)[0] for rank in range(size)]
    if dtype.is_complex:
        values = [value.real.contiguous() for value in values]
    if dtype in KINDS["unsigned"] or not values[0].is_floating_point():
        most = torch.stack([value.to(torch.int64).abs() for value in values]).sum(0)
        assert torch.equal(most.to(dtype).to(torch.int64), most)
        assert int(most.max()) <= torch.iinfo(dtype).max
    else:
        sums = torch.stack([value.double().abs() for value in values]).sum(0)
        assert torch.equal(sums.to(values[0].dtype).double(), sums)


def test_products_are_exact() -> None:
    assert exact_bound("PRODUCT", torch.int8, 4, 20) == 3  # 3**4 = 81 and 4**4 = 256
    assert exact_bound("PRODUCT", torch.float8_e5m2, 5, 20) == 2
    assert exact_bound("PRODUCT", torch.float8_e4m3fnuz, 7, 20) == 2
    assert exact_bound("PRODUCT", torch.float8_e4m3fnuz, 8, 20) == 1  # 2**8 is beyond 240
    assert exact_bound("MAX", torch.float32, 5, 20) is None


@pytest.mark.parametrize("dtype", [*KINDS["floating"], *KINDS["half"], *KINDS["float8"]], ids=str)
@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_averages_are_exact(dtype: torch.dtype, size: int) -> None:
    """An average is the same if values are divided, multiplied by the reciprocal, or summed first."""
    case = Case("all_reduce", tuple(range(size)), dtype, (4, 5), op="AVG")
    if exact_bound("AVG", dtype, size, 1) == 0:
        assert dtype.itemsize == 1 or (size, dtype) == (7, torch.float32)
        return
    values = [case.values(rank)[0] for rank in range(size)]
    shares = [value.double() / size for value in values]
    reciprocal = torch.tensor(1 / size, dtype=dtype)
    for value, share in zip(values, shares, strict=True):
        assert torch.equal(share, share.round())
        if dtype.itemsize > 1:
            assert torch.equal((value * reciprocal).double(), share)
    for numbers in (shares, [value.double() for value in values]):
        most = torch.stack(numbers).abs().sum(0)
        assert torch.equal(most.to(dtype).double(), most)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float32, [0x80000000, 0x7F800000, 0xFF800000, 1, 0x80000001, 0x7FC00001]),
        (torch.bfloat16, [0x8000, 0x7F80, 0xFF80, 1, 0x8001, 0x7FC1]),
        (torch.float16, [0x8000, 0x7C00, 0xFC00, 1, 0x8001, 0x7E01]),
        (torch.float8_e5m2, [0x80, 0x7C, 0xFC, 1, 0x81, 0x7F]),
    ],
)
def test_special_numbers(dtype: torch.dtype, bits: list[int]) -> None:
    mask = (1 << 8 * dtype.itemsize) - 1
    whole = specials(dtype).view(getattr(torch, f"int{8 * dtype.itemsize}"))
    assert [number & mask for number in whole.tolist()] == bits


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int8, torch.float32], ids=str)
def test_sums_of_many_are_those_of_few(dtype: torch.dtype) -> None:
    """From 2**16 elements on they are not made of Python's numbers."""
    case = Case("all_reduce", (0, 1, 2), dtype, (2**16,), op="SUM", wide=dtype in WHOLE)
    values = [case.values(rank)[0] for rank in range(3)]
    halves = zip(*(value.chunk(2) for value in values), strict=True)
    few = torch.cat([reduced(parts, "SUM") for parts in halves])
    assert torch.equal(reduced(values, "SUM").view(torch.uint8), few.view(torch.uint8))


def test_no_float64_holds_the_numbers_of_int64() -> None:
    case = Case("all_gather", (0, 1, 2), torch.int64, (7,))
    for rank in range(3):
        (value, *_) = case.values(rank)
        assert (value.double().long() != value).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.int64, torch.bfloat16], ids=str)
def test_signs_differ_between_elements_and_members(dtype: torch.dtype) -> None:
    case = Case("all_reduce", (0, 1), dtype, (4,), op="MAX")
    first, second = (case.values(rank)[0] for rank in range(2))
    assert {(first < 0).any().item(), (first > 0).any().item()} == {True}
    assert ((first < 0) != (second < 0)).any()


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_members_bring_different_values(operation: str) -> None:
    case = Case(operation, (2, 0, 1), torch.float32, (2, 2), of=2)
    numbers = [
        number
        for turn in range(2)
        for rank in range(3)
        for value in Case(operation, case.ranks, shape=(2, 2), number=turn, of=2).values(rank)[
            : 1 if case.collective.given == "one" else None
        ]
        for number in value.flatten().tolist()
    ]
    assert len(set(numbers)) == len(numbers)


def test_all_to_all_of_the_documentation() -> None:
    """The example of torch.distributed.all_to_all_single: where each row comes from."""
    rows = ((2, 2, 1, 1), (3, 2, 2, 2), (2, 1, 1, 1), (2, 2, 2, 1))
    case = Case("all_to_all_single", (0, 1, 2, 3), torch.int64, (1,), rows=rows)
    inputs = [torch.cat(case.values(rank)) for rank in range(4)]
    wanted = {
        0: [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (3, 1)],
        3: [(0, 5), (1, 7), (1, 8), (2, 4), (3, 6)],
    }
    for rank, places in wanted.items():
        got = torch.cat(case.expected(rank)).tolist()
        assert got == [int(inputs[source][row]) for source, row in places]
