"""One rank's own thread during a step. The server takes messages, chooses the next activity by the schedule, runs it
until it pauses, and sends its request.

The driver of the pipeline (pp rank 0) begins the microbatches and ends the step. The other ranks serve requests until
the end. A rank therefore waits for a message only where another rank is sure to send one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from smp_core import schedule
from smp_core.errors import RUN_ENDED
from smp_core.schedule import Kind, Phase, Progress, Ready
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import modes, saving, streams, uses
from smp_core.torch.execution.activity import Activity
from smp_core.torch.execution.remote import boundary
from smp_core.torch.execution.remote.messages import (
    Backward,
    End,
    Failed,
    Forward,
    Message,
    Returned,
)
from smp_core.torch.execution.remote.packets import (
    NOTHING,
    OutgoingPayload,
    ReceivedPayload,
    freeze,
)
from smp_core.torch.execution.running import RunningStep
from smp_core.torch.execution.workers import Unwound, Worker

Function = Callable[[Activity], object]


def _body(body: Callable[[], object], activity: Activity) -> object:
    with modes.entered(activity.step.modes):
        return body()


class Server:
    """The rank's own thread during a step.

    Attributes:
        _ready: the activities that can run now, each with the function to begin, or None to resume it.
        _waiting: the activities that wait for an answer, by the number of their request.
        _live: the activities that have begun and not finished.
        _requests: the request that an activity runs for.
        _records: the calls that this rank has run for others, by caller and number, until their backward passes.
    """

    def __init__(self, step: RunningStep) -> None:
        self._step, self._transport, self._workers = step, step.transport, step.workers
        self._ready: list[tuple[Ready, Activity, Function | None]] = []
        self._waiting: dict[int, Activity] = {}
        self._live: set[Activity] = set()
        self._requests: dict[Activity, Forward | Backward] = {}
        self._records: dict[tuple[int, int], boundary.ServedCall] = {}
        runtime = step.session.runtime
        # Ranks of a TP group exchange activations in their forward passes, so they all take one order of activities.
        self._deterministic = runtime.config.deterministic_server or runtime.topology.tensor > 1
        self._order = 0
        self._ended: tuple[End, ReceivedPayload] | None = None
        self._results: dict[int, Any] = {}

    # The driver.

    def drive(self, bodies: Sequence[Callable[[], object]]) -> dict[int, Any]:
        """Run the microbatches, and return the result of each, unless the step has failed."""
        step = self._step
        for microbatch, body in enumerate(bodies):
            activity = Activity(step, Phase.FORWARD, microbatch, None)
            self._put(activity, Kind.START, functools.partial(_body, body))
        while self._ready or self._live:
            self._turn(expecting=bool(self._waiting))
        return self._results

    def end(self, end: End, results: OutgoingPayload) -> None:
        """Send the end of the step to the other ranks."""
        if self._transport is not None:
            for rank in range(1, self._transport.size):
                self._transport.send(rank, end, results, None)

    # The other ranks.

    def serve(self) -> tuple[End, ReceivedPayload]:
        """Run the requests of other ranks until the driver ends the step."""
        while self._ended is None:
            self._turn(expecting=True)
        return self._ended

    # All ranks.

    def _put(self, activity: Activity, kind: Kind, function: Function | None = None) -> None:
        self._order += 1
        ready = Ready(activity.phase, activity.microbatch, kind, self._order)
        self._ready.append((ready, activity, function))

    def _choose(self) -> int | None:
        step = self._step
        if step.failure is not None:  # begun activities unwind in any order, and none begins
            return 0 if self._ready else None
        bodies = [each.phase for each in self._live if each.path is None]
        left = step.microbatches - len(self._results) - bodies.count(Phase.BACKWARD)
        progress = Progress(left, len(bodies), step.cap, self._alone())
        return schedule.choose(step.policy, [ready for ready, _, _ in self._ready], progress)

    def _alone(self) -> int | None:
        if self._deterministic and self._transport is not None and self._transport.size > 2:
            for activity in self._waiting.values():
                return activity.microbatch
        return None

    def _turn(self, expecting: bool) -> None:
        """Take a message if one has come, then run one activity; wait for a message if none is ready."""
        self._advance()
        choice = self._choose()
        transport = self._transport
        if expecting:
            assert transport is not None
            transport.expect()
            if choice is None:
                self._take(*transport.receive())
                return
            if not self._deterministic and transport.arrived():
                self._take(*transport.receive())
                choice = self._choose()
        if choice is None:
            raise RuntimeError(f"step {self._step.number}: nothing can run, and nothing is awaited")
        _, activity, function = self._ready.pop(choice)
        step = self._step
        step.timeline.begins(activity, time.perf_counter())
        if function is None:
            assert activity.worker is not None
            self._workers.resume(activity.worker)
        else:
            self._begin(activity, function)
        while activity.aside is not None:
            action, activity.aside = activity.aside, None
            action()
            assert activity.worker is not None
            self._workers.resume(activity.worker)
        step.timeline.ends(activity, time.perf_counter())
        self._look_after(activity)

    def _advance(self) -> None:
        gradients = self._step.gradients
        if gradients is not None:
            gradients.advance()

    def _pauses(self, activity: Activity) -> bool:
        """Return whether an activity may have to wait for something.

        An activity that never waits runs in the rank's own thread, which saves two changes of thread.
        """
        asked = self._requests.get(activity)
        if asked is None:  # a body, which waits for other bodies and other ranks
            return self._transport is not None or self._step.microbatches > 1
        if isinstance(asked, Backward):
            record = self._records.get((asked.caller, asked.of))
            return record is not None and record.called_remote
        return not self._step.sites[asked.key.path].closed

    def _begin(self, activity: Activity, function: Function) -> None:
        step = self._step
        if step.failure is not None:  # the request came before the news of the failure
            activity.finished = activity.unwound = True
            return
        self._live.add(activity)

        def task(worker: Worker | None) -> None:
            activity.worker = worker
            activities.set_current(activity)
            try:
                enter = uses.body if activity.path is None else uses.activity
                with (
                    enter(step.ledger, activity.microbatch, step.seed, step.source),
                    saving.counting(),
                    step.computing(),
                ):
                    activity.value = function(activity)
            except Unwound:
                activity.unwound = True
            except BaseException as error:
                activity.error = error
            finally:
                activities.set_current(None)
                activity.finished = True

        if self._pauses(activity):
            try:
                worker = self._workers.acquire()
            except RuntimeError as error:  # the system starts no more threads
                activity.error, activity.finished = error, True
                return
            self._workers.begin(worker, task)
        else:
            # As in a worker: the draws of the activity do not move the generator of this thread.
            with streams.suspended():
                self._workers.context.copy().run(task, None)

    def _look_after(self, activity: Activity) -> None:
        """Send the request, the result or the failure of an activity that has paused or finished."""
        step = self._step
        if not activity.finished:
            request, activity.request = activity.request, None
            if request is None:
                self._put(activity, Kind.TURN)
            else:
                to, message, payload = request
                self._waiting[message.call] = activity
                self._send(to, message, payload, activity.microbatch)
            return
        self._live.discard(activity)
        if isinstance(activity.error, RUN_ENDED):
            raise activity.error
        if activity.error is not None:
            step.fail(activity, activity.error)
        elif not activity.unwound:
            self._deliver(activity)
            return
        if step.rank == 0:
            self._drop_starts()
        asked = self._requests.pop(activity, None)
        if asked is not None:
            assert step.failure is not None
            answer = Failed(activity.microbatch, asked.call, step.failure)
            self._send(asked.caller, answer, NOTHING, activity.microbatch)

    def _deliver(self, activity: Activity) -> None:
        value, activity.value = activity.value, None
        asked = self._requests.pop(activity, None)
        if asked is None:
            self._results[activity.microbatch] = value
            self._step.end_microbatch(activity.microbatch)
        else:
            assert isinstance(value, OutgoingPayload)
            answer = Returned(activity.microbatch, asked.call)
            self._send(asked.caller, answer, value, activity.microbatch)

    def _drop_starts(self) -> None:
        self._ready = [each for each in self._ready if each[0].kind is not Kind.START]

    def _send(self, to: int, message: Message, payload: OutgoingPayload, microbatch: int) -> None:
        assert self._transport is not None
        self._transport.send(to, message, payload, microbatch)

    # Messages.

    def _take(self, sender: int, message: Message, received: ReceivedPayload) -> None:
        transport, step = self._transport, self._step
        assert transport is not None
        if isinstance(message, End):
            self._ended = message, received
            return
        transport.taken(message.microbatch)
        if isinstance(message, Forward | Backward):
            self._asked(message, received)
            return
        activity = self._waiting.pop(message.call)
        if isinstance(message, Failed):
            step.failed(message.failure)
            if step.rank == 0:
                self._drop_starts()
        else:
            activity.reply = received
        self._put(activity, Kind.GO_ON)

    def _asked(self, message: Forward | Backward, received: ReceivedPayload) -> None:
        step = self._step
        if step.failure is not None:
            answer = Failed(message.microbatch, message.call, step.failure)
            self._send(message.caller, answer, NOTHING, message.microbatch)
            return
        if message.over:
            self._forget([each for each in message.over if step.end_microbatch(each)])
        if isinstance(message, Forward):
            step.seed = message.seed
            activity = Activity(step, Phase.FORWARD, message.microbatch, message.key.path)
            function: Function = lambda each: self._forward(each, message, received)  # noqa: E731
        else:
            # An unknown call gets an empty record, whose backward pass raises that its graph was freed.
            record = self._records.get((message.caller, message.of)) or boundary.ServedCall("")
            activity = Activity(step, Phase.BACKWARD, message.microbatch, record.path)
            function = lambda _: self._backward(record, message, received)  # noqa: E731
        self._requests[activity] = message
        self._put(activity, Kind.GO_ON, function)

    def _forget(self, microbatches: Sequence[int]) -> None:
        """Drop the records whose backward passes will not come, as in evaluation."""
        gone = [key for key, each in self._records.items() if each.microbatch in microbatches]
        for key in gone:
            self._records.pop(key).close()

    def _forward(
        self, activity: Activity, message: Forward, received: ReceivedPayload
    ) -> OutgoingPayload:
        site = self._step.sites[message.key.path]
        site.follow(message.caller, message.training)
        payload, record = boundary.run_forward(
            message,
            received,
            lambda args, kwargs: site.run(activity, message.key, message.hooked, args, kwargs),
        )
        if record is not None:
            record.called_remote, record.microbatch = activity.called_remote, activity.microbatch
            self._records[message.caller, message.call] = record
        return payload

    def _backward(
        self, record: boundary.ServedCall, message: Backward, received: ReceivedPayload
    ) -> OutgoingPayload:
        grads = boundary.run_backward(record, received.thaw())
        if not record.outstanding:
            self._records.pop((message.caller, message.of), None)
            record.close()
        return freeze(grads, "gradients", False)

    # The end.

    def close(self) -> None:
        """Unwind the activities that have begun, however the step has ended, and keep nothing."""
        step = self._step
        self._drop_starts()
        while self._live:
            step.unwinding = True
            for activity in list(self._live):
                if activity.worker is not None:  # else the interruption of this thread has ended it
                    self._workers.resume(activity.worker)
                if activity.finished or activity.worker is None:
                    self._live.discard(activity)
        for record in self._records.values():
            record.close()
        self._records.clear()
        self._waiting.clear()
        self._ready.clear()
