"""Calls of steps: batches in containers, the splitting of each argument, and the expected part of each
microbatch.

The expected part is computed from the recipe alone, by the definition: of ``n`` microbatches, number
``i`` gets the elements from ``i * size / n`` on, ``size / n`` of them, along the batch axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.payloads import Pair
from pytest_smp.strategies.recipes import TensorSpec
from pytest_smp.strategies.recipes import tensors as recipes
from pytest_smp.strategies.slicing import Sliceable, sliceables

#: Arguments of a call in the order of their names, as :class:`StepCall` passes them.
NAMES = ("a", "b", "c")


class MicrobatchSplit(NamedTuple):
    """A batch and the number of microbatches that it is split into."""

    batch: int
    microbatches: int

    @property
    def divisible(self) -> bool:
        """True if the microbatches are of equal size with nothing left."""
        return self.batch % self.microbatches == 0


def microbatch_splits(
    *, divisible: bool = True, max_microbatches: int = 5
) -> SearchStrategy[MicrobatchSplit]:
    """Draw batch sizes and numbers of microbatches, one and equal ones and empty batches among them.

    Args:
        divisible: whether the batch can be divided; if not, it cannot, in every value drawn: it may be
            smaller than the number of microbatches, or off by one.
        max_microbatches: the most.

    Raises:
        InvalidArgument: ``max_microbatches`` is no int of at least 1, or of 2 where nothing divisible
            is wanted; or ``divisible`` no bool.
    """
    check_bool("divisible", divisible)
    check_int("max_microbatches", max_microbatches, at_least=1 if divisible else 2)
    return _splits(divisible, max_microbatches)


@st.composite
def _splits(draw: DrawFn, divisible: bool, most: int) -> MicrobatchSplit:
    microbatches = draw(st.integers(1 if divisible else 2, most))
    rest = 0 if divisible else draw(st.integers(1, microbatches - 1))
    return MicrobatchSplit(draw(st.integers(0, 3)) * microbatches + rest, microbatches)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One argument of a step.

    Args:
        value: a nest; a :class:`~pytest_smp.strategies.TensorSpec` stands for the tensor that it makes,
            a :class:`~pytest_smp.strategies.Sliceable` for itself.
        axis: the batch axis of its tensors; None if the argument is not to be split.
    """

    value: Any
    axis: int | None = 0

    def make(self) -> Any:
        """The argument, of new tensors and new sliceables."""
        return _mapped(_made, self.value)

    def part(self, index: int, microbatches: int) -> Any:
        """The part that microbatch ``index`` must get. Compare by :func:`~pytest_smp.strategies.same`."""
        axis = self.axis
        if axis is None:
            return self.make()

        def part(leaf: Any) -> Any:
            if isinstance(leaf, Sliceable):
                return leaf.parts[index]
            whole = _made(leaf)
            if not isinstance(whole, torch.Tensor):
                return whole
            size = whole.shape[axis] // microbatches
            chosen = [slice(None)] * whole.dim()
            chosen[axis] = slice(index * size, (index + 1) * size)
            return whole[tuple(chosen)]

        return _mapped(part, self.value)


