"""The handle of an operation of `smddp`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from smp_core.transport.smddp.progress import PROGRESS, Blockers
from smp_core.transport.unseen import hide


class PendingOperation(Protocol):
    """An operation: a collective call, a send, a receive."""

    done: bool
    error: Exception | None


class SmddpWork(Work):
    """One operation of this rank. A wait advances every operation that is in flight."""

    def __init__(
        self,
        group: Any,
        operation: PendingOperation,
        outputs: Any,
        name: str,
        blockers: Blockers | None = None,
    ) -> None:
        super().__init__()
        self._blockers = blockers
        self._group, self._operation = group, operation
        self.outputs, self.name = outputs, name
        self._future: Future[Any] | None = None

    def done(self) -> bool:
        """Return whether the operation is done, and advance nothing."""
        return self._operation.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is done.

        Raises DistBackendError after ``timeout`` (the group's, if none or 0 is given) and when a member has ended
        that has not arrived at the operation; CollectiveMismatchError if ranks made different calls.
        """
        operation = self._operation
        if not operation.done:
            self._group.check_process(self.name)
            seconds = (timeout or self._group.timeout).total_seconds()
            blockers, self._blockers = self._blockers, None
            if not PROGRESS.wait(self.done, seconds, blockers):
                raise self.timeout_error(seconds)
        if operation.error is not None:
            raise operation.error
        return True

    def timeout_error(self, seconds: float) -> Exception:
        """The error of an operation that took so long."""
        return dist.DistBackendError(
            f"{self.name} on group {self._group.text()} was not done after {seconds:g} s"
            f"{self._group.missing(self._operation)}"
        )

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """The outputs, or a RuntimeError with the text of the error that ``wait`` raises, or of one after the group's
        time limit.

        The progress thread completes it: DDP waits for futures in C++, where nothing would advance it.
        """
        if self._future is None:
            promise = _FutureResult(self, self._group.timeout.total_seconds())
            self._future = promise.future
            if self.done():
                promise.settle()
            else:
                self._group.check_process(self.name)
                PROGRESS.promise(promise)
        return self._future

    getFuture = get_future

    def is_completed(self) -> bool:
        """Advance all operations, then return whether this one is done."""
        if not self._operation.done:
            PROGRESS.progress()
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
        outputs: list[torch.Tensor] = self.outputs
        return outputs

    def source_rank(self) -> int:
        """The group rank that sent the message of a receive; -1 for any other work."""
        self.wait()
        return int(getattr(self._operation, "source", -1))

    _source_rank = source_rank


class _FutureResult:
    """The result that a future gets from a work (see Promise)."""

    def __init__(self, work: SmddpWork, seconds: float) -> None:
        self._work, self._seconds = work, seconds
        self.end = time.monotonic() + seconds
        self._error: Exception | None = None
        self._settled: Future[None] = Future()
        # Of a callback that raises, the future has an error in C++, too. ``Future.set_exception`` makes the exception
        # the result, in which DDP looks for tensors, and the process crashes.
        self.future: Future[Any] = self._settled.then(self._value)

    def _value(self, _: Future[None]) -> Any:
        if self._error is not None:
            raise self._error
        return self._work.outputs  # ``result`` would count as a wait of the progress thread's

    def ready(self) -> bool:
        return self._work.done()

    def settle(self) -> None:
        self._error = self._work.exception()
        self._settled.set_result(None)

    def expire(self) -> None:
        self._error = self._work.timeout_error(self._seconds)
        self._settled.set_result(None)


hide(SmddpWork, ("wait", "is_completed"))
