"""Asynchronous checkpoints of torch on rank processes: a thread of a rank saves, and communicates, while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, Report, VerdictKind

RANKS = 2


@pytest.fixture(scope="module")
def executor() -> Iterator[Any]:
    executor = open_backend("gloo", ExecutorOptions(ranks=RANKS))
    yield executor
    executor.close()


def run(executor: Any, body: Callable[[], Any], timeout: float = 120.0) -> Report:
    job = Job(body=body, arguments=lambda rank: ((), {}), timeout=timeout)
    report: Report = executor.open(RANKS).run(job)
    return report


def test_training_goes_on_while_checkpoints_are_saved(executor: Any, tmp_path: Any) -> None:
    def body() -> tuple[float, list[float], list[float]]:
        savers, own = dist.new_group(), f"of rank {dist.get_rank()}"
        state = {"shared": torch.arange(3.0), own: torch.ones(2)}
        saved: Any = async_save(state, checkpoint_id=tmp_path, process_group=savers)
        total = torch.ones(1)
        for _ in range(3):
            dist.all_reduce(total)
        saved.result()
        saver = threading.Thread(target=dist.barrier, args=(savers,))
        saver.start()
        dist.all_reduce(total)
        saver.join()
        loaded = {"shared": torch.zeros(3), own: torch.zeros(2)}
        load(loaded, checkpoint_id=tmp_path)
        return total.item(), loaded["shared"].tolist(), loaded[own].tolist()

    report = run(executor, body)
    assert report.values == [(16.0, [0.0, 1.0, 2.0], [1.0, 1.0])] * RANKS, report.error


def test_checkpoint_that_one_rank_leaves_out_is_named_by_the_time_out(executor: Any) -> None:
    """A rank of processes that has returned may have a thread that comes yet, so there is no verdict."""

    def body() -> None:
        if dist.get_rank() == 1:
            saver = threading.Thread(target=dist.barrier, name="saver")
            saver.start()
            saver.join()

    report = run(executor, body, timeout=5.0)
    assert report.verdict is VerdictKind.TIMED_OUT
    text = str(report.error)
    assert "rank 1 has not waited for barrier() [group WORLD, call " in text
    assert "      thread 'saver'\n" in text
    assert "rank 0 has returned" in text
