"""The handle of an operation of `smddp`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from smp_core.transport.smddp.progress import PROGRESS
from smp_core.transport.unseen import hide


class PendingOperation(Protocol):
    """An operation: a collective call, a send, a receive."""

    done: bool
    error: Exception | None


class SmddpWork(Work):
    """One operation of this rank. Waiting moves every operation that is in flight."""

    def __init__(self, group: Any, operation: PendingOperation, outputs: Any, name: str) -> None:
        super().__init__()
        self._group, self._operation = group, operation
        self._outputs, self.name = outputs, name

    def _done(self) -> bool:
        return self._operation.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is done.

        Raises DistBackendError after ``timeout`` (the group's, if none or 0 is given) and when a member has ended
        that has not come to the operation; CollectiveMismatchError if ranks made different calls.
        """
        operation = self._operation
        if not operation.done:
            self._group.check_process(self.name)
            seconds = (timeout or self._group.timeout).total_seconds()
            if not PROGRESS.wait(self._done, seconds):
                raise dist.DistBackendError(
                    f"{self.name} on group {self._group.text()} was not done after {seconds:g} s"
                    f"{self._group.missing(operation)}"
                )
        if operation.error is not None:
            raise operation.error
        return True

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future that is complete.

        DDP waits for futures in C++, where nothing would move, so we wait here.
        """
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    getFuture = get_future

    def is_completed(self) -> bool:
        """Move all that can be moved, then tell whether the operation is done."""
        if not self._operation.done:
            PROGRESS.move()
        return self._operation.done

    def is_success(self) -> bool:
        """Return whether the work is completed, and without an error."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> Exception | None:
        """The error that ``wait`` raises."""
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes, once it is done."""
        self.wait()
        outputs: list[torch.Tensor] = self._outputs
        return outputs

    def source_rank(self) -> int:
        """The group rank that sent the message of a receive; -1 for any other work."""
        self.wait()
        return int(getattr(self._operation, "source", -1))

    _source_rank = source_rank


hide(SmddpWork, ("wait", "is_completed"))
