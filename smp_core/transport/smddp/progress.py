"""The waits of a rank: each moves every operation of the process, then sleeps until one can move again.

So works may be waited for in any order. No thread of ours runs: an operation that takes more than one round goes on
when its rank waits for any operation, or issues one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from smp_core.transport.smddp import futex

_TICK = 0.1  # seconds between two looks whether the others are alive


class ProgressChannel(Protocol):
    """A sequence of operations of one group."""

    def move(self) -> Iterable[futex.Word]:
        """Move what can be moved; return the words that stand in the way of the rest, none if nothing is left."""

    def check(self) -> None:
        """Give operations that can never end their error."""


class ProgressLoop:
    """The channels of this process that have operations in flight."""

    def __init__(self) -> None:
        self.lock = (
            threading.RLock()
        )  # hooks of autograd call from other threads; never held asleep
        self._busy: dict[ProgressChannel, None] = {}

    def begin(self, channel: ProgressChannel) -> None:
        """An operation was added to a channel: move it. Call with the lock held."""
        if any(channel.move()):
            self._busy[channel] = None

    def move(self) -> list[futex.Word]:
        """Move all operations; return the words that stand in the way of the rest."""
        words: list[futex.Word] = []
        with self.lock:
            for channel in list(self._busy):
                before = len(words)
                words += channel.move()
                if len(words) == before:
                    self._busy.pop(channel, None)
        return words

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Move everything until ``done`` says so. False if that took longer than ``seconds``."""
        end = 0.0
        while not done():
            words = self.move()
            if done():
                break
            if not words:
                raise RuntimeError("an operation is in flight and nothing is waited for")
            if not end:
                end = time.monotonic() + seconds
            if not futex.sleep(words, min(_TICK, max(end - time.monotonic(), 0.0))):
                if time.monotonic() >= end:
                    return False
                with self.lock:
                    for channel in list(self._busy):
                        channel.check()
        return True


PROGRESS = ProgressLoop()


def _after_fork() -> None:
    PROGRESS.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
