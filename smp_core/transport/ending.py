"""The end of a plain script: its exit code, told while Python's exit handlers run.

A rank that ends by an error must not wait for the others at its exit: they wait for it. Python does
not tell its exit handlers how the process ends, so this module looks at uncaught exceptions and at
``sys.exit``. Not seen are a bare ``raise SystemExit(1)``, ``exit`` of the interactive shell, and
everything that ends the process past Python.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn


class _Ending:
    """The facts known so far about the end of the process."""

    watched = False
    uncaught: BaseException | None = None
    code: Any = None  # of the last call of sys.exit
    stack: tuple[
        tuple[FrameType, int], ...
    ] = ()  # the frames that called sys.exit, each with its instruction


def watch() -> None:
    """Begin to record the end of the process for ``status``."""
    if _Ending.watched:
        return
    _Ending.watched = True
    hook, leave, pid = sys.excepthook, sys.exit, os.getpid()

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:
            _Ending.uncaught = error
        hook(kind, error, trace)

    def leave_and_tell(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            frames = traceback.walk_stack(sys._getframe(1))
            _Ending.code, _Ending.stack = status, tuple((each, each.f_lasti) for each, _ in frames)
        leave(status)

    sys.excepthook, sys.exit = tell, leave_and_tell


def status() -> int:
    """The exit code, as far as it is known; called by an exit handler."""
    if _Ending.uncaught is not None:
        interrupted = isinstance(_Ending.uncaught, KeyboardInterrupt)
        return 128 + signal.SIGINT if interrupted else 1
    # Somebody may have caught it, and has moved on then.
    if any(frame.f_lasti != at for frame, at in _Ending.stack):
        return 0
    code = _Ending.code
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def at_last(leave: Callable[[], None]) -> None:
    """Call ``leave`` at exit, behind the exit handlers of the script: they may still communicate."""
    _leaves.append(leave)


_leaves: list[Callable[[], None]] = []


@atexit.register  # as the API is imported, which is before a script registers handlers: the last one is called first
def _leave() -> None:
    while _leaves:
        _leaves.pop()()


def end_at_once(status: int) -> NoReturn:
    """End the process without the destructors that would wait for other ranks. Called by an
    exit handler; the other ones are called first.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)
