"""Eager calls: calls of a sharded model outside of steps, which pipeline degree 1 allows (API 1.3.9).

An eager call unshards as in a step. ``model.backward`` then is a step of one microbatch, without its
body: whatever calls its gradients come from, they go to its ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smp_core.torch.execution import uses
from smp_core.torch.execution.accumulation import Ledger
from smp_core.torch.sharding.sharded_model import ShardedModel

#: The microbatch of eager calls.
_NO_MICROBATCH = 0


class EagerCalls:
    """The eager calls between two steps; a ledger that passes gradients on to that of the backward pass."""

    def __init__(self, sharding: ShardedModel, wide: bool) -> None:
        self._sharding, self._unsharded, self._wide = sharding, sharding.unsharded, wide
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
        self._sharding.begin_step(eager=True)
        self._depth += 1
        try:
            with uses.activity(self, _NO_MICROBATCH, 0, self._unsharded):
                yield
            self._unsharded.reshard_all()
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
            with uses.activity(self, _NO_MICROBATCH, 0, self._unsharded):
                yield ledger
            self._unsharded.end_step()
        except BaseException:
            self._sharding.interrupt()
            raise
        finally:
            self._ledger = self._new()
