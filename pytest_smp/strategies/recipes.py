"""Tensors, as recipes: what rank makes which values, laid out how, between which guards.

Words. A *recipe* (:class:`TensorSpec`) is a value: it prints, compares and pickles, and every rank
makes its own tensor from it. A tensor is a view of a *storage*; the elements of the storage that
are not in the view are *guards*. Every byte of a guard is 0x80, and no number that a recipe fills
in has such bytes, so a write outside the view is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy
from hypothesis.vendor.pretty import RepresentationPrinter

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.numbers import ALL, NUMBERS, dtypes, signed

Shape = tuple[int, ...]

GUARD_BYTE = 0x80
_GUARDS_BEHIND = 3  # elements; in front are as many as the offset


# ---- Layouts -------------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    strides: Callable[[Shape], Shape]  #: in elements, for a shape
    min_dims: int  #: with fewer it would be another layout


def _dense(shape: Shape) -> Shape:
    return tuple(math.prod(max(side, 1) for side in shape[at + 1 :]) for at in range(len(shape)))


def _swapped(sides: Shape) -> Shape:
    return sides[:-2] + sides[-1:] + sides[-2:-1]


#: How the elements of a view lie in its storage.
LAYOUTS: Mapping[str, TensorLayout] = {
    "contiguous": TensorLayout(_dense, 0),
    "strided": TensorLayout(lambda shape: tuple(2 * stride for stride in _dense(shape)), 1),
    "sliced": TensorLayout(lambda shape: _dense((*shape[:-1], shape[-1] + 1)), 2),
    "transposed": TensorLayout(lambda shape: _swapped(_dense(_swapped(shape))), 2),
    "reversed": TensorLayout(lambda shape: _dense(shape[::-1])[::-1], 3),
    "expanded": TensorLayout(lambda shape: (0, *_dense(shape[1:])), 1),
}


# ---- The recipe ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """A recipe for one tensor on each rank.

    Args:
        shape: its sides; ``()`` is one element without dimensions.
        dtype: one of the dtypes that :func:`~pytest_smp.strategies.dtypes` draws.
        layout: how it lies in its storage.

            - ``"contiguous"``: densely, row by row.
            - ``"strided"``: every second column; between any two elements is a guard.
            - ``"sliced"``: rows are dense and end in a guard each. At least two dimensions.
            - ``"transposed"``: the last two dimensions lie swapped. At least two dimensions.
            - ``"reversed"``: all dimensions lie in reverse order. At least three dimensions.
            - ``"expanded"``: the first dimension repeats what is there once (stride 0). Input only:
              torch refuses to write to it.

        offset: elements in front of the view, all guards.
        bound: None, or the largest magnitude of the values.

    Values. Element ``e`` (in row-major order) on rank ``r`` of ``world`` ranks takes number
    ``e * world + r`` of a sequence, so values differ between elements and between ranks, also where
    the ranks' shapes differ, until the sequence starts over after :attr:`distinct` numbers. Then
    too one element differs between any two ranks if there are fewer ranks than numbers.

    - Without ``bound``, for movement: numbers near the ends of the dtype, with low bits set, so that
      a detour through a narrower dtype or a wrong sign shows. 512 distinct in bfloat16, 4096 in
      float16 and float32, 254 in int8 and uint8, 1022 in int64 and 511 in uint64 (all beyond what
      a float64 holds), 32 in float8_e4m3, 16 in float8_e5m2.
    - With ``bound``, for reductions: 1 to ``bound``, then, if the dtype has signs, -1 to -``bound``.
      Sums over ``world`` ranks are exact in any order if ``world * bound`` is at most 2**8 in
      bfloat16, 2**11 in float16, 2**24 in float32, 2**4 and 2**3 in float8_e4m3 and float8_e5m2, and
      integers do not overflow below their largest value.
    - A complex number has its imaginary part opposite to its real part.
    - A bool has two values. With ``k`` bits in the largest rank, the first ``k`` elements are the
      bits of the rank, lowest first, and every further ``k`` are these again or their opposites, by
      the Thue-Morse sequence, which has no period. Tensors of at least ``k`` elements differ
      between any two ranks.
    - Along the first dimension of an expanded layout values repeat.

    Raises:
        InvalidArgument: an argument is not as above, or ``bound`` is beyond the integers that are
            exact in ``dtype``.
    """

    shape: Shape
    dtype: torch.dtype
    layout: str = "contiguous"
    offset: int = 0
    bound: int | None = None

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        _check_dtype(self.dtype)
        _check_layout(self.layout)
        if len(self.shape) < LAYOUTS[self.layout].min_dims:
            raise InvalidArgument(
                f"layout={self.layout!r}: needs at least {LAYOUTS[self.layout].min_dims} "
                f"dimensions, and shape={self.shape!r} has {len(self.shape)}"
            )
        check_int("offset", self.offset, at_least=0)
        if self.bound is not None:
            most = NUMBERS[self.dtype].largest_bound
            check_int("bound", self.bound, at_least=1, at_most=most, why=f"{self.dtype}")

    def __repr__(self) -> str:
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        left_out = {field.name for field in fields(self) if said[field.name] == field.default}
        said = {name: value for name, value in said.items() if name not in left_out}
        return f"TensorSpec({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        # Hypothesis prints a dataclass field by field, defaults included, unless told otherwise.
        printer.text(repr(self))

    @property
    def numel(self) -> int:
        """The number of elements of the view."""
        return math.prod(self.shape)

    @property
    def distinct(self) -> int:
        """The number of different values that the tensors of all ranks can hold together."""
        if self.dtype is torch.bool:
            return 2
        count = NUMBERS[self.dtype].per_sign if self.bound is None else self.bound
        return 2 * count if signed(self.dtype) else count

    def make(self, rank: int = 0, world: int = 1) -> torch.Tensor:
        """This rank's tensor: the same values at every call, in a new storage.

        Raises:
            InvalidArgument: not ``0 <= rank < world``.
        """
        check_int("world", world, at_least=1)
        check_int("rank", rank, at_least=0, at_most=world - 1, why="world")
        tensor = self.blank()
        once = self._once(tensor)
        once.copy_(self._values(once.numel(), rank, world).reshape(once.shape))
        return tensor

    def blank(self) -> torch.Tensor:
        """A tensor to write to, laid out as the recipe says: its elements look like guards.

        So an element that was never written differs from every value that :meth:`make` fills in.
        """
        strides = LAYOUTS[self.layout].strides(self.shape)
        last = sum((side - 1) * stride for side, stride in zip(self.shape, strides, strict=True))
        elements = self.offset + (last + 1 if self.numel else 0) + _GUARDS_BEHIND
        storage = torch.full((elements * self.dtype.itemsize,), GUARD_BYTE, dtype=torch.uint8)
        return storage.view(self.dtype).as_strided(self.shape, strides, self.offset)

    def damaged_guards(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The guards in the storage of ``tensor`` that were written: element indices, ascending.

        Args:
            tensor: a result of :meth:`make` or :meth:`blank`, or an alias with the same geometry.

        Raises:
            InvalidArgument: the tensor's geometry is another; a copy, say, has no guards to look at.
        """
        pristine = self.blank()
        if _geometry(tensor) != _geometry(pristine):
            raise InvalidArgument(
                f"tensor has {_geometry(tensor)}: not what {self!r} makes, {_geometry(pristine)}"
            )
        written = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) != GUARD_BYTE
        written = written.view(-1, self.dtype.itemsize).any(dim=1)
        guards = torch.ones(len(written), dtype=torch.bool)
        self._once(guards.as_strided(self.shape, pristine.stride(), self.offset)).fill_(False)
        damaged = written & guards
        return tuple(damaged.nonzero().flatten().tolist())

    def guards_intact(self, tensor: torch.Tensor) -> bool:
        """Return whether nothing outside the view ``tensor`` was written: no :meth:`damaged_guards`."""
        return not self.damaged_guards(tensor)

    def _once(self, view: torch.Tensor) -> torch.Tensor:
        # Of elements that lie in one place, one: torch refuses to write to more.
        return view[:1] if self.layout == "expanded" else view

    def _values(self, count: int, rank: int, world: int) -> torch.Tensor:
        """1-D, of the recipe's dtype."""
        elements = torch.arange(count)
        if self.dtype is torch.bool:
            bits = max(1, (world - 1).bit_length())
            return (((rank >> (elements % bits)) ^ _parity(elements // bits)) & 1).bool()
        numbers = elements * world + rank
        # When the sequence starts over it starts one later: its length may be a multiple of `world`.
        at = (numbers + numbers // self.distinct) % self.distinct
        if not signed(self.dtype):
            return self._unsigned(at)
        half = self.distinct // 2
        value = torch.where(at < half, at + 1, half - at - 1)
        scale = 1 if self.bound is not None else NUMBERS[self.dtype].scale
        if not self.dtype.is_floating_point and not self.dtype.is_complex:
            return (value * int(scale)).to(self.dtype)
        scaled = value.double() * scale  # exact, as the table says
        if self.dtype.is_complex:
            return torch.complex(scaled, -scaled).to(self.dtype)
        return scaled.to(self.dtype)

    def _unsigned(self, at: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor
        if self.bound is not None:
            value = at + 1
        elif self.dtype is torch.uint8:
            value = torch.where(at < 127, 255 - at, 254 - at)  # all but the guards' 128
        else:  # down from the largest: in two's complement that is up from -1
            value = -(at + 1) * int(NUMBERS[self.dtype].scale)
        if self.dtype is torch.uint64:
            return value.view(self.dtype)
        lowest: torch.Tensor = value & (2 ** (8 * self.dtype.itemsize) - 1)
        return lowest.to(self.dtype)


def _parity(numbers: torch.Tensor) -> torch.Tensor:
    """The Thue-Morse sequence: the lowest bit is 1 if a number has an odd number of bits set."""
    for shift in (32, 16, 8, 4, 2, 1):
        numbers = numbers ^ (numbers >> shift)
    return numbers


def _geometry(tensor: torch.Tensor) -> str:
    return (
        f"shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}, "
        f"offset {tensor.storage_offset()}, storage of {len(tensor.untyped_storage())} bytes"
    )


def _check_shape(shape: object) -> None:
    if not isinstance(shape, tuple):
        raise InvalidArgument(f"shape={shape!r}: must be a tuple of ints")
    for side in shape:
        check_int(f"a side of shape={shape!r}", side, at_least=0)


def _check_dtype(dtype: object) -> None:
    if dtype not in ALL:
        raise InvalidArgument(f"dtype={dtype!r}: must be one of {', '.join(map(str, ALL))}")


def _check_layout(layout: object) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidArgument(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")


# ---- The strategies ------------------------------------------------------------------------------


def lengths(world: int) -> SearchStrategy[int]:
    """Draw lengths from 0 to ``2 * world + 1``: what ``world`` ranks might have to divide.

    Lengths of 0, of 1, shorter than the world, equal to it, divisible and not. Shrinks towards 1;
    0 is drawn where 1 does not do.

    Raises:
        InvalidArgument: ``world`` is no int of at least 1.
    """
    check_int("world", world, at_least=1)
    return _sides(2 * world + 1)


def _sides(most: int) -> SearchStrategy[int]:
    # 0 is rarer than the rest, because one side of 0 empties the whole tensor.
    return st.integers(min(1, most), most) | st.integers(0, most)


def shapes(
    *, min_dims: int = 0, max_dims: int = 3, max_side: int = 5, world: int | None = None
) -> SearchStrategy[Shape]:
    """Draw shapes: without dimensions, tiny, odd, and with sides of 0.

    Shrinks towards few dimensions and sides of 1; a side is 0 only where it has to be.

    Args:
        min_dims: fewest dimensions.
        max_dims: most dimensions.
        max_side: largest side.
        world: if given, the first side is drawn from ``lengths(world)`` instead: it does and does
            not divide among so many ranks, and is shorter than the world.

    Raises:
        InvalidArgument: the arguments are no ints with ``0 <= min_dims <= max_dims``,
            ``max_side >= 0`` and ``world >= 1``.
    """
    check_int("min_dims", min_dims, at_least=0)
    check_int("max_dims", max_dims, at_least=min_dims, why="min_dims")
    check_int("max_side", max_side, at_least=0)
    side = _sides(max_side)
    return _shapes(min_dims, max_dims, side if world is None else lengths(world), side)


@st.composite
def _shapes(
    draw: DrawFn,
    min_dims: int,
    max_dims: int,
    first: SearchStrategy[int],
    other: SearchStrategy[int],
) -> Shape:
    dims = draw(st.integers(min_dims, max_dims))
    return tuple(draw(other if at else first) for at in range(dims))


def tensors(
    *,
    dtype: torch.dtype | SearchStrategy[torch.dtype] | None = None,
    shape: Shape | SearchStrategy[Shape] | None = None,
    layout: str | Sequence[str] | None = None,
    as_output: bool = False,
    bound: int | None = None,
) -> SearchStrategy[TensorSpec]:
    """Draw recipes for tensors: see :class:`TensorSpec`.

    Shrinks towards ``TensorSpec(shape=(), dtype=torch.float32)``: the first dtype, few and small
    sides, contiguous, without offset.

    Args:
        dtype: one, or a strategy for it; None is any (:func:`~pytest_smp.strategies.dtypes`).
        shape: one, or a strategy for it; None is any small one (:func:`shapes`).
        layout: the name of one, or names to choose from; None is any that ``as_output`` allows.
        as_output: whether the tensor will be written to, which leaves out ``"expanded"``.
        bound: as in :class:`TensorSpec`; where the dtype cannot hold it, its own bound.

    Raises:
        InvalidArgument: an argument is not as above; no layout is left; or, when drawing, a shape
            has too few dimensions for each of the layouts.
    """
    check_bool("as_output", as_output)
    if bound is not None:
        check_int("bound", bound, at_least=1)
    names = _layout_names(layout, as_output)
    if dtype is None:
        dtype = dtypes()
    elif not isinstance(dtype, SearchStrategy):
        _check_dtype(dtype)
        dtype = st.just(dtype)
    if shape is None:
        needed = min(LAYOUTS[name].min_dims for name in names)
        shape = shapes(min_dims=needed, max_dims=max(3, needed))
    elif not isinstance(shape, SearchStrategy):
        _check_shape(shape)
        _fitting(names, shape)
        shape = st.just(shape)
    return _tensors(dtype, shape, names, bound)


@st.composite
def _tensors(
    draw: DrawFn,
    dtypes: SearchStrategy[torch.dtype],
    shapes: SearchStrategy[Shape],
    names: Sequence[str],
    bound: int | None,
) -> TensorSpec:
    dtype, shape = draw(dtypes), draw(shapes)
    _check_dtype(dtype)
    _check_shape(shape)
    return TensorSpec(
        shape=shape,
        dtype=dtype,
        layout=draw(st.sampled_from(_fitting(names, shape))),
        offset=draw(st.sampled_from([0, 0, 1, 3])),
        bound=None if bound is None else min(bound, NUMBERS[dtype].largest_bound),
    )


def _layout_names(layout: str | Sequence[str] | None, as_output: bool) -> Sequence[str]:
    if layout is None:
        return [name for name in LAYOUTS if name != "expanded" or not as_output]
    names = [layout] if isinstance(layout, str) else list(layout)
    if not names:
        raise InvalidArgument(f"layout={layout!r}: must name at least one of {', '.join(LAYOUTS)}")
    for name in names:
        _check_layout(name)
    if as_output and "expanded" in names:
        raise InvalidArgument("layout='expanded' with as_output=True: torch refuses to write to it")
    return names


def _fitting(names: Sequence[str], shape: Shape) -> list[str]:
    fitting = [name for name in names if LAYOUTS[name].min_dims <= len(shape)]
    if not fitting:
        raise InvalidArgument(
            f"shape={shape!r}: has too few dimensions for the layouts {', '.join(names)}"
        )
    return fitting
