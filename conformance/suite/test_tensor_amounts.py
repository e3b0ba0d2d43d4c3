"""Properties of amounts: empty tensors, large tensors and many calls."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from conformance.cases.draws import CHUNKS, around, share
from conformance.cases.tensor_draws import (
    alternated,
    cases,
    claimed,
    dtypes,
    empty,
    every,
    op_of,
    sides,
    some,
    spread,
    worlds,
)
from conformance.cases.tensor_oracle import exact_bound
from conformance.cases.tensors import COLLECTIVES, Case, play
from conformance.requirements.catalogue import requirement
from conformance.requirements.collectives import EMPTY, operation_of
from pytest_smp.proxies import SmpWorld
from pytest_smp.ranks.capabilities import REDUCTIONS, Capabilities


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
@share(0.1)
def test_calls_of_one_shape(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example calls every collective two or three times."""
    ranks = data.draw(worlds(smp_world), "ranks")
    turns = data.draw(st.integers(2, 3), "turns")
    played = [
        dataclasses.replace(case, number=number)
        for case in data.draw(every(ranks, smp_world, shape=sides(1), of=turns), "cases")
        for number in range(turns)
    ]
    smp_world.run(play, *played, ranks=ranks)


@requirement("COLL-MANY")
@given(data=st.data())
@share(0.02)
def test_many_calls(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims, names = smp_world.capabilities, claimed(smp_world)
    ranks = min(data.draw(st.integers(1, 3), "ranks"), smp_world.ranks)
    order = data.draw(st.permutations(names), "order")
    dtype = data.draw(st.sampled_from(sorted(dtypes(claims), key=_wide)), "dtype")
    turns = 220 // len(names)
    everyone = tuple(range(ranks))
    played = [
        Case(name, everyone, dtype, (2,), op=op_of(name), number=turn, of=turns, root=turn % ranks)
        for turn in range(turns)
        for name in order
        if dtype in dtypes(claims, op_of(name), name)
    ]
    smp_world.run(play, *played, ranks=ranks)


def _wide(dtype: torch.dtype) -> int:
    """A sort key that puts wide dtypes first: narrow ones have few numbers, so values repeat."""
    return -dtype.itemsize


def fitting(claims: Capabilities, dtype: torch.dtype, ranks: int) -> list[str]:
    """The reduce ops that the backend claims for a dtype and whose result is exact in any order."""
    name = str(dtype).removeprefix("torch.")
    no_order = ("MIN", "MAX", "PRODUCT") if dtype.is_complex else ()
    return [
        op
        for op in REDUCTIONS
        if name in claims.reductions.get(op, ())
        and op not in no_order
        and exact_bound(op, dtype, ranks, 1) != 0
    ]


#: The number of collectives that get tensors around the largest chunk, which take long.
LARGEST = 4


@requirement("COLL-LARGE")
@given(data=st.data())
@share(0)
def test_large_tensors(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example goes through every collective, with tensors around each size of a chunk."""
    claims = smp_world.capabilities
    ranks = min(data.draw(st.sampled_from([2, 3]), "ranks"), smp_world.ranks)
    order = data.draw(st.permutations(claimed(smp_world)), "the first get the largest")
    first = data.draw(st.booleans(), "the first is asynchronous")
    for at, name in enumerate(order):
        *small, large, largest = CHUNKS
        # The large chunk occurs twice, so that one call is asynchronous and one is not; roots change, too.
        chunks = [*small, large, large, *([largest] if at < LARGEST else [])]
        last_root = data.draw(st.integers(0, ranks - 1), "the root before the first")
        played = []
        for turn, chunk in enumerate(chunks, 1):
            dtype = data.draw(st.sampled_from(dtypes(claims, op_of(name), name)), "dtype")
            size = data.draw(around(chunk), f"size for {name}")
            op = op_of(name)
            if op and chunk == CHUNKS[0]:  # other ops are reduced number by number
                op = data.draw(st.sampled_from(fitting(claims, dtype, ranks)), "op")
            root = (last_root + turn) % ranks if COLLECTIVES[name].root else 0
            played.append(Case(name, tuple(range(ranks)), dtype, (size,), op=op, root=root))
        smp_world.run(play, *alternated(played, first), ranks=ranks)
