"""Calls that end or replace the process, made on a rank of `sim`: they end this rank as a crash.

Without this, ``os._exit(0)`` on one rank would end pytest itself, with the exit status of a session that passed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from pytest_smp.ranks.sim.rank_context import RankContext
from smp_core.transport import current_rank, stack_frames

#: The functions of ``os`` that all others of their kind call; each gets the arguments of the call.
_CALLS: dict[str, Callable[..., str]] = {
    "_exit": lambda status: f"exit code {status & 0xFF}",
    "execv": lambda path, *_: f"replaced by {path}",
    "execve": lambda path, *_: f"replaced by {path}",
}


class ProcessExit:
    """While entered, a rank's call of ``os._exit`` or ``os.exec*`` is its crash; see RankContext.crash.

    Forked children and threads that no rank started keep the functions of ``os``.
    """

    def __init__(self, contexts: Sequence[RankContext]) -> None:
        self._contexts = contexts
        self._process = os.getpid()

    def __enter__(self) -> None:
        self._functions = {name: getattr(os, name) for name in _CALLS}
        for name, function in self._functions.items():
            setattr(os, name, self._guarded(name, function))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for name, function in self._functions.items():
            setattr(os, name, function)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def end_rank(*args: Any, **kwargs: Any) -> Any:
            context = current_rank.current()
            rank = current_rank.parent_rank() if context is None else context.rank
            if rank is None or os.getpid() != self._process:
                return function(*args, **kwargs)
            place = stack_frames.caller_place()
            is_body = current_rank.parent_rank() is None
            helper = "" if is_body else f" in thread {threading.current_thread().name!r}"
            where = f" by os.{name}{helper}" + ("" if place is None else f"\n    {place}")
            self._contexts[rank].crash(_CALLS[name](*args, **kwargs), where)
            raise SystemExit(0)  # ends the helper thread

        return end_rank
