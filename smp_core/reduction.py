"""The order of every reduction, as functions that an engine and its reference share.

Values are folded pairwise along a balanced binary tree over rank order: neighbours first, then
pairs of pairs, an odd one waits for the next level. Contiguous blocks of a power of two ranks are
subtrees of that tree, so folding inside blocks and then over blocks gives the same bits as one
fold. 16-bit and 8-bit floating types are folded in float32 and rounded once; an average is the sum
with one division at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def fold(values: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """Combine one or more values along the tree, lower position on the left."""
    level = list(values)
    if not level:
        raise ValueError("fold needs at least one value")
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            pairs.append(level[-1])
        level = pairs
    return level[0]


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
REDUCE_OPS = frozenset(_COMBINE)
_BITWISE = frozenset({"BAND", "BOR", "BXOR"})
_ORDERED = frozenset({"MIN", "MAX"})
_SMALL_FLOATS = frozenset(
    {torch.float16, torch.bfloat16}
    | {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and "float8" in str(dtype)
    }
)
# torch has few kernels for these on the CPU; sums and products modulo 2**n agree in the signed
# type.
_UNSIGNED = {torch.uint16: torch.int64, torch.uint32: torch.int64}
_INT64_MIN = -(2**63)


def why_not(op: str, dtype: torch.dtype) -> str | None:
    """Why ``op`` is not defined on ``dtype``, or None if it is."""
    if op not in REDUCE_OPS:
        return f"reduce op {op} is not supported; supported are {', '.join(sorted(REDUCE_OPS))}"
    floating = dtype.is_floating_point or dtype.is_complex
    if op in _BITWISE and floating:
        return f"reduce op {op} needs an integer or boolean tensor, not {dtype}"
    if op in _ORDERED and dtype.is_complex:
        return f"reduce op {op} needs ordered values, not {dtype}"
    if op == "AVG" and not floating:
        return f"reduce op AVG divides, so it needs a floating-point tensor, not {dtype}"
    return None


def reduce_tensors(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce tensors of one shape and dtype, in the order of the tree; returns a new tensor of that
    dtype.

    ``op`` is one of REDUCE_OPS; ``bool`` adds and multiplies as "or" and "and". Integers wrap
    around.
    """
    dtype = tensors[0].dtype
    combine = _COMBINE[op]
    if dtype in _SMALL_FLOATS:
        result = fold([tensor.float() for tensor in tensors], combine)
    elif dtype in _UNSIGNED:
        result = fold([tensor.to(_UNSIGNED[dtype]) for tensor in tensors], combine)
    elif dtype is torch.uint64:
        # As int64; for an order, shifted so that signed comparison agrees with unsigned.
        shift = _INT64_MIN if op in _ORDERED else 0
        result = (
            fold([tensor.contiguous().view(torch.int64) + shift for tensor in tensors], combine)
            - shift
        )
        return result.view(torch.uint64)
    else:
        result = fold(tensors, combine)
    if op == "AVG" and dtype.is_complex:
        # Part by part: torch's complex division rounds differently from shape to shape.
        result = torch.view_as_complex(torch.view_as_real(result) / len(tensors))
    elif op == "AVG":
        result = result / len(tensors)
    return (
        result.to(dtype)
        if result.dtype is not dtype
        else result
        if len(tensors) > 1
        else result.clone()
    )
