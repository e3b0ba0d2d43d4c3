"""Rank processes for tests of the `smddp` process group alone: forked, without an executor or a board."""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from smp_core.transport.smddp import segment
from smp_core.transport.smddp.segment import row_bytes

LIMIT = datetime.timedelta(seconds=240)
#: The value of a rank that was killed.
KILLED = "killed"
RANKS = 3  # an odd number in the tree of a fold
ROW_BYTES = row_bytes(RANKS)
MANY = 40 * ROW_BYTES // 4  # numbers of float32 that take many rounds
WIDE = 60  # a layer of so many columns has more than a bucket


def value(rank: int, count: int, part: int = 0) -> torch.Tensor:
    """A rank's input, or a part of it."""
    generator = torch.Generator().manual_seed(rank * 100 + part)
    return torch.randn(count, generator=generator)


def text_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def limit() -> float:
    """Seconds after which an operation that goes on by itself counts as hanging."""
    return LIMIT.total_seconds() / 3


def progress_threads() -> int:
    """The number of progress threads of this process."""
    return sum(each.name == "smddp progress" for each in threading.enumerate())


def on_machines(names: str) -> Callable[[int], None]:
    """Have each rank pretend to be on a machine: a letter of ``names``. For ``before`` of ``on_ranks``."""

    def pretend(rank: int) -> None:
        segment._machine = lambda: names[rank]
        os.environ["MASTER_ADDR"] = "127.0.0.1"

    return pretend


def wait_for_departure(member: int) -> None:
    """Return when this rank has noticed that a member of the default group has ended."""
    group: Any = dist.group.WORLD
    end = time.monotonic() + LIMIT.total_seconds()
    while not group._segment.departure(member):
        assert time.monotonic() < end
        time.sleep(0.001)


def _rank(
    body: Callable[[int], Any],
    rank: int,
    size: int,
    store: str,
    pipe: Any,
    before: Callable[[int], None],
) -> None:
    importlib.import_module("smp_core.transport.smddp")
    torch.set_num_threads(1)
    try:
        before(rank)
        dist.init_process_group(
            "smddp",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=LIMIT,
        )
        pipe.send((True, body(rank)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def on_ranks(
    folder: Path,
    size: int,
    body: Callable[[int], Any],
    before: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """The values that a body returns on each rank, or KILLED. ``before`` is called before the group is made.

    Raises AssertionError, with the traces of the ranks that fail.
    """
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (body, rank, size, str(folder / "store"), theirs, before)
        process = context.Process(target=_rank, args=arguments)
        process.start()
        theirs.close()
        started.append((process, ours))
    values, failures, end = [], [], time.monotonic() + LIMIT.total_seconds()
    for process, ours in started:
        try:
            answered = ours.poll(max(end - time.monotonic(), 0))
            ok, value = ours.recv() if answered else (False, "no answer")
        except EOFError:
            ok, value = True, KILLED
        if not ok:
            process.kill()
            failures.append(value)
        process.join()
        if value == KILLED and process.exitcode not in (0, 1, -signal.SIGKILL):
            failures.append(f"a rank has crashed: exit code {process.exitcode}")
        values.append(value)
    assert not failures, "\n".join(failures)
    return values


def check_values(folder: Path, check: Callable[[int], None], machines: str = "") -> None:
    """Run a check on each rank, on one machine or on those that ``on_machines`` gets."""
    before = (on_machines(machines),) if machines else ()
    assert on_ranks(folder, RANKS, check, *before) == [None] * RANKS
