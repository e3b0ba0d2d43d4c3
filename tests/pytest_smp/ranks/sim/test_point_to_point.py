"""Tensor point-to-point on `sim`: matched by sender, receiver and tag, in the order of posting; a
send returns only when it has been received.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist


def tensor(rank: int, slot: int, count: int = 3) -> torch.Tensor:
    return torch.tensor(numbers(rank, slot, count))


def numbers(rank: int, slot: int, count: int = 3) -> list[float]:
    return [float(1 + index + 10 * slot + 100 * rank) for index in range(count)]


def empty(count: int = 3) -> torch.Tensor:
    return torch.full((count,), -1.0)


def test_a_ring_of_eight(smp_world: Any) -> None:
    def body() -> list[float]:
        rank = dist.get_rank()
        inbox = empty()
        work = dist.isend(tensor(rank, 0), (rank + 1) % 8)
        assert dist.recv(inbox, (rank - 1) % 8) == (rank - 1) % 8
        assert work is not None
        work.wait()
        result: list[float] = inbox.tolist()
        return result

    assert smp_world.run(body, ranks=8) == [numbers((rank - 1) % 8, 0) for rank in range(8)]


def test_messages_of_one_pair_and_tag_arrive_in_order(smp_world: Any) -> None:
    def body() -> list[list[float]]:
        if dist.get_rank() == 0:
            for slot in range(5):
                dist.send(tensor(0, slot), 1)
            return []
        inboxes = [empty() for _ in range(5)]
        for inbox in inboxes:
            dist.recv(inbox, 0)
        return [inbox.tolist() for inbox in inboxes]

    assert smp_world.run(body, ranks=2)[1] == [numbers(0, slot) for slot in range(5)]


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_tags_are_received_out_of_order(smp_world: Any, first: str) -> None:
    """Whichever side posts first."""

    def body() -> list[list[float]]:
        rank = dist.get_rank()
        works: list[Any] = []
        inboxes = {tag: empty() for tag in (7, 0, 3)}
        if (first == "sender") != (rank == 0):
            dist.barrier()
        if rank == 0:
            works = [dist.isend(tensor(0, tag), 1, tag=tag) for tag in (0, 3, 7)]
        else:
            works = [dist.irecv(inboxes[tag], 0, tag=tag) for tag in (7, 0, 3)]
        if (first == "sender") == (rank == 0):
            dist.barrier()
        for work in works[::-1]:
            work.wait()
        return [] if rank == 0 else [inboxes[tag].tolist() for tag in (0, 3, 7)]

    assert smp_world.run(body, ranks=2)[1] == [numbers(0, tag) for tag in (0, 3, 7)]


def test_a_send_returns_only_when_it_has_been_received(smp_world: Any) -> None:
    """Rank threads share this list: it shows the order of events. Ranks 1 and 2 meet three times
    before the receive, which gives rank 0 every chance to go on too early."""
    events: list[str] = []

    def body() -> None:
        rank = dist.get_rank()
        pair = dist.new_group([1, 2])
        if rank == 0:
            dist.send(tensor(0, 0), 1)
            events.append("sent")
            return
        for _ in range(3):
            dist.barrier(pair)
        if rank == 1:
            events.append("about to receive")
            dist.recv(empty(), 0)
        dist.destroy_process_group(pair)

    smp_world.run(body, ranks=3)
    assert events == ["about to receive", "sent"]


def test_receive_from_any_source_returns_who_sent(smp_world: Any) -> None:
    def body() -> dict[int, list[float]]:
        rank = dist.get_rank()
        if rank != 2:
            dist.send(tensor(rank, 0), 2)
            return {}
        heard = {}
        for _ in range(4):
            inbox = empty()
            sender = dist.recv(inbox)
            heard[sender] = inbox.tolist()
        return heard

    assert smp_world.run(body, ranks=5)[2] == {rank: numbers(rank, 0) for rank in (0, 1, 3, 4)}


def test_receive_from_any_source_respects_the_tag(smp_world: Any) -> None:
    def body() -> tuple[int, list[float], int, list[float]] | None:
        rank = dist.get_rank()
        if rank == 0:
            early, late = empty(), empty()
            second = dist.recv(late, tag=5)
            first = dist.recv(early, tag=4)
            return second, late.tolist(), first, early.tolist()
        dist.send(tensor(rank, 0), 0, tag=3 + rank)
        return None

    assert smp_world.run(body, ranks=3)[0] == (2, numbers(2, 0), 1, numbers(1, 0))


def test_any_source_in_a_group_gives_world_ranks(smp_world: Any) -> None:
    def body() -> tuple[int, list[float]] | None:
        rank = dist.get_rank()
        group = dist.new_group([2, 3, 1], sort_ranks=False)
        result = None
        if rank == 3:
            inbox = empty()
            result = dist.recv(inbox, group=group), inbox.tolist()
        if rank == 1:
            dist.send(tensor(rank, 0), 3, group=group)
        if rank:
            dist.destroy_process_group(group)
        return result

    assert smp_world.run(body, ranks=4)[3] == (1, numbers(1, 0))


def test_batches_need_no_order_between_sends_and_receives(smp_world: Any) -> None:
    """Every rank sends to all others and receives from all, sends first on even ranks."""

    def body() -> list[list[float]]:
        rank, others = dist.get_rank(), [each for each in range(4) if each != dist.get_rank()]
        inboxes = {other: empty() for other in others}
        sends = [dist.P2POp(dist.isend, tensor(rank, other), other) for other in others]
        receives = [dist.P2POp(dist.irecv, inboxes[other], other) for other in others]
        batch = sends + receives if rank % 2 == 0 else receives[::-1] + sends
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return [inboxes[other].tolist() for other in others]

    for rank, got in enumerate(smp_world.run(body, ranks=4)):
        assert got == [numbers(other, slot=rank) for other in range(4) if other != rank]


def test_two_messages_of_a_batch_keep_their_order(smp_world: Any) -> None:
    def body() -> list[list[float]]:
        rank = dist.get_rank()
        peer, inboxes = 1 - rank, [empty(), empty()]
        batch = [dist.P2POp(dist.isend, tensor(rank, slot), peer) for slot in range(2)]
        batch += [dist.P2POp(dist.irecv, inbox, peer) for inbox in inboxes]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return [inbox.tolist() for inbox in inboxes]

    expected = [[numbers(1 - rank, slot) for slot in range(2)] for rank in range(2)]
    assert smp_world.run(body, ranks=2) == expected


def test_groups_keep_their_messages_apart(smp_world: Any) -> None:
    """Same pair, same tag, two groups and the world: a receive gets its own group's message."""

    def body() -> list[list[float]]:
        rank = dist.get_rank()
        groups = [None, dist.new_group([0, 1]), dist.new_group([1, 0], sort_ranks=False)]
        inboxes = [empty() for _ in groups]
        works: list[Any] = []
        for slot, group in enumerate(groups):
            if rank == 0:
                works.append(dist.isend(tensor(0, slot), 1, group=group))
        for group, inbox in [*zip(groups, inboxes, strict=True)][::-1]:
            if rank == 1:
                works.append(dist.irecv(inbox, 0, group=group))
        for work in works:
            work.wait()
        for group in groups[1:]:
            dist.destroy_process_group(group)
        return [inbox.tolist() for inbox in inboxes]

    assert smp_world.run(body, ranks=2)[1] == [numbers(0, slot) for slot in range(3)]


