"""Properties of refused calls of tensor collectives: the rank goes on, and the others notice nothing."""

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
    """Run :func:`call_badly` for each case and its roots."""
    for case, roots in calls:
        call_badly(case, roots, callers, lists, errors)


def call_badly(
    case: Case,
    roots: dict[str, int],
    callers: list[int],
    lists: bool,
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> None:
    """Make a wrong call on some ranks, and then run the case on all.

    Args:
        case: the right call.
        roots: the keywords of the wrong call that name the root.
        callers: the ranks that make the wrong call.
        lists: whether the wrong call has the lists of tensors of its operation.
        errors: the exceptions of which one is expected.
    """
    me = dist.get_rank()
    if me in callers:
        given = [torch.ones(2) for _ in range(case.size if lists else 1)]
        taken = [torch.zeros(2) for _ in range(case.size if lists else 1)]
        if not lists and case.operation == "gather":
            taken = []
        elif not lists and case.operation == "scatter":
            given = []
        how: dict[str, Any] = dict(roots)
        with pytest.raises(errors):  # no match: the text of torch's errors is not promised
            case.collective.call(given, taken, how)
        for each in taken:
            assert not each.any(), f"rank {me}: {case.operation} was refused, and wrote"
    play(case)


@requirement("COLL-ERROR-ROOT")
@given(data=st.data())
@share(0.1)
def test_roots_named_twice_or_not_at_all(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example makes both mistakes with every claimed collective that has a root."""
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
    """Each example calls every claimed collective that has a root, with one below 0 and one beyond the last."""
    ranks = data.draw(worlds(smp_world), "ranks")
    calls = []
    for case, keyword in rooted(smp_world, data, ranks):
        below = st.sampled_from([-1, -ranks, -ranks - 1]) | st.integers(-99, -1)
        for numbers in (below, st.integers(ranks, 99)):
            wrong = data.draw(numbers, f"no rank, for {case.operation}")
            calls.append((case, {f"group_{keyword}" if by_position else keyword: wrong}))
    callers = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1), "callers")
    # No lists are passed: torch's Python refuses a list on a rank that is not the root, which would hide
    # the backend's answer.
    smp_world.run(call_all_badly, calls, sorted(callers), False, REFUSALS, ranks=ranks)


@requirement("COLL-ERROR-LIST")
@given(data=st.data())
@share(0.1)
def test_no_list_on_the_root(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example calls gather and scatter, if claimed."""
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
