"""What a worker is doing: one microbatch's body, or one call of a module that another rank asked for.

What it calls, and with which random stream, is the affair of uses.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from smp_core.torch.execution.remote.packets import Frozen, Parcel
from smp_core.torch.execution.running import RunningStep
from smp_core.torch.execution.schedule import Phase
from smp_core.torch.execution.workers import Unwound, Worker


class Activity:
    """One task of a worker; or of the rank's own thread, if it is sure not to pause.

    ``crossed``: it has called a module of another rank. ``entered`` is the module whose forward hooks
    run, until its ``forward`` is called. ``request`` is what the rank's own thread is to send when the
    activity has paused, None if it only waits for its turn; ``reply`` is what it was resumed with.
    ``aside``: what it has paused for, that the rank's own thread does; then it goes on at once.
    """

    __slots__ = (
        "aside",
        "crossed",
        "entered",
        "error",
        "finished",
        "microbatch",
        "number",
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
        self.number = -1
        self.aside: Callable[[], object] | None = None
        self.crossed = False
        self.entered: Any = None
        self.worker: Worker | None = None
        self.request: tuple[int, Any, Frozen] | None = None
        self.reply: Parcel | None = None
        self.finished = self.unwound = False
        self.error: BaseException | None = None
        self.value: Any = None

    def pause(self) -> None:
        """Let others go on; returns when this is resumed, with modules in training mode that were.

        Raises Unwound if the step was given up.
        """
        self.check()
        if self.worker is None and self.path is None:
            return  # the one body of a step that nobody else has a part in
        if self.worker is None:
            raise RuntimeError(f"module {self.path!r} pauses, which was not to be expected of it")
        root = self.step.sites.get("")
        training = b"" if root is None else root.training()
        self.worker.pause()
        if root is not None:
            root.train(training)
        self.check()

    def step_aside(self, action: Callable[[], object]) -> None:
        """Have the rank's own thread, the only one that communicates, carry out ``action``.

        Raises Unwound if the step was given up.
        """
        self.check()
        if self.worker is None:  # in that thread
            action()
        else:
            self.aside = action
            self.worker.pause()
            self.check()

    def ask(self, rank: int, message: Any, frozen: Frozen) -> Parcel:
        """Send a request to another pp rank, and wait for the answer."""
        self.request = rank, message, frozen
        self.pause()
        reply, self.reply = self.reply, None
        assert reply is not None
        return reply

    def check(self) -> None:
        """Raise Unwound if the step was given up."""
        if self.step.failure is not None or self.step.unwinding:
            self.request = None
            raise Unwound


class _Thread(threading.local):
    activity: Activity | None = None


_thread = _Thread()


def current() -> Activity | None:
    """What the calling thread is doing; None outside of steps."""
    return _thread.activity


def set_current(activity: Activity | None) -> None:
    """Say what the calling thread is doing."""
    _thread.activity = activity