def _made(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return leaf.make()
    return leaf.again() if isinstance(leaf, Sliceable) else leaf


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The container with ``function(leaf)`` for each leaf: for the containers that are drawn here."""
    match value:
        case Pair():
            return Pair(*(_mapped(function, part) for part in value))
        case list() | tuple() | set() | frozenset():
            return type(value)(_mapped(function, part) for part in value)
        case dict():
            return type(value)((key, _mapped(function, part)) for key, part in value.items())
    return function(value)


def batches(
    microbatches: int,
    *,
    axis: int | None = 0,
    slicing: bool = True,
    dtype: torch.dtype | SearchStrategy[torch.dtype] | None = None,
    depth: int = 2,
) -> SearchStrategy[Batch]:
    """Draw arguments: containers of tensors, sliceables and other things.

    Every tensor has the batch axis, and a batch of its own that the microbatches divide: sizes differ,
    and are sometimes 0. Tensors have every layout and dtype. Containers are lists, tuples, dicts, sets,
    ordered dicts and :class:`~pytest_smp.strategies.Pair`. Shrinks towards a small tensor.

    Args:
        microbatches: how many.
        axis: the batch axis, also from the end (-1); None for an argument that is not split, in which
            tensors are of any shape.
        slicing: whether sliceables occur.
        dtype: of the tensors; all of them by default.
        depth: most containers in one another; with 0, an argument is a tensor or another leaf.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    check_int("microbatches", microbatches, at_least=1)
    check_bool("slicing", slicing)
    check_int("depth", depth, at_least=0)
    if axis is not None and type(axis) is not int:
        raise InvalidArgument(f"axis={axis!r}: must be an int, or None")
    return _batches(microbatches, axis, slicing, dtype, depth)


# To make a strategy takes longer than to draw from it, and calls draw from many: they are kept.
@functools.lru_cache(maxsize=512)
def _batches(
    microbatches: int, axis: int | None, slicing: bool, dtype: Any, depth: int
) -> SearchStrategy[Batch]:
    leaves: list[SearchStrategy[Any]] = 4 * [_tensors(microbatches, axis, dtype)] + [_others]
    if slicing:
        leaves.append(sliceables(microbatches))
    return _batch(leaves, depth, axis)


#: Leaves that are handed on unsplit, as scripts do with the model and the optimizer.
_others = st.none() | st.integers(0, 9) | st.text(max_size=3)
_sides = st.sampled_from([1, 2, 3, 0])
_counts = st.integers(0, 3)
_keys = st.lists(st.text(max_size=3) | st.integers(0, 9), unique=True, max_size=3)
_containers: list[Any] = 6 * [None] + [list, tuple, dict, Pair, OrderedDict, set, frozenset]
_recipes = functools.lru_cache(maxsize=2048)(recipes)


@st.composite
def _tensors(draw: DrawFn, microbatches: int, axis: int | None, dtype: Any) -> TensorSpec:
    if axis is None:
        return draw(_recipes(dtype=dtype))
    needed = axis + 1 if axis >= 0 else -axis
    shape = [draw(_sides) for _ in range(draw(st.integers(needed, 3)))]
    shape[axis] = microbatches * draw(_sides)
    return draw(_recipes(dtype=dtype, shape=tuple(shape)))


# Not by `st.recursive`, which takes ten times as long.
@st.composite
def _batch(draw: DrawFn, leaves: list[SearchStrategy[Any]], depth: int, axis: int | None) -> Batch:
    kinds, chosen = st.sampled_from(_containers), st.integers(0, len(leaves) - 1)

    def value(left: int) -> Any:
        kind = draw(kinds) if left else None
        if kind is None:
            return draw(leaves[draw(chosen)])
        if kind is Pair:
            return Pair(value(left - 1), value(left - 1))
        if kind in (dict, OrderedDict):
            return kind((key, value(left - 1)) for key in draw(_keys))
        if kind in (list, tuple):
            return kind(value(left - 1) for _ in range(draw(_counts)))
        # Of one element: a set of more has no order in which a property could compare tensors.
        each = value(0)
        return kind() if isinstance(each, Sliceable) else kind([each])

    return Batch(value(depth), axis)


# ---- Calls ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepCall:
    """A call of a step with the arguments ``a``, ``b`` and ``c``, and the rules to split them.

    Args:
        microbatches: how many.
        arguments: by name, in the order of :data:`NAMES`.
        keywords: how many of them, from the last, are passed by keyword.
        explicit: whether ``input_split_axes`` also names arguments whose axis is 0.
    """

    microbatches: int
    arguments: Mapping[str, Batch]
    keywords: int = 0
    explicit: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the ranks."""
        return {"microbatches": self.microbatches}

    @property
    def rules(self) -> dict[str, Any]:
        """The arguments of ``smp.step``; those that need not be said are left out."""
        whole = [name for name, each in self.arguments.items() if each.axis is None]
        axes = {
            name: each.axis
            for name, each in self.arguments.items()
            if each.axis is not None and (each.axis != 0 or self.explicit)
        }
        said = {"non_split_inputs": whole, "input_split_axes": axes}
        return {name: rule for name, rule in said.items() if rule}

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New arguments: positional ones and those by keyword."""
        made = {name: each.make() for name, each in self.arguments.items()}
        first = len(made) - self.keywords
        return tuple(made.values())[:first], dict(list(made.items())[first:])

    def part(self, index: int) -> tuple[Any, ...]:
        """The arguments that the body must get for microbatch ``index``."""
        return tuple(each.part(index, self.microbatches) for each in self.arguments.values())


#: Batch axes that calls have; the first one is the simplest.
AXES: tuple[int | None, ...] = (0, 0, 0, 1, -1, -2, None)


def step_calls(
    *,
    max_microbatches: int = 4,
    axes: Sequence[int | None] = AXES,
    slicing: bool = True,
    dtype: torch.dtype | SearchStrategy[torch.dtype] | None = None,
    depth: int = 2,
) -> SearchStrategy[StepCall]:
    """Draw calls of a step: one to three arguments, each split along an axis of its own or not at all.

    Args:
        max_microbatches: the most.
        axes: what the axes of arguments are drawn from, None for one that is not split.
        slicing: as of :func:`batches`.
        dtype: as of :func:`batches`.
        depth: as of :func:`batches`.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    check_int("max_microbatches", max_microbatches, at_least=1)
    options: dict[str, Any] = {"slicing": slicing, "dtype": dtype, "depth": depth}
    if not axes:
        raise InvalidArgument(f"axes={axes!r}: must hold at least one")
    for axis in axes:
        batches(1, axis=axis, **options)  # refuses bad arguments now
    return _step_calls(max_microbatches, st.sampled_from(tuple(axes)), options)


@st.composite
def _step_calls(
    draw: DrawFn, most: int, axes: SearchStrategy[int | None], options: dict[str, Any]
) -> StepCall:
    # Two microbatches first: with one, hardly anything can go wrong.
    counts = [each for each in (2, 3, 1) if each <= most] + list(range(4, most + 1))
    microbatches = draw(st.sampled_from(counts))
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    arguments = {name: draw(batches(microbatches, axis=draw(axes), **options)) for name in names}
    return StepCall(microbatches, arguments, draw(st.integers(0, len(names))), draw(st.booleans()))