def test_point_to_point_and_collectives_do_not_mix(smp_world: Any) -> None:
    def body() -> tuple[list[float], list[float]]:
        rank = dist.get_rank()
        inbox, total = empty(), tensor(rank, 1)
        works: list[Any] = [dist.isend(tensor(rank, 0), 1 - rank)] if rank == 0 else []
        dist.all_reduce(total)
        if rank == 1:
            dist.recv(inbox, 0)
        for work in works:
            work.wait()
        return inbox.tolist(), total.tolist()

    total = [a + b for a, b in zip(numbers(0, 1), numbers(1, 1), strict=True)]
    assert smp_world.run(body, ranks=2) == [([-1.0] * 3, total), (numbers(0, 0), total)]


def test_isend_and_irecv_to_oneself(smp_world: Any) -> None:
    """torch allows it for these two, in either order, and refuses a blocking send to oneself."""

    def body() -> list[list[float]]:
        rank, inboxes = dist.get_rank(), [empty(), empty()]
        works: list[Any] = [dist.irecv(inboxes[0], rank, tag=9)]
        works.append(dist.isend(tensor(rank, 4), rank, tag=9))
        works.append(dist.isend(tensor(rank, 5), rank))
        works.append(dist.irecv(inboxes[1], rank))
        for work in works:
            work.wait()
        with pytest.raises(ValueError, match="same as"):
            dist.send(tensor(rank, 0), rank)
        return [inbox.tolist() for inbox in inboxes]

    expected = [[numbers(rank, 4), numbers(rank, 5)] for rank in range(2)]
    assert smp_world.run(body, ranks=2) == expected


