"""The threads that the activities of one rank run in. One of them runs at a time, or the rank's own:
the baton is handed over.

Only the rank's own thread communicates. An activity that needs another rank leaves a request and
pauses; the rank's own thread resumes it with the answer.
"""

from __future__ import annotations

import _thread
import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from smp_core.transport import current_rank as rank_threads

_SLICE = 1.0  # seconds between two looks at whether the rank's own thread has been interrupted


class Unwound(BaseException):
    """Raised in an activity whose step has been given up, to unwind it. Passes through ``except
    Exception``.
    """


class Worker:
    """One thread. It runs a task, is idle, runs the next."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.turn = _thread.allocate_lock()
        self.turn.acquire()
        self.task: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._serve, name="smp worker", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        crew = self._crew
        self.turn.acquire()
        before = torch.get_num_threads()
        if before != crew.compute_threads:
            torch.set_num_threads(crew.compute_threads)
        rank_threads.set_current(crew.rank)
        try:
            while self.task is not None:
                task, self.task = self.task, None
                crew.context.copy().run(task)
                del task
                torch.set_grad_enabled(True)
                crew.idle.append(self)
                crew.baton.release()
                self.turn.acquire()
        finally:
            rank_threads.set_current(None)
            if before != crew.compute_threads:
                torch.set_num_threads(before)  # the default of threads to come is the last set

    def pause(self) -> None:
        """Called in this thread: give the baton back, and return when it comes again.

        The random state is this activity's own, though torch keeps one for the process.
        """
        state = torch.default_generator.get_state()
        self._crew.baton.release()
        self.turn.acquire()
        torch.default_generator.set_state(state)


class Crew:
    """The workers of one rank in one step."""

    def __init__(self) -> None:
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.idle: list[Worker] = []
        self.context = contextvars.copy_context()
        self.compute_threads = torch.get_num_threads()
        self.rank: Any = rank_threads.current()

    def hire(self) -> Worker:
        """A worker that is idle. Raises RuntimeError if there is none, and no thread to be had."""
        return self.idle.pop() if self.idle else Worker(self)

    def begin(self, worker: Worker, task: Callable[[Worker], None]) -> None:
        """Run a task in a worker; returns when it pauses or is over. The task does not raise."""
        worker.task = lambda: task(worker)
        self.resume(worker)

    def resume(self, worker: Worker) -> None:
        """Let a worker run; returns when it pauses or its task is over."""
        state = torch.default_generator.get_state()
        worker.turn.release()
        try:
            while not self.baton.acquire(timeout=_SLICE):
                pass
        except BaseException as interruption:  # Ctrl-C, or the harness gives this rank up
            _interrupt(worker.thread, type(interruption))
            self.baton.acquire()
            raise
        finally:
            torch.default_generator.set_state(state)

    def close(self) -> None:
        """End the threads. All tasks are over."""
        idle, self.idle = self.idle, []
        for worker in idle:
            worker.task = None
            worker.turn.release()
        for worker in idle:
            worker.thread.join()


def _interrupt(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise in a thread at its next bytecode: ends a loop in Python, not one in C."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
