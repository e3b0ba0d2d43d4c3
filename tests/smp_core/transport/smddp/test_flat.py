"""Tensors as bytes: views, tensors without elements, and storages that change."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from smp_core.transport.smddp import flat, segment
from tests.smp_core.transport.smddp.rank_processes import MANY, RANKS, check_values, limit, on_ranks


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


def check_storages_can_be_resized(rank: int) -> None:
    """FSDP frees the memory of a parameter that it has gathered."""
    tensor, whole = torch.ones(4), torch.empty(4 * RANKS)
    dist.all_gather_single(whole, tensor)
    dist.all_reduce(tensor)
    for each in (tensor, whole):
        each.untyped_storage().resize_(0)
        assert not each.untyped_storage().nbytes()


def test_tensors_one_behind_the_other_are_read_from_their_memory() -> None:
    memory = torch.arange(24.0)
    for parts in (
        [memory[2:5], memory[5:6], memory[6:20]],
        [memory[2:4], memory[4:6].view(torch.int32)],
        [memory[9:9], memory[2:8].view(2, 3), memory[0:0], memory[8:10]],
        [torch.empty(0), memory[2:5]],
    ):
        read = flat.read(parts)
        assert flat.address(read) == memory[2:].data_ptr()
        assert read.tobytes() == b"".join(part.numpy().tobytes() for part in parts)


def test_tensors_that_lie_elsewhere_are_read_one_by_one() -> None:
    memory, other = torch.arange(24.0), torch.arange(4.0)
    numbers = np.arange(24, dtype=np.float32)
    first, rest, whole = map(torch.from_numpy, (numbers[:4], numbers[4:], numbers))
    for parts in (
        [first, rest],  # neighbours, and two storages
        [first, whole[4:]],  # two storages that begin at one place
        [memory[2:5], memory[6:20]],
        [memory[5:6], memory[2:5]],
        [memory[::2], memory[23:]],
        [memory[:4], other],
        [memory[:4], torch.complex(other, other).conj().imag],
    ):
        expected = b"".join(part.resolve_neg().contiguous().numpy().tobytes() for part in parts)
        read = flat.read(parts)
        assert read.tobytes() == expected
        assert flat.address(read) not in [part.data_ptr() for part in parts]


CHECKS: list[Callable[[int], None]] = [
    check_views,
    check_nothing_is_written_to_tensors_without_elements,
    check_storages_can_be_resized,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None]) -> None:
    check_values(tmp_path, check)


def test_an_operation_keeps_the_memory_that_its_tensor_gives_up(tmp_path: Path) -> None:
    """Pipelines free the output that they have sent in that way."""
    given_up = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> None:
        tensor = torch.full((MANY,), float(rank + 1))
        if rank == 0:
            assert given_up.wait(limit())
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((MANY,), 3.0))
            return
        work = dist.all_reduce(tensor, async_op=True)
        tensor.data = torch.empty(1)
        others = [torch.full((MANY,), 7.0) for _ in range(4)]
        given_up.set()
        assert work is not None
        work.wait()
        assert all(torch.equal(each, torch.full((MANY,), 7.0)) for each in others)

    on_ranks(tmp_path, 2, body)
