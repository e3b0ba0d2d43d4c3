"""An activity: the body of one microbatch, or one module call that this rank runs for another rank.

The module calls of an activity and their random streams are those of uses.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from smp_core.schedule import Phase
from smp_core.torch.execution.remote.messages import Request
from smp_core.torch.execution.remote.packets import OutgoingPayload, ReceivedPayload
from smp_core.torch.execution.running import RunningStep
from smp_core.torch.execution.workers import Unwound, Worker


class Activity:
    """One task of a worker, or of the rank's own thread if the task is sure not to pause.

    Attributes:
        step: the step in progress.
        phase: forward or backward.
        microbatch: its index.
        path: of the module; None for the body of a microbatch.
        aside: an action that the rank's own thread carries out in a pause, before it resumes the activity.
        called_remote: the activity has called a module of another rank.
        entered: the module whose hooks run, until its ``forward`` is called.
        worker: the thread of the activity; None in the rank's own thread.
        request: the message that the rank's own thread sends in a pause; None if the activity waits for its turn.
        reply: the answer to the request.
        finished: the task has ended.
        unwound: the task has ended because the step has failed.
        error: the exception that the task has raised.
        value: the task's result.
    """

    __slots__ = (
        "aside",
        "called_remote",
        "entered",
        "error",
        "finished",
        "microbatch",
        "path",
        "phase",
        "reply",
        "request",
        "step",
        "unwound",
        "value",
        "worker",
    )

    def __init__(self, step: RunningStep, phase: Phase, microbatch: int, path: str | None) -> None:
        self.step, self.phase, self.microbatch, self.path = step, phase, microbatch, path
        self.aside: Callable[[], object] | None = None
        self.called_remote = False
        self.entered: object = None
        self.worker: Worker | None = None
        self.request: tuple[int, Request, OutgoingPayload] | None = None
        self.reply: ReceivedPayload | None = None
        self.finished = self.unwound = False
        self.error: BaseException | None = None
        self.value: object = None

    def pause(self) -> None:
        """Let other activities run until this one is resumed. Modules keep their training modes.

        Raises Unwound if the step has failed.
        """
        self.check()
        if self.worker is None and self.path is None:
            return  # the one body of a step with one microbatch and one stage: nothing else could run
        if self.worker is None:
            raise RuntimeError(f"module {self.path!r} pauses, which was not to be expected of it")
        root = self.step.sites.get("")
        # A body sets modes for the whole rank, and other bodies run in the pause.
        training = b"" if root is None else root.training()
        self.worker.pause()
        if root is not None:
            root.train(training)
        self.check()

    def step_aside(self, action: Callable[[], object]) -> None:
        """Have the rank's own thread carry out ``action``, because no other thread communicates.

        Raises Unwound if the step has failed.
        """
        self.check()
        if self.worker is None:  # this is the rank's own thread
            action()
        else:
            self.aside = action
            self.worker.pause()
            self.check()

    def ask(self, rank: int, message: Request, payload: OutgoingPayload) -> ReceivedPayload:
        """Send a request to another pp rank, and wait for the answer."""
        self.request = rank, message, payload
        self.pause()
        reply, self.reply = self.reply, None
        assert reply is not None
        return reply

    def check(self) -> None:
        """Raise Unwound if the step has failed."""
        if self.step.failure is not None or self.step.unwinding:
            self.request = None
            raise Unwound


class _Thread(threading.local):
    activity: Activity | None = None


_thread = _Thread()


def current() -> Activity | None:
    """The activity of the calling thread; None outside of steps."""
    return _thread.activity


def set_current(activity: Activity | None) -> None:
    """Set the activity of the calling thread."""
    _thread.activity = activity
