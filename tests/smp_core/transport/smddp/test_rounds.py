"""The rounds of `smddp`: many operations at once, calls that differ, and failures inside of an operation."""

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

from smp_core.errors import BackendError, CollectiveMismatchError, UnsupportedError
from smp_core.reduction import reduce_tensors
from smp_core.transport.smddp import collectives, futex, segment
from smp_core.transport.smddp.collectives import ONE_HOP_BYTES
from tests.smp_core.transport.smddp.rank_processes import (
    KILLED,
    RANKS,
    ROW_BYTES,
    check_values,
    on_ranks,
    text_of,
    value,
)


def check_many_at_once(rank: int) -> None:
    tensors = [value(rank, 10 ** (number % 6), number) for number in range(60)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        everybody = [value(each, 10 ** (number % 6), number) for each in range(RANKS)]
        assert torch.equal(tensor, reduce_tensors(everybody, "SUM")), number


def check_equal_sizes_without_room(rank: int) -> None:
    """The members have the same sizes, which are longer as text than the room that a member has for them."""
    counts = [
        number % 7 + number for number in range(2 * segment.DESCRIPTION_BYTES // len("[[1], 1], "))
    ]
    outputs = [[torch.empty(count) for count in counts] for _ in range(RANKS)]
    inputs = [torch.full((count,), float(rank)) for count in counts]
    dist.group.WORLD.allgather_coalesced(outputs, inputs).wait()
    for source, tensors in enumerate(outputs):
        assert all((each == source).all() for each in tensors)


CHECKS: list[Callable[[int], None]] = [check_many_at_once, check_equal_sizes_without_room]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None]) -> None:
    check_values(tmp_path, check)


def test_every_rank_learns_of_calls_that_differ(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        tensor = torch.ones(3 if rank == 1 else 2)
        reported = [text_of(CollectiveMismatchError, lambda: dist.all_reduce(tensor))]
        outputs = [torch.empty(2 if rank == 2 else 1) for _ in range(RANKS)]
        inputs = [torch.ones(1) for _ in range(RANKS)]
        reported.append(text_of(CollectiveMismatchError, lambda: dist.all_to_all(outputs, inputs)))
        output, rows = torch.empty(RANKS, 2), torch.ones(RANKS * (2 if rank == 2 else 1), 2)
        reported.append(
            text_of(CollectiveMismatchError, lambda: dist.all_to_all_single(output, rows))
        )
        dist.barrier()  # the group serves on
        return reported

    first, *others = on_ranks(tmp_path, RANKS, body)
    assert all(reported == first for reported in others)
    assert "call 1 on group WORLD differs in shape" in first[0]
    assert "odd one out: rank 1" in first[0]
    assert "rank 0 sends 1 element to rank 2" in first[1]
    assert "odd one out: rank 2" in first[1]
    ones, twos = [1] * RANKS, [2] * RANKS
    assert f"rank 2 sends 2 rows of 2 elements to rank 0 (input split sizes {twos})" in first[2]
    assert f"rank 0 expects 1 row of 2 elements from rank 2 (output split sizes {ones})" in first[2]
    assert "odd one out: rank 2" in first[2]


def test_calls_of_different_lengths_differ_and_the_group_serves_on(tmp_path: Path) -> None:
    """One rank's call takes many rounds, and those of the others take one."""

    def body(rank: int) -> str:
        tensor = torch.ones(10 * ROW_BYTES if rank == 1 else 1)
        reported = text_of(CollectiveMismatchError, lambda: dist.all_reduce(tensor))
        for number in range(10):
            tensor = torch.full((ROW_BYTES,), float(number))
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((ROW_BYTES,), float(RANKS * number)))
        return reported

    first, *others = on_ranks(tmp_path, RANKS, body)
    assert all(reported == first for reported in others)
    assert "odd one out: rank 1" in first


def test_different_sizes_without_room_are_an_error_of_every_rank(
    tmp_path: Path,
) -> None:
    def body(rank: int) -> str:
        group: Any = dist.group.WORLD
        inputs = [torch.ones(rank * each) for each in range(1000)]
        outputs = [[torch.empty(member * each) for each in range(1000)] for member in range(RANKS)]
        reported = text_of(
            UnsupportedError, lambda: group.allgather_coalesced(outputs, inputs).wait()
        )
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # the group serves on
        assert tensor.item() == RANKS
        return reported

    first, *others = on_ranks(tmp_path, RANKS, body)
    assert all(reported == first for reported in others)
    assert "all_gather_coalesced on group WORLD: the sizes that rank 0 gives are too long" in first
    assert "Gather fewer tensors in one call" in first


