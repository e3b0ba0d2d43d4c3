"""Rows of bytes in shared memory, folded in the order of smp_core/reduction.py, without a copy before.

Types that numpy adds as torch does are folded by numpy: it begins an addition in a tenth of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from smp_core.reduction import reduce_tensors
from smp_core.transport.smddp.flat import Bytes

_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}
_INTEGERS = {
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
}
_HALVES = (torch.float16, torch.bfloat16)
# Minimum and maximum are torch's: numpy takes another zero of -0.0 and 0.0.
_COMBINE: dict[str, Any] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


_STRIP = (
    32 * 1024
)  # bytes of each row that are folded at a time: the sums of a level stay in a core's cache


def fold_rows(rows: Any, dtype: torch.dtype, op: str, target: Bytes) -> None:
    """Write the reduction of two-dimensional bytes, whose rows are the members', to the target."""
    combine = _COMBINE.get(op)
    known = _FLOATS.get(dtype) or _INTEGERS.get(dtype)
    if combine is None or not (known or dtype in _HALVES):
        tensors = torch.from_numpy(rows).view(dtype).unbind(0)
        target[:] = reduce_tensors(tensors, op).view(torch.uint8).numpy()
        return
    if known:
        wide, result = rows.view(known), target.view(known)
    else:
        wide = torch.from_numpy(rows).view(dtype).float().numpy()
        result = np.empty(wide.shape[1], np.float32)
    with np.errstate(all="ignore"):  # infinite and undefined sums are values, as in torch
        _fold(wide, combine, result)
    if op == "AVG" or not known:
        value = torch.from_numpy(result)
        mean = value / len(rows) if op == "AVG" else value
        target[:] = mean.to(dtype).view(torch.uint8).numpy()


def _fold(rows: Any, combine: Any, result: Any) -> None:
    """The tree of smp_core/reduction.py, whose left part is of the largest power of two rows.

    A power of two rows is folded level by level, a strip at a time.
    """
    count = len(rows)
    if count == 1:
        result[:] = rows[0]
        return
    if count & (count - 1) == 0:
        step = _STRIP // rows.itemsize
        for at in range(0, result.size, step):
            level = rows[:, at : at + step]
            while len(level) > 2:
                level = combine(level[0::2], level[1::2])
            combine(level[0], level[1], out=result[at : at + step])
        return
    half = 1 << (count - 1).bit_length() - 1
    left, right = rows[0], rows[half]
    if half > 1:
        left = result
        _fold(rows[:half], combine, left)
    if count - half > 1:
        right = np.empty_like(result)
        _fold(rows[half:], combine, right)
    combine(left, right, out=result)
