"""The fold: its tree, its types, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_core.reduction import REDUCE_OPS, fold, reduce_tensors, why_not

# Written out by hand from the definition: neighbours first, then pairs of pairs, the odd one waits.
TREES = {
    1: "0",
    2: "(01)",
    3: "((01)2)",
    4: "((01)(23))",
    5: "(((01)(23))4)",
    6: "(((01)(23))(45))",
    7: "(((01)(23))((45)6))",
    8: "(((01)(23))((45)(67)))",
}


@pytest.mark.parametrize("count", TREES)
def test_the_tree(count):
    assert fold([str(i) for i in range(count)], lambda a, b: f"({a}{b})") == TREES[count]


def test_nothing_to_fold_is_an_error():
    with pytest.raises(ValueError, match="at least one value"):
        fold([], max)


@given(st.integers(0, 3), st.integers(1, 8))
def test_blocks_of_a_power_of_two_are_subtrees(exponent, blocks):
    def pair(a, b):
        return f"({a}{b})"

    block = 2**exponent
    values = [f"{i}," for i in range(block * blocks)]
    inside = [fold(values[i : i + block], pair) for i in range(0, len(values), block)]
    assert fold(inside, pair) == fold(values, pair)


def test_order_is_visible_in_float32():
    tiny, big = 2.0**-24, 1.0
    values = [torch.tensor([value]) for value in (big, tiny, tiny, tiny)]
    # (1 + tiny) rounds to 1 by ties to even, (tiny + tiny) is 2**-23: the sum is 1 + 2**-23.
    assert float(reduce_tensors(values, "SUM")) == 1 + 2.0**-23


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats_are_folded_in_float32_and_rounded_once(dtype):
    step = torch.finfo(dtype).eps
    values = [torch.tensor([value], dtype=dtype) for value in (1.0, step / 2, step / 2, 0.0)]
    # In the type itself 1 + step/2 rounds to 1, and 1 + (step/2 + 0) to 1 again.
    assert float(reduce_tensors(values, "SUM")) == 1 + step


def test_an_average_is_one_division_at_the_end():
    values = [torch.tensor([value], dtype=torch.float16) for value in (1.0, 2.0, 4.0)]
    assert float(reduce_tensors(values, "AVG")) == float(torch.tensor(7 / 3).half())


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=9),
    st.sampled_from([torch.uint8, torch.uint16, torch.uint32, torch.uint64]),
    st.integers(0, 3),
)
def test_unsigned_types_wrap_and_compare_as_unsigned(values, dtype, shift):
    bits = torch.iinfo(dtype).bits
    modulus = 2**bits
    wide = [(value << (bits - 8 - shift if bits > 8 else 0)) % modulus for value in values]
    tensors = [torch.tensor([value], dtype=dtype) for value in wide]
    oracle = {
        "SUM": sum(wide) % modulus,
        "PRODUCT": math.prod(wide) % modulus,
        "MIN": min(wide),
        "MAX": max(wide),
    }
    for op, expected in oracle.items():
        result = reduce_tensors(tensors, op)
        assert result.dtype is dtype
        assert result.tolist() == [expected], op


def test_booleans_add_as_or_and_multiply_as_and():
    values = [torch.tensor([a, b]) for a, b in ((True, True), (False, True))]
    assert reduce_tensors(values, "SUM").tolist() == [True, True]
    assert reduce_tensors(values, "PRODUCT").tolist() == [False, True]


@pytest.mark.parametrize(
    ("op", "dtype", "reason"),
    [
        ("PREMUL_SUM", torch.float32, "not supported"),
        ("BAND", torch.float32, "needs an integer or boolean"),
        ("MAX", torch.complex64, "needs ordered values"),
        ("AVG", torch.int64, "divides"),
    ],
)
def test_what_is_not_defined_says_why(op, dtype, reason):
    assert reason in str(why_not(op, dtype))
    assert why_not("SUM", dtype) is None


def test_the_result_shares_no_memory_with_an_input():
    for op in sorted(REDUCE_OPS):
        value = torch.tensor([1, 0], dtype=torch.int32 if op[0] == "B" else torch.float32)
        assert reduce_tensors([value], op).data_ptr() != value.data_ptr()
