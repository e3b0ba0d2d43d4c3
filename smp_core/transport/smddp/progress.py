"""The waits of a rank, and its helper thread: each moves the operations of the process, then sleeps until one can move.

So works may be waited for in any order, and an operation goes on while its rank computes or waits for something else.

Note [Who moves]: while a thread of the program waits for a work, that thread moves everything, because its answer
comes soonest so. Otherwise the helper thread does, if any operation is in flight: one step at a time, and it lets
a thread of the program that wants to issue an operation go first.

Note [Who sleeps]: a thread sleeps on the words of the channels that it knows. So channels are numbered as they become
busy, and each sleeper has noted the last number: the helper thread is called for a channel that no sleeper knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import distributed as dist

from smp_core.transport import ending
from smp_core.transport.smddp import futex

_TICK = 0.1  # seconds between two looks whether the others are alive
_LONG = 3600.0  # seconds that a helper with nothing to do sleeps
# Steps of a channel when an operation is issued that nobody waits for yet: a short one is done if all others have come.
_ISSUED = 2

ALL = sys.maxsize  # steps, of which there are never so many


class Stops(NamedTuple):
    """The words that stand in the way of all that is in flight, as they were seen."""

    words: Sequence[futex.Word]
    begun: int
    """The number of the channel that had become busy last."""


class ProgressChannel(Protocol):
    """A sequence of operations of one group."""

    def move(self, steps: int = ALL) -> Sequence[futex.Word] | None:
        """Move what can be moved, in at most so many steps.

        Returns the words that stand in the way of the rest, none if nothing is left; None if more can be moved.
        """

    def check(self) -> None:
        """Give operations that can never end their error."""


class Promise(Protocol):
    """Somebody outside of this package waits for an operation, and cannot move it."""

    end: float
    """When it has waited long enough, by time.monotonic."""

    def ready(self) -> bool:
        """Return whether the operation is done."""

    def settle(self) -> None:
        """Tell of its result, or of its error."""

    def expire(self) -> None:
        """Tell that it took too long."""


class _Turns:
    """The lock of all channels. Threads of the program go before the helper thread."""

    def __init__(self) -> None:
        # Hooks of autograd call from other threads, and a future's callbacks may issue operations.
        self._lock = threading.RLock()
        self._wanted = threading.RLock()  # a signal's handler may come while its thread waits

    def __enter__(self) -> None:
        # A thread that holds the lock gets it again here, so nobody waits below who holds it.
        if not self._lock.acquire(blocking=False):
            with self._wanted:
                self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """The lock, once no thread of the program waits for it."""
        with self._wanted:
            pass
        with self._lock:
            yield


class ProgressLoop:
    """The channels of this process that have operations in flight."""

    def __init__(self) -> None:
        self.lock = _Turns()  # never held asleep
        self._busy: dict[ProgressChannel, None] = {}
        self._promises: dict[Promise, None] = {}
        self._groups: set[object] = set()
        self._helper: _Helper | None = None
        self._ends_with_process = False
        self._begun = 0  # the number of the channel that became busy last
        # The last number that each sleeper knows: a thread of the program, by a token; the helper thread, 0 if it has
        # left everything to others.
        self._waiting: dict[object, int] = {}
        self._helper_knows = 0

    def begin(self, channel: ProgressChannel, waits: bool = False) -> Stops | None:
        """An operation was added to a channel: move it. Call with the lock held.

        ``waits``: the caller waits for it at once, so the helper thread is not called. Returns the argument of
        ``wait`` then, if it is known.
        """
        words = channel.move(ALL if waits else _ISSUED)
        if words is None or words:
            if words is None or channel not in self._busy:
                self._begun += 1
                self._busy[channel] = None
            if not waits:
                self._hand_over()
            elif (
                words and len(self._busy) == 1 and not self._promises
            ):  # else ``wait`` settles what is done
                return Stops(words, self._begun)
        return None

    def move(self, steps: int = ALL) -> list[futex.Word] | None:
        """Move all operations; return what ProgressChannel.move returns, for all channels."""
        return self._move_and_note(steps, None)

    def _move_and_note(self, steps: int, sleeper: object) -> list[futex.Word] | None:
        with self.lock:
            words = self._move(steps)
            if sleeper is not None:
                self._waiting[sleeper] = self._begun
        self._settle()
        return words

    def promise(self, promise: Promise) -> None:
        """Settle this promise when its operation is done, whoever moves it."""
        self._promises[promise] = None
        self._hand_over()
        self._settle()

    def wait(self, done: Callable[[], bool], seconds: float, stops: Stops | None = None) -> bool:
        """Move everything until ``done`` says so. False if that took longer than ``seconds``.

        ``stops``: what ``begin`` returned, so that the first move, which would find the same, is saved. The kernel
        compares the words with the memory before it lets a thread sleep.
        """
        token = object()
        self._waiting[token] = self._begun if stops is None else stops.begun
        try:
            return self._wait(done, seconds, token, stops and stops.words)
        finally:
            del self._waiting[token]
            self._hand_over()

    def _wait(
        self,
        done: Callable[[], bool],
        seconds: float,
        token: object,
        words: Sequence[futex.Word] | None,
    ) -> bool:
        end = looked = 0.0
        while not done():
            if words is None:
                words = self._move_and_note(ALL, token)
            if done():
                break
            if not words:
                raise RuntimeError("an operation is in flight and nothing is waited for")
            now = time.monotonic()
            if not end:
                end, looked = now + seconds, now
            elif now >= end:
                return False
            elif now - looked >= _TICK:  # also where other operations wake this one all the time
                thread = threading.current_thread()
                if isinstance(thread, _Helper) and thread.ended:
                    # The process waits for this thread before it ends, and perhaps the other ranks for its end.
                    raise dist.DistBackendError(
                        "the callback of a future waits for an operation, and its rank ends or has destroyed its last "
                        "group"
                    )
                self._look()
                looked, words = now, None
                continue
            futex.sleep(words, min(_TICK, max(end - now, 0.0)))
            words = None
        return True

    def _move(self, steps: int) -> list[futex.Word] | None:
        words: list[futex.Word] = []
        more = False
        for channel in list(self._busy):
            stops = channel.move(steps)
            if stops is None:
                more = True
            elif stops:
                words += stops
            else:
                self._busy.pop(channel, None)
        return None if more else words

    def _look(self) -> None:
        """Look for members that have ended, and for promises that took too long."""
        with self.lock:
            for channel in list(self._busy):
                channel.check()
        now = time.monotonic()
        for promise in list(self._promises):
            if promise.end <= now and not promise.ready() and self._taken(promise):
                promise.expire()
        self._settle()

    def _settle(self) -> None:
        """Settle what is done, without the lock: whoever is told may issue operations."""
        for promise in list(self._promises):
            if promise.ready() and self._taken(promise):
                promise.settle()

    def _taken(self, promise: Promise) -> bool:
        """Take a promise; True for one thread alone."""
        try:
            del self._promises[promise]
        except KeyError:
            return False
        return True

    # The helper thread.

    def enter(self, group: object) -> None:
        """Begin to serve a group: there is a helper thread from the first group to the last."""
        with self.lock:
            self._groups.add(group)
            if self._helper is None:
                self._helper = _Helper(self)
            if not self._ends_with_process:
                self._ends_with_process = True
                ending.at_last(self.end)

    def leave(self, group: object) -> None:
        """The group is destroyed. Of what it has in flight, that goes on that can."""
        with self.lock:
            self._move(ALL)  # a channel without operations is not held any longer
            self._groups.discard(group)
            helper = None if self._groups else self._helper
            if helper is not None:
                self._helper = None  # a group that begins now has another one
        self._settle()
        if helper is not None:
            helper.end()

    def _hand_over(self) -> None:
        """Have the helper thread move what is in flight, if nobody else does."""
        helper = self._helper
        if helper is None or not self._busy:
            return
        if self._helper_knows != self._begun and not self._is_waited():
            helper.call()

    def _is_waited(self) -> bool:
        """Return whether a thread of the program waits and knows all that is in flight."""
        return self._begun in self._waiting.values()

    def help(self) -> Sequence[futex.Word] | None:
        """One step of the helper thread: as ``move``, but nothing while a thread of the program moves everything."""
        self._helper_knows = 0  # before it looks: a thread whose wait ends looks at this then
        if self._is_waited():
            return []
        with self.lock.last():
            if self._is_waited():
                return []
            words = self._move(1)
            self._helper_knows = self._begun
        self._settle()
        return words

    def look(self) -> None:
        """See ``_look``; nothing while a thread of the program does."""
        if not self._waiting:
            self._look()

    def end(self) -> None:
        """End the helper thread: at the end of the process Python could not stop it inside of torch."""
        with self.lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()


class _Helper(threading.Thread):
    """Moves operations while the threads of the program do something else."""

    def __init__(self, loop: ProgressLoop) -> None:
        super().__init__(name="smddp helper", daemon=True)
        self._loop, self.ended = loop, False
        self._calls = ctypes.c_uint32()
        self._address = ctypes.addressof(self._calls)
        self.start()

    def call(self) -> None:
        """There is something to move."""
        futex.add_and_wake(self._address)

    def end(self) -> None:
        self.ended = True
        self.call()
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        looked = time.monotonic()
        while True:
            seen = self._calls.value  # first: a call after the look at `ended` ends the sleep
            if self.ended:
                return
            words = self._loop.help()
            if words:
                now = time.monotonic()
                if now - looked >= _TICK:
                    self._loop.look()
                    looked = now
            if words is not None:
                calls = self._address, seen
                futex.sleep([calls, *words], _TICK if words else _LONG)


PROGRESS = ProgressLoop()


def _after_fork() -> None:
    PROGRESS.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
