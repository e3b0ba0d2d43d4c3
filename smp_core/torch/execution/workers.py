"""The threads that run the activities of one rank. One thread of the rank runs at a time: the one that has the baton.

Only the rank's own thread communicates. An activity that needs another rank leaves a request and pauses. The rank's own
thread sends the request and resumes the activity with the answer.
"""

from __future__ import annotations

import _thread
import contextvars
import ctypes
import threading
from collections.abc import Callable

import torch

from smp_core.transport import current_rank as rank_threads
from smp_core.transport.helper_threads import HelperThread

_SLICE = 1.0  # seconds: an interruption of the rank's own thread takes effect between two waits


class Unwound(BaseException):
    """Raised in an activity to unwind it, because its step has failed. No ``except Exception`` catches it."""


class Worker:
    """One thread that runs tasks one after the other, and is idle in between."""

    def __init__(self, pool: WorkerThreads) -> None:
        self._pool = pool
        self.turn = _thread.allocate_lock()
        self.turn.acquire()
        self.task: Callable[[], None] | None = None
        self.thread = HelperThread(
            target=self._serve, name="smp worker", daemon=True, stands_for=pool.thread
        )
        self.thread.start()

    def _serve(self) -> None:
        pool = self._pool
        self.turn.acquire()
        before = torch.get_num_threads()
        if before != pool.compute_threads:
            torch.set_num_threads(pool.compute_threads)
        rank_threads.set_current(pool.rank)
        try:
            while self.task is not None:
                task, self.task = self.task, None
                pool.context.copy().run(task)
                del task
                torch.set_grad_enabled(True)
                pool.idle.append(self)
                pool.baton.release()
                self.turn.acquire()
        finally:
            rank_threads.set_current(None)
            if before != pool.compute_threads:
                torch.set_num_threads(before)  # new threads get the number that was set last

    def pause(self) -> None:
        """Give the baton back, and return when it comes again. Called in this thread."""
        # Torch has one generator for the process, and each activity needs a state of its own.
        state = torch.default_generator.get_state()
        self._pool.baton.release()
        self.turn.acquire()
        torch.default_generator.set_state(state)


class WorkerThreads:
    """The worker threads of one rank in one step."""

    def __init__(self) -> None:
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.idle: list[Worker] = []
        self.context = contextvars.copy_context()
        self.compute_threads = torch.get_num_threads()
        self.rank = rank_threads.current()
        self.thread = _thread.get_ident()

    def acquire(self) -> Worker:
        """Return an idle worker, or a new one. Raises RuntimeError if no thread can be started."""
        return self.idle.pop() if self.idle else Worker(self)

    def begin(self, worker: Worker, task: Callable[[Worker], None]) -> None:
        """Run a task, which does not raise, in a worker. Returns when the task pauses or has ended."""
        worker.task = lambda: task(worker)
        self.resume(worker)

    def resume(self, worker: Worker) -> None:
        """Give a worker the baton. Returns when the worker pauses or its task has ended."""
        state = torch.default_generator.get_state()
        worker.turn.release()
        try:
            while not self.baton.acquire(timeout=_SLICE):
                pass
        except BaseException as interruption:  # Ctrl-C, or the harness cancels this rank
            _interrupt(worker.thread, type(interruption))
            self.baton.acquire()
            raise
        finally:
            torch.default_generator.set_state(state)

    def close(self) -> None:
        """End the threads, once all tasks have ended."""
        idle, self.idle = self.idle, []
        for worker in idle:
            worker.task = None
            worker.turn.release()
        for worker in idle:
            worker.thread.join()


def _interrupt(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next bytecode, which ends a loop in Python but not one in C."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
