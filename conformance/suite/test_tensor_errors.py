"""Calls of tensor collectives that torch refuses: the rank goes on, and the others never know."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from conformance.cases.draws import share
from conformance.cases.tensor_draws import claimed, rooted, worlds
from conformance.cases.tensors import COLLECTIVES, Case, play
from conformance.cases.traffic import REFUSALS
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld


def call_all_badly(
    calls: list[tuple[Case, dict[str, int]]],
    callers: list[int],
    lists: bool,
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> None:
    """``call_badly`` one after the other."""
    for case, roots in calls:
        call_badly(case, roots, callers, lists, errors)


def call_badly(
    case: Case,
    roots: dict[str, int],
    callers: list[int],
    lists: bool,
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> None:
    """Some ranks call with these names of the root, or without lists; then all carry the case out."""
    me = dist.get_rank()
    if me in callers:
        given = [torch.ones(2) for _ in range(case.size if lists else 1)]
        taken = [torch.zeros(2) for _ in range(case.size if lists else 1)]
        if not lists and case.operation == "gather":
            taken = []
        elif not lists and case.operation == "scatter":
            given = []
        how: dict[str, Any] = dict(roots)
        with pytest.raises(errors):  # torch's text is its own affair
            case.collective.call(given, taken, how)
        for each in taken:
            assert not each.any(), f"rank {me}: {case.operation} was refused, and wrote"
    play(case)


@requirement("COLL-ERROR-ROOT")
@given(data=st.data())
@share(0.1)
def test_roots_named_twice_or_not_at_all(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example goes through every collective with a root, and through both mistakes."""
    ranks = data.draw(worlds(smp_world), "ranks")
    calls = []
    for case, keyword in rooted(smp_world, data, ranks):
        calls.append((case, {keyword: case.root, f"group_{keyword}": case.root}))
        if case.operation in ("broadcast", "reduce"):
            calls.append((case, {}))
    callers = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1), "callers")
    smp_world.run(call_all_badly, calls, sorted(callers), True, ranks=ranks)


@requirement("COLL-ERROR-RANGE")
@given(data=st.data(), by_position=st.booleans())
@share(0.1)
def test_roots_that_there_are_not(
    smp_world: SmpWorld, data: st.DataObject, by_position: bool
) -> None:
    """Each example goes through every collective with a root, once below 0 and once beyond the last."""
    ranks = data.draw(worlds(smp_world), "ranks")
    calls = []
    for case, keyword in rooted(smp_world, data, ranks):
        below = st.sampled_from([-1, -ranks, -ranks - 1]) | st.integers(-99, -1)
        for numbers in (below, st.integers(ranks, 99)):
            wrong = data.draw(numbers, f"no rank, for {case.operation}")
            calls.append((case, {f"group_{keyword}" if by_position else keyword: wrong}))
    callers = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1), "callers")
    # Without lists: torch's Python refuses one on a rank that is not the root, before any backend is asked.
    smp_world.run(call_all_badly, calls, sorted(callers), False, REFUSALS, ranks=ranks)


@requirement("COLL-ERROR-LIST")
@given(data=st.data())
@share(0.1)
def test_no_list_on_the_root(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example goes through both collectives."""
    ranks = data.draw(worlds(smp_world), "ranks")
    root = data.draw(st.integers(0, ranks - 1), "root")
    calls = [
        (
            Case(operation, tuple(range(ranks)), shape=(2,), root=root),
            {COLLECTIVES[operation].root: root},
        )
        for operation in claimed(smp_world, ["gather", "scatter"])
    ]
    smp_world.run(call_all_badly, calls, [root], False, ranks=ranks)
