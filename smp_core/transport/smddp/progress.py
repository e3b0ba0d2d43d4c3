"""The progress engine of a rank: a wait, or the progress thread, advances all operations of the process, then sleeps
until one can advance.

So works may be waited for in any order, and an operation goes on while its rank computes or waits for something else.

Note [Who advances]: while a thread of the program waits for a work, that thread advances everything, because its answer
comes soonest so. Otherwise the progress thread does, if any operation is in flight: one step at a time, and a thread of
the program that wants to issue an operation goes first.

Note [Who sleeps]: a thread sleeps on the words of the channels that it knows. So channels are numbered as they become
busy, and each sleeper has noted the last number: the progress thread is woken for a channel that no sleeper knows.
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
from smp_core.transport.helper_threads import HelperThread
from smp_core.transport.smddp import futex

_POLL_INTERVAL = 0.1  # seconds between two checks whether the others are alive
_IDLE_SLEEP = 3600.0  # seconds that the progress thread sleeps if nothing is in flight
# Steps of a channel when an operation is issued without a wait: a short one is done if all others have arrived.
_STEPS_WHEN_ISSUED = 2

ALL = sys.maxsize  # steps, of which there are never so many


class Blockers(NamedTuple):
    """The words that all operations in flight wait for, with the values that were seen."""

    words: Sequence[futex.Word]
    begun: int
    """The number of the channel that had become busy last."""


class ProgressChannel(Protocol):
    """A sequence of operations of one group."""

    def progress(self, steps: int = ALL) -> Sequence[futex.Word] | None:
        """Advance the operations, in at most so many steps.

        Returns the words that the rest waits for, none if nothing is left; None if more steps are possible.
        """

    def check(self) -> None:
        """Give operations that can never end their error."""


class Promise(Protocol):
    """A wait outside of this package, which cannot advance the operation."""

    end: float
    """The end of the wait's time limit, by time.monotonic."""

    def ready(self) -> bool:
        """Return whether the operation is done."""

    def settle(self) -> None:
        """Deliver the result, or the error."""

    def expire(self) -> None:
        """Deliver the error of an operation that took too long."""


class _PriorityLock:
    """The lock of all channels. Threads of the program go before the progress thread."""

    def __init__(self) -> None:
        # Hooks of autograd call from other threads, and a future's callbacks may issue operations.
        self._lock = threading.RLock()
        self._wanted = threading.RLock()  # a signal's handler may come while its thread waits

    def __enter__(self) -> None:
        # A thread that holds the lock gets it again here, so no thread below waits for itself.
        if not self._lock.acquire(blocking=False):
            with self._wanted:
                self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def yielding(self) -> Iterator[None]:
        """The lock, once no thread of the program waits for it."""
        with self._wanted:
            pass
        with self._lock:
            yield


