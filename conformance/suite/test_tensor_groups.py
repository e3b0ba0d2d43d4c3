"""Properties of groups of tensor collectives: any order and size, overlap, and ranks outside the group."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from conformance.cases.draws import share
from conformance.cases.tensor_draws import MOST, claimed, dtypes, every, groups, op_of, some, worlds
from conformance.cases.tensors import COLLECTIVES, Case, new_group, play
from conformance.requirements.catalogue import requirement
from conformance.session.verdicts import not_supported
from pytest_smp.proxies import SmpWorld, TmpPath


@pytest.mark.parametrize(
    ("group", "least"),
    [
        pytest.param(group, least, id=id, marks=requirement(f"COLL-GROUP-{id}"))
        for id, group, least in (
            ("ORDER", "unsorted", 2),
            ("SORTED", "any", 1),
            ("WITHOUT-0", "without 0", 2),
            ("ALONE", "alone", 1),
        )
    ],
)
@given(data=st.data())
@share(0.1)
def test_groups(smp_world: SmpWorld, data: st.DataObject, group: str, least: int) -> None:
    """Each example calls every claimed collective on one group."""
    ranks = data.draw(worlds(smp_world, least), "ranks")
    played = data.draw(every(ranks, smp_world, group=group), "cases")
    if group == "any":
        played = [dataclasses.replace(case, default=False, sort=True) for case in played]
    smp_world.run(play, *played, ranks=ranks)


@requirement("COLL-SIZES")
@given(data=st.data())
@share(0.02)
def test_every_size(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example runs all sizes, so that a bug at one size is found by every example."""
    claims = smp_world.capabilities
    chosen = data.draw(some(dtypes(claims), 1), "dtypes")
    for ranks in range(1, min(MOST, smp_world.ranks) + 1):
        played = [
            Case(name, tuple(range(ranks)), dtype, (2,), op=op, root=ranks - 1)
            for name in claimed(smp_world)
            for op in [op_of(name)]
            for dtype in chosen
            if dtype in dtypes(claims, op, name)
        ]
        smp_world.run(play, *played, ranks=ranks)


@requirement("COLL-GROUP-OVERLAP")
@given(data=st.data())
@share(0.1)
def test_groups_that_share_ranks(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example calls every claimed collective, on one group after the other."""
    claims = smp_world.capabilities
    ranks = data.draw(worlds(smp_world, 2), "ranks")
    made = data.draw(st.lists(groups(ranks, claims, "any"), min_size=2, max_size=4), "groups")
    shape = st.just((2, 1))  # one shape, so that a call of a wrong group would match
    on_each = [
        data.draw(every(ranks, smp_world, members=each, shape=shape, of=len(made)), "cases")
        for each in made
    ]
    turns = zip(*on_each, strict=True)  # the same collective, on every group
    played = [
        dataclasses.replace(case, number=number, dtype=turn[0].dtype)
        for turn in turns
        for number, case in enumerate(turn)
    ]
    smp_world.run(play, *played, ranks=ranks)


def call_all_from_outside(called: list[tuple[str, torch.dtype]], ranks: list[int]) -> None:
    """Call collectives from ranks outside a group; members make no call."""
    group, me = new_group(ranks), dist.get_rank()
    if me in ranks:
        dist.destroy_process_group(group)
        return
    for operation, dtype in called:
        call_from_outside(operation, dtype, group, len(ranks))


def call_from_outside(operation: str, dtype: torch.dtype, group: Any, size: int) -> None:
    """Call a collective on a group that this rank is not in, and check that no tensor has changed."""
    collective, me = COLLECTIVES[operation], dist.get_rank()
    given = [torch.ones(size, dtype=dtype) for _ in range(size)]
    taken = [torch.ones(size, dtype=dtype) for _ in range(size)]
    how = {f"group_{collective.root}": 0} if collective.root else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so, too
        result = collective.call(given, taken, {"group": group, **how})
    assert result is None, f"rank {me} is not in the group, and {operation} returned {result!r}"
    for each in given + taken:
        assert each.double().eq(1).all(), f"rank {me} is not in the group, and {operation} wrote"


@requirement("COLL-GROUP-OUTSIDER")
@given(data=st.data())
@share(0.1)
def test_calls_from_outside(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example calls every claimed collective."""
    world = data.draw(worlds(smp_world, 2), "ranks")
    outsider = data.draw(st.integers(0, world - 1), "outsider")
    members = [rank for rank in range(world) if rank != outsider]
    real = [dtype for dtype in dtypes(smp_world.capabilities) if not dtype.is_complex]
    real = real or not_supported("no dtype that is not complex is claimed")
    called = [(name, data.draw(st.sampled_from(real), name)) for name in claimed(smp_world)]
    smp_world.run(call_all_from_outside, called, members, ranks=world)


# ---- Barriers ------------------------------------------------------------------------------------


def meet_and_look(members: list[int] | None, count: int, folder: Path) -> list[list[int]]:
    """Enter ``count`` barriers of a group; return the members that were missing when each one returned.

    Args:
        members: the ranks of the group; None is the default group.
        count: the number of barriers.
        folder: a folder that all ranks see.
    """
    me, missing = dist.get_rank(), []
    group = None if members is None else new_group(members)
    inside = list(range(dist.get_world_size())) if members is None else members
    for number in range(count if me in inside else 0):
        (folder / f"{me} at {number}").touch()
        dist.barrier(group=group)
        missing.append([r for r in inside if not (folder / f"{r} at {number}").exists()])
    if members is not None and me in members:
        dist.destroy_process_group(group)
    return missing


@requirement("COLL-BARRIER-ALL")
@given(data=st.data(), count=st.integers(1, 3))
@share(0.2)
def test_all_come_before_one_leaves(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject, count: int
) -> None:
    """Files show which ranks have entered.

    Each rank makes its file before its call, so all files exist when a correct barrier returns, on any
    backend and at any speed.
    """
    ranks = data.draw(worlds(smp_world), "ranks")
    seen = smp_world.run(meet_and_look, None, count, smp_tmp_path.fresh(), ranks=ranks)
    for rank, barriers in enumerate(seen):
        for number, missing in enumerate(barriers):
            assert not missing, f"rank {rank} left barrier {number} before ranks {missing} came"


@requirement("COLL-BARRIER-GROUP")
@given(data=st.data(), count=st.integers(1, 3))
@share(0.2)
def test_a_barrier_is_of_its_group(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject, count: int
) -> None:
    """Other ranks enter no barrier, so a barrier that waits for them never ends."""
    ranks = data.draw(worlds(smp_world, 2), "ranks")
    size = data.draw(st.integers(1, ranks), "size")
    members = sorted(data.draw(st.permutations(range(ranks)), "members")[:size])
    seen = smp_world.run(meet_and_look, members, count, smp_tmp_path.fresh(), ranks=ranks)
    for rank in members:
        for number, missing in enumerate(seen[rank]):
            assert not missing, f"rank {rank} left barrier {number} before ranks {missing} came"
