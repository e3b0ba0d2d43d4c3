"""The handle of an asynchronous operation.

Every operation of the process group gives one; torch waits for it. The outputs are written when the
rank learns that the operation is done: in ``wait``, or when ``is_completed`` says so.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from pytest_smp.ranks.sim.mailbox import Post
from pytest_smp.ranks.sim.rank_context import RankContext
from pytest_smp.ranks.sim.scheduler import Operation, WaitExpired
from smp_core.errors import RaceError
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.memory import InFlightBuffer
from smp_core.transport.peers import ANY
from smp_core.transport.stack_frames import Place
from smp_core.transport.unseen import hide


class TensorOperation(Operation, Protocol):
    """An operation that gives its ranks tensors."""

    def give_up(self, rank: int) -> None:
        """Take note that the rank's wait has timed out, so that nothing of it is a leak."""

    def values(self, rank: int) -> list[torch.Tensor]:
        """The values that a rank gets, once the operation is done: one per output."""


class SimWork(Work):
    """Done when the scheduler says that its operation is. Waiting passes the turn."""

    def __init__(
        self,
        context: RankContext,
        operation: TensorOperation,
        in_flight: InFlightBuffer,
        outputs: Any,
        name: str,
        place: Place | None,
    ) -> None:
        super().__init__()
        self._context, self._operation, self._outputs = context, operation, outputs
        self.in_flight, self.name, self.place = in_flight, name, place
        self._forgotten = False
        context.fabric.unwaited[id(self)] = self
        context.fabric.overlap_table.enter(in_flight, self)

    @property
    def receives(self) -> bool:
        """True if the operation is the receive of a message."""
        return isinstance(self._operation, Post) and bool(self.in_flight.outputs)

    def _wait(self, timeout: timedelta | None = None) -> None:
        if self._forgotten:
            return
        context = self._context
        context.check_thread(self.name)
        if not timeout and context.scheduler.clock is not None:
            timeout = context.fabric.torch_world().wait_timeout
        try:
            context.scheduler.wait(context.thread_state, self._operation, timeout)
        except WaitExpired:
            raise self._expired(timeout) from None
        self._land()

    def _expired(self, timeout: timedelta | None) -> RuntimeError:
        """Give the operation up; return what Gloo raises."""
        context, operation = self._context, self._operation
        context.fabric.unwaited.pop(id(self), None)
        context.fabric.overlap_table.leave(self.in_flight)
        self.in_flight.unwatch()
        self._forgotten = True
        missing = operation.missing(context.rank)
        operation.give_up(context.rank)
        milliseconds = f"{(timeout or timedelta()).total_seconds() * 1000:g}"
        if self.name == "monitored_barrier":
            text = f"[Rank {context.rank}]: Rank {missing[0]} failed to pass monitoredBarrier in {milliseconds} ms"
        else:
            text = f"Timed out waiting {milliseconds}ms for {self.name}; missing: {ranks_text(missing)}"
        return RuntimeError(text)

    def _land(self) -> None:
        """The rank has learnt that the operation is done."""
        context = self._context
        if context.fabric.unwaited.pop(id(self), None) is None:
            return
        context.fabric.overlap_table.leave(self.in_flight)
        what = self.in_flight.changed()
        if what is not None:
            self.race(f"{what} while the operation was in flight")
        self.in_flight.land(self._operation.values(context.rank))

    def race(self, what: str) -> NoReturn:
        """End the run: memory of this operation was used before it was waited for."""
        context, issued = self._context, "" if self.place is None else f"\n      {self.place}"
        error = RaceError(
            f"race: rank {context.rank}: {what}\n"
            f"  {self.name} was issued here, and not waited for{issued}\n"
            "hint: from issue to wait, the tensors of an asynchronous operation belong to it"
        )
        context.scheduler.fail(context.thread_state, error)
        raise error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is done.

        The timeout is used with --smp-timeouts=simulated: otherwise a wait that cannot end is a verdict.
        """
        self._wait(timeout)
        return True

    def synchronize(self) -> None:
        """Wait for the operation, like ``wait``."""
        self._wait()

    def forget(self) -> None:
        """Leave torch's registry of functional collectives at the rank's end, since the registry would keep
        the work and its tensors for ever.
        """
        outputs, self._outputs, self._forgotten = self._outputs, [], True
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, torch.Tensor):
                torch.ops._c10d_functional.wait_tensor(output)

    def get_future(self) -> Future[Any]:
        """A future that is complete.

        DDP waits for futures in C++, where no turn can pass, so we wait here.
        """
        self._wait()
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    getFuture = get_future

    def is_completed(self) -> bool:
        """Let the others run once, then tell whether the operation is done."""
        context = self._context
        context.check_thread(self.name)
        if id(self) not in context.fabric.unwaited:
            return True
        if not self._operation.done:
            context.scheduler.give_way(context.thread_state)
        if not self._operation.done or context.scheduler.decide(2):
            return False
        self._land()
        return True

    @property
    def done(self) -> bool:
        """True if the operation is done; the rank may not have learnt it yet."""
        return self._operation.done

    def is_success(self) -> bool:
        """Return the value of ``is_completed``: an operation cannot fail by itself."""
        return self.is_completed()

    def exception(self) -> None:
        """Return None: a failed operation ends the run."""
        return

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation writes, once it is done."""
        self._wait()
        outputs: list[torch.Tensor] = self._outputs
        return outputs

    def source_rank(self) -> int:
        """The group rank whose message a receive from any source has got; -1 of a collective, which has none."""
        self._wait()
        if not isinstance(self._operation, Post):
            return -1
        source = self._operation.source
        assert source is not ANY  # the wait has matched it
        return source

    _source_rank = source_rank


hide(SimWork, ("_wait", "is_completed"))
