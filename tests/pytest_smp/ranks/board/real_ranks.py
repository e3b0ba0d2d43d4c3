"""Rank processes on Gloo whose records a board reads, without an executor: forked, and killed at the
end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from pytest_smp.ranks.board import Board, BoardRecorder, Finding
from pytest_smp.ranks.board.instrument import Instrument

Body = Callable[[int], None]
_LIMIT = 60.0  # seconds; nothing here should come near it


@dataclass
class Seen:
    """The results of a run: the finding, the ranks' own errors, the records, the leaks."""

    board: Board
    finding: Finding | None = None
    errors: dict[int, str] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    timed_out: bool = False


def run(body: Body, size: int, patience: float = 1.0) -> Seen:
    """Run ``body(rank)`` on ``size`` ranks until all are back or the board has a finding."""
    with tempfile.TemporaryDirectory() as folder:
        pids: dict[int, int] = {}
        lines: dict[Connection, int] = {}
        for rank in range(size):
            ours, theirs = Pipe(duplex=False)
            pid = os.fork()
            if not pid:
                _serve(body, rank, size, folder, theirs)
            theirs.close()
            pids[rank], lines[ours] = pid, rank
        try:
            return _watch(lines, size, patience)
        finally:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for line in lines:
                line.close()


def _serve(body: Body, rank: int, size: int, folder: str, line: Connection) -> None:
    status = 1
    # Of this process alone: what launches ranks on two machines in a later test would inherit it.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        recorder = BoardRecorder(rank, lambda data: line.send_bytes(b"R" + data))
        instrument = Instrument(recorder)
        instrument.install()
        c10d._world.group_count = 0  # tests that ran before in this process may have made groups
        store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.barrier()  # before the run: all begin together, and nothing of this is recorded
        recorder.begin(7)
        try:
            body(rank)
        except BaseException:
            line.send_bytes(b"E" + traceback.format_exc().encode())
        recorder.end()
        line.send_bytes(b"Q")
        status = 0
        signal.pause()  # as in a pool: its connections stay
    finally:
        sys.stderr.flush()
        os._exit(status)


def _watch(lines: dict[Connection, int], size: int, patience: float) -> Seen:
    board = Board(size, patience=patience)
    board.reset(7)
    seen = Seen(board, data=dict.fromkeys(range(size), b""))
    running, deadline = set(range(size)), time.monotonic() + _LIMIT
    while running:
        for line in wait([*lines], timeout=0.02):
            assert isinstance(line, Connection)
            rank = lines[line]
            try:
                message = line.recv_bytes()
            except (EOFError, ConnectionResetError):  # Gloo has ended the process
                del lines[line]
                line.close()
                board.gone(rank)
                running.discard(rank)
                continue
            kind, data = message[:1], message[1:]
            if kind == b"Q":
                running.discard(rank)
            elif kind == b"E":
                seen.errors[rank] = data.decode()
            else:
                seen.data[rank] += data
                board.feed(rank, data)
        seen.finding = board.look(running, time.monotonic())
        if seen.finding is not None:
            return seen
        if time.monotonic() > deadline:
            seen.timed_out = True
            return seen
    if not seen.errors:
        seen.leaks, _ = board.leaks(False)
    return seen
