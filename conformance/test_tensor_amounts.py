"""How much and how often: nothing at all, a lot at once, a lot of calls."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from conformance.requirements import requirement
from conformance.requirements.collectives import EMPTY, operation_of
from conformance.tensor_draws import (
    alternated,
    cases,
    claimed,
    dtypes,
    empty,
    share,
    sides,
    some,
    spread,
    worlds,
)
from conformance.tensors import COLLECTIVES, Case, play
from pytest_smp.proxies import SmpWorld


def op_of(operation: str) -> str:
    """SUM for what reduces."""
    return "SUM" if COLLECTIVES[operation].reduces else ""


@pytest.mark.parametrize(
    "operation",
    [pytest.param(operation_of(each), id=each.id, marks=requirement(each.id)) for each in EMPTY],
)
@given(data=st.data())
@share(0.08)
def test_nothing_at_all(smp_world: SmpWorld, data: st.DataObject, operation: str) -> None:
    claims, op = smp_world.capabilities, op_of(operation)
    ranks = data.draw(worlds(smp_world), "ranks")
    case = data.draw(cases(ranks, claims, operation, shape=empty(), op=op), "case")
    chosen = data.draw(some(dtypes(claims, op, operation)), "dtypes")
    first = data.draw(st.booleans(), "the first is asynchronous")
    played = alternated(spread(case, chosen), first)
    after = [dataclasses.replace(each, shape=(2, 1)) for each in played]
    smp_world.run(play, *played, *after, ranks=ranks)


@requirement("COLL-REPEATED")
@given(data=st.data())
@share(0.3)
def test_calls_of_one_shape(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims = smp_world.capabilities
    operation = data.draw(st.sampled_from(claimed(smp_world)), "operation")
    op = op_of(operation)
    ranks = data.draw(worlds(smp_world), "ranks")
    case = data.draw(cases(ranks, claims, operation, shape=sides(1), op=op, of=2), "case")
    chosen = data.draw(some(dtypes(claims, op, operation)), "dtypes")
    played = [
        dataclasses.replace(each, number=number)
        for each in spread(case, chosen)
        for number in range(case.of)
    ]
    smp_world.run(play, *played, ranks=ranks)


@requirement("COLL-MANY")
@given(data=st.data())
@share(0.02)
def test_many_calls(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims, names = smp_world.capabilities, claimed(smp_world)
    ranks = data.draw(worlds(smp_world), "ranks")
    order = data.draw(st.permutations(names), "order")
    dtype = data.draw(st.sampled_from(sorted(dtypes(claims), key=_wide)), "dtype")
    turns = 300 // len(names)
    everyone = tuple(range(ranks))
    played = [
        Case(name, everyone, dtype, (2,), op=op_of(name), number=turn, of=turns, root=turn % ranks)
        for turn in range(turns)
        for name in order
        if dtype in dtypes(claims, op_of(name), name)
    ]
    smp_world.run(play, *played, ranks=ranks)


def _wide(dtype: torch.dtype) -> int:
    """Dtypes with many numbers first: with few of them, values come again."""
    return -dtype.itemsize


#: Sizes that are no multiples of what buffers are cut into, beside those that are.
LARGE = (2**12 - 1, 2**12 + 1, 3 * 2**12 + 5, 2**16 + 1, 2**20 + 1)


@requirement("COLL-LARGE")
@given(data=st.data())
@share(0.01)
def test_large_tensors(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims = smp_world.capabilities
    ranks = min(data.draw(st.sampled_from([2, 3]), "ranks"), smp_world.ranks)
    dtype = data.draw(st.sampled_from(dtypes(claims)), "dtype")
    sizes = data.draw(st.permutations(LARGE), "sizes of the first calls, and so on")
    first = data.draw(st.booleans(), "the first is asynchronous")
    played = [
        Case(name, tuple(range(ranks)), dtype, (size,), op=op_of(name), root=ranks - 1)
        for name, size in zip(claimed(smp_world), itertools.cycle(sizes), strict=False)
        if dtype in dtypes(claims, op_of(name), name)
    ]
    for case in alternated(played, first):
        smp_world.run(play, case, ranks=ranks)
