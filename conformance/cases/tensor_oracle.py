"""The inputs and the expected results of a tensor collective, computed without a rank.

Reductions are computed number by number in Python. Such arithmetic is exact, so no order is implied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from pytest_smp.strategies import TensorSpec, same
from pytest_smp.strategies.equality import tensor_bytes
from pytest_smp.strategies.numbers import KINDS, NUMBERS, signed

Tensor = torch.Tensor
Signs = Literal["alternating", "negative", "positive", "mixed"]


class Recipe(NamedTuple):
    """How an input is made: its numbers times the factor, or special ones in their place."""

    spec: TensorSpec
    factor: int
    special: bool
    signs: Signs


#: The number of elements from which a tensor counts as large.
MANY = 2**16
#: The period after which the numbers of a large tensor repeat. The period is a prime, so two places
#: that are a power of two apart hold different numbers.
_PERIOD = 2**16 + 1


def made(spec: TensorSpec, source: int, sources: int) -> Tensor:
    """Make the tensor of a recipe. A large tensor repeats its first numbers, which is faster."""
    if spec.numel <= _PERIOD or spec.layout == "expanded":
        return spec.make(source, sources)
    some = dataclasses.replace(spec, shape=(_PERIOD,), layout="contiguous", offset=0)
    again = some.make(source, sources).repeat(-(-spec.numel // _PERIOD))
    return spec.blank().copy_(again[: spec.numel].view(spec.shape))


def kept(recipe: Recipe, source: int, sources: int) -> Tensor:
    """The tensor of a recipe, cached; callers must only read it.

    Each rank needs the values of all ranks, and simulated ranks share the cache. Only the latest large
    tensors stay cached.
    """
    large = recipe.spec.numel >= MANY
    return (_kept_large if large else _kept_small)(recipe, source, sources)


@functools.lru_cache(maxsize=4096)
def _kept_small(recipe: Recipe, source: int, sources: int) -> Tensor:
    return _recipe_made(recipe, source, sources)


@functools.lru_cache(maxsize=12)  # enough for a call of few ranks; each tensor takes up to 48 MB
def _kept_large(recipe: Recipe, source: int, sources: int) -> Tensor:
    return _recipe_made(recipe, source, sources)


def _recipe_made(recipe: Recipe, source: int, sources: int) -> Tensor:
    spec = recipe.spec
    tensor = made(spec, source, sources)
    once = tensor[:1] if spec.layout == "expanded" else tensor
    if recipe.special:
        some = specials(spec.dtype)
        once.copy_(some[(torch.arange(once.numel()) + source) % len(some)].view(once.shape))
    elif recipe.factor != 1:
        once.copy_((once.double() * recipe.factor).to(spec.dtype))
    if recipe.signs != "alternating":
        once.copy_(with_signs(once.reshape(-1), recipe.signs, source).view(once.shape))
    return tensor


def with_signs(numbers: Tensor, signs: Signs, source: int) -> Tensor:
    """Change the signs of a 1-D tensor's numbers. A dtype without signs only gets zeros, if "mixed"."""
    dtype = numbers.dtype
    if dtype.is_complex or dtype.is_floating_point:
        wide = numbers.to(torch.complex128 if dtype.is_complex else torch.float64)
    else:
        wide = numbers.to(torch.int64)
    if signed(dtype):
        positive = wide.real > 0 if dtype.is_complex else wide > 0
        wide = torch.where(positive, wide, -wide)
    # Pseudorandom numbers from 0 to 7: the place and the member, mixed by multiplication.
    chance = (
        (torch.arange(len(wide)) * 2654435761 + source % 2**20 * 40503 + 97) % 2**32 // 2**13 % 8
    )
    if signed(dtype) and signs != "positive":
        wide = torch.where((chance < 4) | (signs == "negative"), -wide, wide)
    if signs == "mixed":
        wide = torch.where(chance % 4 == 0, torch.zeros_like(wide), wide)
    return wide.to(dtype)


# ---- Special numbers -----------------------------------------------------------------------------

#: Bits of the mantissa of the dtypes that have all special numbers. The other float8 dtypes have no
#: infinities; the fnuz ones have no -0.0 either.
MANTISSAS: Mapping[torch.dtype, int] = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e5m2: 2,
    torch.complex128: 52,
    torch.complex64: 23,
}


@functools.cache
def specials(dtype: torch.dtype) -> Tensor:
    """The special numbers of a dtype, 1-D: -0.0, infinities, least subnormals, a NaN other than torch.nan.

    The numbers are made from the bits of IEEE 754: sign, exponent, mantissa. The NaN is quiet. A complex
    number holds two of the special numbers.
    """
    width, mantissa = 8 * dtype.to_real().itemsize, MANTISSAS[dtype]
    sign = -(1 << (width - 1))
    infinity = (~sign >> mantissa) << mantissa
    nan = infinity | 1 << (mantissa - 1) | 1
    bits = [sign, infinity, sign | infinity, 1, sign | 1, nan]
    whole = getattr(torch, f"int{width}")
    real = torch.tensor(bits, dtype=whole).view(dtype.to_real())
    if not dtype.is_complex:
        return real
    return torch.view_as_complex(torch.stack([real, real.roll(1)], dim=-1))


# ---- What a reduction gives ----------------------------------------------------------------------

WHOLE = frozenset(KINDS["integer"] + KINDS["unsigned"])


