"""The model of programs: results of every operation against cases worked by hand, reductions against
numpy and Python's own arithmetic, inputs against what TensorSpec makes.
"""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from pytest_smp.strategies import TensorSpec
from pytest_smp.strategies.communication import Lie, Step
from pytest_smp.strategies.communication.operations import expected, given
from pytest_smp.strategies.communication.values import bound, reduced, rounded, stream, wrapped
from pytest_smp.strategies.numbers import ALL, NUMBERS

# Group (2, 0, 1): the first member is rank 2. Rank r holds 10 r, 10 r + 1, ...
GROUP = (2, 0, 1)
ONE = {0: [[0, 1]], 1: [[10, 11]], 2: [[20, 21]]}
JOINED = {rank: [[10 * rank + at for at in range(6)]] for rank in range(3)}
LISTS = {rank: [[10 * rank], [10 * rank + 1], [10 * rank + 2]] for rank in range(3)}


def everybody(tensors: list[list[int]]) -> dict[int, Any]:
    return dict.fromkeys(GROUP, tensors)


CASES: list[tuple[str, dict[str, Any], dict[int, Any], dict[int, Any]]] = [
    ("all_reduce", {"reduce_op": "SUM"}, ONE, everybody([[30, 33]])),
    ("reduce", {"reduce_op": "MAX", "root": 0}, ONE, {2: [None], 0: [[20, 21]], 1: [None]}),
    ("broadcast", {"root": 1}, {1: [[10, 11]]}, everybody([[10, 11]])),
    ("all_gather", {}, ONE, everybody([[20, 21], [0, 1], [10, 11]])),
    ("all_gather_single", {}, ONE, everybody([[20, 21, 0, 1, 10, 11]])),
    ("gather", {"root": 0}, ONE, {0: [[20, 21], [0, 1], [10, 11]]}),
    ("scatter", {"root": 1}, {1: LISTS[1]}, {2: [[10]], 0: [[11]], 1: [[12]]}),
    # The first piece goes to rank 2, the second to rank 0.
    ("reduce_scatter", {"reduce_op": "SUM"}, LISTS, {2: [[30]], 0: [[33]], 1: [[36]]}),
    (
        "reduce_scatter_single",
        {"reduce_op": "SUM", "shape": (2,)},
        JOINED,
        {2: [[30, 33]], 0: [[36, 39]], 1: [[42, 45]]},
    ),
    (
        "all_to_all",
        {"rows": ((1,) * 3,) * 3},
        LISTS,
        {2: [[20], [0], [10]], 0: [[21], [1], [11]], 1: [[22], [2], [12]]},
    ),
    # Rank 2 sends 1 row to itself and 2 to rank 0; rank 0 sends 3 to rank 1; rank 1 one to each.
    (
        "all_to_all_single",
        {"rows": ((1, 2, 0), (0, 0, 3), (1, 1, 1)), "shape": (1,)},
        {2: [[20, 21, 22]], 0: [[0, 1, 2]], 1: [[10, 11, 12]]},
        {2: [[20, 10]], 0: [[21, 22, 11]], 1: [[0, 1, 2, 12]]},
    ),
    ("send", {"root": 2, "peer": 1}, {2: [[20, 21]], 1: []}, {1: [[20, 21]]}),
    # Each sends to the next: 2 to 0, 0 to 1, 1 to 2.
    ("batch_isend_irecv", {"shift": 1}, ONE, {2: [[10, 11]], 0: [[20, 21]], 1: [[0, 1]]}),
    ("batch_isend_irecv", {"shift": 2}, ONE, {2: [[0, 1]], 0: [[10, 11]], 1: [[20, 21]]}),
]


@pytest.mark.parametrize(
    ("operation", "fields", "inputs", "outputs"),
    CASES,
    ids=[f"{operation} {fields}" for operation, fields, _, _ in CASES],
)
def test_results_are_those_worked_by_hand(
    operation: str, fields: dict[str, Any], inputs: dict[int, Any], outputs: dict[int, Any]
) -> None:
    step = Step(0, operation, members=GROUP, dtype="int64", **{"shape": (2,), **fields})
    assert expected(step, inputs) == outputs


def test_rows_of_an_expanded_input_are_all_alike() -> None:
    step = Step(0, "all_gather_single", members=(0, 1), shape=(2, 1), input=Lie("expanded"))
    assert expected(step, {0: [[5]], 1: [[6]]}) == {0: [[5, 5, 6, 6]], 1: [[5, 5, 6, 6]]}


