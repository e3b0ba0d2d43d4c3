"""Calls on Gloo that name a rank which the group does not have.

Gloo refuses a wrong root, and takes a wrong peer: it waits for ever or dies. The board then says what
`sim` says, never takes the number for an index, and never turns itself off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from pytest_smp.ranks.board import Board
from pytest_smp.ranks.protocols import VerdictKind
from smp_core.errors import RankError
from smp_core.transport.peers import ANY

from .real_ranks import run
from .streams import BARRIER, world

kept: list[Any] = []  # works that a body does not wait for: Gloo waits when one is forgotten


def x() -> torch.Tensor:
    return torch.zeros(2)


def batch(how: Any, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(how, x(), peer)]):
        work.wait()


def default() -> Any:
    return dist.group.WORLD


CALLS: dict[str, tuple[str, int, Callable[[], object]]] = {
    "send": ("send", -1, lambda: dist.send(x(), -1)),
    "send by position": ("send", -2, lambda: dist.send(x(), group_dst=-2)),
    "recv": ("recv", -1, lambda: dist.recv(x(), -1)),
    "recv from beyond": ("recv", 3, lambda: dist.recv(x(), 3)),
    "isend, kept": ("send", -3, lambda: kept.append(dist.isend(x(), -3))),
    "irecv, kept": ("recv", -1, lambda: kept.append(dist.irecv(x(), -1))),
    "batch": ("recv", -1, lambda: batch(dist.irecv, -1)),
    "ProcessGroup.send": ("send", -1, lambda: default().send([x()], -1, 0).wait()),
    "through the dispatcher": (
        "send",
        -1,
        lambda: kept.append(torch.ops.c10d.send([x()], default().boxed(), -1, 0)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_peer_that_gloo_takes(name: str) -> None:
    verb, peer, call = CALLS[name]

    def body(rank: int) -> None:
        if rank == 1:
            call()
        dist.barrier()

    seen = run(body, 3)
    assert seen.finding is not None, seen.errors
    assert isinstance(seen.finding.error, RankError)
    assert seen.finding.verdict is VerdictKind.FAILED
    assert seen.finding.root == 1
    first, *rest = str(seen.finding.error).splitlines()
    assert first.startswith(f"{verb}: rank {peer} is not in the group; group ranks are 0 to 2")
    way = "send to" if verb == "send" else "recv from"
    assert rest[0] == f"  rank 1: {way} rank {peer} (float32, shape [2], tag 0)"
    assert "test_strays.py" in rest[1]


@pytest.mark.parametrize("root", [-1, -3, 3, 2**40])
def test_a_root_that_gloo_refuses(root: int) -> None:
    """On one rank, which goes on: the call counts nowhere."""

    def body(rank: int) -> None:
        if rank == 1:
            for call in (
                lambda: dist.broadcast(x(), root),
                lambda: dist.reduce(x(), root),
                lambda: dist.gather(x(), None, root),
                lambda: dist.scatter(x(), None, root),
            ):
                with pytest.raises(RuntimeError, match=f"invalid root rank: {root}"):
                    call()
        dist.barrier()

    seen = run(body, 3)
    assert seen.finding is None
    assert not seen.errors, "\n".join(seen.errors.values())
    assert seen.board.settled()


# ---- Records made by hand ------------------------------------------------------------------------


def test_one_that_the_backend_refuses_does_not_count() -> None:
    board, (one, other) = world(2)
    number = one.recorder.post(True, one.world, -1, 0, "key", lambda: BARRIER)
    one.recorder.withdrawn(number)
    for rank in (one, other):
        rank.does(BARRIER)
        rank.returns()
    assert board.look((), 0.0) is None
    assert board.settled()


@pytest.mark.parametrize("late", [False, True])
def test_one_that_ends(late: bool) -> None:
    """By an error, of which the body knows; or as if there had been such a rank."""
    board, (one, other) = world(2)
    number = one.posts("isend", 7)
    one.waits(number)
    assert board.look((0, 1), 0.0) is None  # it may still be refused
    (one.recorder.failed if late else one.recorder.done)([number])
    for rank in (one, other):
        rank.does(BARRIER)
        rank.returns()
    finding = board.look((), 0.0)
    if late:
        assert finding is None
    else:
        assert finding is not None
        assert isinstance(finding.error, RankError)
        assert finding.root == 0


def test_who_waits_for_the_rank_that_made_it_is_not_blamed() -> None:
    board, (one, other) = world(2)
    one.waits(one.posts("irecv", -1))
    other.waits(other.posts("isend", 0))
    assert board.look((0, 1), 0.0) is None
    finding = board.look((0, 1), 100.0)
    assert finding is not None
    assert isinstance(finding.error, RankError)
    assert finding.root == 0
    assert {*finding.waits} == {0, 1}


def test_no_number_is_any_source() -> None:
    def waits(peer: Any) -> str:
        board, (one, _) = world(2)
        one.waits(one.posts("irecv", peer))
        return board.where(0)

    assert waits(ANY).startswith("in recv from any rank (float32, shape [4], tag 0) ")
    for peer in (-2, -1, 2, 2**40):
        assert waits(peer).startswith(
            f"in recv from rank {peer} (float32, shape [4], tag 0) [group WORLD]: rank {peer} is not "
            "in the group; group ranks are 0 to 1"
        )


def test_the_last_call_is_known() -> None:
    board: Board
    board, (one, _) = world(2)
    assert board.last(0) == ""
    one.does(BARRIER)
    assert board.last(0).startswith("after barrier() [group WORLD, call 1]")
    one.posts("isend", 5)
    assert board.last(0).startswith(
        "after send to rank 5 (float32, shape [4], tag 0) [group WORLD]: "
    )
