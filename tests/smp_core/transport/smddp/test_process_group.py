"""The process group of `smddp`: threads, groups, refused calls, and what a group leaves behind."""

from __future__ import annotations

import datetime
import gc
import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from smp_core.errors import (
    ArgumentError,
    BackendError,
    CollectiveMismatchError,
    NotInitializedError,
)
from smp_core.reduction import reduce_tensors
from smp_core.transport.smddp import process_group
from tests.smp_core.transport.smddp.rank_processes import (
    RANKS,
    check_values,
    on_machines,
    on_ranks,
    text_of,
    value,
)


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


CHECKS: list[Callable[[int], None]] = [check_threads_of_a_rank]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_values(tmp_path: Path, check: Callable[[int], None]) -> None:
    check_values(tmp_path, check)


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


def test_a_step_of_fsdp_is_that_of_the_whole_model(tmp_path: Path) -> None:
    importlib.import_module("torch._dynamo")  # once, and not in each rank
    assert on_ranks(tmp_path, 4, a_step_of_fsdp) == [None] * 4


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


@pytest.mark.parametrize("leaver", range(RANKS))
def test_a_rank_may_leave_a_group_before_the_others_use_it(tmp_path: Path, leaver: int) -> None:
    """The first member made the memory, and others open it."""
    left = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> float:
        group: Any = dist.new_group([0, 1, 2])
        others, value = [each for each in range(RANKS) if each != leaver], torch.zeros(1)
        if rank == leaver:
            dist.destroy_process_group(group)
            left.set()
        else:
            assert left.wait(60)
            if rank == others[0]:
                dist.send(torch.ones(1), others[1], group)
            else:
                dist.recv(value, others[0], group)
        return value.item()

    received = on_ranks(tmp_path, RANKS, body)
    assert received == [
        float(rank == max(each for each in range(RANKS) if each != leaver)) for rank in range(RANKS)
    ]


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


def test_the_machines_of_a_group_whose_world_is_another_backend_s(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "other"), RANKS)  # type: ignore[attr-defined]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        group: Any = dist.new_group([2, 0], backend="smddp", sort_ranks=False)
        tensor = torch.tensor([2.0**rank])
        if rank != 1:
            assert isinstance(group, process_group.SmddpProcessGroup)
            dist.all_reduce(tensor, group=group)
            dist.destroy_process_group(group)
        dist.barrier()
        return tensor.item()

    assert on_ranks(tmp_path, RANKS, body, on_machines("aab")) == [5, 2, 5]
