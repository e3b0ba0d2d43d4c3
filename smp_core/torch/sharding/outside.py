"""Calls of a sharded model outside of steps, which pipeline degree 1 allows (SMP_API.md 1.3 item 9).

What is called there gathers as in a step; ``model.backward`` then is a step of one microbatch, without its
body. Gradients wait in a ledger of their own until it comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smp_core.torch.pipeline import uses
from smp_core.torch.pipeline.accumulation import Ledger
from smp_core.torch.sharding.state import Sharding


class Outside:
    """The calls between two steps, or two backward passes."""

    def __init__(self, sharding: Sharding, wide: bool) -> None:
        self._sharding, self._gathered, self._wide = sharding, sharding.gathered, wide
        self._ledger: Ledger | None = None
        self._depth = 0

    @property
    def ledger(self) -> Ledger:
        """Where the gradients of calls since the last backward pass go."""
        if self._ledger is None:
            self._ledger = Ledger(1)
            self._ledger.wide = self._wide
        return self._ledger

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Entered around each call of a module."""
        if self._depth or uses.current_microbatch() is not None:  # in a call, or in backward
            yield
            return
        self._sharding.begin_step()
        self._depth += 1
        try:
            with uses.activity(self.ledger, 0, 0, self._gathered):
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
        ledger = self.ledger
        try:
            with uses.activity(ledger, 0, 0, self._gathered):
                yield ledger
            self._gathered.end_step()
        except BaseException:
            self._sharding.interrupt()
            raise
        finally:
            self._ledger = None
