"""Calls of tensor collectives that torch refuses: the rank goes on, and the others never know."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from conformance.requirements import requirement
from conformance.tensor_draws import claimed, share, worlds
from conformance.tensors import COLLECTIVES, Case, play
from pytest_smp.proxies import SmpWorld


def call_badly(case: Case, roots: dict[str, int], callers: list[int], lists: bool) -> None:
    """Some ranks call with these names of the root, or without lists; then all carry the case out."""
    me = dist.get_rank()
    if me in callers:
        given = [torch.ones(2) for _ in range(case.size if lists else 1)]
        taken = [torch.zeros(2) for _ in range(case.size if lists else 1)]
        if not lists and case.operation == "gather":
            taken = []
        elif not lists:
            given = []
        how: dict[str, Any] = dict(roots)
        with pytest.raises(ValueError):  # noqa: PT011  # torch's text is its own affair
            case.collective.call(given, taken, how)
        for each in taken:
            assert not each.any(), f"rank {me}: {case.operation} was refused, and wrote"
    play(case)


@requirement("COLL-ERROR-ROOT")
@given(data=st.data())
@share(0.3)
def test_roots_named_twice_or_not_at_all(smp_world: SmpWorld, data: st.DataObject) -> None:
    rooted = [name for name, each in COLLECTIVES.items() if each.root]
    operation = data.draw(st.sampled_from(claimed(smp_world, rooted)), "operation")
    keyword = COLLECTIVES[operation].root
    ranks = data.draw(worlds(smp_world), "ranks")
    root = data.draw(st.integers(0, ranks - 1), "root")
    named = [{keyword: root, f"group_{keyword}": root}]
    if operation in ("broadcast", "reduce"):
        named.append({})
    roots = data.draw(st.sampled_from(named), "roots")
    op = "SUM" if operation == "reduce" else ""
    case = Case(operation, tuple(range(ranks)), shape=(2,), op=op, root=root)
    callers = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1), "callers")
    smp_world.run(call_badly, case, roots, sorted(callers), True, ranks=ranks)


@requirement("COLL-ERROR-LIST")
@given(data=st.data())
@share(0.2)
def test_no_list_on_the_root(smp_world: SmpWorld, data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from(claimed(smp_world, ["gather", "scatter"])), "operation")
    ranks = data.draw(worlds(smp_world), "ranks")
    root = data.draw(st.integers(0, ranks - 1), "root")
    case = Case(operation, tuple(range(ranks)), shape=(2,), root=root)
    roots = {COLLECTIVES[operation].root: root}
    smp_world.run(call_badly, case, roots, [root], False, ranks=ranks)
