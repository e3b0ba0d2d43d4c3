"""The handle of an operation. The outputs are written when the rank learns that it is done: in
``wait``, or when ``is_completed`` says so.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from smp_core.errors import CollectiveMismatchError
from smp_core.transport.memory import InFlightBuffer
from smp_core.transport.mpi.exchange import MpiOperation, ReceiveOperation
from smp_core.transport.mpi.messenger import Messenger
from smp_core.transport.protocols import Group
from smp_core.transport.unseen import hide


class RankSide(Protocol):
    """The members of a rank's fabric (fabric.py) that works and process groups use."""

    rank: int
    messenger: Messenger
    unwaited: dict[int, MpiWork]

    def channel(self, group: Group) -> str:
        """A name for a group that is being made."""


class MpiWork(Work):
    """One operation of this rank. Waiting moves every operation that is in flight."""

    def __init__(
        self,
        fabric: RankSide,
        operation: MpiOperation,
        in_flight: InFlightBuffer,
        outputs: Any,
        name: str,
    ) -> None:
        super().__init__()
        self._fabric, self._operation, self._in_flight = fabric, operation, in_flight
        self._outputs, self.name = outputs, name
        self._landed = False
        self._error: CollectiveMismatchError | None = None
        fabric.unwaited[id(self)] = self

    def _done(self) -> bool:
        return self._landed or self._operation.done

    def _land(self) -> None:
        """The rank has learnt that the operation is done."""
        if not self._landed:
            self._landed = True
            self._fabric.unwaited.pop(id(self), None)
            try:
                with torch.no_grad():
                    self._in_flight.land(self._operation.values())
            except CollectiveMismatchError as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is done.

        Raises DistBackendError after ``timeout``, if one is given and not 0, as torch's own
        backends do; CollectiveMismatchError if ranks made different calls.
        """
        seconds = timeout.total_seconds() if timeout else None
        if not self._fabric.messenger.wait(self._done, seconds):
            raise dist.DistBackendError(f"{self.name} was not done after {seconds:g} s")
        self._land()
        return True

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def forget(self) -> None:
        """At the end of a run: leave torch's registry of functional collectives, which would keep
        the work and its tensors for ever.
        """
        self._landed, self._error = True, None
        outputs, self._outputs = self._outputs, []
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, torch.Tensor):
                torch.ops._c10d_functional.wait_tensor(output)

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
        """Move all messages that can be moved, then tell whether the operation is done."""
        if not self._done():
            self._fabric.messenger.look()
        if not self._done():
            return False
        self._land()
        return True

    def is_success(self) -> bool:
        """Return whether the work is completed; False if ranks made different calls."""
        try:
            return self.is_completed()
        except CollectiveMismatchError:
            return False

    def exception(self) -> CollectiveMismatchError | None:
        """The error that ``wait`` has raised."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes, once it is done."""
        self.wait()
        outputs: list[torch.Tensor] = self._outputs
        return outputs

    def source_rank(self) -> int:
        """The group rank that sent the message of a receive; -1 for any other work."""
        self.wait()
        return self._operation.source if isinstance(self._operation, ReceiveOperation) else -1

    _source_rank = source_rank


hide(MpiWork, ("wait", "is_completed"))