def exact_bound(op: str, dtype: torch.dtype, size: int, numbers: int) -> int | None:
    """The ``bound`` of a recipe that makes a reduction exact in any order; 0 if there is none.

    Where ``size`` is no power of two, an average takes multiples of ``size``. Then the result is exact
    whether a backend divides the numbers or their sum.

    Args:
        op: the name of the ReduceOp.
        dtype: the dtype of the tensors.
        size: the number of tensors that are reduced.
        numbers: the most numbers of the recipe's sequence that are used.
    """
    numbered = NUMBERS[dtype]
    most = numbered.largest_bound
    if op not in ("SUM", "AVG", "PRODUCT") or dtype is torch.bool:
        return None  # the result is one of the numbers, or their bits
    if op == "PRODUCT":  # at worst a power of two, which is exact in every dtype that reaches it
        return max(2 if 2**size <= _largest(dtype) else 1, int(most ** (1 / size) + 1e-9))
    if op == "AVG" and size & (size - 1):
        # Division of complex numbers need not be exact. A backend may multiply by the reciprocal, and
        # of the reciprocals used here float32 only rounds 1/7 too far: 21 * float32(1/7) != 3.
        if dtype.is_complex or (size, dtype) == (7, torch.float32):
            return 0
        odd = size // (size & -size)
        return most // (
            size * odd
        )  # then sums are multiples of size, at most most // odd times size
    # Values are multiples of one number by factors up to 3 * (numbers + 1). If sums of `size` such
    # values are still numbers of the sequence, a bound is not needed.
    if signed(dtype) and dtype is not torch.int64 and 3 * size * (numbers + 1) <= numbered.per_sign:
        return None
    return max(1, most // size)


def _largest(dtype: torch.dtype) -> float:
    floating = dtype.is_floating_point or dtype.is_complex
    return (torch.finfo if floating else torch.iinfo)(dtype).max


def wrapped(number: int, dtype: torch.dtype) -> int:
    """The integer that a dtype holds in place of a number: modulo 2 to the power of its bits."""
    bits = 8 * dtype.itemsize
    number %= 1 << bits
    return number - (1 << bits) if signed(dtype) and number >> (bits - 1) else number


_FOLDS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "SUM": sum,
    "AVG": lambda numbers: sum(numbers) / len(numbers),
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "BAND": functools.partial(functools.reduce, operator.and_),
    "BOR": functools.partial(functools.reduce, operator.or_),
    "BXOR": functools.partial(functools.reduce, operator.xor),
}


#: A sum of bools is "or" and a product of bools is "and", as in torch.add and torch.mul.
_BOOL_FOLDS: Mapping[str, Callable[[Sequence[bool]], bool]] = {
    **_FOLDS,
    "SUM": any,
    "PRODUCT": all,
}


def reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Reduce tensors of one shape and dtype; integers wrap around.

    The result is exact if every partial result is: see :func:`exact_bound`.
    """
    dtype, shape = tensors[0].dtype, tensors[0].shape
    if tensors[0].numel() >= 2**13 and op == "SUM":  # sums of Python's numbers would take seconds
        return _sum_of_many(tensors)
    fold = (_BOOL_FOLDS if dtype is torch.bool else _FOLDS)[op]
    numbers = [fold(column) for column in zip(*map(_numbers, tensors), strict=True)]
    if dtype in WHOLE:
        numbers = [wrapped(number, dtype) for number in numbers]
    exact = dtype if dtype.is_complex or not dtype.is_floating_point else torch.float64
    return torch.tensor(numbers, dtype=exact).to(dtype).reshape(shape)


def _sum_of_many(tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    if dtype is torch.uint64:  # modulo 2**64, sums of int64 and of uint64 have the same bits
        return _sum_of_many([tensor.view(torch.int64) for tensor in tensors]).view(dtype)
    wide = torch.float64
    if dtype.is_complex or dtype in WHOLE:
        wide = torch.complex128 if dtype.is_complex else torch.int64
    return torch.stack([tensor.to(wide) for tensor in tensors]).sum(0).to(dtype)


def _numbers(tensor: Tensor) -> list[Any]:
    flat = tensor.reshape(-1)
    numbers: list[Any] = (flat.double() if tensor.dtype.is_floating_point else flat).tolist()
    return numbers


# ---- Comparison ----------------------------------------------------------------------------------


def alike(got: Tensor, want: Tensor) -> bool:
    """Return whether two results of a reduction are equal: bools by value, other dtypes to the last bit.

    To torch any byte but 0 is True. The bytes of bools have a requirement of their own, so a backend
    that fails it can still pass the others.
    """
    if want.dtype is torch.bool and (got.dtype, got.shape) == (want.dtype, want.shape):
        return torch.equal(got, want)
    return same(got, want)


def difference(got: Tensor, want: Tensor) -> str:
    """Describe in words how two unequal tensors differ."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return (
            f"is {got.dtype} of shape {list(got.shape)}, "
            f"not {want.dtype} of shape {list(want.shape)}"
        )
    if got.numel() <= 16:
        return f"is {_text(got)}, not {_text(want)}"
    width = got.dtype.itemsize
    wrong = (tensor_bytes(got) != tensor_bytes(want)).view(-1, width).any(dim=1).nonzero().flatten()
    first = int(wrong[0])
    return (
        f"differs at {len(wrong)} of {got.numel()} elements; element {first} is "
        f"{_text(got.reshape(-1)[first])}, not {_text(want.reshape(-1)[first])}"
    )


def _text(tensor: Tensor) -> str:
    floating = tensor.dtype.is_floating_point
    return str((tensor.double() if floating else tensor).tolist())
