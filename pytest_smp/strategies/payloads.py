"""Objects to send between ranks: picklable containers, with tensors and arrays in them."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from hypothesis.vendor import pretty
from torch.utils.weak import WeakTensorKeyDictionary

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.numbers import PICKLABLE
from pytest_smp.strategies.recipes import TensorSpec
from pytest_smp.strategies.recipes import tensors as recipes


class Pair(NamedTuple):
    """A named tuple to send: what takes it for a plain tuple loses its type."""

    first: Any
    second: Any

    def _repr_pretty_(self, printer: pretty.RepresentationPrinter, cycle: bool) -> None:
        printer.repr_call("Pair", (), self._asdict())


@dataclass
class Record:
    """An instance of a class to send. Equality is :func:`~pytest_smp.strategies.same`'s."""

    name: str
    value: Any


# A tensor's own repr rounds its values and hides its layout, so a failing example shows the recipe
# in its place. Hypothesis asks by type, after the printers of its own `builds`: those would choose
# the tensor's repr, because it is shorter.
_RECIPES: MutableMapping[torch.Tensor, TensorSpec] = WeakTensorKeyDictionary()


def _print_tensor(tensor: torch.Tensor, printer: pretty.RepresentationPrinter, cycle: bool) -> None:
    recipe = _RECIPES.get(tensor)
    printer.text(repr(tensor) if recipe is None else f"{recipe!r}.make()")


pretty.for_type_by_name("torch", "Tensor", _print_tensor)


def objects(*, tensors: bool = True, max_leaves: int = 8) -> SearchStrategy[Any]:
    """Draw objects that plain pickle can carry: compare what arrives by ``same``, not by ``==``.

    Leaves are None, bools, ints of any size, floats (infinities and -0.0 among them, no nan), str,
    bytes, one-dimensional numpy arrays, and tensors of every dtype that torch can unpickle, of every
    layout, with and without elements. Containers are tuples, lists, dicts, sets, frozensets,
    :class:`Pair` and :class:`Record`. Shrinks towards ``None``.

    In a failing example a tensor is shown as the recipe it was made from: ``TensorSpec(...).make()``.

    Args:
        tensors: whether tensors occur.
        max_leaves: most leaves in an object, about.

    Raises:
        InvalidArgument: ``tensors`` is no bool, or ``max_leaves`` no int of at least 1.
    """
    check_bool("tensors", tensors)
    check_int("max_leaves", max_leaves, at_least=1)
    leaves: list[SearchStrategy[Any]] = [_atoms(), _sets(), _arrays()]
    if tensors:
        # As often as all others together, since scripts send mostly tensors.
        leaves += 3 * [_made(recipes(dtype=st.sampled_from(PICKLABLE)))]
    # Not by `one_of`, which would give each kind of atom the weight of all tensors.
    leaf = st.integers(0, len(leaves) - 1).flatmap(lambda at: leaves[at])
    return st.recursive(st.none() | leaf, _containers, max_leaves=max_leaves)


def _atoms() -> SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**63, -(2**64), 10**30]),  # no machine word holds these
        st.floats(allow_nan=False),
        st.sampled_from([math.inf, -math.inf, -0.0]),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.just(()),
    )


def _sets() -> SearchStrategy[Any]:
    atoms = _atoms()
    return st.sets(atoms, max_size=3) | st.frozensets(atoms, max_size=3)


@st.composite
def _arrays(draw: DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(["int64", "float32", "bool"]))
    # Small whole numbers, because numpy prints floats with 8 digits.
    numbers = draw(st.lists(st.integers(-100, 100), max_size=4))
    array: np.ndarray[Any, Any] = np.array(numbers, dtype=dtype)
    return array


@st.composite
def _made(draw: DrawFn, recipe: SearchStrategy[TensorSpec]) -> torch.Tensor:
    spec = draw(recipe)
    tensor = spec.make()
    _RECIPES[tensor] = spec
    return tensor


def _containers(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
    # None is mapped from another, as `st.dictionaries` is: Hypothesis prints a mapped object by its
    # own repr where that is shorter, and so any tensor in it.
    return st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children),
        st.tuples(children, children),
        _dicts(children),
        _pairs(children),
        _records(children),
    )


@st.composite
def _dicts(draw: DrawFn, children: SearchStrategy[Any]) -> dict[Any, Any]:
    keys = st.text(max_size=3) | st.integers() | st.booleans()
    return {key: draw(children) for key in draw(st.lists(keys, unique=True, max_size=3))}


@st.composite
def _pairs(draw: DrawFn, children: SearchStrategy[Any]) -> Pair:
    return Pair(draw(children), draw(children))


@st.composite
def _records(draw: DrawFn, children: SearchStrategy[Any]) -> Record:
    return Record(draw(st.text(max_size=3)), draw(children))
