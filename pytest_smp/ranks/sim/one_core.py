"""One core for all threads of a run.

One rank thread runs at a time, so a second core computes nothing; but a turn that is handed to a
thread on another core costs the wake-up of that core, up to several times what a short body costs.
So while a run lasts, the controller and the rank threads, and the threads that they start, share the core
that the controller was on. Afterwards the controller has the cores again that it had, and so have
threads that were started meanwhile and live on. A process that a body starts has them from the
beginning, and a body that asks is told them: it is the turn that needs one core, not what a body
does beside it.

Meanwhile the rank threads are scheduled as SCHED_BATCH. A rank that hands over its turn wakes the next rank's
thread, and still holds Python's interpreter lock. A thread of the default policy would run at once, find the lock
taken and sleep again: three changes of thread for each turn. One of SCHED_BATCH runs when the waker sleeps: one.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: Python's audit events (sys.audit) in the thread that is about to start a process.
_STARTS = frozenset(
    {"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"}
)

_get = getattr(os, "sched_getaffinity", None)
_set = getattr(os, "sched_setaffinity", None)
_DEFAULT: int | None = getattr(os, "SCHED_OTHER", None)
_BATCH: int | None = getattr(os, "SCHED_BATCH", None)


class OneCore:
    """While entered, ``threads`` and the calling thread share one core.

    Where the operating system has no such thing, refuses it, or gives the process one core anyway, nothing
    is changed.
    """

    _entered: OneCore | None = None  # a process runs one world of threads at a time
    _looked_at: set[int] = set()  # noqa: RUF012  the threads of the process when the last run was over

    def __init__(self, threads: Sequence[threading.Thread]) -> None:
        self._threads = [0, *(thread.native_id or 0 for thread in threads)]
        self._cores: set[int] = set()  # that the calling thread had
        self._core: set[int] = set()  # that it has; empty: nothing is changed
        self._used: set[int] = set()  # every core that was that one
        self._batch = False  # the rank threads are scheduled as SCHED_BATCH

    def __enter__(self) -> OneCore:
        if _get is None or _set is None:
            return self
        self._cores = _get(0)
        if len(self._cores) < 2:
            return self
        core = _current_core()
        self._core = {core if core in self._cores else min(self._cores)}
        try:
            _set(0, self._core)
        except OSError:  # a sandbox that forbids it
            self._core = set()
            return self
        self._used = set(self._core)
        self._batch = _BATCH is not None and _policy() == _DEFAULT
        self._move(self._threads[1:])
        _watch_processes()
        OneCore._entered = self
        self._told_before = os.sched_getaffinity
        os.sched_getaffinity = self._told
        self._fork_exec = _posixsubprocess.fork_exec
        _posixsubprocess.fork_exec = self._releasing(self._fork_exec)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._core:
            return
        OneCore._entered = None
        os.sched_getaffinity = self._told_before
        _posixsubprocess.fork_exec = self._fork_exec
        self.release([0])
        self._release_born()

    def _release_born(self) -> None:
        """Threads that bodies started have their core from them, and may outlive the run: a pool's."""
        try:
            threads = {int(each) for each in os.listdir("/proc/self/task")}
        except OSError:  # no such folder here
            return
        born = threads.difference(OneCore._looked_at, self._threads)  # as a rule there is none
        OneCore._looked_at = threads
        for thread in born:
            with contextlib.suppress(OSError):  # it has ended
                cores: set[int] = _get(thread)  # type: ignore[misc]
                if len(cores) == 1 and cores <= self._used:
                    self.release([thread])

    def follow(self) -> None:
        """Move to the core that the calling thread is on now: called while a long run lasts.

        The operating system wakes this thread on a core that is idle, if there is one. Without this, two
        long runs that share a core by chance would share it to their ends.
        """
        if not self._core:
            return
        self.release([0])  # from now on it goes where there is room
        core = _current_core()
        if core in self._cores and core not in self._core:
            self._core = {core}
            self._used.add(core)
            self._move(self._threads[1:])

    def release(self, threads: Iterable[int | None]) -> None:
        """Give threads, by their native ids (0: the calling one), all cores and the default policy again."""
        if self._core:
            for thread in threads:
                with contextlib.suppress(OSError):  # it has ended
                    _set(thread, self._cores)  # type: ignore[misc]
                    if self._batch:
                        _schedule(thread, _DEFAULT)

    def _move(self, threads: Iterable[int]) -> None:
        for thread in threads:
            with contextlib.suppress(OSError):
                _set(thread, self._core)  # type: ignore[misc]
                if self._batch:
                    _schedule(thread, _BATCH)

    def _release_caller(self) -> None:
        """Give the calling thread all cores again: a process that it starts inherits the thread's cores."""
        if _get(0) == self._core:  # type: ignore[misc]
            self.release([0])

    def _told(self, thread: int) -> set[int]:
        """Stands in for os.sched_getaffinity, whose callers look for the number of useful workers: all cores."""
        cores: set[int] = _get(thread)  # type: ignore[misc]
        return set(self._cores) if cores == self._core else cores

    def _releasing(self, fork_exec: Callable[..., Any]) -> Callable[..., Any]:
        """multiprocessing starts its servers by this, and says nothing to sys.audit."""

        @functools.wraps(fork_exec)
        def released(*arguments: Any) -> Any:
            self._release_caller()
            return fork_exec(*arguments)

        return released


def _policy() -> int | None:
    try:
        return os.sched_getscheduler(0)
    except OSError:  # musl's C library has none
        return None


def _schedule(thread: int | None, policy: int | None) -> None:
    assert thread is not None
    assert policy is not None
    os.sched_setscheduler(thread, policy, os.sched_param(0))


@functools.cache
def _sched_getcpu() -> Callable[[], int] | None:
    try:
        found: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None
    return found


def _current_core() -> int:
    """The core that the calling thread is on; -1 where nobody can say."""
    ask = _sched_getcpu()
    return -1 if ask is None else ask()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and OneCore._entered is not None:
        OneCore._entered._release_caller()


@functools.cache
def _watch_processes() -> None:
    """Listen to Python's audit events: once in a process, since a listener cannot be removed."""
    sys.addaudithook(_heard)
