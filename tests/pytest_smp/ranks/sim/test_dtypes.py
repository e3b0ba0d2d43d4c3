"""Every dtype on `sim`: moved bit by bit, reduced where the operation is defined on it, refused by
name where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from smp_core.errors import UnsupportedError

FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
SMALL_FLOATS = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ALL = [*FLOAT8, *SMALL_FLOATS, *FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]
SIZE = 3


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Moving.


def pattern(dtype: torch.dtype, rank: int, slot: int, count: int = 4) -> list[int]:
    """The bytes of ``count`` elements: unlike between ranks and slots; NaNs with payload, signed
    zeros and subnormals are among them."""
    length = count * torch.empty(0, dtype=dtype).element_size()
    seed = 1 + slot + 10 * rank
    if dtype is torch.bool:  # a byte of a bool is 0 or 1; the seed in binary, 4 digits wide
        return [(seed >> index) & 1 for index in range(count)]
    return [(seed * 37 + index * 101 + (index * index) % 7) % 256 for index in range(length)]


def filled(dtype: torch.dtype, rank: int, slot: int) -> torch.Tensor:
    return torch.tensor(pattern(dtype, rank, slot), dtype=torch.uint8).view(dtype)


def content(tensor: torch.Tensor) -> list[int]:
    result: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return result


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", ALL, ids=name)
def test_moves_keep_every_bit(smp_world: Any, dtype: torch.dtype) -> None:
    def body() -> dict[str, Any]:
        rank = dist.get_rank()
        got: dict[str, Any] = {}

        def room(count: int = 4) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype)

        mine = filled(dtype, rank, 0)
        dist.broadcast(mine, src=1)
        got["broadcast"] = content(mine)
        outputs = [room() for _ in range(SIZE)]
        dist.all_gather(outputs, filled(dtype, rank, 1))
        got["all_gather"] = [content(each) for each in outputs]
        flat = room(4 * SIZE)
        dist.all_gather_single(flat, filled(dtype, rank, 1))
        got["all_gather_single"] = content(flat)
        inputs = [filled(dtype, rank, 2 + slot) for slot in range(SIZE)]
        dist.scatter(mine, inputs if rank == 2 else None, src=2)
        got["scatter"] = content(mine)
        dist.gather(filled(dtype, rank, 1), outputs if rank == 1 else None, dst=1)
        got["gather"] = [content(each) for each in outputs]  # as all_gather's where not written
        dist.all_to_all(outputs, inputs)
        got["all_to_all"] = [content(each) for each in outputs]
        dist.all_to_all_single(flat, filled_flat(inputs))
        got["all_to_all_single"] = content(flat)
        inbox = room()
        work = dist.isend(inputs[0], (rank + 1) % SIZE)
        dist.recv(inbox, (rank - 1) % SIZE)
        assert work is not None
        work.wait()
        got["recv"] = content(inbox)
        return got

    def filled_flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat([each.view(torch.uint8) for each in tensors])
        return joined.view(dtype)

    everyone = [pattern(dtype, rank, 1) for rank in range(SIZE)]
    for rank, got in enumerate(smp_world.run(body, ranks=SIZE)):
        exchanged = [pattern(dtype, source, 2 + rank) for source in range(SIZE)]
        assert got == {
            "broadcast": pattern(dtype, 1, 0),
            "all_gather": everyone,
            "all_gather_single": [*chain(*everyone)],
            "scatter": pattern(dtype, 2, 2 + rank),
            "gather": everyone,
            "all_to_all": exchanged,
            "all_to_all_single": [*chain(*exchanged)],
            "recv": pattern(dtype, (rank - 1) % SIZE, 2),
        }


# Reducing. The oracle is numpy for what numpy has, and a sum written down by hand for the rest.


def reduced(smp_world: Any, columns: list[list[Any]], dtype: torch.dtype, op: Any) -> Any:
    """all_reduce of ``columns[rank]``, the same on all ranks."""

    def body() -> Any:
        mine = torch.tensor(columns[dist.get_rank()], dtype=dtype)
        dist.all_reduce(mine, op=op)
        return mine.to(torch.float32).tolist() if dtype in FLOAT8 else mine.tolist()

    first, *others = smp_world.run(body, ranks=len(columns))
    assert all(repr(other) == repr(first) for other in others)  # NaN equals nothing
    return first


NUMPY: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@pytest.mark.parametrize("op", NUMPY)
@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED], ids=name)
def test_integers_wrap_around(smp_world: Any, dtype: torch.dtype, op: str) -> None:
    """Values at both ends of the range, so that sums and products overflow (G14) and an
    order that takes the sign bit for a sign is wrong."""
    kind = np.dtype(name(dtype))
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    columns = [
        [high, low, 3, high - 1, low + 5],
        [1, 100, 5, high // 2 + 7, high],
        [low + 2, high - 3, 7, 2, high - 9],
    ]
    with np.errstate(over="ignore"):
        first, second, third = (np.array(column, dtype=kind) for column in columns)
        expected = NUMPY[op](NUMPY[op](first, second), third).tolist()
    assert reduced(smp_world, columns, dtype, getattr(dist.ReduceOp, op)) == expected


@pytest.mark.parametrize("op", NUMPY)
def test_booleans(smp_world: Any, op: str) -> None:
    """All eight triples. Sum is "or", product is "and", as numpy has them; there is no wrap."""
    columns = [[bool(triple >> bit & 1) for triple in range(8)] for bit in range(3)]
    expected = {
        "SUM": any,
        "MAX": any,
        "BOR": any,
        "PRODUCT": all,
        "MIN": all,
        "BAND": all,
        "BXOR": lambda bits: sum(bits) % 2 == 1,
    }[op]
    wanted = [expected(bits) for bits in zip(*columns, strict=True)]
    assert reduced(smp_world, columns, torch.bool, getattr(dist.ReduceOp, op)) == wanted


@pytest.mark.parametrize("dtype", [*FLOATS, *SMALL_FLOATS, *FLOAT8[:4]], ids=name)
def test_floating_types(smp_world: Any, dtype: torch.dtype) -> None:
    """Values that every one of these types holds exactly, and whose results it holds, too."""
    columns = [[1.0, -2.0, 0.5], [2.0, -1.0, 4.0], [1.0, 4.0, -0.5], [4.0, 1.0, -2.0]]
    rows = list(zip(*columns, strict=True))
    for op, oracle in (
        ("SUM", sum),
        ("PRODUCT", math.prod),
        ("MIN", min),
        ("MAX", max),
        ("AVG", lambda row: sum(row) / 4),
    ):
        got = reduced(smp_world, columns, dtype, getattr(dist.ReduceOp, op))
        assert got == [oracle(row) for row in rows], op


@pytest.mark.parametrize("op", ["MIN", "MAX", "SUM"])
def test_a_nan_of_any_rank_reaches_all(smp_world: Any, op: str) -> None:
    """In IEEE 754 a comparison with NaN is false: a minimum by `<` would lose it."""
    nan = math.nan
    columns = [[nan, 1.0, 2.0, 3.0], [1.0, nan, 2.0, 3.0], [1.0, 2.0, nan, 3.0]]
    got = reduced(smp_world, columns, torch.float32, getattr(dist.ReduceOp, op))
    assert [math.isnan(number) for number in got] == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=name)
def test_complex_sum_and_average(smp_world: Any, dtype: torch.dtype) -> None:
    columns = [[1 + 2j, -3j], [4 - 1j, 5 + 0j]]
    assert reduced(smp_world, columns, dtype, dist.ReduceOp.SUM) == [5 + 1j, 5 - 3j]
    assert reduced(smp_world, columns, dtype, dist.ReduceOp.AVG) == [2.5 + 0.5j, 2.5 - 1.5j]


# Refusing.


@pytest.mark.parametrize(
    ("dtype", "op", "why"),
    [
        (torch.int64, "AVG", "AVG divides, so it needs a floating-point tensor, not torch.int64"),
        (torch.bool, "AVG", "AVG divides, so it needs a floating-point tensor, not torch.bool"),
        (torch.float32, "BAND", "BAND needs an integer or boolean tensor, not torch.float32"),
        (torch.bfloat16, "BXOR", "BXOR needs an integer or boolean tensor, not torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("call", ["all_reduce", "reduce", "reduce_scatter", "single"])
def test_an_undefined_reduction_is_refused_at_its_own_call(
    smp_world: Any, call: str, dtype: torch.dtype, op: str, why: str
) -> None:
    """G15. The other rank has called already and gets no mismatch: the bad call never
    joined."""

    def body() -> None:
        mine, reduce_op = torch.ones(2, dtype=dtype), getattr(dist.ReduceOp, op)
        if dist.get_rank() == 0:
            dist.barrier()
        elif call == "all_reduce":
            dist.all_reduce(mine, op=reduce_op)
        elif call == "reduce":
            dist.reduce(mine, dst=0, op=reduce_op)
        elif call == "reduce_scatter":
            dist.reduce_scatter(mine, [mine, mine], op=reduce_op)
        else:
            dist.reduce_scatter_single(mine, torch.ones(4, dtype=dtype), op=reduce_op)

    report = smp_world.report(body, ranks=2)
    assert report.root == 1
    assert isinstance(report.error, UnsupportedError)
    assert why in str(report.error)


def test_a_reduce_op_that_is_not_supported_is_named(smp_world: Any) -> None:
    def body() -> None:
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0))

    report = smp_world.report(body, ranks=2)
    assert isinstance(report.error, UnsupportedError)
    assert "all_reduce: reduce op PREMUL_SUM is not supported" in str(report.error)


def test_tensors_of_one_call_must_have_one_dtype(smp_world: Any) -> None:
    def body() -> None:
        group: Any = dist.group.WORLD
        group.allreduce([torch.ones(1), torch.ones(1, dtype=torch.int32)]).wait()

    report = smp_world.report(body, ranks=2)
    assert isinstance(report.error, ValueError)
    assert "must have one dtype, not float32 int32" in str(report.error)
