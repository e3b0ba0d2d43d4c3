"""Properties of roots: any member, named by its rank in the world or in the group, or not at all."""

from __future__ import annotations

import dataclasses
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.cases.draws import share
from conformance.cases.tensor_draws import cases, dtypes, some, spread, worlds
from conformance.cases.tensors import play
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(name, id=name, marks=requirement(f"COLL-{name.upper()}-ROOT"))
        for name in ("broadcast", "reduce", "gather", "scatter")
    ],
)
@given(data=st.data())
@share(0.5)
def test_roots(smp_world: SmpWorld, data: st.DataObject, operation: str) -> None:
    claims = smp_world.capabilities
    op = "SUM" if operation == "reduce" else ""
    ranks = data.draw(worlds(smp_world), "ranks")
    groups = ["any", "without 0", "without 0"] if ranks > 1 else ["any"]
    group = data.draw(st.sampled_from(groups), "group")
    case = data.draw(cases(ranks, claims, operation, group=group, op=op), "case")
    named: list[Literal["world", "group", "nothing"]] = ["world", "world", "group"]
    if operation in ("gather", "scatter") and 0 in case.ranks:
        named.append("nothing")
    root_as = data.draw(st.sampled_from(named), "the root is named by its rank in")
    if root_as == "nothing":
        case = dataclasses.replace(case, root=case.ranks.index(0))
    chosen = data.draw(some(dtypes(claims, op, operation)), "dtypes")
    played = spread(dataclasses.replace(case, root_as=root_as), chosen)
    smp_world.run(play, *played, ranks=ranks)
