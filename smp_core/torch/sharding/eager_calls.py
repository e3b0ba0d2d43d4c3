"""Eager calls: calls of a model outside of steps, which pipeline degree 1 allows (API 1.3.9).

``model.backward`` then is a step of one microbatch, without its body: whatever calls its gradients come from, they go
to its ledger. An eager call of a sharded model unshards as in a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from smp_core.torch.execution import uses
from smp_core.torch.execution.accumulation import Ledger
from smp_core.torch.sharding.unsharding import Unsharded

#: The microbatch of eager calls.
_NO_MICROBATCH = 0


class EagerCalls:
    """The eager calls of a model whose parameters are whole: they are plain calls. ``wide`` as of a Ledger."""

    def __init__(self, wide: bool) -> None:
        self._wide = wide

    def _new_ledger(self) -> Ledger:
        ledger = Ledger(1)
        ledger.wide = self._wide
        return ledger

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Call ``module`` outside of a step, by ``forward(*args, **kwargs)``."""
        return forward(*args, **kwargs)

    def backward(self) -> AbstractContextManager[Ledger]:
        """Entered around a backward pass; gives the ledger that its gradients go to."""
        return self._backward()

    @contextlib.contextmanager
    def _backward(self) -> Iterator[Ledger]:
        ledger = self._new_ledger()
        with uses.activity(ledger, _NO_MICROBATCH, 0):
            yield ledger


class EagerSharding(Protocol):
    """The sharded model, as far as eager calls need it."""

    unsharded: Unsharded

    def begin_step(self, *, eager: bool = False) -> None:
        """Before an eager call."""

    def interrupt(self) -> None:
        """After one that failed."""


class ShardedEagerCalls(EagerCalls):
    """The eager calls of a sharded model; as a ledger, they pass gradients on to the ledger of the backward pass."""

    def __init__(self, sharding: EagerSharding, wide: bool) -> None:
        super().__init__(wide)
        self._sharding, self._unsharded = sharding, sharding.unsharded
        self._ledger = self._new_ledger()
        self._depth = 0

    def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
        """Do nothing: gradients are processed at the end of the backward pass."""

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take a contribution for the present backward pass, or the next."""
        self._ledger.add(microbatch, parameter, gradient)

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        with self._call():
            return uses.hold(module, forward, args, kwargs)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
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
    def _backward(self) -> Iterator[Ledger]:
        ledger = self._ledger
        try:
            with uses.activity(self, _NO_MICROBATCH, 0, self._unsharded):
                yield ledger
            self._unsharded.end_step()
        except BaseException:
            self._sharding.interrupt()
            raise
        finally:
            self._ledger = self._new_ledger()
