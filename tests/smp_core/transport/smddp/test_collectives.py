"""The collectives of `smddp`: values at the edges of their rounds, and ranks that end inside of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from smp_core.reduction import reduce_tensors
from smp_core.transport.smddp import segment
from smp_core.transport.smddp.collectives import ONE_HOP_BYTES, block_bytes
from tests.smp_core.transport.smddp.rank_processes import (
    KILLED,
    RANKS,
    ROW_BYTES,
    check_values,
    on_ranks,
    text_of,
    value,
    wait_for_departure,
)

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


def check_several_gathers_at_once(rank: int) -> None:
    """The outputs follow each other in memory, and so do the inputs: in memory of their own, or in the outputs."""
    group: Any = dist.group.WORLD
    for count in EDGES:
        first, second = ([value(each, count, part) for each in range(RANKS)] for part in range(2))
        expected = torch.cat([*first, *second])
        for at in (None, 1):  # the end of the input lies where other ranks' elements come first
            whole = torch.zeros(2 * RANKS * count)
            inputs = torch.empty(2 * count) if at is None else whole[at : at + 2 * count]
            inputs.copy_(torch.cat([first[rank], second[rank]]))
            outputs = list(torch.split(whole, [RANKS * count] * 2))
            parts = list(torch.split(inputs, [count] * 2))
            group.all_gather_single_coalesced(outputs, parts).wait()
            assert torch.equal(whole, expected), (count, at)


def check_several_scatters_at_once(rank: int) -> None:
    """The outputs follow each other in memory: in memory of their own, or in that of an input; or they lie apart."""
    group: Any = dist.group.WORLD
    for count in EDGES:
        lengths = count, count + 1, 0, 1
        given = [
            [value(each, RANKS * length, part) for each in range(RANKS)]
            for part, length in enumerate(lengths)
        ]
        expected = [
            reduce_tensors(everybody, "SUM")[rank * length : (rank + 1) * length]
            for everybody, length in zip(given, lengths, strict=True)
        ]
        for where in ("one memory", "an input", "apart"):
            inputs = [everybody[rank].clone() for everybody in given]
            outputs = [torch.empty(length) for length in lengths]
            if where != "apart":
                first = inputs[1] if where == "an input" else torch.empty(sum(lengths))
                outputs = list(first[: sum(lengths)].split(lengths))
            group.reduce_scatter_single_coalesced(outputs, inputs).wait()
            assert all(map(torch.equal, outputs, expected)), (count, where)


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


def check_memory_of_large_tensors(rank: int) -> None:
    """No operation copies its tensors: beside them it takes the slots of the rounds, whatever the sizes are."""
    most, count = (
        2 * segment.ROUND_SLOTS * RANKS * ROW_BYTES,
        8 * segment.ROUND_SLOTS * RANKS * ROW_BYTES // 4,
    )

    def operations(count: int) -> list[Callable[[], Any]]:
        source, target = torch.ones(count), torch.ones(count)
        parts = source.view(RANKS, -1)
        group: Any = dist.group.WORLD
        outputs = list(target[: count // RANKS].chunk(2))
        inputs = list(source.split([RANKS * len(each) for each in outputs]))
        return [
            lambda: dist.all_reduce(target),
            lambda: dist.broadcast(target, 1),
            lambda: dist.reduce(target, 1),
            lambda: dist.all_gather_single(target, parts[rank]),
            lambda: dist.reduce_scatter_single(target[: count // RANKS], source),
            lambda: group.reduce_scatter_single_coalesced(outputs, inputs).wait(),
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


CHECKS: list[Callable[[int], None]] = [
    check_reductions,
    check_moves,
    check_several_gathers_at_once,
    check_several_scatters_at_once,
    check_uneven,
    check_mixed_dtypes,
    check_memory_of_large_tensors,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None]) -> None:
    check_values(tmp_path, check)


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