class ProgressLoop:
    """The channels of this process that have operations in flight."""

    def __init__(self) -> None:
        self.lock = _PriorityLock()  # never held asleep
        self._busy: dict[ProgressChannel, None] = {}
        self._promises: dict[Promise, None] = {}
        self._groups: set[object] = set()
        self._progress_thread: _ProgressThread | None = None
        self._ends_with_process = False
        self._begun = 0  # the number of the channel that became busy last
        # The last number that each sleeper knows: a thread of the program, by a token; the progress thread, 0 if it has
        # left everything to others.
        self._waiting: dict[object, int] = {}
        self._thread_knows = 0

    def begin(self, channel: ProgressChannel, waits: bool = False) -> Blockers | None:
        """Advance an operation that was added to a channel. Call with the lock held.

        ``waits``: the caller waits for it at once, so the progress thread is not woken. Returns the argument of
        ``wait`` then, if it is known.
        """
        words = channel.progress(ALL if waits else _STEPS_WHEN_ISSUED)
        if words is None or words:
            if words is None or channel not in self._busy:
                self._begun += 1
                self._busy[channel] = None
            if not waits:
                self._wake_thread()
            elif (
                words and len(self._busy) == 1 and not self._promises
            ):  # else ``wait`` settles what is done
                return Blockers(words, self._begun)
        return None

    def progress(self, steps: int = ALL) -> list[futex.Word] | None:
        """Advance all operations; return what ProgressChannel.progress returns, for all channels."""
        return self._progress_and_note(steps, None)

    def _progress_and_note(self, steps: int, sleeper: object) -> list[futex.Word] | None:
        with self.lock:
            words = self._progress_channels(steps)
            if sleeper is not None:
                self._waiting[sleeper] = self._begun
        self._settle()
        return words

    def promise(self, promise: Promise) -> None:
        """Settle this promise when its operation is done, whichever thread advances it."""
        self._promises[promise] = None
        self._wake_thread()
        self._settle()

    def wait(
        self, done: Callable[[], bool], seconds: float, blockers: Blockers | None = None
    ) -> bool:
        """Advance everything until ``done`` returns true. False if that took longer than ``seconds``.

        ``blockers``: the result of ``begin``, which saves the first attempt to advance, because that would find the
        same. The kernel compares the words with the memory before it lets a thread sleep.
        """
        token = object()
        self._waiting[token] = self._begun if blockers is None else blockers.begun
        try:
            return self._wait(done, seconds, token, blockers and blockers.words)
        finally:
            del self._waiting[token]
            self._wake_thread()

    def _wait(
        self,
        done: Callable[[], bool],
        seconds: float,
        token: object,
        words: Sequence[futex.Word] | None,
    ) -> bool:
        end = polled = 0.0
        while not done():
            if words is None:
                words = self._progress_and_note(ALL, token)
            if done():
                break
            if not words:
                raise RuntimeError("an operation is in flight and nothing is waited for")
            now = time.monotonic()
            if not end:
                end, polled = now + seconds, now
            elif now >= end:
                return False
            elif (
                now - polled >= _POLL_INTERVAL
            ):  # also where other operations wake this one all the time
                thread = threading.current_thread()
                if isinstance(thread, _ProgressThread) and thread.ended:
                    # The process waits for this thread before it ends, and perhaps the other ranks for its end.
                    raise dist.DistBackendError(
                        "the callback of a future waits for an operation, and its rank ends or has destroyed its last "
                        "group"
                    )
                self._poll()
                polled, words = now, None
                continue
            futex.sleep(words, min(_POLL_INTERVAL, max(end - now, 0.0)))
            words = None
        return True

    def _progress_channels(self, steps: int) -> list[futex.Word] | None:
        words: list[futex.Word] = []
        more = False
        for channel in list(self._busy):
            blockers = channel.progress(steps)
            if blockers is None:
                more = True
            elif blockers:
                words += blockers
            else:
                self._busy.pop(channel, None)
        return None if more else words

    def _poll(self) -> None:
        """Poll for members that have ended, and for promises that took too long."""
        with self.lock:
            for channel in list(self._busy):
                channel.check()
        now = time.monotonic()
        for promise in list(self._promises):
            if promise.end <= now and not promise.ready() and self._taken(promise):
                promise.expire()
        self._settle()

    def _settle(self) -> None:
        """Settle what is done, without the lock: a callback may issue operations."""
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

    # The progress thread.

    def enter(self, group: object) -> None:
        """Begin to serve a group: there is a progress thread from the first group to the last."""
        with self.lock:
            self._groups.add(group)
            if self._progress_thread is None:
                self._progress_thread = _ProgressThread(self)
            if not self._ends_with_process:
                self._ends_with_process = True
                ending.at_last(self.end)

    def leave(self, group: object) -> None:
        """End to serve a group, which is destroyed. Its operations in flight go on as far as they can."""
        with self.lock:
            self._progress_channels(ALL)  # a channel without operations is not held any longer
            self._groups.discard(group)
            thread = None if self._groups else self._progress_thread
            if thread is not None:
                self._progress_thread = None  # a group that begins now has another one
        self._settle()
        if thread is not None:
            thread.end()

    def _wake_thread(self) -> None:
        """Wake the progress thread, unless a thread of the program advances all that is in flight."""
        thread = self._progress_thread
        if thread is None or not self._busy:
            return
        if self._thread_knows != self._begun and not self._has_waiter():
            thread.wake()

    def _has_waiter(self) -> bool:
        """Return whether a thread of the program waits and knows all that is in flight."""
        return self._begun in self._waiting.values()

    def progress_in_background(self) -> Sequence[futex.Word] | None:
        """One step of the progress thread: as ``progress``, but nothing while a thread of the program advances
        everything."""
        self._thread_knows = 0  # before it reads the waits: a thread whose wait ends reads this
        if self._has_waiter():
            return []
        with self.lock.yielding():
            if self._has_waiter():
                return []
            words = self._progress_channels(1)
            self._thread_knows = self._begun
        self._settle()
        return words

    def poll(self) -> None:
        """See ``_poll``; nothing while a thread of the program does."""
        if not self._waiting:
            self._poll()

    def end(self) -> None:
        """End the progress thread: at the end of the process Python could not stop it inside of torch."""
        with self.lock:
            thread, self._progress_thread = self._progress_thread, None
        if thread is not None:
            thread.end()


class _ProgressThread(HelperThread):
    """Advances operations while the threads of the program do something else."""

    def __init__(self, loop: ProgressLoop) -> None:
        super().__init__(name="smddp progress", daemon=True)
        self._loop, self.ended = loop, False
        self._wakeups = ctypes.c_uint32()
        self._address = ctypes.addressof(self._wakeups)
        self.start()

    def wake(self) -> None:
        """Wake the thread, because some operation may advance."""
        futex.add_and_wake(self._address)

    def end(self) -> None:
        self.ended = True
        self.wake()
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        polled = time.monotonic()
        while True:
            seen = self._wakeups.value  # first: a wake-up after the check of `ended` ends the sleep
            if self.ended:
                return
            words = self._loop.progress_in_background()
            if words:
                now = time.monotonic()
                if now - polled >= _POLL_INTERVAL:
                    self._loop.poll()
                    polled = now
            if words is not None:
                wakeups = self._address, seen
                futex.sleep([wakeups, *words], _POLL_INTERVAL if words else _IDLE_SLEEP)


PROGRESS = ProgressLoop()


def _after_fork() -> None:
    PROGRESS.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
