"""The works of `smddp`: time limits, and futures with the results and errors of operations."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.smp_core.transport.smddp.rank_processes import KILLED, WIDE, on_ranks, text_of


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


def test_a_future_of_an_operation_that_fails_has_its_error(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        future = dist.all_reduce(torch.ones(rank + 1), async_op=True).get_future()
        with pytest.raises(Exception, match="differs in shape") as caught:
            future.wait()
        dist.barrier()
        return str(caught.value).partition("\n\nAt:")[
            0
        ]  # the lines behind it are of the rank's own stack

    reported = on_ranks(tmp_path, 2, body)
    assert reported == [reported[0]] * 2


def test_a_future_learns_of_the_end_of_a_rank(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            os._exit(1)
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        with pytest.raises(Exception, match="cannot end") as caught:
            future.wait()
        return str(caught.value)

    reported = on_ranks(tmp_path, 2, body)
    assert "rank 1: its process" in reported[0]
    assert reported[1] == KILLED


def test_a_rank_that_ends_in_a_backward_pass_of_ddp_is_an_error(tmp_path: Path) -> None:
    """DDP waits in C++, where a future whose result is an exception ended the process."""

    def body(rank: int) -> str:
        model, ends = torch.nn.Linear(WIDE, WIDE), False

        def end(gradient: torch.Tensor) -> None:
            if ends:
                os._exit(1)

        wrapped = DistributedDataParallel(model)
        x = torch.ones(1, WIDE, requires_grad=True)
        wrapped(x).sum().backward()
        if rank == 1:
            ends = True
            model.weight.register_hook(end)
        with pytest.raises(RuntimeError, match="cannot end") as caught:
            wrapped(x).sum().backward()
        return str(caught.value)

    reported = on_ranks(tmp_path, 2, body)
    assert "rank 1: its process" in reported[0]
    assert reported[1] == KILLED


def test_a_future_has_the_limit_of_its_group(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        group = dist.new_group(timeout=datetime.timedelta(seconds=0.2))
        if rank == 0:
            future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
            with pytest.raises(Exception, match=r"not done after 0\.2 s: rank 1 did not come"):
                future.wait()
        dist.barrier()

    on_ranks(tmp_path, 2, body)