def test_object_lists(smp_world: Any) -> None:
    def body() -> tuple[int, list[Any]] | None:
        if dist.get_rank() == 0:
            dist.send_object_list([{"a": tensor(0, 0)}, "two"], 2)
            return None
        if dist.get_rank() == 1:
            return None
        inbox: list[Any] = [None, None]
        sender = dist.recv_object_list(inbox, 0)
        return sender, [inbox[0]["a"].tolist(), inbox[1]]

    assert smp_world.run(body, ranks=3) == [None, None, (0, [numbers(0, 0), "two"])]


def test_shapes_may_differ_when_the_elements_fit(smp_world: Any) -> None:
    """As on Gloo: elements move in memory order, the receiver's shape says where they go."""

    def body() -> list[list[float]]:
        if dist.get_rank() == 0:
            dist.send(tensor(0, 0, 6).view(3, 2), 1)
            return []
        inbox = torch.full((2, 3), -1.0)
        dist.recv(inbox, 0)
        result: list[list[float]] = inbox.tolist()
        return result

    flat = numbers(0, 0, 6)
    assert smp_world.run(body, ranks=2)[1] == [flat[:3], flat[3:]]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_scalars_and_nothing(smp_world: Any, shape: tuple[int, ...]) -> None:
    def body() -> Any:
        rank = dist.get_rank()
        mine = torch.full(shape, 5.0 + rank)
        if rank == 0:
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
        return mine.shape, mine.tolist()

    expected = torch.Size(shape), torch.full(shape, 5.0).tolist()
    assert smp_world.run(body, ranks=2) == [expected] * 2


def test_what_is_received_is_a_copy(smp_world: Any) -> None:
    def body() -> list[float]:
        rank, mine = dist.get_rank(), tensor(dist.get_rank(), 0)
        if rank == 0:
            dist.send(mine, 1)
            mine.fill_(-5)
            dist.barrier()
        else:
            dist.recv(mine, 0)
            dist.barrier()
        result: list[float] = mine.tolist()
        return result

    assert smp_world.run(body, ranks=2)[1] == numbers(0, 0)


@pytest.mark.parametrize("call", ["send", "recv", "isend", "irecv"])
@pytest.mark.parametrize("peer", [2, -2, 99])
def test_a_peer_out_of_range_is_an_error_of_the_caller(
    smp_world: Any, call: str, peer: int
) -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            with pytest.raises(ValueError):  # noqa: PT011  torch's own message, or ours
                getattr(dist, call)(empty(), peer)

    smp_world.run(body, ranks=2)
