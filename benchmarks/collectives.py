"""Tensor collectives of 8 rank processes on one machine: the `smddp` backend, Gloo, an MPI by buffers, and a bare copy.

The time of a call is that of a run of calls, from the first rank's begin to the last rank's end, divided by their
number. Gloo, `smddp` and the copy run in the same processes, in turns; the MPI is a job of its own in each turn.
The bare copy is what a rank has to copy at least, and to add if the call reduces, from its own memory. The buffers of
all have one allocator.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.figures import Figure, median

RANKS = 8
SIZES = (8, 1024, 64 * 1024, 1024**2, 8 * 1024**2, 64 * 1024**2)  # bytes of the whole tensor
TURNS = 3
# Calls before the clock starts: a call of one round uses the next of four slots each time, and all are touched once.
WARM = 4
_GLOO, _SMDDP, _COPY = "gloo", "smddp", "copy"
_MIB = 1024**2
_KIB64 = 64 * 1024

Call = Callable[[], Any]
Times = dict[str, dict[str, list[float]]]  # by operation and size, by what: seconds of a call
Span = tuple[float, float]  # when a rank began a run of calls, and when it had ended it


def _buffers(whole: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part of a rank of a whole of so many bytes, the whole, and another whole: of float32, or of bytes where that
    is too coarse. Numpy's own arrays would have huge pages, and torch's tensors have none.
    """
    dtype = torch.uint8 if whole < 4 * RANKS else torch.float32
    part = torch.ones(whole // RANKS // dtype.itemsize, dtype=dtype)
    full = part.repeat(RANKS)
    return part, full, torch.empty_like(full)


def _torch_calls(whole: int, group: Any) -> dict[str, Call]:
    """Each collective, on a whole tensor of so many bytes."""
    part, full, other = _buffers(whole)
    return {
        "all_gather": lambda: dist.all_gather_single(other, part, group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "broadcast": lambda: dist.broadcast(full, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
    }


def _copies(whole: int) -> dict[str, Call]:
    """The copies and additions of a rank in each collective: from memory of its own, so without any exchange."""
    part, rows, other = (each.numpy() for each in _buffers(whole))
    rows = rows.reshape(RANKS, -1)
    other = other.reshape(RANKS, -1)

    def copy() -> None:
        other[:] = rows

    def reduce() -> None:
        part[:] = rows[0]
        for row in rows[1:]:
            np.add(part, row, out=part)

    def both() -> None:
        reduce()
        copy()

    return {
        "all_gather": copy,
        "reduce_scatter": reduce,
        "all_reduce": both,
        "broadcast": copy,
        "all_to_all": copy,
    }


def _mpi_calls(whole: int, world: Any) -> dict[str, Call]:
    from mpi4py import MPI

    part, full, other = (each.numpy() for each in _buffers(whole))
    return {
        "all_gather": lambda: world.Allgather(part, other),
        "reduce_scatter": lambda: world.Reduce_scatter_block(full, part),
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, full),
        "broadcast": lambda: world.Bcast(full, 0),
        "all_to_all": lambda: world.Alltoall(full, other),
    }


def _span(call: Call, barrier: Call, repetitions: int) -> Span:
    for _ in range(WARM):
        call()
    barrier()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    end = time.perf_counter()
    barrier()  # nobody makes the next buffers before all have ended
    return start, end


def _repetitions(whole: int) -> int:
    return max(4, min(100, 64 * _MIB // whole))


def _measured(calls: Callable[[int], dict[str, Call]], barrier: Call) -> list[Span]:
    """A rank's span of each row, by size and operation."""
    return [
        _span(call, barrier, _repetitions(whole))
        for whole in SIZES
        for call in calls(whole).values()
    ]


def _seconds(spans: list[list[Span]]) -> dict[str, float]:
    """Seconds of a call in each row, from the spans of all ranks: their clock is one."""
    rows = [(name, whole) for whole in SIZES for name in _copies(8)]
    return {
        f"{name} of {_text(whole)}": (max(ends) - min(starts)) / _repetitions(whole)
        for (name, whole), (starts, ends) in zip(
            rows, (zip(*row, strict=True) for row in zip(*spans, strict=True)), strict=True
        )
    }


def _rank(rank: int, folder: str, results: Any) -> None:
    importlib.import_module("smp_core.transport.smddp")  # on the rank: torch starts threads
    torch.set_num_threads(1)
    gc.collect()  # one in the middle of a row would copy what the forked rank shares with its parent
    gc.freeze()
    dist.init_process_group(
        _GLOO,
        store=dist.FileStore(f"{folder}/store", RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(minutes=5),
    )
    ours = dist.new_group(backend=_SMDDP)
    groups = {_GLOO: dist.group.WORLD, _SMDDP: ours}
    measured = {
        name: _measured(
            lambda whole, group=group: _torch_calls(whole, group), lambda: dist.barrier(ours)
        )  # type: ignore[misc]
        for name, group in groups.items()
    }
    measured[_COPY] = _measured(_copies, lambda: dist.barrier(ours))
    results.put(measured)
    dist.destroy_process_group()


def _torch_turn() -> dict[str, dict[str, float]]:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, results)) for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        measured: list[dict[str, list[Span]]] = [results.get(timeout=3600) for _ in ranks]
        for process in ranks:
            process.join()
    return {what: _seconds([each[what] for each in measured]) for what in measured[0]}


def _mpi_rank() -> None:
    """A rank of the MPI job: rank 0 prints the name of the MPI and its times."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    spans = world.gather(_measured(lambda whole: _mpi_calls(whole, world), world.Barrier))
    if world.rank == 0:
        assert spans is not None
        name = " ".join(MPI.Get_library_version().replace(",", " ").split()[:2])
        print(json.dumps({name.removesuffix("Version:").strip(): _seconds(spans)}))


def _mpi_turn(mpiexec: Path) -> dict[str, dict[str, float]]:
    program = "from benchmarks import collectives; collectives._mpi_rank()"
    open_mpi = (mpiexec.parent / "ompi_info").exists()
    # mpi4py takes the MPI of its own environment, if it is not told another.
    library = mpiexec.parents[1] / "lib" / "libmpi.so"
    other = {"MPI4PY_LIBMPI": str(library), "MPI4PY_MPIABI": "openmpi"} if open_mpi else {}
    command = [mpiexec, *(["--oversubscribe"] if open_mpi else []), "-n", str(RANKS)]
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        env={**os.environ, **other},
        capture_output=True,
        text=True,
        timeout=3600,
        check=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _text(count: int) -> str:
    for unit, size in (("MiB", _MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} B"


def _budget(whole: int) -> str:
    mpi = "at least level with MPI" if whole >= _KIB64 else "within 3 times MPI"
    copy = ", within 1.5 of a copy" if whole >= _MIB else ""
    return f"at least 5 times Gloo, {mpi}{copy}"


def _ratio(middle: dict[str, float], whole: int) -> str:
    """Of others' times to ours; of ours to the copy's."""
    ours = middle[_SMDDP]
    others = [
        f"{middle[each] / ours:.2g} times {each}" for each in middle if each not in (_SMDDP, _COPY)
    ]
    copy = f"{ours / middle[_COPY]:.2g} of a copy" if whole >= _MIB else ""
    return ", ".join(filter(None, [*others, copy]))


def measure() -> list[Figure]:
    """Milliseconds of one call; ratios are those of medians, of the same run.

    Beside the mpiexec of this environment stand those that the variable SMP_BENCH_MPIEXEC names (``a:b``).
    """
    named = os.environ.get("SMP_BENCH_MPIEXEC", "").split(os.pathsep)
    jobs = [Path(sys.executable).parent / "mpiexec", *map(Path, filter(None, named))]
    times: Times = {}
    for _ in range(TURNS):
        turn = _torch_turn()
        for mpiexec in jobs:
            if mpiexec.exists():
                turn |= _mpi_turn(mpiexec)
        for what, measured in turn.items():
            for row, value in measured.items():
                times.setdefault(row, {}).setdefault(what, []).append(1000 * value)
    figures = []
    sizes = [whole for whole in SIZES for _ in _copies(8)]
    for whole, (row, by_what) in zip(sizes, times.items(), strict=True):
        middle = {what: median(values) for what, values in by_what.items()}
        for what, values in by_what.items():
            if what == _COPY and whole < _MIB:
                continue
            ours = what == _SMDDP
            figures.append(
                Figure(
                    f"{what}: {row} on {RANKS} ranks",
                    middle[what],
                    "ms",
                    (min(values), max(values)),
                    ratio=_ratio(middle, whole) if ours else "",
                    budget=_budget(whole) if ours else "",
                )
            )
    return figures
