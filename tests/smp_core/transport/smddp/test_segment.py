"""The shared memory of a group: its start, its room, and the ends of members."""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from smp_core.errors import BackendError
from smp_core.transport.smddp import segment
from tests.smp_core.transport.smddp.rank_processes import (
    KILLED,
    RANKS,
    ROW_BYTES,
    on_ranks,
    text_of,
)


def test_the_sizes_of_a_thousand_members_have_room() -> None:
    """Those of an uneven all_to_all: a member has two for each member, all different."""
    size = 1000
    runs = [[[2**40 + each, 2**20], 1] for each in range(size)]
    room = segment.SegmentLayout(size).description_bytes
    assert len(json.dumps([runs, runs])) + 1000 < room  # and the call
    assert room % 4096 == 0


def test_no_room_for_shared_memory_is_an_error_of_every_rank(tmp_path: Path) -> None:
    def limit(rank: int) -> None:
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    with pytest.raises(AssertionError, match="there is no shared memory") as caught:
        on_ranks(tmp_path, 2, lambda rank: dist.barrier(), limit)
    assert "File too large" in str(caught.value)


def map_nothing() -> None:
    """Have all shared memory refused to this process."""

    def refuse(*_: Any) -> Any:
        raise BackendError("cannot map")

    segment._map_file = refuse


def test_a_rank_that_cannot_map_the_memory_ends_the_start_of_all(tmp_path: Path) -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            map_nothing()

    with pytest.raises(AssertionError, match="there is no shared memory: member 1: cannot map"):
        on_ranks(tmp_path, 2, lambda rank: dist.barrier(), fail)


def test_a_start_that_fails_leaves_no_descriptor(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, int]:
        def late() -> segment.SharedSegment:
            there = segment.SharedSegment(dist.HashStore(), 0, 2, "of a test")  # type: ignore[attr-defined]
            there.wait_for_all(datetime.timedelta(milliseconds=1))
            return there

        def unmapped() -> segment.SharedSegment:
            map_nothing()
            return segment.SharedSegment(dist.HashStore(), 0, 2, "of a test")  # type: ignore[attr-defined]

        gc.collect()  # of the parent's: it may hold descriptors
        before = len(os.listdir("/proc/self/fd"))
        assert "1 of 2 ranks came" in text_of(dist.DistBackendError, late)
        after_one = len(os.listdir("/proc/self/fd"))
        assert text_of(BackendError, unmapped) == "cannot map"
        return after_one - before, len(os.listdir("/proc/self/fd")) - after_one

    assert on_ranks(tmp_path, 1, body) == [(0, 0)]


def test_a_first_member_that_does_not_come_is_named() -> None:
    late = segment.SharedSegment(dist.HashStore(), 1, 2, "of a test")  # type: ignore[attr-defined]
    reported = text_of(BackendError, lambda: late.open(datetime.timedelta(milliseconds=1)))
    assert (
        "group of a test: member 1 waited for the shared memory of member 0, which did not"
        in reported
    )


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


def test_the_end_of_a_rank_that_has_not_mapped_the_memory_ends_the_start(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            segment.SharedSegment.open = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
        return text_of(dist.DistBackendError, lambda: dist.new_group([0, 1]))

    reported, killed = on_ranks(tmp_path, 2, body)
    assert killed == KILLED
    assert re.search(r"group \S+ cannot begin: member 1: its process \d+ has ended", reported)


def test_a_rank_may_map_the_memory_and_end_while_another_looks_for_it(tmp_path: Path) -> None:
    looks = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> str:
        if rank == 1:
            assert looks.wait(60)
            dist.new_group([0, 1])
            os.kill(os.getpid(), signal.SIGKILL)
        process_end = segment.SharedSegment._process_end

        def wait_for_end(self: Any, member: int) -> str:
            looks.set()
            while not (ended := process_end(self, member)):
                time.sleep(0.01)
            return ended

        segment.SharedSegment._process_end = wait_for_end  # type: ignore[method-assign]
        group = dist.new_group([0, 1])
        segment.SharedSegment._process_end = process_end  # type: ignore[method-assign]
        return text_of(dist.DistBackendError, lambda: dist.barrier(group))

    reported, killed = on_ranks(tmp_path, 2, body)
    assert killed == KILLED
    assert re.search(r"cannot end: rank 1: its process \d+ has ended", reported)


def test_all_members_hear_of_one_that_cannot_begin(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            map_nothing()
        return text_of(BackendError, lambda: dist.new_group([0, 1, 2]))

    told = "there is no shared memory: member 1: cannot map"
    assert on_ranks(tmp_path, RANKS, body) == [told, "cannot map", told]


def test_a_member_that_comes_late_hears_that_the_first_has_not_waited() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    short = datetime.timedelta(milliseconds=1)
    first = segment.SharedSegment(store, 0, 2, "of a test")
    reported = text_of(dist.DistBackendError, lambda: first.wait_for_all(short))
    assert "1 of 2 ranks came" in reported
    late = segment.SharedSegment(store, 1, 2, "of a test")
    assert text_of(BackendError, lambda: late.open(short)).endswith(f"member 0: {reported}")


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
