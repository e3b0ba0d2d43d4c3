"""The exceptions that ranks handle while they wait: in an ``except``, a ``finally``, or the end of a ``with``.

Such a wait follows from the exception, which no other rank sees: a verdict on the wait tells it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from smp_core.transport import stack_frames

_LONGEST = 200  # characters of an exception's text


def exception_text(error: BaseException | None) -> str:
    """Return ``RuntimeError: bad batch 17 (train.py:7)``, with the user's line that raised it; empty for None.

    Does not raise, whatever the exception's class does.
    """
    if error is None:
        return ""
    try:
        text = str(error).partition("\n")[0][:_LONGEST]
    except BaseException:
        text = ""
    text = f"{type(error).__name__}: {text}".removesuffix(": ")
    place = None
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if not stack_frames.is_plumbing(code):
            place = f"{Path(code.co_filename).name}:{entry.tb_lineno}"
        entry = entry.tb_next
    return text if place is None else f"{text} ({place})"


def while_handling(exception: str) -> str:
    """The end of a sentence on a wait or a call of a rank that handles an exception; empty if it handles none."""
    return f", while it handles {exception}" if exception else ""


def thread_exceptions() -> dict[int, BaseException]:
    """The exception that each thread handles, by the thread's identifier; only threads that handle one."""
    with stack_frames.collection_paused():
        handled = sys._current_exceptions()
    exceptions = {}
    for thread, entry in handled.items():
        error = entry[1] if isinstance(entry, tuple) else entry  # a triple until Python 3.11
        if error is not None:
            exceptions[thread] = error
    return exceptions
