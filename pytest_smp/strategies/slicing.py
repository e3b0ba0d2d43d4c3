"""Objects with ``smp_slice``: what a step must ask for their parts, and pass on whatever it gets."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from hypothesis.vendor.pretty import RepresentationPrinter

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.equality import same
from pytest_smp.strategies.payloads import objects


class Sliceable:
    """An object that a step slices: microbatch ``i`` gets ``parts[i]``, of any type.

    ``calls`` lists what ``smp_slice`` was called with: (num_mb, mb, axis). Two are equal if their parts
    are the same; their calls do not count, and are no part of a pickle.
    """

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.calls: list[tuple[int, int, int]] = []

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        """The part of microbatch ``mb``; :class:`WrongSlice` where there is none."""
        self.calls.append((num_mb, mb, axis))
        if num_mb != len(self.parts) or not 0 <= mb < num_mb:
            return WrongSlice(num_mb, mb, axis)
        return self.parts[mb]

    def again(self) -> Sliceable:
        """A new object with the same parts and no calls."""
        return Sliceable(*self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sliceable) and same(self.parts, other.parts)

    __hash__ = object.__hash__  # it may stand in a set, where it is found by identity

    def __reduce__(self) -> tuple[Any, ...]:
        return Sliceable, self.parts

    def __repr__(self) -> str:
        return f"Sliceable({', '.join(map(repr, self.parts))})"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.repr_call("Sliceable", self.parts, {})


class WrongSlice(tuple[int, ...]):
    """The value that a :class:`Sliceable` gives for a microbatch that does not exist: no exception, so
    that a property compares the value, and fails.
    """

    def __new__(cls, *asked: int) -> WrongSlice:
        """``asked`` are the arguments of the call: num_mb, mb, axis."""
        return super().__new__(cls, asked)


def sliceables(
    microbatches: int, *, tensors: bool = True, max_leaves: int = 4
) -> SearchStrategy[Sliceable]:
    """Draw objects that are sliced into so many microbatches.

    Their parts are :func:`~pytest_smp.strategies.objects`, so of any type, not alike in size, None
    among them, and sometimes :class:`Sliceable` themselves, which a step must not slice again.
    Shrinks towards parts that are None.

    Args:
        microbatches: how many parts.
        tensors: whether tensors occur.
        max_leaves: most leaves in a part, about.

    Raises:
        InvalidArgument: ``microbatches`` or ``max_leaves`` is no int of at least 1, or ``tensors`` no
            bool.
    """
    check_int("microbatches", microbatches, at_least=1)
    check_bool("tensors", tensors)
    return _sliceables(microbatches, objects(tensors=tensors, max_leaves=max_leaves))


@st.composite
def _sliceables(draw: DrawFn, count: int, parts: SearchStrategy[Any]) -> Sliceable:
    deep = st.integers(0, 7)
    return Sliceable(
        *(Sliceable(draw(parts)) if draw(deep) == 7 else draw(parts) for _ in range(count))
    )
