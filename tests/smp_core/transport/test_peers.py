"""The ranks that a call may name: a number that is no rank is an error of the rank that calls, on `sim`.

No number means any source, and none counts from the end as a Python index does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from pytest_smp.ranks.protocols import OutcomeKind, VerdictKind
from smp_core.errors import RankError
from smp_core.transport.peers import ANY, member

Group = Any
Call = Callable[[int, Group], object]


def x() -> torch.Tensor:
    return torch.zeros(2)


def batch(how: Any, **named: Any) -> list[None]:
    return [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(how, x(), **named)])]


#: The operation and the role as messages name them, and the call with a position in the group.
BY_POSITION: dict[str, tuple[str, str, Call]] = {
    "send": ("send", "rank", lambda at, g: dist.send(x(), group=g, group_dst=at)),
    "recv": ("recv", "rank", lambda at, g: dist.recv(x(), group=g, group_src=at)),
    "isend": ("send", "rank", lambda at, g: dist.isend(x(), group=g, group_dst=at)),
    "irecv": ("recv", "rank", lambda at, g: dist.irecv(x(), group=g, group_src=at)),
    "ProcessGroup.send": ("send", "rank", lambda at, g: g.send([x()], at, 0)),
    "ProcessGroup.recv": ("recv", "rank", lambda at, g: g.recv([x()], at, 0)),
    "send_object_list": (
        "send",
        "rank",
        lambda at, g: dist.send_object_list([1], group=g, group_dst=at),
    ),
    "recv_object_list": (
        "recv",
        "rank",
        lambda at, g: dist.recv_object_list([None], group=g, group_src=at),
    ),
    "broadcast": ("broadcast", "root", lambda at, g: dist.broadcast(x(), group=g, group_src=at)),
    "broadcast_object_list": (
        "broadcast",
        "root",
        lambda at, g: dist.broadcast_object_list([1], group=g, group_src=at),
    ),
    "reduce": ("reduce", "root", lambda at, g: dist.reduce(x(), group=g, group_dst=at)),
    "gather": ("gather", "root", lambda at, g: dist.gather(x(), None, group=g, group_dst=at)),
    "scatter": ("scatter", "root", lambda at, g: dist.scatter(x(), None, group=g, group_src=at)),
    "functional.broadcast": ("broadcast", "root", lambda at, g: functional.broadcast(x(), at, g)),
}
#: The same with a rank of the world.
BY_RANK: dict[str, tuple[str, str, Call]] = {
    "send": ("send", "rank", lambda at, g: dist.send(x(), at, g)),
    "recv": ("recv", "rank", lambda at, g: dist.recv(x(), at, g)),
    "isend": ("send", "rank", lambda at, g: dist.isend(x(), at, g)),
    "irecv": ("recv", "rank", lambda at, g: dist.irecv(x(), at, g)),
    "batch_isend_irecv (isend)": (
        "send",
        "rank",
        lambda at, g: batch(dist.isend, peer=at, group=g),
    ),
    "batch_isend_irecv (irecv)": (
        "recv",
        "rank",
        lambda at, g: batch(dist.irecv, peer=at, group=g),
    ),
    "broadcast": ("broadcast", "root", lambda at, g: dist.broadcast(x(), at, g)),
    "reduce": ("reduce", "root", lambda at, g: dist.reduce(x(), at, group=g)),
    "gather": ("gather", "root", lambda at, g: dist.gather(x(), None, at, g)),
    "scatter": ("scatter", "root", lambda at, g: dist.scatter(x(), None, at, g)),
}


def no_positions(size: int) -> st.SearchStrategy[int]:
    """Numbers that are no position in a group of this size: the edges first."""
    edges = [-1, -2, -size, -size - 1, size, size + 1, 2**31 - 1, 2**31, 2**40, -(2**31), -(2**40)]
    far = st.integers(-(2**62), -1) | st.integers(size, 2**62)
    return st.sampled_from(edges) | far


def refused(call: Call, at: int, members: list[int] | None, on: int) -> str:
    """The error of the call on rank ``on``; then all ranks go on together."""
    group = dist.group.WORLD if members is None else dist.new_group(members, sort_ranks=False)
    said = ""
    if dist.get_rank() == on:
        with pytest.raises(ValueError, match=r".") as raised:
            call(at, group)
        said = f"{type(raised.value).__name__}: {raised.value}"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    if group is not dist.group.WORLD and isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)
    return said


@given(data=st.data(), name=st.sampled_from(sorted(BY_POSITION)))
def test_a_position_that_the_group_has_not(smp_world: Any, data: st.DataObject, name: str) -> None:
    ranks = data.draw(st.integers(2, 4), "ranks")
    members = data.draw(
        st.none()
        | st.permutations(range(ranks)).flatmap(
            lambda order: st.integers(1, ranks).map(lambda count: order[:count])
        ),
        "members",
    )
    size = ranks if members is None else len(members)
    on = data.draw(st.sampled_from(range(ranks) if members is None else members), "on")
    at = data.draw(no_positions(size), "position")
    operation, role, call = BY_POSITION[name]
    said = smp_world.run(refused, call, at, members, on, ranks=ranks)[on]
    expected = (
        f"RankError: {operation}: {role} {at} is not in the group; group ranks are 0 to {size - 1}"
    )
    assert said.startswith(expected)


@given(data=st.data(), name=st.sampled_from(sorted(BY_RANK)))
@example(data=None, name="recv")
def test_a_rank_that_the_world_has_not(
    smp_world: Any, data: st.DataObject | None, name: str
) -> None:
    ranks = 2 if data is None else data.draw(st.integers(2, 4), "ranks")
    on = 0 if data is None else data.draw(st.integers(0, ranks - 1), "on")
    at = -1 if data is None else data.draw(no_positions(ranks), "rank")
    operation, role, call = BY_RANK[name]
    said = smp_world.run(refused, call, at, None, on, ranks=ranks)[on]
    expected = (
        f"RankError: {operation}: {role} {at} is not in the group; group ranks are 0 to {ranks - 1}"
    )
    assert said.startswith(expected)


@given(data=st.data(), name=st.sampled_from(sorted(BY_RANK)))
def test_a_rank_outside_the_group(smp_world: Any, data: st.DataObject, name: str) -> None:
    """torch translates ranks of the world, and says so itself; no call may get past it."""
    ranks = data.draw(st.integers(2, 4), "ranks")
    members = data.draw(
        st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1, unique=True), "members"
    )
    outside = [rank for rank in range(ranks) if rank not in members]
    at = data.draw(st.sampled_from(outside) | no_positions(ranks), "rank")
    on = data.draw(st.sampled_from(members), "on")
    said = smp_world.run(refused, BY_RANK[name][2], at, members, on, ranks=ranks)[on]
    assert f"{at} is not part of group" in said


def test_the_edge_of_a_halo_exchange_fails_on_its_rank(smp_world: Any) -> None:
    """Rank 0 has no left neighbour: rank - 1 is not any source, although a message is there."""

    def body() -> None:
        rank, buffer = dist.get_rank(), torch.zeros(2)
        if rank == 1:
            dist.send(torch.ones(2), 0)
        else:
            dist.recv(buffer, rank - 1)

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.FAILED
    assert report.root == 0
    assert report.outcomes[0].kind is OutcomeKind.RAISED
    assert isinstance(report.error, RankError)
    assert str(report.error) == (
        "recv: rank -1 is not in the group; group ranks are 0 to 1. A receive without a source "
        "(src=None) takes a message of any rank"
    )


@pytest.mark.parametrize("at", [None, 1.0, "1", ANY])
def test_what_is_no_integer_is_no_member(at: Any) -> None:
    with pytest.raises(
        RankError, match=r"send: rank .* is not in the group; group ranks are 0 to 2"
    ):
        member("send", "rank", at, 3)
