"""The handle of operations that were coalesced: several works, waited for as one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future


class CombinedWork(Work):
    """Several works waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each, in the order of issue."""
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        """Wait for all works, as ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all works are done."""
        completed = [
            work.is_completed() for work in self._works
        ]  # ask each: asking lets the others run
        return all(completed)

    def is_success(self) -> bool:
        """Return whether all works are done, as ``is_completed`` does."""
        return self.is_completed()

    def exception(self) -> None:
        """Return None: a failed operation ends the run."""
        return

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operations write, once all are done."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:
        """A future that is complete."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result([work.result() for work in self._works])
        return future

    getFuture = get_future
