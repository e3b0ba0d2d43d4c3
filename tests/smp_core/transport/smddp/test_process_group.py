"""The `smddp` process group: values at the edges of its rounds, messages, and failures of every kind."""

from __future__ import annotations

import ctypes
import datetime
import errno
import gc
import importlib
import json
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from smp_core.errors import (
    ArgumentError,
    BackendError,
    CollectiveMismatchError,
    NotInitializedError,
    UnsupportedError,
)
from smp_core.reduction import reduce_tensors
from smp_core.transport.smddp import collectives, futex, process_group, segment
from smp_core.transport.smddp.collectives import ONE_HOP_BYTES, block_bytes
from smp_core.transport.smddp.segment import PACKET_BYTES, PACKET_SLOTS, PIECE_BYTES, ROW_BYTES
from tests.smp_core.transport.smddp.rank_processes import KILLED, on_ranks, wait_for_departure

RANKS = 3  # an odd one in the tree of a fold
#: Numbers of float32 at which an operation takes one more round, or goes another way.
EDGES = sorted(
    {
        edge // 4 + more
        for edge in (
            0,
            ONE_HOP_BYTES,
            block_bytes(RANKS),
            ROW_BYTES,
            ROW_BYTES * RANKS,
            2 * ROW_BYTES * RANKS,
        )
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
    for unit in (0, 1, block_bytes(RANKS) // 4 // 2 + 1, ROW_BYTES // 4 // 3 + 1):
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


def check_views(rank: int) -> None:
    """A tensor whose elements are the negative of what its memory has."""
    negative = torch.tensor([complex(0, rank)]).conj().imag
    assert negative.is_neg()
    parts = [torch.empty(1) for _ in range(RANKS)]
    dist.all_gather(parts, negative)
    assert [part.item() for part in parts] == [-each for each in range(RANKS)]


def check_nothing_is_written_to_tensors_without_elements(rank: int) -> None:
    """A stride that no element has, and memory behind it that belongs to another tensor."""
    for _ in range(2 * segment.ROUND_SLOTS):  # the memory of each round is not empty any more
        dist.all_reduce(torch.ones(4))
    memory = torch.zeros(4)
    outputs = [memory.as_strided((0,), (2,)) for _ in range(RANKS)]
    dist.all_gather(outputs, torch.empty(0))
    dist.broadcast(outputs[0], 0)
    dist.all_reduce(outputs[0])
    assert not memory.any()


def check_mixed_dtypes(rank: int) -> None:
    """One coalesced call reduces tensors of different dtypes, each as what it is, in one round and in several."""
    for count in (1, 5, block_bytes(RANKS) // 4):
        inputs = [
            value(rank, RANKS * count).to(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
        ]
        outputs = [torch.empty(count, dtype=each.dtype) for each in inputs]
        with c10d._coalescing_manager():
            for output, each in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_single(output, each)
        for output in outputs:
            everybody = [value(each, RANKS * count).to(output.dtype) for each in range(RANKS)]
            total = reduce_tensors(everybody, "SUM")[rank * count : (rank + 1) * count]
            assert torch.equal(output, total), (count, output.dtype)


def check_storages_can_be_resized(rank: int) -> None:
    """FSDP frees the memory of a parameter that it has gathered."""
    tensor, whole = torch.ones(4), torch.empty(4 * RANKS)
    dist.all_gather_single(whole, tensor)
    dist.all_reduce(tensor)
    for each in (tensor, whole):
        each.untyped_storage().resize_(0)
        assert not each.untyped_storage().nbytes()


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


def check_threads_of_a_rank(rank: int) -> None:
    """Each of two threads has a group and a tag of its own."""
    groups = [dist.new_group() for _ in range(2)]
    sums: list[list[torch.Tensor]] = [[], []]
    received: list[list[torch.Tensor]] = [[], []]
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS

    def run(thread: int) -> None:
        for number in range(20):
            count = 10 ** (number % 6)
            tensor = value(rank, count, thread)
            dist.all_reduce(tensor, group=groups[thread])
            sums[thread].append(tensor)
            work = dist.isend(value(rank, count, thread), after, tag=thread)
            tensor = torch.empty(count)
            dist.recv(tensor, before, tag=thread)
            received[thread].append(tensor)
            work.wait()

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for thread in range(2):
        assert len(received[thread]) == 20
        for tensor, came in zip(sums[thread], received[thread], strict=True):
            everybody = [value(each, len(tensor), thread) for each in range(RANKS)]
            assert torch.equal(tensor, reduce_tensors(everybody, "SUM"))
            assert torch.equal(came, everybody[before])


def check_memory_of_large_tensors(rank: int) -> None:
    """No operation copies its tensors: beside them it takes the slots of the rounds, whatever the sizes are."""
    most, count = (
        2 * segment.ROUND_SLOTS * RANKS * ROW_BYTES,
        8 * segment.ROUND_SLOTS * RANKS * ROW_BYTES // 4,
    )

    def operations(count: int) -> list[Callable[[], Any]]:
        source, target = torch.ones(count), torch.ones(count)
        parts = source.view(RANKS, -1)
        return [
            lambda: dist.all_reduce(target),
            lambda: dist.broadcast(target, 1),
            lambda: dist.reduce(target, 1),
            lambda: dist.all_gather_single(target, parts[rank]),
            lambda: dist.reduce_scatter_single(target[: count // RANKS], source),
            lambda: dist.all_to_all_single(target, source),
            lambda: dist.send(source, 1) if rank == 0 else rank > 1 or dist.recv(target, 0),
        ]

    def resident(peak: bool) -> int:
        words = Path("/proc/self/status").read_text().split()
        return int(words[words.index("VmHWM:" if peak else "VmRSS:") + 1]) * 1024

    # A first call reads code of torch and of Python from disk, which counts as resident, too.
    for operation in operations(RANKS):
        operation()
    for number, operation in enumerate(operations(count)):
        before = resident(peak=False)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        operation()
        grown = resident(peak=True) - before
        assert grown <= most < 4 * count // RANKS, (number, grown)


def a_step_of_fsdp(rank: int) -> None:
    """Each rank has a batch of its own; all numbers are small multiples of powers of two, so that sums are exact."""
    from torch.distributed.fsdp import fully_shard

    def model() -> torch.nn.Sequential:
        made = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        for seed, each in enumerate(made.parameters()):
            generator = torch.Generator().manual_seed(seed)
            each.data = torch.randint(-4, 5, each.shape, generator=generator) / 4
        return made

    def batch(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + rank)
        return torch.randint(-4, 5, (3, 4), generator=generator) / 2

    plain = model()
    for each in range(4):
        (plain(batch(each)).sum() / 4).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()

    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    sharded(batch(rank)).sum().backward()
    optimizer.step()
    expected = plain.state_dict()
    for name, each in sharded.state_dict().items():
        assert torch.equal(each.full_tensor(), expected[name]), name


CHECKS: list[Callable[[int], None]] = [
    check_reductions,
    check_moves,
    check_uneven,
    check_many_at_once,
    check_messages,
    check_more_messages_than_the_ring_has,
    check_receives_are_matched_in_order,
    check_any_source,
    check_views,
    check_nothing_is_written_to_tensors_without_elements,
    check_mixed_dtypes,
    check_storages_can_be_resized,
    check_equal_sizes_without_room,
    check_threads_of_a_rank,
    check_memory_of_large_tensors,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None]) -> None:
    assert on_ranks(tmp_path, RANKS, check) == [None] * RANKS


def test_a_step_of_fsdp_is_that_of_the_whole_model(tmp_path: Path) -> None:
    importlib.import_module("torch._dynamo")  # once, and not in each rank
    assert on_ranks(tmp_path, 4, a_step_of_fsdp) == [None] * 4


def text_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_every_rank_learns_of_calls_that_differ(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        tensor = torch.ones(3 if rank == 1 else 2)
        reported = [text_of(CollectiveMismatchError, lambda: dist.all_reduce(tensor))]
        outputs = [torch.empty(2 if rank == 2 else 1) for _ in range(RANKS)]
        inputs = [torch.ones(1) for _ in range(RANKS)]
        reported.append(text_of(CollectiveMismatchError, lambda: dist.all_to_all(outputs, inputs)))
        dist.barrier()  # the group serves on
        return reported

    first, *others = on_ranks(tmp_path, RANKS, body)
    assert all(reported == first for reported in others)
    assert "call 1 on group WORLD differs in shape" in first[0]
    assert "odd one out: rank 1" in first[0]
    assert "rank 0 sends 1 elements to rank 2" in first[1]


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


def test_lists_of_different_lengths_differ(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        count = 1 + (rank == 1)
        outputs = [[torch.empty(1) for _ in range(count)] for _ in range(RANKS)]
        group: Any = dist.group.WORLD
        call = group.allgather_coalesced
        reported = text_of(
            CollectiveMismatchError, lambda: call(outputs, [torch.ones(1)] * count).wait()
        )
        with pytest.raises(ArgumentError, match=r"member 0 has 2 outputs, and there are 1 inputs"):
            call([[torch.empty(1)] * 2, *[[torch.empty(1)]] * 2], [torch.ones(1)])
        with pytest.raises(ArgumentError, match=r"2 lists of outputs and 1 inputs"):
            call([[torch.empty(1)]] * 2, [torch.ones(1)])
        with pytest.raises(ArgumentError, match=r"3 lists of outputs and 0 inputs"):
            call([[]] * 3, [])
        dist.barrier()  # the group serves on
        return reported

    first, *others = on_ranks(tmp_path, RANKS, body)
    assert all(reported == first for reported in others)
    assert "differs in number of tensors" in first
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


def test_the_sizes_of_a_thousand_members_have_room() -> None:
    """Those of an uneven all_to_all: a member has two for each member, all different."""
    size = 1000
    runs = [[[2**40 + each, 2**20], 1] for each in range(size)]
    room = segment.SegmentLayout(size).description_bytes
    assert len(json.dumps([runs, runs])) + 1000 < room  # and the call
    assert room % 4096 == 0


def test_a_message_that_differs_is_an_error_on_both_sides(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        tensor = torch.ones(2 + rank)
        call = dist.recv if rank else dist.send
        return text_of(CollectiveMismatchError, lambda: call(tensor, 1 - rank))

    one, other = on_ranks(tmp_path, 2, body)
    assert one == other
    assert "rank 0: send of 2 elements of float32" in one
    assert "rank 1: recv of 3 elements of float32" in one


LARGE = 3 * ROW_BYTES  # numbers of float32: more than a round has room for, of every operation
LONG_OPERATIONS: dict[str, Callable[[int], Any]] = {
    "broadcast": lambda rank: dist.broadcast(torch.ones(LARGE), 1, async_op=True),
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(LARGE), async_op=True),
    "reduce": lambda rank: dist.reduce(torch.ones(LARGE), 0, async_op=True),
    "all_gather": lambda rank: dist.all_gather(
        [torch.empty(LARGE) for _ in range(RANKS)], torch.ones(LARGE), async_op=True
    ),
    "all_gather_single": lambda rank: dist.all_gather_single(
        torch.empty(RANKS * LARGE), torch.ones(LARGE), async_op=True
    ),
    "reduce_scatter_single": lambda rank: dist.reduce_scatter_single(
        torch.empty(LARGE), torch.ones(RANKS * LARGE), async_op=True
    ),
    "all_to_all": lambda rank: dist.all_to_all_single(
        torch.empty(RANKS * LARGE), torch.ones(RANKS * LARGE), async_op=True
    ),
    "gather": lambda rank: dist.gather(
        torch.ones(LARGE),
        None if rank else [torch.empty(LARGE) for _ in range(RANKS)],
        async_op=True,
    ),
    "scatter": lambda rank: dist.scatter(
        torch.empty(LARGE),
        [torch.ones(LARGE) for _ in range(RANKS)] if rank == 1 else None,
        1,
        async_op=True,
    ),
}


@pytest.mark.parametrize("name", LONG_OPERATIONS)
def test_the_end_of_a_rank_inside_of_an_operation_is_an_error_of_the_others(
    tmp_path: Path, name: str
) -> None:
    """The rank has come to the first round, and holds back the second."""

    def body(rank: int) -> str:
        if rank != 1:
            wait_for_departure(1)
        work = LONG_OPERATIONS[name](rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reported = text_of(dist.DistBackendError, work.wait)
        assert "rank 1" in text_of(dist.DistBackendError, dist.barrier)  # the group is broken
        return reported

    one, killed, other = on_ranks(tmp_path, RANKS, body)
    assert killed == KILLED
    for text in (one, other):
        assert "rank 1" in text
        assert "has ended" in text


def test_a_rank_that_dies_as_it_arrives_has_come(tmp_path: Path) -> None:
    """It has counted itself in the word of the round, and nothing else. The others have come before: one that comes
    later could be missed by a poll of the other one.
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
    """It has written the round, and has not counted itself in the word."""

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


def test_no_room_for_shared_memory_is_an_error_of_every_rank(tmp_path: Path) -> None:
    def limit(rank: int) -> None:
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    with pytest.raises(AssertionError, match="there is no shared memory") as caught:
        on_ranks(tmp_path, 2, lambda rank: dist.barrier(), limit)
    assert "File too large" in str(caught.value)


def test_a_rank_that_cannot_map_the_memory_ends_the_start_of_all(tmp_path: Path) -> None:
    def fail(rank: int) -> None:
        if rank == 1:

            def refuse(*_: Any) -> Any:
                raise BackendError("cannot map")

            segment._map_file = refuse

    with pytest.raises(AssertionError, match="there is no shared memory: member 1: cannot map"):
        on_ranks(tmp_path, 2, lambda rank: dist.barrier(), fail)


def test_a_start_that_fails_leaves_no_descriptor(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, int]:
        def late() -> segment.SharedSegment:
            there = segment.SharedSegment(dist.HashStore(), 0, 2, "of a test")  # type: ignore[attr-defined]
            there.wait_for_all(datetime.timedelta(milliseconds=1))
            return there

        def unmapped() -> segment.SharedSegment:
            def refuse(*_: Any) -> Any:
                raise BackendError("cannot map")

            segment._map_file = refuse
            return segment.SharedSegment(dist.HashStore(), 0, 2, "of a test")  # type: ignore[attr-defined]

        gc.collect()  # of the parent's: it may hold descriptors
        before = len(os.listdir("/proc/self/fd"))
        assert "1 of 2 ranks came" in text_of(dist.DistBackendError, late)
        after_one = len(os.listdir("/proc/self/fd"))
        assert text_of(BackendError, unmapped) == "cannot map"
        return after_one - before, len(os.listdir("/proc/self/fd")) - after_one

    assert on_ranks(tmp_path, 1, body) == [(0, 0)]


def test_a_group_whose_members_do_not_come_leaves_no_descriptor(tmp_path: Path) -> None:
    """Below a default group of another backend the members exchange their machines."""

    def body(rank: int) -> int:
        store = dist.HashStore()  # type: ignore[attr-defined]
        gc.collect()  # of the parent's: it may hold descriptors
        before = len(os.listdir("/proc/self/fd"))
        limit = datetime.timedelta(milliseconds=1)
        reported = text_of(
            BackendError,
            lambda: process_group.SmddpProcessGroup(store, 0, 2, (0, 2), "of a test", limit),
        )
        assert "1 of 2 ranks came" in reported
        return len(os.listdir("/proc/self/fd")) - before

    assert on_ranks(tmp_path, 1, body) == [0]


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


def test_a_first_member_that_does_not_come_is_named() -> None:
    late = segment.SharedSegment(dist.HashStore(), 1, 2, "of a test")  # type: ignore[attr-defined]
    reported = text_of(BackendError, lambda: late.open(datetime.timedelta(milliseconds=1)))
    assert (
        "group of a test: member 1 waited for the shared memory of member 0, which did not"
        in reported
    )


def test_threads_that_use_a_group_first_at_once_open_it_once(tmp_path: Path) -> None:
    """The second thread comes while the first opens the group."""

    def body(rank: int) -> int:
        group: Any = dist.new_group([0])
        rounds, opened, came = process_group.Rounds, [], threading.Event()
        second = threading.Thread(target=group._check, args=("barrier",))

        class Lock:
            """Tells that the second thread has to wait."""

            def __init__(self, lock: Any) -> None:
                self._lock = lock

            def __enter__(self) -> None:
                if not self._lock.acquire(blocking=False):
                    came.set()
                    self._lock.acquire()

            def __exit__(self, *_: object) -> None:
                self._lock.release()

        def made(*args: Any) -> Any:
            opened.append(1)
            if threading.current_thread() is second:
                came.set()
            else:
                second.start()
                assert came.wait(60)
            return rounds(*args)

        process_group.Rounds = made
        group._opening = Lock(group._opening)
        dist.barrier(group)
        second.join()
        return len(opened)

    assert on_ranks(tmp_path, 1, body) == [1]


WAITS: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(ROW_BYTES)),
    "recv": lambda rank: dist.recv(torch.ones(1), 1),
    "send": lambda rank: dist.send(torch.ones(ROW_BYTES), 1),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_end_of_a_rank_ends_the_waits_for_it(tmp_path: Path, name: str) -> None:
    def shared() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line for line in lines if line.split()[1].startswith("rw-s")}

    before = shared()  # of ranks of other tests, which this process keeps

    def body(rank: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        text = text_of(dist.DistBackendError, lambda: WAITS[name](rank))
        new = shared() - before
        assert all("/memfd:smddp (deleted)" in line for line in new)  # without any name
        return text

    one, killed, other = on_ranks(tmp_path, RANKS, body)
    assert killed == KILLED
    for text in (one, other):
        assert "rank 1: its process" in text
        assert "has ended" in text


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


def test_the_end_of_a_rank_that_has_not_used_a_group_ends_the_waits_for_it(tmp_path: Path) -> None:
    """It has made its handle on the group, and has not mapped the memory."""
    fork = multiprocessing.get_context("fork")
    made, over = fork.Event(), fork.Barrier(RANKS - 1)

    def body(rank: int) -> str:
        group = dist.new_group([0, 1, 2])
        if rank == 1:
            made.set()
            os.kill(os.getpid(), signal.SIGKILL)
        assert made.wait(60)
        reported = text_of(dist.DistBackendError, lambda: dist.barrier(group))
        over.wait(60)  # rank 0 has the memory that the other one opens
        return reported

    one, killed, other = on_ranks(tmp_path, RANKS, body)
    assert killed == KILLED
    for text in (one, other):
        assert "rank 1: its process" in text
        assert "has ended" in text


def test_a_member_that_is_joining_has_not_ended(tmp_path: Path) -> None:
    """Another member may read the table between any two numbers that it writes there."""

    def body(rank: int) -> list[str]:
        there = segment.SharedSegment(dist.HashStore(), 0, 2, "of a test")  # type: ignore[attr-defined]
        row = there.layout.member(1)
        reported = []
        for at, number in (
            (row.process, os.getpid()),
            (row.process_start, segment._start_time(os.getpid())),
        ):
            there.count(at).value = number
            reported.append(there.departure(1))
            there.count(at).value = 0
        there.leave()
        return reported

    assert on_ranks(tmp_path, 1, body) == [["", ""]]


def test_a_process_is_known_by_any_name(tmp_path: Path) -> None:
    """A program's name has 15 bytes, so its last character may be cut."""

    def body(rank: int) -> bool:
        Path("/proc/self/comm").write_bytes("fourteen bytes\N{SNOWMAN}".encode())
        return segment._start_time(os.getpid()) is not None

    assert on_ranks(tmp_path, 1, body) == [True]


def test_a_member_has_not_ended_where_it_cannot_be_read(tmp_path: Path) -> None:
    """The process has as many descriptors as it may have."""

    def body(rank: int) -> str:
        there = segment.SharedSegment(dist.HashStore(), 0, 2, "of a test")  # type: ignore[attr-defined]
        row, pid = there.layout.member(1), os.getpid()
        there.count(row.process).value = pid
        there.count(row.process_start).value = segment._start_time(pid)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
        reported = there.departure(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        there.leave()
        return reported

    assert on_ranks(tmp_path, 1, body) == [""]


def test_a_sleep_on_memory_that_is_gone_ends() -> None:
    assert futex.sleep([(4096, 0)], 60)
    assert futex.sleep([(4096, 0), (8192, 0)], 60)


def test_a_wait_that_is_woken_for_other_things_finds_who_has_ended(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        sleep = futex.sleep

        def woken(words: Any, seconds: float) -> bool:
            sleep(words, min(seconds, 0.001))
            return True

        futex.sleep = woken
        return text_of(dist.DistBackendError, lambda: dist.recv(torch.empty(1), 1))

    one, killed = on_ranks(tmp_path, 2, body)
    assert killed == KILLED
    assert "rank 1: its process" in one


def test_a_rank_that_leaves_the_group_ends_the_waits_for_it(tmp_path: Path) -> None:
    noticed = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> str:
        if rank == 1:
            dist.destroy_process_group()
            assert noticed.wait(60)
            return "1 has left"
        reported = text_of(dist.DistBackendError, dist.barrier)
        noticed.set()
        return reported

    assert "rank 1: it has destroyed the group" in on_ranks(tmp_path, 2, body)[0]


def test_a_wait_has_a_limit_and_names_late_ranks(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank:
            dist.recv(torch.empty(1), 0)
            return "late"
        work = dist.barrier(async_op=True)
        limit = datetime.timedelta(milliseconds=50)
        reported = text_of(dist.DistBackendError, lambda: work.wait(limit))
        dist.send(torch.ones(1), 1)
        return reported

    assert (
        "barrier on group WORLD was not done after 0.05 s: rank 1 did"
        in on_ranks(tmp_path, 2, body)[0]
    )


def test_a_monitored_barrier_has_a_limit_of_its_own(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group: Any = dist.group.WORLD
        if rank:
            dist.recv(torch.empty(1), 0)
            group.monitored_barrier()
            return "late"
        limit = datetime.timedelta(milliseconds=50)
        reported = text_of(dist.DistBackendError, lambda: group.monitored_barrier(limit))
        for late in (1, 2):
            dist.send(torch.ones(1), late)
        return reported

    assert on_ranks(tmp_path, RANKS, body)[0] == (
        "monitored_barrier on group WORLD was not done after 0.05 s: ranks 1-2 did not come to it"
    )


def test_a_tag_of_more_than_64_bits_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        group: Any = dist.group.WORLD
        tensor = torch.tensor([float(rank)])
        for tag in (2**63, -(2**63) - 1):
            for call in (group.send, group.recv):
                reported = text_of(
                    ArgumentError, lambda call=call, tag=tag: call([tensor], 1 - rank, tag)
                )
                assert f"tag {tag} is no integer of 64 bits" in reported
        for tag in (2**63 - 1, -(2**63)):
            if rank:
                group.recv([tensor], 0, tag).wait()
            else:
                group.send([tensor], 1, tag).wait()
        assert tensor.item() == 0

    assert on_ranks(tmp_path, 2, body) == [None, None]


def test_a_fork_of_a_rank_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> int:
        dist.barrier()
        child = os.fork()
        if not child:
            reported = text_of(BackendError, dist.barrier)
            os._exit("is a fork of a rank" not in reported)
        ended = os.waitpid(child, 0)[1]
        dist.barrier()
        return ended

    assert on_ranks(tmp_path, 2, body) == [0, 0]


def test_a_hundred_groups_leave_nothing_behind(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:smddp")

    def body(rank: int) -> bool:
        gc.collect()  # of the process that was forked
        before = held()
        for number in range(100):
            order = [0, 1, 2] if number % 2 else [2, 0, 1]
            group = dist.new_group(order, sort_ranks=False)
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 3
            assert held()[0] <= before[0]  # the memory of a group that was used needs no descriptor
            dist.destroy_process_group(group)
            with pytest.raises((NotInitializedError, ValueError)):
                dist.barrier(group)
        del group
        files, mapped = held()
        assert files <= before[0]
        return mapped == before[1] == 1

    assert on_ranks(tmp_path, RANKS, body) == [True] * RANKS


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(
        BackendError, match=r"futexes of Linux on x86_64; this is Linux on aarch64\. Take gloo"
    ):
        futex.require()


def refusing(problem: int) -> Callable[..., int]:
    """A system call that fails."""

    def call(*_: Any) -> int:
        ctypes.set_errno(problem)
        return -1

    return call


@pytest.mark.parametrize("problem", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_that_cannot_wait_for_several_words_is_asked_for_one(
    monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """EPERM: a filter of system calls that does not know this one."""
    monkeypatch.setattr(futex, "_waitv", refusing(problem))
    monkeypatch.setattr(futex, "_several", True)
    words = (ctypes.c_uint32 * 2)()
    seen = [(ctypes.addressof(words) + 4 * at, 0) for at in range(2)]
    assert not futex.sleep(seen, 0.001)
    assert not futex._several
    words[0] = 1
    assert futex.sleep(seen, 60)


def test_a_futex_call_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (ctypes.c_uint32 * 2)()
    address = ctypes.addressof(words)
    calls: list[Callable[[], Any]] = [
        lambda: futex.add_one(address, address + 4),
        lambda: futex.add_and_wake(address),
        lambda: futex.wake(address),
        lambda: futex.sleep([(address, 0)], 0.001),
    ]
    for call in calls:
        call()
    for name in ("_futex", "_futex_at_once"):
        monkeypatch.setattr(futex, name, refusing(errno.EPERM))
    for call in calls:
        assert "the kernel refuses a futex call: Operation not permitted" in text_of(
            BackendError, call
        )


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
