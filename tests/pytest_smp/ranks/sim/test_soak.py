"""A thousand runs in one process, failures of every kind among them, leave nothing behind."""

from __future__ import annotations

import collections
import gc
import os
import sys
import threading

import pytest
import torch
from torch import distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job, VerdictKind

RANKS = 4


def passes():
    value = torch.ones(3, requires_grad=True)
    (value * smp.rank()).sum().backward()
    dist.all_reduce(value.grad)
    return smp.allgather({"rank": smp.rank()}, smp.WORLD)


def raises_on_one():
    if smp.rank() == 2:
        raise ValueError("planted")
    smp.barrier()


def raises_on_all():
    raise ValueError("planted")


def deadlock_of_objects():
    smp.recv_from((smp.rank() + 1) % RANKS, smp.RankType.WORLD_RANK)


def deadlock_in_backward():
    value = torch.ones(3, requires_grad=True)
    value.register_hook(lambda grad: dist.all_reduce(grad))
    if smp.rank():
        (value * 2).sum().backward()


def mismatch():
    dist.all_reduce(torch.ones(2 + (smp.rank() == 3)))


def leak():
    if smp.rank() == 0:
        dist.isend(torch.ones(2), 1)


def group_left():
    dist.barrier(dist.new_group([0, 1, 2, 3]))


def unpicklable():
    smp.allgather(threading.Lock(), smp.WORLD)


def makes_the_default_group_again():
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("sim", rank=smp.rank(), world_size=RANKS, store=store)
    dist.barrier()


BODIES = {
    passes: VerdictKind.PASSED,
    raises_on_one: VerdictKind.FAILED,
    raises_on_all: VerdictKind.FAILED,
    deadlock_of_objects: VerdictKind.DEADLOCK,
    deadlock_in_backward: VerdictKind.DEADLOCK,
    mismatch: VerdictKind.MISMATCH,
    leak: VerdictKind.LEAK,
    group_left: VerdictKind.PASSED,
    unpicklable: VerdictKind.FAILED,
    makes_the_default_group_again: VerdictKind.PASSED,
}


def census() -> dict[str, object]:
    """The things that a run could leave behind: live objects of ours and torch's, threads, descriptors, hooks."""
    gc.collect()
    kinds = collections.Counter(
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in gc.get_objects()
        if str(type(each).__module__).startswith(("smp_core", "torch", "builtins.frame"))
        or isinstance(each, BaseException)
    )
    return {
        "objects": dict(kinds),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "excepthook": sys.excepthook,
        "threading excepthook": threading.excepthook,
        "default group": dist.is_initialized(),
        "compute threads": torch.get_num_threads(),
        "random": torch.initial_seed(),
    }


@pytest.mark.parametrize("rounds", [100])
def test_a_thousand_runs_leave_nothing_behind(rounds):
    threads = threading.enumerate()
    executor = open_backend("sim")
    try:
        world = executor.open(RANKS)

        def all_once():
            for body, verdict in BODIES.items():
                report = world.run(Job(body=body, arguments=lambda rank: ((), {}), timeout=60))
                assert report.verdict is verdict, (body, report.error)

        all_once()
        all_once()
        before = census()
        for _ in range(rounds):
            all_once()
        assert census() == before
    finally:
        executor.close()
    assert threading.enumerate() == threads


def test_functional_collectives_that_nobody_waits_for_are_forgotten():
    """torch keeps them, tensors and all, in a registry of its own until somebody waits."""
    from torch._C._distributed_c10d import _get_work_registry_size
    from torch.distributed import _functional_collectives as functional

    def body():
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        raise ValueError("planted")

    before = _get_work_registry_size()
    executor = open_backend("sim")
    try:
        for _ in range(3):
            executor.open(RANKS).run(Job(body=body, arguments=lambda rank: ((), {})))
    finally:
        executor.close()
    assert _get_work_registry_size() == before
