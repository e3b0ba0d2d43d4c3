"""State that a process has once and a body may change: environment, folder, import path, signal
handlers, streams. A rank process gives each body the controller's values, and restores them afterwards.

Comparing costs less than setting: nearly all bodies change nothing, and a rank compares after every run.
"""

from __future__ import annotations

import concurrent.futures.thread as pools
import contextlib
import ctypes
import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_smp.ranks.board.child_processes import has_children
from pytest_smp.ranks.processes.stacks import STACKS

_PR_SET_CHILD_SUBREAPER = 36
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_HANDLED = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, STACKS}))
# signal.getsignal makes an enumeration's member of every answer: 100 us for all of them, not 3.
_handler: Callable[[int], Any] = vars(sys.modules["_signal"])["getsignal"]


def environment() -> Any:
    """os.environ as it is now, for a comparison: not to be changed.

    The mapping behind it where there is one (a dictionary of bytes), since decoding 40 variables
    takes 70 us.
    """
    inner = getattr(os.environ, "_data", None)
    return inner if isinstance(inner, dict) else dict(os.environ)


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """The variables to set, or to unset (None), to turn ``before`` into ``now``."""
    changed: dict[str, str | None] = {
        name: value for name, value in now.items() if before.get(name) != value
    }
    changed.update({name: None for name in before if name not in now})
    return changed


class ProcessState:
    """The process state of one rank process.

    The controller gives the environment (``set_environment``) and ``path``, which stay until it gives
    others.
    """

    def __init__(self) -> None:
        self._base = dict(os.environ)
        self._wanted = dict(environment())
        self.path = list(sys.path)
        self._handlers = [_handler(each) for each in _HANDLED]
        self._directory = os.path.realpath("/proc/self/cwd")
        self._umask = os.umask(0o077)
        os.umask(self._umask)

    def set_environment(self, changed: Mapping[str, str | None]) -> None:
        """Set the variables that the controller has changed since it started the ranks."""
        wanted = {**self._base, **changed}
        for name, value in changes(
            os.environ, {name: value for name, value in wanted.items() if value is not None}
        ).items():
            _set(name, value)
        self._wanted = dict(environment())

    @contextlib.contextmanager
    def around(self, directory: str | None) -> Iterator[None]:
        """While entered, a body runs in ``directory``; its changes to the process state are undone at the end."""
        sys.path[:] = self.path
        limit = sys.getrecursionlimit()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with contextlib.suppress(OSError):
            os.chdir(self._directory)
        if directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(directory)
        streams = sys.stdin, sys.stdout, sys.stderr
        try:
            yield
        finally:
            for timer in _TIMERS:  # first: a timer would end a later body
                signal.setitimer(timer, 0)
            faulthandler.cancel_dump_traceback_later()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            gc.enable()
            if self._handlers != [_handler(each) for each in _HANDLED]:
                self._restore_handlers()
            sys.setrecursionlimit(limit)
            os.umask(self._umask)
            sys.stdin, sys.stdout, sys.stderr = streams
            for name in {name for name, _ in environment().items() ^ self._wanted.items()}:
                value = self._wanted.get(name)
                _set(os.fsdecode(name), None if value is None else os.fsdecode(value))

    def _restore_handlers(self) -> None:
        for number, handler in zip(_HANDLED, self._handlers, strict=True):
            if _handler(number) is not handler and handler is not None:
                signal.signal(number, handler)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class Belongings:
    """The threads, child processes and file descriptors of a rank process. No body may find any that an
    earlier body has added and left.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Count the present threads and descriptors as the rank's own."""
        self._threads = set(threading.enumerate())
        self._descriptors = open_descriptors()
        self._count, self._lowest = _count_descriptors(), _lowest_descriptor()

    def adopt(self, descriptors: Collection[str]) -> None:
        """Count these descriptors, which have come since, as the rank's own, too."""
        if not descriptors:
            return
        self._descriptors |= set(descriptors)
        if self._count is not None:
            self._count += len(descriptors)
        self._lowest = next(
            number for number in itertools.count() if str(number) not in self._descriptors
        )

    def join_threads(self) -> None:
        """Wait for the threads that have come since, as the interpreter does at its end: not for daemon threads.

        A pool's threads are left out: they wait for tasks until their pool is shut down.
        """
        while waiting := [
            thread
            for thread in threading.enumerate()
            if thread not in self._threads and not thread.daemon
            if getattr(thread, "_target", None) is not pools._worker
        ]:
            for thread in waiting:  # and for those that they start
                thread.join()

    def added(self, *, descriptors: bool) -> list[str]:
        """The threads and processes that have come since, in words; open descriptors only if asked for."""
        left = []
        if threading.active_count() != len(self._threads):
            for thread in set(threading.enumerate()) - self._threads:
                left.append(f"thread {thread.name!r} still runs")
        if has_children():
            left += [f"process {child} still runs" for child in children()]
        if descriptors and not self._as_before():
            try:
                left += self._new_descriptors()
            except OSError as error:  # it takes a descriptor to list them
                left.append(f"its file descriptors cannot be listed: {error}")
        return left

    def _as_before(self) -> bool:
        """Return whether the number of open descriptors and the lowest free one are as before.

        One closed and one opened descriptor leave the number as it was, so the lowest free one is
        compared, too.
        """
        same = self._count is not None and self._count == _count_descriptors()
        return same and self._lowest == _lowest_descriptor()

    def _new_descriptors(self) -> list[str]:
        if not open_descriptors(self._descriptors):
            return []
        gc.collect()
        new = open_descriptors(self._descriptors)
        return [f"file descriptor {each} is open: {_target(each)}" for each in sorted(new)]


def adopt_orphans() -> None:
    """Become the parent of what this process's children leave behind when they die (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def open_descriptors(known: Collection[str] = ()) -> set[str]:
    """This process's open descriptors, by number, apart from those that are known."""
    found = set(os.listdir("/proc/self/fd")).difference(known)
    return {each for each in found if _is_open(int(each))}  # the one that listed them is not


def _count_descriptors() -> int | None:
    """The number of open descriptors: since Linux 6.2 the folder's size; None where the kernel does not tell."""
    return os.stat("/proc/self/fd").st_size or None


def _lowest_descriptor() -> int:
    """The number that the next descriptor will have; -1 where there can be no more."""
    try:
        descriptor = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    os.close(descriptor)
    return descriptor


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _target(descriptor: str) -> str:
    """The file or other object behind a descriptor, in words."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return "closed again"


def children() -> list[int]:
    """This process's children, ended ones that nobody waited for included."""
    found = []
    for task in Path("/proc/self/task").iterdir():  # a child is its thread's
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found
