"""Properties of tensors that are not contiguous: strided, sliced, transposed, reversed, expanded inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.cases.draws import share
from conformance.cases.tensor_draws import (
    READABLE,
    WRITABLE,
    alternated,
    cases,
    dtypes,
    sides,
    some,
    spread,
    worlds,
)
from conformance.cases.tensors import COLLECTIVES, play
from conformance.requirements.catalogue import requirement
from conformance.requirements.collectives import LAYOUTS, operation_of
from conformance.requirements.registry import Requirement
from pytest_smp.proxies import SmpWorld

#: Layouts other than contiguous, for outputs and for inputs.
_VIEWS = tuple(name for name in WRITABLE if name != "contiguous")
_INPUTS = tuple(name for name in READABLE if name != "contiguous")

#: Mostly shapes in which every layout has other strides than a contiguous tensor.
_SHAPES = st.lists(st.integers(2, 4), min_size=2, max_size=3).map(tuple) | sides(1, 3, 4)


def parameter(declared: Requirement) -> Any:
    """The parameters of the property for a requirement: an operation, and layouts of inputs and outputs."""
    operation = operation_of(declared)
    both = declared.id.endswith("-LAYOUT")
    # A tensor that is written to cannot be expanded; a broadcast only reads the root's tensor.
    read = COLLECTIVES[operation].taken != "same" or operation == "broadcast"
    how = {}
    if both or declared.id.endswith("-IN"):
        how["given"] = _INPUTS if read else _VIEWS
    if both or declared.id.endswith("-OUT"):
        how["taken"] = _VIEWS
    return pytest.param(operation, how, id=declared.id, marks=requirement(declared.id))


@pytest.mark.parametrize(("operation", "how"), [parameter(each) for each in LAYOUTS])
@given(data=st.data())
@share(0.2)
def test_views(
    smp_world: SmpWorld, data: st.DataObject, operation: str, how: dict[str, Any]
) -> None:
    claims = smp_world.capabilities
    op = "SUM" if COLLECTIVES[operation].reduces else ""
    ranks = data.draw(worlds(smp_world), "ranks")
    case = data.draw(cases(ranks, claims, operation, shape=_SHAPES, op=op, **how), "case")
    chosen = data.draw(some(dtypes(claims, op, operation)), "dtypes")
    first = data.draw(st.booleans(), "the first is asynchronous")
    smp_world.run(play, *alternated(spread(case, chosen), first), ranks=ranks)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(operation_of(each), id=each.id, marks=requirement(each.id))
        for each in LAYOUTS
        if not each.id.endswith("-OUT")
    ],
)
@given(data=st.data())
@share(0.03)
def test_transposed_beside_contiguous(
    smp_world: SmpWorld, data: st.DataObject, operation: str
) -> None:
    """Both layouts are dense, so a backend that ignores strides would still read the right bytes, misplaced."""
    claims = smp_world.capabilities
    op = "SUM" if COLLECTIVES[operation].reduces else ""
    ranks = data.draw(worlds(smp_world, 2), "ranks")
    shape = st.lists(st.integers(2, 4), min_size=2, max_size=2).map(tuple)
    drawn = cases(ranks, claims, operation, group="default", shape=shape, op=op)
    case = dataclasses.replace(data.draw(drawn, "case"), given=("transposed", "contiguous"))
    chosen = data.draw(some(dtypes(claims, op, operation)), "dtypes")
    smp_world.run(play, *spread(case, chosen), ranks=ranks)
