"""The messages of `smddp`: values, order, and members that end before they answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from smp_core.errors import CollectiveMismatchError
from smp_core.transport.smddp import flat, point_to_point
from smp_core.transport.smddp.point_to_point import EAGER_BYTES
from smp_core.transport.smddp.segment import PACKET_BYTES, PACKET_SLOTS, PIECE_BYTES
from tests.smp_core.transport.smddp.rank_processes import (
    KILLED,
    RANKS,
    check_values,
    on_ranks,
    progress_threads,
    text_of,
    value,
    wait_for_departure,
)


def check_messages(rank: int) -> None:
    counts = (0, 1, PACKET_BYTES // 4, PIECE_BYTES // 4 + 1, PIECE_BYTES)
    sent = {number: value(rank, count, number) for number, count in enumerate(counts)}
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    works = [dist.isend(tensor, after, tag=number) for number, tensor in sent.items()]
    for number, count in reversed(list(enumerate(counts))):
        tensor = torch.empty(count)
        dist.recv(tensor, before, tag=number)
        assert torch.equal(tensor, value(before, count, number)), count
    for work in works:
        work.wait()


def check_more_messages_than_the_ring_has(rank: int) -> None:
    """The last receive of a rank is done only when its sender needs no more of it: nobody waits here for long."""
    group = dist.new_group([0, 1])
    if rank < 2:
        number = 10 * PACKET_SLOTS
        sends = []
        for sender in range(2):  # one after the other: a rank that sends takes what has come
            if rank == sender:
                sends = [
                    dist.isend(torch.full((2,), float(each)), 1 - rank)
                    for each in range(rank, number, 2)
                ]
            dist.barrier(group)
        tensors = [torch.empty(2) for _ in sends]
        for work in reversed([*sends, *(dist.irecv(tensor, 1 - rank) for tensor in tensors)]):
            work.wait()
        expected = [float(each) for each in range(1 - rank, number, 2)]
        assert [tensor[0].item() for tensor in tensors] == expected


def check_receives_are_matched_in_order(rank: int) -> None:
    """All receives are posted before the first message comes."""
    tensors = [torch.empty(1) for _ in range(3)]
    works = [dist.irecv(tensor, 1) for tensor in tensors if rank == 0]
    dist.barrier()
    if rank == 1:
        for number in range(3):
            dist.send(torch.tensor([float(number)]), 0)
    for work in works:
        work.wait()
    assert rank or [tensor.item() for tensor in tensors] == [0, 1, 2]


def check_any_source(rank: int) -> None:
    if rank:
        dist.send(torch.full((2, 3), float(rank)), 0)
        return
    tensor = torch.empty(3, 2).t()
    for _ in range(RANKS - 1):
        assert (tensor == dist.recv(tensor)).all()


CHECKS: list[Callable[[int], None]] = [
    check_messages,
    check_more_messages_than_the_ring_has,
    check_receives_are_matched_in_order,
    check_any_source,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None]) -> None:
    check_values(tmp_path, check)


def test_a_message_that_differs_is_an_error_on_both_sides(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        tensor = torch.ones(2 + rank)
        call = dist.recv if rank else dist.send
        return text_of(CollectiveMismatchError, lambda: call(tensor, 1 - rank))

    one, other = on_ranks(tmp_path, 2, body)
    assert one == other
    assert "rank 0: send of 2 elements of float32" in one
    assert "rank 1: recv of 3 elements of float32" in one


def test_the_end_of_a_sender_that_was_not_answered_ends_the_receive(tmp_path: Path) -> None:
    """Its message is long, and the answer waits behind messages that it has not taken."""

    def body(rank: int) -> str:
        if rank:
            dist.isend(torch.ones(PIECE_BYTES), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_departure(1)
        for _ in range(PACKET_SLOTS + 1):
            dist.isend(torch.ones(1), 1, tag=1)
        return text_of(dist.DistBackendError, lambda: dist.recv(torch.empty(PIECE_BYTES), 1))

    one, killed = on_ranks(tmp_path, 2, body)
    assert killed == KILLED
    assert "recv from a member of group WORLD cannot end: rank 1: its process" in one


def test_an_ack_of_a_member_that_was_given_up_does_not_end_the_progress_thread(
    tmp_path: Path,
) -> None:
    """Rank 1 leaves a group with a receive in flight, and takes the message when its sender has got an error."""
    fork = multiprocessing.get_context("fork")
    left, given_up = fork.Event(), fork.Event()

    def body(rank: int) -> None:
        group = dist.new_group()
        dist.barrier(group)
        if rank == 1:
            take = point_to_point.PointToPoint._read_packet

            def late(self: Any, *args: Any) -> None:
                assert given_up.wait(60)
                take(self, *args)

            point_to_point.PointToPoint._read_packet = late  # type: ignore[method-assign]
            received = torch.zeros(1)
            work = dist.irecv(received, 0, group=group)
            dist.destroy_process_group(group)
            left.set()
            assert given_up.wait(60)
            assert work is not None
            work.wait()
            assert received.item() == 1
        else:
            # The call that posts the receive would take an earlier message, and wait in it before the group is left.
            assert left.wait(60)
            for _ in range(2):  # the second one reads the answer to the first
                with pytest.raises(dist.DistBackendError, match="it has destroyed the group"):
                    dist.send(torch.ones(1), 1, group=group)
                given_up.set()
                dist.barrier()
        if rank == 1:
            dist.barrier()
            dist.barrier()
        assert progress_threads() == 1

    on_ranks(tmp_path, 2, body)


def test_what_fails_in_a_receive_is_its_error_alone(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        for count in (1, EAGER_BYTES):
            if rank == 0:
                dist.send(torch.ones(count, 2), 1)
            else:
                finish = flat.Target.finish

                def full(self: Any) -> None:
                    raise MemoryError("no room")

                flat.Target.finish = full  # type: ignore[method-assign]
                work = dist.irecv(torch.ones(2, count).t(), 0)
                assert work is not None
                with pytest.raises(RuntimeError, match="MemoryError: no room"):
                    work.get_future().wait()
                flat.Target.finish = finish  # type: ignore[method-assign]
            dist.barrier()
        tensor = torch.ones(3)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        assert tensor.tolist() == [2.0] * 3
        assert progress_threads() == 1

    on_ranks(tmp_path, 2, body)
