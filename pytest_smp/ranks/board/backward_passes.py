"""Waits of DDP's reducer, at the end of a backward pass: see Note [Waits in C++] of dispatched."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import autograd

from pytest_smp.ranks.board.recorder import BoardRecorder

_engine: Any = autograd.Variable._execution_engine
_RUN = "_engine_run_backward"
#: The innermost frame of Python's below which the engine runs, and DDP's reducer in it.
_CODE: types.CodeType = vars(autograd)[_RUN].__code__


class _Thread(threading.local):
    """The state of one thread: the depth of backward passes, and the calls that the outermost one waits for."""

    depth = 0
    awaited: list[int] | None = None


class BackwardPasses:
    """The calls that each backward pass waits for before it ends."""

    def __init__(self, recorder: BoardRecorder) -> None:
        self._recorder, self._thread = recorder, _Thread()

    def wrappers(self) -> Sequence[tuple[Any, str, Callable[..., Any]]]:
        """The owner and the name of each function to replace, and the wrapper of it."""
        run: Callable[..., Any] = vars(autograd)[_RUN]
        return [(autograd, _RUN, functools.wraps(run)(functools.partial(self._run, run)))]

    def calls(self, depth: int) -> bool:
        """Return whether C++ code of the outermost pass calls the function ``depth`` frames up, by no
        Python between: a hook of the body's may go on without a wait.
        """
        return self._thread.depth == 1 and sys._getframe(depth + 1).f_code is _CODE

    def awaits(self, numbers: Sequence[int]) -> None:
        """DDP's reducer waits for these calls when the pass is over: in a callback that it queues behind
        the last bucket. A callback that is queued at the first one runs just before.
        """
        thread, recorder = self._thread, self._recorder
        if not thread.depth:
            return
        if thread.awaited is None:
            awaited: list[int] = []
            thread.awaited = awaited
            run = recorder.run

            def before_the_reducer_waits() -> None:
                if recorder.active and recorder.run == run:
                    recorder.waits(awaited)

            _engine.queue_callback(before_the_reducer_waits)
        thread.awaited.extend(numbers)

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread, recorder = self._thread, self._recorder
        thread.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            thread.depth -= 1
            if not thread.depth and thread.awaited is not None:
                numbers, thread.awaited = thread.awaited, None
                if recorder.active:
                    recorder.done(numbers)
