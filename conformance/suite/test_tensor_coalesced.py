"""Properties of collectives that are issued as one: by the coalescing manager, and by torch's operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, reject
from torch.distributed import distributed_c10d as c10d

from conformance.cases.draws import share
from conformance.cases.tensor_draws import cases, dtypes, groups, op_of, sides, worlds
from conformance.cases.tensor_oracle import alike, difference
from conformance.cases.tensors import Case, inspect, keywords, new_group, place, prepare
from conformance.requirements.catalogue import requirement
from conformance.requirements.collectives import COALESCED, operation_of
from pytest_smp.proxies import SmpWorld

#: The ways to coalesce calls. The operators, of compiled and traced programs, join along the first
#: dimension.
WAYS = ("manager", "manager, asynchronous", "operators")

#: torch's operators by collective. Each lambda looks its operator up at the call, because a mutant may have
#: replaced the operator.
OPERATORS: Mapping[str, Callable[[list[torch.Tensor], int, str], list[torch.Tensor]]] = {
    "all_reduce": lambda given, size, name: operators().all_reduce_coalesced(given, "sum", name),
    "all_gather_single": lambda given, size, name: operators().all_gather_into_tensor_coalesced(
        given, size, name
    ),
    "reduce_scatter_single": lambda given, size, name: operators().reduce_scatter_tensor_coalesced(
        given, "sum", size, name
    ),
}


def operators() -> Any:
    """torch's namespace of operators; torch's Python functions around them import the compiler for seconds."""
    return torch.ops._c10d_functional


def coalesce(played: Sequence[Case], way: str) -> None:
    """Issue these calls of one collective and one group as one, and compare this rank's outputs."""
    one = played[0]
    group = None if one.default else new_group(one.ranks)
    if dist.get_rank() not in one.ranks:
        return
    me = one.ranks.index(dist.get_rank())
    parts = [prepare(case, me) for case in played]
    if way == "operators":
        given = [part.given[0] for part in parts]
        name = (group or c10d._get_default_group()).group_name
        got = OPERATORS[one.operation](given, one.size, name)
        for number, (case, each) in enumerate(zip(played, got, strict=True)):
            found, want = operators().wait_tensor(each), torch.cat(case.expected(me))
            where = f"{place(case, me)}, {way}, call {number} of {len(played)}"
            assert alike(found.reshape(want.shape), want), f"{where}: {difference(found, want)}"
    else:
        asynchronous = way != "manager"
        with c10d._coalescing_manager(group, async_ops=asynchronous) as manager:
            for case, part in zip(played, parts, strict=True):
                case.collective.call(part.given, part.taken, keywords(case, me, group))
        if asynchronous:
            manager.wait()
        for number, (case, part) in enumerate(zip(played, parts, strict=True)):
            inspect(case, me, part, f"{place(case, me)}, {way}, call {number} of {len(played)}")
    if group is not None:
        dist.destroy_process_group(group)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(operation_of(each), id=each.id, marks=requirement(each.id))
        for each in COALESCED
    ],
)
@given(data=st.data(), way=st.sampled_from(WAYS))
@share(0.2)
def test_calls_that_are_issued_as_one(
    smp_world: SmpWorld, data: st.DataObject, operation: str, way: str
) -> None:
    claims = smp_world.capabilities
    ranks = data.draw(worlds(smp_world), "ranks")
    members = data.draw(groups(ranks, claims, "any"), "group")
    op = op_of(operation)
    moved = dtypes(claims, op, operation)
    if (
        way == "operators"
    ):  # torch's functions turn complex tensors into real ones for the backend; the operators do not
        moved = [each for each in moved if not each.is_complex] or reject()
    dtype = data.draw(st.sampled_from(moved), "dtype")
    count = data.draw(st.integers(1, 5), "calls")
    one = cases(
        ranks,
        claims,
        operation,
        members=members,
        shape=sides(1),
        op=op,
        dtype=dtype,
        of=count,
        unchanged=operation != "all_reduce",
    )
    played = [data.draw(one, f"call {number}") for number in range(count)]
    numbered = [dataclasses.replace(case, number=number) for number, case in enumerate(played)]
    smp_world.run(coalesce, numbered, way, ranks=ranks)
