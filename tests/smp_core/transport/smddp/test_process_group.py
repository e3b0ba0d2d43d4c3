"""The `smddp` process group: values at the edges of its rounds, messages, and every kind of trouble."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from smp_core.errors import BackendError, CollectiveMismatchError, NotInitializedError
from smp_core.reduction import reduce_tensors
from smp_core.transport.smddp import segment
from smp_core.transport.smddp.collectives import SMALL, cell_of
from smp_core.transport.smddp.segment import BULK, CELL, CELLS, LARGEST
from tests.smp_core.transport.smddp.rank_processes import KILLED, on_ranks

RANKS = 3  # an odd one in the tree of a fold
#: Numbers of float32 at which an operation takes one more round, or goes another way.
EDGES = sorted(
    {
        edge // 4 + more
        for edge in (0, SMALL, cell_of(RANKS), LARGEST, LARGEST * RANKS, 2 * LARGEST * RANKS)
        for more in (0, 1)
    }
)


def value(rank: int, count: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 100 + part)
    return torch.randn(count, generator=generator)


def check_reductions(rank: int) -> None:
    for count in EDGES:
        everybody = [value(each, count) for each in range(RANKS)]
        total = reduce_tensors(everybody, "SUM")
        tensor = everybody[rank].clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total), count
        tensor = everybody[rank].clone()
        dist.reduce(tensor, 1)
        assert torch.equal(tensor, total if rank == 1 else everybody[rank]), count
        parts = [[value(each, count, part) for part in range(RANKS)] for each in range(RANKS)]
        output = torch.empty(count)
        mine = reduce_tensors([each[rank] for each in parts], "AVG")
        dist.reduce_scatter(output, parts[rank], dist.ReduceOp.AVG)
        assert torch.equal(output, mine), count
        dist.reduce_scatter_single(output, torch.cat(parts[rank]), dist.ReduceOp.AVG)
        assert torch.equal(output, mine), count


def check_moves(rank: int) -> None:
    for count in EDGES:
        everybody = [value(each, count) for each in range(RANKS)]
        whole = torch.empty(RANKS * count)
        whole[rank * count : (rank + 1) * count] = everybody[rank]
        dist.all_gather_single(whole, whole[rank * count : (rank + 1) * count])  # in place
        assert torch.equal(whole, torch.cat(everybody)), count
        whole = torch.empty(RANKS * count + 1)
        whole[1 : count + 1] = everybody[rank]  # ends in the place of rank 1's first element
        dist.all_gather_single(whole[:-1], whole[1 : count + 1])
        assert torch.equal(whole[:-1], torch.cat(everybody)), count
        whole = whole[:-1].clone()
        tensor = everybody[rank].clone()
        dist.broadcast(tensor, 2)
        assert torch.equal(tensor, everybody[2]), count
        outputs = [torch.empty(count) for _ in range(RANKS)]
        dist.gather(everybody[rank], outputs if rank == 0 else None, 0)
        assert rank or all(map(torch.equal, outputs, everybody)), count
        parts = [[value(each, count, part) for part in range(RANKS)] for each in range(RANKS)]
        dist.scatter(tensor, parts[1] if rank == 1 else None, 1)
        assert torch.equal(tensor, parts[1][rank]), count
        dist.all_to_all_single(whole, torch.cat(parts[rank]))
        assert torch.equal(whole, torch.cat([each[rank] for each in parts])), count
        whole = torch.cat(parts[rank])
        dist.all_to_all_single(whole, whole)  # in place: what is written must be sent before
        assert torch.equal(whole, torch.cat([each[rank] for each in parts])), count


def check_uneven(rank: int) -> None:
    """Rank r sends r + s + 1 times as much to rank s, so that ranks are done after different rounds."""
    for unit in (0, 1, cell_of(RANKS) // 4 // 2 + 1, LARGEST // 4 // 3 + 1):
        inputs = [value(rank, (rank + each + 1) * unit, each) for each in range(RANKS)]
        expected = [value(each, (rank + each + 1) * unit, rank) for each in range(RANKS)]
        outputs = [torch.empty_like(each) for each in expected]
        dist.all_to_all(outputs, inputs)
        assert all(map(torch.equal, outputs, expected)), unit
        expected = [value(each, each * unit) for each in range(RANKS)]
        outputs = [torch.empty_like(each) for each in expected]
        dist.all_gather(outputs, expected[rank])
        assert all(map(torch.equal, outputs, expected)), unit


def check_many_at_once(rank: int) -> None:
    tensors = [value(rank, 10 ** (number % 6), number) for number in range(60)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        everybody = [value(each, 10 ** (number % 6), number) for each in range(RANKS)]
        assert torch.equal(tensor, reduce_tensors(everybody, "SUM")), number


def check_messages(rank: int) -> None:
    counts = (0, 1, CELL // 4, BULK // 4 + 1, BULK)
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
    if rank < 2:
        number = 10 * CELLS
        sends = [
            dist.isend(torch.full((2,), float(each)), 1 - rank) for each in range(rank, number, 2)
        ]
        tensors = [torch.empty(2) for _ in sends]
        for work in reversed([*sends, *(dist.irecv(tensor, 1 - rank) for tensor in tensors)]):
            work.wait()
        expected = [float(each) for each in range(1 - rank, number, 2)]
        assert [tensor[0].item() for tensor in tensors] == expected


def check_any_source(rank: int) -> None:
    if rank:
        dist.send(torch.full((2, 3), float(rank)), 0)
        return
    tensor = torch.empty(3, 2).t()
    for _ in range(RANKS - 1):
        assert (tensor == dist.recv(tensor)).all()


CHECKS: list[Callable[[int], None]] = [
    check_reductions,
    check_moves,
    check_uneven,
    check_many_at_once,
    check_messages,
    check_more_messages_than_the_ring_has,
    check_any_source,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None]) -> None:
    assert on_ranks(tmp_path, RANKS, check) == [None] * RANKS


def text_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_every_rank_learns_of_calls_that_differ(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        tensor = torch.ones(3 if rank == 1 else 2)
        said = [text_of(CollectiveMismatchError, lambda: dist.all_reduce(tensor))]
        outputs = [torch.empty(2 if rank == 2 else 1) for _ in range(RANKS)]
        inputs = [torch.ones(1) for _ in range(RANKS)]
        said.append(text_of(CollectiveMismatchError, lambda: dist.all_to_all(outputs, inputs)))
        dist.barrier()  # the group serves on
        return said

    first, *others = on_ranks(tmp_path, RANKS, body)
    assert all(said == first for said in others)
    assert "call 1 on group WORLD differs in shape" in first[0]
    assert "odd one out: rank 1" in first[0]
    assert "rank 0 sends 1 elements to rank 2" in first[1]


def test_a_message_that_differs_is_an_error_on_both_sides(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        tensor = torch.ones(2 + rank)
        call = dist.recv if rank else dist.send
        return text_of(CollectiveMismatchError, lambda: call(tensor, 1 - rank))

    one, other = on_ranks(tmp_path, 2, body)
    assert one == other
    assert "rank 0: send of 2 elements of float32" in one
    assert "rank 1: recv of 3 elements of float32" in one


DYING: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(LARGEST)),
    "recv": lambda rank: dist.recv(torch.ones(1), 1),
    "send": lambda rank: dist.send(torch.ones(LARGEST), 1),
}


@pytest.mark.parametrize("name", DYING)
def test_the_end_of_a_rank_ends_the_waits_for_it(tmp_path: Path, name: str) -> None:
    names = set(os.listdir("/dev/shm"))

    def body(rank: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return text_of(dist.DistBackendError, lambda: DYING[name](rank))

    one, killed, other = on_ranks(tmp_path, RANKS, body)
    assert killed == KILLED
    for text in (one, other):
        assert "rank 1: its process" in text
        assert "has ended" in text
    assert not [each for each in set(os.listdir("/dev/shm")) - names if "mpi" not in each]


def test_a_rank_that_leaves_the_group_ends_the_waits_for_it(tmp_path: Path) -> None:
    told = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> str:
        if rank == 1:
            dist.destroy_process_group()
            assert told.wait(60)
            return "1 has left"
        said = text_of(dist.DistBackendError, dist.barrier)
        told.set()
        return said

    assert "rank 1: it has destroyed the group" in on_ranks(tmp_path, 2, body)[0]


def test_a_wait_has_a_limit_and_names_who_is_late(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank:
            dist.recv(torch.empty(1), 0)
            return "late"
        work = dist.barrier(async_op=True)
        limit = datetime.timedelta(milliseconds=50)
        said = text_of(dist.DistBackendError, lambda: work.wait(limit))
        dist.send(torch.ones(1), 1)
        return said

    assert (
        "barrier on group WORLD was not done after 0.05 s: rank 1 did"
        in on_ranks(tmp_path, 2, body)[0]
    )


def test_a_fork_of_a_rank_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> int:
        dist.barrier()
        child = os.fork()
        if not child:
            said = text_of(BackendError, dist.barrier)
            os._exit("is a fork of a rank" not in said)
        ended = os.waitpid(child, 0)[1]
        dist.barrier()
        return ended

    assert on_ranks(tmp_path, 2, body) == [0, 0]


def test_a_hundred_groups_leave_nothing_behind(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:smddp")

    def body(rank: int) -> bool:
        before = held()
        for number in range(100):
            order = [0, 1, 2] if number % 2 else [2, 0, 1]
            group = dist.new_group(order, sort_ranks=False)
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 3
            assert held()[0] == before[0]  # the memory of a group that was used needs no descriptor
            dist.destroy_process_group(group)
            with pytest.raises((NotInitializedError, ValueError)):
                dist.barrier(group)
        del group
        assert held() == before
        return before[1] == 1

    assert on_ranks(tmp_path, RANKS, body) == [True] * RANKS


def test_ranks_of_two_hosts_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group = dist.new_group([0, 1])
        if rank:
            segment._host = lambda: "another"  # type: ignore[assignment]
            return text_of(BackendError, lambda: dist.barrier(group))
        return ""

    assert "are on different hosts" in on_ranks(tmp_path, 2, body)[1]
