"""The object transport on 8 ranks of MPI."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from smp_core.errors import CollectiveMismatchError, PayloadError
from smp_core.transport.mpi import messenger
from smp_core.transport.protocols import Group


def check_objects_of_every_kind_and_size(world: Any) -> None:
    objects, me, size = world.fabric.objects, world.rank, world.size
    edge = messenger.INLINE
    for value in (None, 7, "text", {"a": [1, (2, 3)]}, torch.arange(5), b"x" * 3_000_000):
        if me == 2:
            objects.send(value, 6)
        if me == 6:
            got = objects.recv_from(2)
            same = torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
            assert same, value
    for length in range(edge - 300, edge + 20, 7):
        gathered = objects.allgather(bytes([me]) * length if me == 3 else me, world.group)
        assert gathered == [bytes([3]) * length if rank == 3 else rank for rank in range(size)]


def check_sends_and_broadcasts_arrive_in_order(world: Any) -> None:
    objects, me, size = world.fabric.objects, world.rank, world.size
    evens = Group("EVENS", (0, 2, 4, 6))
    if me == 4:
        objects.broadcast(["to all"], world.group)
        objects.send("to 2", 2)
        objects.broadcast("to evens" * 10_000, evens)
        objects.send("to 7", 7)
    else:
        assert objects.recv_from(4) == ["to all"]
        if me == 2:
            assert objects.recv_from(4) == "to 2"
        if me in (0, 2, 6):
            assert objects.recv_from(4) == "to evens" * 10_000
        if me == 7:
            assert objects.recv_from(4) == "to 7"
    # From whom it says, whoever was first.
    if me == 0:
        assert [objects.recv_from(src) for src in range(size - 1, 0, -1)] == [*range(70, 0, -10)]
    else:
        objects.send(10 * me, 0)
    lonely = Group("LONELY", (me,))
    objects.broadcast("nobody", lonely)
    assert objects.allgather(me, lonely) == [me]
    objects.barrier(lonely)


def check_a_send_returns_when_it_was_taken(world: Any) -> None:
    objects, me = world.fabric.objects, world.rank
    if me == 0:
        outgoing = objects._mailbox.send(1, 0, messenger_payload("early"))
    for _ in range(3):
        objects.barrier(world.group)
    if me == 0:
        assert not outgoing.done
    objects.barrier(world.group)
    if me == 1:
        assert objects.recv_from(0) == "early"
    if me == 0:
        world.fabric.messenger.wait(lambda: outgoing.done)


def messenger_payload(obj: object) -> bytes:
    from smp_core.transport.mpi import objects

    return objects._frozen(obj, "a test")


def check_groups_do_not_mix(world: Any) -> None:
    objects, me, size = world.fabric.objects, world.rank, world.size
    backwards = Group("BACK", tuple(range(size))[::-1])
    same = Group("SAME", tuple(range(size)))
    half = Group("HALF", (5, 1, 4))
    for number in range(me % 3 if me in half.ranks else 0):  # nobody else waits for these
        objects.barrier(Group("ALONE", (me,)))
        assert number < 3
    first = objects.allgather(("back", me), backwards)
    second = objects.allgather(("same", me), same)
    assert first == [("back", rank) for rank in range(size)][::-1]
    assert second == [("same", rank) for rank in range(size)]
    if me in half.ranks:
        assert objects.allgather(me, half) == [5, 1, 4]
        objects.barrier(half)


def check_every_element_is_a_copy(world: Any) -> None:
    objects, me = world.fabric.objects, world.rank
    mine = [me]
    gathered = objects.allgather(mine, world.group)
    assert gathered[me] == mine
    assert gathered[me] is not mine
    gathered[me].append("changed")
    assert mine == [me]
    if me == 1:
        objects.broadcast(mine, world.group)
        mine.append("later")
    else:
        assert objects.recv_from(1) == [1]


def check_what_cannot_be_pickled_is_refused_and_nothing_sent(world: Any) -> None:
    objects, me, size = world.fabric.objects, world.rank, world.size
    bad = {"fine": 1, "lock": threading.Lock()}
    for call in (
        lambda: objects.send(bad, (me + 1) % size),
        lambda: objects.broadcast(bad, world.group),
        lambda: objects.allgather(bad, world.group),
    ):
        with pytest.raises(PayloadError, match=r"\['lock'\]"):
            call()
    assert world.board.calls == []
    assert objects.allgather(me, world.group) == [*range(size)]


class Unreadable:
    """Its pickle says: int("no number")."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def check_what_cannot_be_unpickled_names_the_call_that_sent_it(world: Any) -> None:
    objects, me, size = world.fabric.objects, world.rank, world.size
    with pytest.raises(PayloadError, match=r"^smp\.allgather: .* unpickled: .*ValueError"):
        objects.allgather(Unreadable() if me == 3 else me, world.group)
    if me == 0:
        objects.send(Unreadable(), 1)
        objects.broadcast(Unreadable(), world.group)
    elif me == 1:
        with pytest.raises(PayloadError, match=r"^smp\.send\(world rank 1\): .* unpickled: "):
            objects.recv_from(0)
    if me:
        with pytest.raises(PayloadError, match=r"^smp\.broadcast\(group WORLD\): .* unpickled: "):
            objects.recv_from(0)
    assert objects.allgather("end", world.group) == ["end"] * size


def check_the_board_is_told(world: Any) -> None:
    objects, me = world.fabric.objects, world.rank
    trio = Group("TRIO", (0, 1, 2))
    if me == 0:
        objects.send(1, 1)
        objects.broadcast(2, trio)
    if me in (1, 2):
        for _ in range(3 - me):
            objects.recv_from(0)
    if me in trio.ranks:
        objects.allgather(3, trio)
        objects.barrier(trio)
    receive = ("smp.recv_from", "WORLD", (), 0)
    assert world.board.calls == {
        0: [("smp.send", "WORLD", (1,), None), ("smp.broadcast", "TRIO", (1, 2), None)],
        1: [receive, receive],
        2: [receive],
    }.get(me, []) + (
        [("smp.allgather", "TRIO", (), None), ("smp.barrier", "TRIO", (), None)] if me < 3 else []
    )


def check_different_calls_are_a_mismatch(world: Any) -> None:
    objects, me = world.fabric.objects, world.rank
    if me == 0:
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 0: smp\.barrier\n  rank [1-7]: smp\.all"
        ):
            objects.barrier(world.group)
    world.stop_after = world.asked
    if me:
        from smp_core.errors import Cancelled

        with pytest.raises(Cancelled):
            objects.allgather(me, world.group)


def check_many_small_objects(world: Any) -> None:
    objects, me, size = world.fabric.objects, world.rank, world.size
    for number in range(300):
        if me == number % size:
            objects.send(number, (me + 1) % size)
        elif me == (number + 1) % size:
            assert objects.recv_from((me - 1) % size) == number
    assert objects.allgather("end", world.group) == ["end"] * size
