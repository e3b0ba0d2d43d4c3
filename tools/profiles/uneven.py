"""Training with uneven numbers of batches, in each form and on each backend: every run must end in a deadlock that
names the ranks, without the time limit.

    python -m tools.profiles.uneven --backends sim gloo smddp mpi

prints a line for each run: the verdict, the rank that is named as the one that returned, and the seconds from the
moment when the last rank came to its last batch, or to its end, to the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import random
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.board import Board
from pytest_smp.ranks.protocols import Executor, ExecutorOptions, Job, VerdictKind
from tools.soak.programs import SoakArguments

RANKS = 2
EXTRA = 1, 2, 3  # batches that one rank has more than the other
_LIMIT = 60.0  # seconds

Train = Callable[[], None]


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def _of(model: nn.Module) -> Train:
    return lambda: model(torch.ones(4, 3)).sum().backward()


def _ddp() -> Train:
    return _of(DistributedDataParallel(_layers()))


def _ddp_with_buffers() -> Train:
    return _of(DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))


def _ddp_with_a_hook() -> Train:
    model = DistributedDataParallel(_layers())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return _of(model)


def _fsdp2() -> Train:
    model = _layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return _of(model)


def import_optimizers() -> None:
    """Import what a first optimizer imports, once for all ranks that are forked afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, in torch itself
        importlib.import_module("torch.distributed.optim")


def _join_left_out() -> Train:
    import_optimizers()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(_layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train = _of(model)

    def train_and_update() -> None:
        train()
        optimizer.step()

    return train_and_update


def _step(**configuration: Any) -> Train:
    smp.init({"microbatches": 2, **configuration})
    model = smp.DistributedModel(_layers())

    @smp.step
    def train_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).sum()
        model.backward(loss)
        return loss

    return lambda: train_step(model, torch.ones(4, 3))


#: By name: a function that makes the model on a rank, and gives the training of one batch.
FORMS: dict[str, Callable[[], Train]] = {
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    "Join left out": _join_left_out,
    "step": functools.partial(_step, ddp=True),
    "step in a pipeline": functools.partial(_step, pipeline_parallel_degree=2),
    "DDP with buffers": _ddp_with_buffers,
    "DDP with a hook": _ddp_with_a_hook,
}


def train(form: str, short: int, extra: int, folder: str) -> None:
    """The body: rank ``short`` trains one batch, the other one ``extra`` more."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_batch = FORMS[form]()
    path = Path(folder, str(rank))
    for _ in range(1 if rank == short else 1 + extra):
        path.write_text(repr(time.monotonic()))
        train_batch()
    if rank == short:
        path.write_text(repr(time.monotonic()))


@dataclasses.dataclass(frozen=True)
class UnevenRun:
    """One run: what it was, and what came of it.

    Attributes:
        named: the rank that the message names as the one that has returned, -1 if it names none.
        seconds: from the last rank's last batch or end to the verdict.
    """

    form: str
    backend: str
    short: int
    extra: int
    verdict: VerdictKind
    named: int
    seconds: float
    message: str

    @property
    def right(self) -> bool:
        """True if the run has ended in the verdict that it should."""
        return self.verdict is VerdictKind.DEADLOCK and self.named == self.short


def run(executor: Executor, backend: str, form: str, short: int, extra: int) -> UnevenRun:
    """Run one case."""
    with tempfile.TemporaryDirectory() as folder, _stamped() as stamps:
        arguments = SoakArguments((form, short, extra, folder))
        job = Job(body=train, arguments=arguments, timeout=_LIMIT, capture=True)
        report = executor.open(RANKS).run(job)
        end = stamps[0] if stamps else time.monotonic()
        times = [float(path.read_text()) for path in Path(folder).iterdir()]
    message = str(report.error)
    named = re.search(r"^  rank (\d+) has returned$", message, re.MULTILINE)
    return UnevenRun(
        form,
        backend,
        short,
        extra,
        report.verdict,
        int(named[1]) if named else -1,
        end - max(times, default=end),
        message,
    )


@contextlib.contextmanager
def _stamped() -> Iterator[list[float]]:
    """While entered, the time of each finding of the board is noted."""
    stamps: list[float] = []
    look = Board.look

    def look_and_note(board: Board, *args: Any) -> Any:
        finding = look(board, *args)
        if finding is not None:
            stamps.append(time.monotonic())
        return finding

    with mock.patch.object(Board, "look", look_and_note):
        yield stamps


@contextlib.contextmanager
def opened(backend: str) -> Iterator[Executor]:
    """An executor whose ranks have imported what the forms need."""
    options = ExecutorOptions(ranks=RANKS, capture=True, prelude=import_optimizers)
    executor = open_backend(backend, options)
    try:
        yield executor
    finally:
        executor.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print. Returns 1 if a run has not ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m tools.profiles.uneven", description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["sim", "gloo", "smddp", "mpi"])
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=[*FORMS])
    parser.add_argument("--seed", type=int, default=0, help="of the rank that has fewer batches")
    options = parser.parse_args(arguments)
    rng, runs = random.Random(options.seed), list[UnevenRun]()
    for backend in options.backends:
        with opened(backend) as executor:
            for form, extra in itertools.product(options.forms, EXTRA):
                case = run(executor, backend, form, rng.randrange(RANKS), extra)
                runs.append(case)
                print(
                    f"{backend:6} {form:18} +{extra} {case.verdict!s:10} rank {case.named} has returned, "
                    f"{case.seconds:.3f} s{'' if case.right else '   WRONG: ' + case.message}",
                    flush=True,
                )
    wrong = sum(not case.right for case in runs)
    for backend in options.backends:
        seconds = [case.seconds for case in runs if case.backend == backend]
        print(f"{backend}: median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s")
    median = statistics.median(case.seconds for case in runs)
    print(f"{len(runs)} runs, {wrong} wrong, median {median:.3f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
