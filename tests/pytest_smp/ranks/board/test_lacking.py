"""A process group in Python that lacks an operation: torch's own error, with and without the board."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from pytest_smp.ranks.board import BoardRecorder
from pytest_smp.ranks.board.fingerprint import COLLECTIVES
from pytest_smp.ranks.board.instrument import Instrument


class Lacking(dist.ProcessGroup):
    """A group of one rank that can do nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def getBackendName(self) -> str:
        return "lacking"


@pytest.fixture
def default_group() -> Iterator[Lacking]:
    """A default group without operations, of a class of its own: see ``both``."""
    group = type("Lacking", (Lacking,), {})()
    dist.Backend.register_backend("lacking", lambda *_: group, devices=["cpu"])
    try:
        dist.init_process_group("lacking", store=dist.HashStore(), rank=0, world_size=1)
        yield group
    finally:
        dist.destroy_process_group()
        dist.Backend.backend_list.remove("lacking")
        for table in (dist.Backend._plugins, dist.Backend.backend_capability):
            for name in ("lacking", "LACKING"):
                table.pop(name, None)
        delattr(dist.Backend, "LACKING")


def x() -> torch.Tensor:
    return torch.zeros(2)


#: By method of a process group, arguments that torch's bindings take.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "barrier": (),
    "monitored_barrier": (),
    "broadcast": ([x()], dist.BroadcastOptions()),
    "allreduce": ([x()], dist.AllreduceOptions()),
    "allreduce_coalesced": ([x()], dist.AllreduceCoalescedOptions()),
    "reduce": ([x()], dist.ReduceOptions()),
    "allgather": ([[x()]], [x()]),
    "allgather_coalesced": ([[x()]], [x()]),
    "all_gather_single": (x(), x()),
    "_allgather_base": (x(), x()),
    "all_gather_single_coalesced": ([x()], [x()]),
    "allgather_into_tensor_coalesced": ([x()], [x()]),
    "reduce_scatter": ([x()], [[x()]], dist.ReduceScatterOptions()),
    "reduce_scatter_single": (x(), x(), dist.ReduceScatterOptions()),
    "_reduce_scatter_base": (x(), x(), dist.ReduceScatterOptions()),
    "reduce_scatter_single_coalesced": ([x()], [x()]),
    "reduce_scatter_tensor_coalesced": ([x()], [x()]),
    "gather": ([[x()]], [x()], dist.GatherOptions()),
    "scatter": ([x()], [[x()]], dist.ScatterOptions()),
    "alltoall": ([x()], [x()]),
    "all_to_all_single": (x(), x(), [], []),
    "alltoall_base": (x(), x(), [], []),
    "send": ([x()], 0, 0),
    "recv": ([x()], 0, 0),
    "recv_anysource": ([x()], 0),
}


def error_of(call: Callable[[], object]) -> str:
    """The error that a call raises. A recursion is cut at once, before the stack of C is full."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit // 4)
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.setrecursionlimit(limit)
    return ""


def both(call: Callable[[], object]) -> tuple[str, str]:
    """The errors that a call raises without the board, and with it.

    The call with the board comes first: pybind11 looks an override that a class does not have up only once.
    """
    recorder = BoardRecorder(0, lambda data: None)
    instrument = Instrument(recorder)
    instrument.install()
    recorder.begin()
    try:
        recorded = error_of(call)
    finally:
        recorder.end()
        instrument.uninstall()
    return error_of(call), recorded


def test_every_operation_that_is_recorded_is_tried() -> None:
    assert {*COLLECTIVES} - {"monitored_barrier"} <= {*ARGUMENTS}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_error_is_that_of_torch(default_group: Lacking, name: str) -> None:
    method = getattr(dist.ProcessGroup, name, None)
    if method is None:  # of this version of torch
        assert name not in vars(dist.ProcessGroup)
        return
    plain, recorded = both(lambda: getattr(default_group, name)(*ARGUMENTS[name]))
    assert plain
    assert "RecursionError" not in plain
    assert recorded == plain


@pytest.mark.parametrize("name", ["get_future", "is_completed", "is_success"])
def test_works_too(name: str) -> None:
    work = type("LackingWork", (dist.Work,), {})()
    plain, recorded = both(getattr(work, name))
    assert recorded == plain
