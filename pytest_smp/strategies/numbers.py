"""Dtypes by kind, and the numbers that tensors of each are filled with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

#: The dtypes that `sim` moves and reduces. Three kinds of torch's dtypes are left out: complex32, which
#: torch itself calls experimental and cannot compare; float8_e8m0fnu, which has neither a zero nor a
#: sign; quantized, packed and sub-byte types.
KINDS: Mapping[str, tuple[torch.dtype, ...]] = {
    "floating": (torch.float32, torch.float64),
    "half": (torch.bfloat16, torch.float16),
    "float8": (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    ),
    "integer": (torch.int64, torch.int32, torch.int16, torch.int8),
    "unsigned": (torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    "bool": (torch.bool,),
    "complex": (torch.complex64, torch.complex128),
}

ALL = tuple(dtype for dtypes in KINDS.values() for dtype in dtypes)

#: Those that survive plain pickle. torch 2.13 pickles the rest but cannot unpickle them:
#: "type object 'torch.storage.UntypedStorage' has no attribute 'dtype'".
PICKLABLE = tuple(
    dtype
    for dtype in ALL
    if dtype not in (*KINDS["float8"], torch.uint16, torch.uint32, torch.uint64)
)


class Numbers(NamedTuple):
    """The numbers of a dtype: multiples of ``scale``, ``per_sign`` of each sign, in this order.

    Signed: ``scale, 2*scale, ..., -scale, -2*scale, ...``. Unsigned: down from the largest number,
    so that signs and overflow matter. The scales of wide dtypes give a number low bits too, so that
    a detour through a narrower dtype changes it. None of them is 0, and none has the bytes of a
    guard (all ``0x80``): hence 127, 254 and 32000.
    """

    per_sign: int
    scale: float = 1
    exact: int = 0  #: the largest ``bound`` of a recipe, where that is not ``per_sign``

    @property
    def largest_bound(self) -> int:
        return self.exact or self.per_sign


_FLOAT32 = Numbers(2**11, 1 + 2**-12, exact=2**24)  # 23 bits each: exact
_FLOAT64 = Numbers(2**22, 1 + 2**-30, exact=2**53)  # 52 bits each: exact
# Each beyond what a float64 holds exactly; the unsigned ones on both sides of 2**63.
_INT64 = Numbers(2**9 - 1, 2**53 + 1, exact=2**61)  # of both signs: counted in an int64
_UINT64 = Numbers(2**9 - 1, 2**55 + 1, exact=2**62)

NUMBERS: Mapping[torch.dtype, Numbers] = {
    torch.float32: _FLOAT32,
    torch.float64: _FLOAT64,
    torch.complex64: _FLOAT32,
    torch.complex128: _FLOAT64,
    torch.float16: Numbers(2**11),
    torch.bfloat16: Numbers(2**8),
    torch.float8_e4m3fn: Numbers(2**4),
    torch.float8_e4m3fnuz: Numbers(2**4),
    torch.float8_e5m2: Numbers(2**3),
    torch.float8_e5m2fnuz: Numbers(2**3),
    torch.int8: Numbers(127),
    torch.int16: Numbers(32000),
    torch.int32: Numbers(32000, 2**16 + 1, exact=2**31 - 1),
    torch.int64: _INT64,
    torch.uint8: Numbers(254, exact=127),
    torch.uint16: Numbers(32000),
    torch.uint32: Numbers(32000, 2**16 + 1, exact=2**31 - 1),
    torch.uint64: _UINT64,
    torch.bool: Numbers(2, exact=1),
}


def signed(dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype have a sign; a bool has none."""
    return dtype not in (*KINDS["unsigned"], torch.bool)


def dtypes(*kinds: str) -> SearchStrategy[torch.dtype]:
    """Draw dtypes of the given kinds, or of all.

    Kinds: ``"floating"`` (float32 and float64), ``"half"`` (bfloat16 and float16), ``"float8"``
    (four types), ``"integer"`` (signed), ``"unsigned"``, ``"bool"``, ``"complex"``.

    Shrinks towards the first dtype of the first kind given: ``torch.float32`` if none is.

    Raises:
        InvalidArgument: a kind is unknown.
    """
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise InvalidArgument(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    return st.sampled_from([dtype for kind in kinds or KINDS for dtype in KINDS[kind]])