# ---- Inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("rank", [0, 2, 4])
def test_inputs_are_what_tensor_specs_make(dtype: torch.dtype, rank: int) -> None:
    name = str(dtype).removeprefix("torch.")
    for largest in (None, 1, min(NUMBERS[dtype].largest_bound, 2**53)):
        if largest == 1 and dtype is torch.bool:
            continue  # a bool has two values, whatever its bound
        wanted = TensorSpec((40,), dtype, bound=largest).make(rank, 5)
        made = torch.tensor(stream(name, largest, rank, 5, 0, 40), dtype=dtype)
        assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))


def test_inputs_differ_between_ranks_elements_and_calls() -> None:
    steps = [Step(number, "all_gather", members=(0, 1, 2), shape=(2, 3)) for number in range(2)]
    values = [value for step in steps for rank in range(3) for value in given(step, rank, 3)[0]]
    assert len(set(values)) == 36


# ---- Reductions ----------------------------------------------------------------------------------

NUMPY = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("op", NUMPY)
def test_integers_reduce_as_in_numpy(dtype: str, op: str) -> None:
    columns = [stream(dtype, None, rank, 3, 0, 50) for rank in range(3)]
    with np.errstate(over="ignore"):
        wanted = functools.reduce(NUMPY[op], np.array(columns, dtype=dtype))
    assert reduced(dtype, op, columns) == [*map(int, wanted)]


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("SUM", [False, True, True]),
        ("MAX", [False, True, True]),
        ("BOR", [False, True, True]),
        ("PRODUCT", [False, False, True]),
        ("MIN", [False, False, True]),
        ("BAND", [False, False, True]),
        ("BXOR", [False, True, False]),
    ],
)
def test_bools_add_by_or_and_multiply_by_and(op: str, wanted: list[bool]) -> None:
    assert reduced("bool", op, [[False, True, True], [False, False, True]]) == wanted


def test_wrapping_by_hand() -> None:
    assert [wrapped(value, "int8") for value in (127, 128, -129, 256)] == [127, -128, 127, 0]
    assert [wrapped(value, "uint8") for value in (255, 256, -1)] == [255, 0, 255]


def test_complex_numbers_and_floats_by_hand() -> None:
    # (1 - i)(2 - 2i) = -4i; the zero has no sign.
    (product,) = reduced("complex64", "PRODUCT", [[1 - 1j], [2 - 2j]])
    assert product == -4j
    assert str(product.real) == "0.0"
    assert reduced("complex64", "SUM", [[1 - 1j], [2 - 2j]]) == [3 - 3j]
    assert reduced("float32", "SUM", [[1.0, -2.0], [2.0, -3.0]]) == [3.0, -5.0]
    assert reduced("float32", "AVG", [[1.0, 2.0], [2.0, 4.0]]) == [1.5, 3.0]
    assert str(reduced("float32", "SUM", [[1.0], [-1.0]])) == "[0.0]"


def test_zeros_of_complex_products_have_no_sign() -> None:
    for count in range(1, 6):
        for factors in itertools.product((1 - 1j, -2 + 2j), repeat=count):
            (product,) = reduced("complex128", "PRODUCT", [[factor] for factor in factors])
            assert "-0.0" not in (str(product.real), str(product.imag))


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2fnuz"]
)
def test_quotients_are_rounded_as_torch_rounds_float64(dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    for numerator in range(-16, 17):
        for size in range(1, 9):
            quotient = torch.tensor(numerator / size, dtype=torch.float64).to(torch_dtype)
            assert rounded(Fraction(numerator, size), dtype) == quotient.double().item()


@pytest.mark.parametrize("dtype", [str(each).removeprefix("torch.") for each in ALL])
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "AVG"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_partial_results_of_floats_are_exact_in_every_order(dtype: str, op: str, size: int) -> None:
    """Of the largest inputs, with all signs alike, no partial result has more digits than the dtype."""
    largest = bound(dtype, op, size)
    torch_dtype = getattr(torch, dtype)
    if not (torch_dtype.is_floating_point or torch_dtype.is_complex):
        assert largest is None
        return
    assert largest is not None
    limit = NUMBERS[torch_dtype].largest_bound
    if op == "PRODUCT":
        # (v - vi)**n is at most 2**n v**n in each part.
        assert largest == 1 or largest**size * (2**size if torch_dtype.is_complex else 1) <= limit
    else:
        assert largest == 1 or largest * size <= limit
    assert size <= limit