def test_a_rank_that_dies_as_it_arrives_has_come(tmp_path: Path) -> None:
    """The rank has counted itself in the word of the round, and nothing else. The others have arrived before: one that
    arrives later could be missed by a poll of the other one.
    """
    come = multiprocessing.get_context("fork").Semaphore(0)

    def body(rank: int) -> float:
        if rank == 1:
            assert all(come.acquire(timeout=60) for _ in range(RANKS - 1))
            add = futex.add_one

            def last(address: int, idle: int) -> None:
                add(address, idle)
                os.kill(os.getpid(), signal.SIGKILL)

            futex.add_one = last
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        come.release()
        work.wait()
        assert "rank 1: its process" in text_of(dist.DistBackendError, dist.barrier)
        return tensor.item()

    assert on_ranks(tmp_path, RANKS, body) == [RANKS, KILLED, RANKS]


def test_a_rank_that_dies_before_it_arrives_has_not_come(tmp_path: Path) -> None:
    """The rank has written the round, and has not counted itself in the word."""

    def body(rank: int) -> str:
        if rank == 1:
            futex.add_one = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return text_of(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1)))

    one, killed, other = on_ranks(tmp_path, RANKS, body)
    assert killed == KILLED
    assert "rank 1: its process" in one
    assert "rank 1: its process" in other


def test_what_fails_inside_of_an_operation_on_one_rank_ends_it_on_all(tmp_path: Path) -> None:
    over = multiprocessing.get_context("fork").Barrier(
        RANKS
    )  # the end of one would be another reason

    def body(rank: int) -> str:
        if rank == 1:

            def full(*_: Any) -> None:
                raise MemoryError("no room")

            collectives.fold_rows = full
            reported = text_of(MemoryError, lambda: dist.all_reduce(torch.ones(ONE_HOP_BYTES)))
        else:
            reported = text_of(
                dist.DistBackendError, lambda: dist.all_reduce(torch.ones(ONE_HOP_BYTES))
            )
        over.wait(60)
        return reported

    one, raised, other = on_ranks(tmp_path, RANKS, body)
    assert raised == "no room"
    for text in (one, other):
        assert "call 1 on group WORLD cannot end: rank 1: an operation of it" in text


def test_what_is_interrupted_inside_of_an_operation_ends_the_group(tmp_path: Path) -> None:
    """Ctrl-C strikes when rank 1 has been counted, and before it knows. Messages of the group end as well."""
    fork = multiprocessing.get_context("fork")
    come, others = fork.Semaphore(0), fork.Semaphore(0)

    def body(rank: int) -> str:
        dist.barrier()
        if rank == 1:
            assert all(come.acquire(timeout=60) for _ in range(RANKS - 1))
            add = futex.add_one

            def struck(*args: Any) -> None:
                add(*args)
                futex.add_one = add
                raise KeyboardInterrupt

            futex.add_one = struck
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(1))
            reported = [text_of(dist.DistBackendError, dist.barrier) for _ in range(2)]
            reported.append(text_of(dist.DistBackendError, lambda: dist.send(torch.ones(1), 0)))
            assert reported == [reported[0]] * 3
            assert all(
                others.acquire(timeout=60) for _ in range(RANKS - 1)
            )  # its end would be another reason
            return reported[0]
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        come.release()  # one that comes after rank 1 could be missed by a poll of the other one
        work.wait()
        reported = [text_of(dist.DistBackendError, dist.barrier)]
        reported.append(text_of(dist.DistBackendError, lambda: dist.recv(torch.ones(1), 1)))
        others.release()
        assert all(
            "rank 1: an operation of it on the group has failed" in each for each in reported
        )
        return ""

    found = on_ranks(tmp_path, RANKS, body)[1]
    assert found == "an operation on group WORLD has failed on this rank: KeyboardInterrupt"


def test_each_call_on_a_broken_group_has_an_error_of_its_own(tmp_path: Path) -> None:
    """One error for all would keep the frames of all calls, with their tensors."""

    def body(rank: int) -> None:
        if rank == 1:
            os._exit(0)
        errors = []
        for _ in range(3):
            with pytest.raises(dist.DistBackendError, match="rank 1: its process") as caught:
                dist.barrier()
            errors.append(caught.value)
        assert len({id(each) for each in errors}) == 3

    on_ranks(tmp_path, 2, body)


def test_a_rank_that_cannot_arrive_ends_the_operation_on_all(tmp_path: Path) -> None:
    others = multiprocessing.get_context("fork").Semaphore(0)

    def body(rank: int) -> str:
        if rank == 1:

            def refused(*_: Any) -> None:
                raise BackendError("refused")

            futex.add_one = refused
            reported = text_of(BackendError, lambda: dist.all_reduce(torch.ones(1)))
            assert all(others.acquire(timeout=60) for _ in range(RANKS - 1))
            return reported
        reported = text_of(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1)))
        others.release()
        return reported

    one, refused, other = on_ranks(tmp_path, RANKS, body)
    assert refused == "refused"
    for text in (one, other):
        assert "call 1 on group WORLD cannot end: rank 1: an operation of it" in text
