"""The numbers that tensors hold and the reductions of them, in plain Python: one half of the model.

Nothing here computes with torch: numbers are ints, floats and complex, tensors flat lists of them.
A rank's tensors hold the numbers that ``TensorSpec.make`` fills in, so values differ between ranks and
elements. A call starts at an element of its own, so values differ between calls of one shape, too.

Floats are exact in any order, by their bounds. Integers wrap around modulo 2**n; a bool adds by
"or" and multiplies by "and" (smp_core.reduction).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from pytest_smp.strategies.numbers import NUMBERS, signed

#: A tensor's values, row by row.
Values = list[Any]

#: Significant binary digits; of a complex dtype, those of each part.
_DIGITS: Mapping[str, int] = {
    "float64": 53,
    "complex128": 53,
    "float32": 24,
    "complex64": 24,
    "float16": 11,
    "bfloat16": 8,
    "float8_e4m3fn": 4,
    "float8_e4m3fnuz": 4,
    "float8_e5m2": 3,
    "float8_e5m2fnuz": 3,
}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name`` in torch."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def bound(dtype: str, reduce_op: str, size: int) -> int | None:
    """The largest magnitude of inputs with which the reduction over ``size`` ranks is exact in any
    order; None where every number will do.
    """
    if dtype not in _DIGITS or reduce_op in ("", "MIN", "MAX"):
        return None
    limit = NUMBERS[torch_dtype(dtype)].largest_bound
    if reduce_op != "PRODUCT":
        return max(1, limit // size)
    if dtype.startswith("complex"):  # a factor v - vi is sqrt(2) times as large as v
        limit >>= size
    return max(each for each in range(1, 65) if each == 1 or each**size <= limit)


def stream(
    dtype: str, largest: int | None, rank: int, world: int, start: int, count: int
) -> Values:
    """``count`` numbers of a rank, from its element ``start`` on: see TensorSpec."""
    return [_number(dtype, largest, rank, world, at) for at in range(start, start + count)]


def _number(dtype: str, largest: int | None, rank: int, world: int, element: int) -> Any:
    if dtype == "bool":
        bits = max(1, (world - 1).bit_length())
        return bool(((rank >> (element % bits)) ^ (element // bits).bit_count()) & 1)
    numbers = NUMBERS[torch_dtype(dtype)]
    per_sign = numbers.per_sign if largest is None else largest
    scale = numbers.scale if largest is None else 1
    both = signed(torch_dtype(dtype))
    distinct = 2 * per_sign if both else per_sign
    at = element * world + rank
    at = (at + at // distinct) % distinct
    if not both:
        return _unsigned(dtype, largest, at, int(scale))
    value = at + 1 if at < per_sign else per_sign - at - 1
    if dtype.startswith("complex"):
        return complex(value * scale, -value * scale)
    return float(value * scale) if dtype in _DIGITS else value * int(scale)


def _unsigned(dtype: str, largest: int | None, at: int, scale: int) -> int:
    if largest is not None:
        return at + 1
    if dtype == "uint8":  # all but the guards' 128
        return 255 - at if at < 127 else 254 - at
    return wrapped(-(at + 1) * scale, dtype)


def wrapped(value: int, dtype: str) -> int:
    """The integer that ``dtype`` holds for ``value``: modulo 2**n."""
    bits = 8 * torch_dtype(dtype).itemsize
    value &= 2**bits - 1
    return value - 2**bits if signed(torch_dtype(dtype)) and value >> (bits - 1) else value


def rounded(value: Fraction, dtype: str) -> float:
    """The number of a floating dtype next to ``value``, half to even. For normal numbers."""
    if not value:
        return 0.0
    exponent = math.floor(math.log2(abs(value))) + 1 - _DIGITS[dtype]
    unit = Fraction(2) ** exponent
    return float(round(value / unit) * unit)


_BITWISE: Mapping[str, Callable[[Any, Any], Any]] = {
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
_AS_BOOL = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


def reduced(dtype: str, reduce_op: str, tensors: Sequence[Values]) -> Values:
    """The ranks' tensors reduced, element by element."""
    if dtype == "bool":
        reduce_op = _AS_BOOL.get(reduce_op, reduce_op)
    combine = functools.partial(_reduced, dtype, reduce_op)
    return [combine(column) for column in zip(*tensors, strict=True)]


def _reduced(dtype: str, reduce_op: str, column: Sequence[Any]) -> Any:
    if reduce_op in ("MIN", "MAX"):
        return min(column) if reduce_op == "MIN" else max(column)
    if reduce_op in _BITWISE:
        return functools.reduce(_BITWISE[reduce_op], column)
    total = math.prod(column) if reduce_op == "PRODUCT" else sum(column)
    if dtype not in _DIGITS:
        return wrapped(total, dtype)
    if reduce_op == "AVG":
        size = len(column)
        if dtype.startswith("complex"):
            return complex(_quotient(total.real, size, dtype), _quotient(total.imag, size, dtype))
        return _quotient(total, size, dtype)
    return total


def _quotient(total: float, size: int, dtype: str) -> float:
    return rounded(Fraction(total) / size, dtype)
