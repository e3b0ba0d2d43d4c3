"""Calls of a sharded model outside of steps, which pipeline degree 1 allows (API 1.3.9).

What is called there gathers as in a step; ``model.backward`` then is a step of one microbatch, without its
body: whatever calls its gradients come from, they go to its ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smp_core.torch.execution import uses
from smp_core.torch.execution.accumulation import Ledger
from smp_core.torch.sharding.state import Sharding

#: What stands for the microbatch of calls outside of steps, beside those of steps.
_NO_MICROBATCH = 0


class Outside:
    """The calls between two steps; a ledger that passes on what it gets to that of the backward pass."""

    def __init__(self, sharding: Sharding, wide: bool) -> None:
        self._sharding, self._gathered, self._wide = sharding, sharding.gathered, wide
        self._ledger = self._new()
        self._depth = 0

    def _new(self) -> Ledger:
        ledger = Ledger(1)
        ledger.wide = self._wide
        return ledger

    def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
        """Nothing is done before the end."""

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take a contribution for the present backward pass, or the next."""
        self._ledger.add(microbatch, parameter, gradient)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Entered around each call of a module."""
        if self._depth or uses.current_microbatch() is not None:  # in a call, or in backward
            yield
            return
        self._sharding.begin_step(outside=True)
        self._depth += 1
        try:
            with uses.activity(self, _NO_MICROBATCH, 0, self._gathered):
                yield
            self._gathered.rest()
        except BaseException:
            self._sharding.interrupt()
            raise
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def backward(self) -> Iterator[Ledger]:
        """Entered around a backward pass; gives the ledger that its gradients go to."""
        ledger = self._ledger
        try:
            with uses.activity(self, _NO_MICROBATCH, 0, self._gathered):
                yield ledger
            self._gathered.end_step()
        except BaseException:
            self._sharding.interrupt()
            raise
        finally:
            self._ledger = self._new()
