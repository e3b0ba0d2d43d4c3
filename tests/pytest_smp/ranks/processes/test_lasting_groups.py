"""The API's own process groups on `gloo`: made once for a world, and no body's business."""

from __future__ import annotations

import datetime
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from smp_core import runtime
from smp_core.transport.protocols import Group

RANKS = 3
kept: list[object] = []  # on a rank, from run to run


@pytest.fixture(scope="module")
def executor():
    executor = open_backend("gloo", ExecutorOptions(ranks=RANKS))
    yield executor
    executor.close()


@pytest.fixture
def run(executor):
    def run(body, *args):
        job = Job(body=body, arguments=_Arguments(args), timeout=20.0)
        return executor.open(RANKS).run(job)

    return run


class _Arguments:
    def __init__(self, args):
        self._args = args

    def __call__(self, rank):
        return self._args, {}


def _group(name: str, ranks: tuple[int, ...] = (0, 1, 2)) -> Any:
    return runtime.current("this test").fabric.process_group(Group(name, ranks))


def _sum(name: str, ranks: tuple[int, ...] = (0, 1, 2)) -> float:
    tensor = torch.tensor([smp.rank() + 1.0])
    _group(name, ranks).allreduce([tensor]).wait()
    return float(tensor)


def _again(name: str) -> tuple[float, bool, int]:
    value = _sum(name)
    group = _group(name)
    known = any(group is each for each in kept)
    kept.append(group)
    return value, known, os.getpid()


def test_it_is_made_once_and_the_ranks_stay(run):
    first, second = run(_again, "smp test"), run(_again, "smp test")
    assert [value[:2] for value in first.values] == [(6.0, False)] * RANKS
    assert [value[:2] for value in second.values] == [(6.0, True)] * RANKS
    assert [value[2] for value in first.values] == [value[2] for value in second.values]


def test_one_that_bodies_may_have_is_made_anew(run):
    run(_again, "PP_GROUP")
    assert [value[1] for value in run(_again, "PP_GROUP").values] == [False] * RANKS


def test_members_need_not_have_made_the_same_groups(run):
    def some():
        return _sum("smp two", (0, 1)) if smp.rank() < 2 else None

    def all_and_new():
        return _sum("smp later"), dist.new_group([0, 1, 2]) is not None

    assert run(some).values == [3.0, 3.0, None]
    assert run(all_and_new).values == [(6.0, True)] * RANKS


def test_what_a_body_leaves_beside_it_is_found(run, executor):
    def leaves():
        kept.append(os.open(os.devnull, os.O_RDONLY))
        value = _sum("smp beside")
        kept.append(os.open(os.devnull, os.O_RDONLY))
        return value

    before = executor.replaced
    assert run(leaves).values == [6.0] * RANKS
    assert executor.replaced == before + RANKS
    assert run(_sum, "smp beside").values == [6.0] * RANKS  # of a world formed anew
    assert executor.replaced == before + RANKS


def _joins(backend: str) -> list[float]:
    """As a script for torchrun does it, twice; with a group of its own and one of the API's."""
    sums = []
    for _ in range(2):
        dist.init_process_group(backend)
        group = dist.new_group([0, 1, 2])
        value = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(value, group=group)
        sums += [value.item(), _sum("smp joined")]
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group(backend)
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return sums


def test_a_body_joins_the_ranks_that_are_there_and_leaves_them(run, executor):
    assert run(_joins, "nccl").values == [[6.0] * 4] * RANKS
    before = executor.replaced
    assert run(_joins, "gloo").values == [[6.0] * 4] * RANKS
    assert run(_sum, "smp joined").values == [6.0] * RANKS
    assert executor.replaced == before  # no rank was lost by it


def _ends_a_wait_for_a_key(limit: datetime.timedelta) -> None:
    dist.init_process_group(timeout=limit)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(RuntimeError, match="missing"):
        store.get("missing")
    dist.barrier()


def _limit_of_the_store() -> datetime.timedelta:
    dist.init_process_group()
    return dist.distributed_c10d._get_default_store().timeout


def test_the_time_limit_of_a_body_holds_for_waits_of_its_run(run, executor):
    before = executor.replaced
    (limit,) = {*run(_limit_of_the_store).values}
    report = run(_ends_a_wait_for_a_key, datetime.timedelta(seconds=0.5))
    assert report.verdict is VerdictKind.PASSED
    assert run(_limit_of_the_store).values == [limit] * RANKS
    assert executor.replaced == before


def test_a_member_that_never_comes_is_a_deadlock(run):
    report = run(lambda: smp.rank() or _sum("smp nobody"))
    assert report.verdict is VerdictKind.DEADLOCK
    assert "smp.process_group" in str(report.error)
    assert run(_sum, "smp nobody").values == [6.0] * RANKS


def _mesh(group: bool) -> None:
    init_device_mesh("cpu", (RANKS,), mesh_dim_names=("a",))
    init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("a", "b"))
    if group:
        dist.new_group([0, 1])


def test_groups_of_a_device_mesh_are_no_leak(run):
    """torch makes them, and gives no call that destroys a mesh. A body's own group stays one."""
    assert run(_mesh, False).warnings == []
    (warning,) = run(_mesh, True).warnings
    assert "was never destroyed" in warning
