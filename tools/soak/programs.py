"""The programs of the soak: what every rank does, step by step, and checks."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import smp_core.torch as smp
from tools.soak.collectives import TORCH, Names, expect
from tools.soak.differing import Differing
from tools.soak.inside import Inside

#: Bytes that each rank writes in a step that writes.
SIZE = 1 << 16
_PAUSED = 0.2  # the share of steps that some ranks begin late


@dataclasses.dataclass(frozen=True)
class SoakStep:
    """One step, whose values differ from those of steps with another ``number``.

    ``pauses``: for each rank the seconds by which it begins the step late.
    """

    kind: str
    number: int
    pauses: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class SoakArguments:
    """The same arguments for every rank (see base.Job)."""

    args: tuple[Any, ...]

    def __call__(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, {}


def draw(rng: random.Random, most: int = 6) -> tuple[SoakStep, ...]:
    """A program."""
    kinds = rng.choices(sorted(STEPS), k=rng.randint(2, most))
    return tuple(SoakStep(kind, number) for number, kind in enumerate(kinds, 1))


def with_pauses(rng: random.Random, steps: tuple[SoakStep, ...], size: int) -> tuple[SoakStep, ...]:
    """The program with drawn pauses before some of its steps."""

    def pause() -> float:
        return rng.choice((0.0, 0.0, 0.002, 0.02, 0.2))

    return tuple(
        dataclasses.replace(step, pauses=tuple(pause() for _ in range(size)))
        if rng.random() < _PAUSED
        else step
        for step in steps
    )


def without_pauses(steps: Iterable[SoakStep]) -> tuple[SoakStep, ...]:
    """The program with no pause."""
    return tuple(dataclasses.replace(step, pauses=()) for step in steps)


def run(
    steps: Iterable[SoakStep],
    folder: str,
    inside: Inside | None = None,
    differing: Differing | None = None,
) -> int:
    """The body. Returns how many calls the rank made; its steps raise AssertionError.

    ``inside``: a rank that is to die in one of the steps. ``differing``: one that makes another call in a step's place.
    """
    calls = 0
    for index, step in enumerate(steps):
        if step.pauses:
            time.sleep(step.pauses[smp.rank()])
        if differing is not None and differing.step == index:
            differing.call(smp.rank(), smp.size())
            continue
        dies = inside if inside is not None and inside.step == index else None
        if dies is not None:
            dies.before(smp.rank(), folder)
        calls += len(STEPS[step.kind][0](step.number, folder))
        if dies is not None:
            dies.after(smp.rank())
    return calls


def calls(steps: Iterable[SoakStep], rank: int, size: int) -> collections.Counter[str]:
    """The number of times that a rank makes each call, by the calls' names in faults."""
    counts: collections.Counter[str] = collections.Counter()
    for step in steps:
        counts.update(STEPS[step.kind][1](step.number, rank, size))
    return counts


# ---- Steps: what a rank does, which calls it makes of these names. --------------------------------


def _allgather(number: int, folder: str) -> Names:
    expect(
        smp.allgather((number, smp.rank()), smp.WORLD),
        [(number, rank) for rank in range(smp.size())],
    )
    return ("smp.allgather",)


def _barrier(number: int, folder: str) -> Names:
    smp.barrier()
    return ("smp.barrier",)


def _sends(number: int, rank: int, size: int) -> Names:
    """The calls of a step in which one rank sends to its right neighbour."""
    source = number % size
    if size == 1:
        return ()
    if rank == source:
        return ("smp.send",)
    return ("smp.recv_from",) if rank == (source + 1) % size else ()


def _send(number: int, folder: str) -> Names:
    names = _sends(number, smp.rank(), smp.size())
    source = number % smp.size()
    if "smp.send" in names:
        smp.send(("object", number), (source + 1) % smp.size(), smp.RankType.WORLD_RANK)
    elif names:
        expect(smp.recv_from(source, smp.RankType.WORLD_RANK), ("object", number))
    return names


def _broadcasts(number: int, rank: int, size: int) -> Names:
    if size == 1:
        return ()
    return ("smp.broadcast",) if rank == number % size else ("smp.recv_from",)


def _broadcast(number: int, folder: str) -> Names:
    names, root = _broadcasts(number, smp.rank(), smp.size()), number % smp.size()
    if "smp.broadcast" in names:
        smp.broadcast(("to all", number), smp.WORLD)
    elif names:
        expect(smp.recv_from(root, smp.RankType.WORLD_RANK), ("to all", number))
    return names


def _rings(number: int, rank: int, size: int) -> Names:
    return ("dist.send", "dist.recv") if size > 1 else ()


def _ring(number: int, folder: str) -> Names:
    """Every rank sends to the right, and receives from the left."""
    rank, size = smp.rank(), smp.size()
    if size > 1:
        work: Any = dist.isend(torch.tensor([number, rank]), (rank + 1) % size)
        got = torch.zeros(2, dtype=torch.int64)
        dist.recv(got, (rank - 1) % size)
        expect(got.tolist(), [number, (rank - 1) % size])
        work.wait()
    return _rings(number, rank, size)


def _write(number: int, folder: str) -> Names:
    path = os.path.join(folder, f"rank-{smp.rank()}")
    with open(path, "wb") as file:
        file.write(bytes(SIZE))
    return ()


def _always(*names: str) -> Callable[[int, int, int], Names]:
    return lambda number, rank, size: names


STEPS: dict[str, tuple[Callable[[int, str], Names], Callable[[int, int, int], Names]]] = {
    **TORCH,
    "allgather": (_allgather, _always("smp.allgather")),
    "barrier": (_barrier, _always("smp.barrier")),
    "broadcast": (_broadcast, _broadcasts),
    "ring": (_ring, _rings),
    "send": (_send, _sends),
    "write": (_write, _always()),
}
