"""A rank whose call differs from those of the others, which some backends answer with a crash of another rank."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch
import torch.distributed as dist

import smp_core.torch as smp


def _reduced(dtype: torch.dtype = torch.float32, size: int = 5) -> None:
    dist.all_reduce(torch.ones(size, dtype=dtype))


def _gathered(size: int, dtype: torch.dtype) -> None:
    part = torch.ones(4, dtype=dtype)
    dist.all_gather([torch.empty_like(part) for _ in range(size)], part)


#: By kind: the call of the rank that differs, and that of the others; both get the number of ranks.
CALLS: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {
    "dtype": (lambda size: _reduced(torch.float64), lambda size: _reduced()),
    "gathered dtype": (
        lambda size: _gathered(size, torch.float64),
        lambda size: _gathered(size, torch.float32),
    ),
    "object call": (lambda size: smp.barrier(), lambda size: smp.allgather(0, smp.WORLD)),
    "operation": (lambda size: dist.barrier(), lambda size: _reduced()),
    "reduce op": (
        lambda size: dist.all_reduce(torch.ones(5), op=dist.ReduceOp.MAX),
        lambda size: _reduced(),
    ),
    "root": (
        lambda size: dist.broadcast(torch.ones(5), 0),
        lambda size: dist.broadcast(torch.ones(5), 1),
    ),
    "size": (lambda size: _reduced(size=500), lambda size: _reduced()),
}


@dataclasses.dataclass(frozen=True)
class Differing:
    """In step number ``step`` (from 0) ``rank`` makes another call than the others; ``kind``: a key of `CALLS`."""

    rank: int
    step: int
    kind: str

    @classmethod
    def draw(cls, rng: random.Random, rank: int, steps: int) -> Differing:
        """Draw the difference and its step."""
        return cls(rank, rng.randrange(steps), rng.choice([*CALLS]))

    def call(self, rank: int, size: int) -> None:
        """Make the call of this rank."""
        odd, even = CALLS[self.kind]
        (odd if rank == self.rank else even)(size)
