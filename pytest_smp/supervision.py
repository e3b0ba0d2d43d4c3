"""A parent for a session that certifies: the exit status is the session's, whatever ends its process.

A backend in C, or a library, may call ``exit(0)`` while a property runs. The process would end with the status of a
session that passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType

import _pytest.config
import pytest

from pytest_smp import launch

_SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
_SI_KERNEL = 0x80  # si_code of a signal from the terminal, which the child gets as well
_PR_SET_PDEATHSIG = 1

#: The judgement of the suite in a session that certifies; no exit status of a plugin replaces it.
CERTIFIED: pytest.StashKey[bool] = pytest.StashKey()


def supervise(config: pytest.Config) -> None:
    """Fork the process that is to run the session, and return in it.

    The parent ends with the exit status of the session, once the child has ended. Does nothing without
    --smp-certify, in a worker of xdist, under a launcher, with other threads, or where a program has called
    ``pytest.main``, whose own end is not ours.
    """
    if not _is_asked(config) or hasattr(config, "workerinput") or launch.job_size() is not None:
        return
    if threading.active_count() > 1 or not _is_command(sys._getframe()):
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    read, write = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child:
        os.close(write)
        status = _status(read, child)
        sys.stderr.flush()
        os._exit(
            status
        )  # without exit handlers of what was imported before the fork: the child has run them
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.close(read)
    config.pluginmanager.register(_Session(write), "smp-supervised")


class _Session:
    """Tells the parent how the session has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._session: pytest.Session | None = None  # --help has none

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_unconfigure(self, config: pytest.Config) -> Generator[None, object, object]:
        # The status is final now: a backend that ends the process while it is closed changes nothing.
        status = 0 if self._session is None else int(self._session.exitstatus)
        asked = bool(config.getoption("smp_certify", None))  # an ini key counts for the suite alone
        if self._session is not None and not status and not config.stash.get(CERTIFIED, not asked):
            # A hook of others has set the status, or has ended the session before the suite could judge.
            print(
                "smp: nothing is certified, whatever exit status a plugin has set", file=sys.stderr
            )
            status = int(pytest.ExitCode.TESTS_FAILED)
        os.write(self._descriptor, str(status).encode())
        return (yield)


def _is_asked(config: pytest.Config) -> bool:
    asked = config.getoption("smp_certify", None)
    if asked is None:
        with contextlib.suppress(ValueError):  # no such key: -p no:smp-suite
            asked = config.getini("smp_certify")
    return bool(asked)


def _is_command(frame: FrameType | None) -> bool:
    """Return whether pytest is the program, ``pytest`` or ``python -m pytest``."""
    names = ("console_main", "_console_main")  # the second one since pytest 9.1
    entries = {
        vars(_pytest.config)[name].__code__ for name in names if hasattr(_pytest.config, name)
    }
    while frame is not None:
        if frame.f_code in entries:
            return True
        frame = frame.f_back
    return False


def _status(read: int, child: int) -> int:
    """Wait for the child, pass signals on to it, and return the exit status for this process."""
    while True:
        received = signal.sigwaitinfo(_SIGNALS)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code != _SI_KERNEL:
                os.kill(child, received.si_signo)
            continue
        pid, ended = os.waitpid(child, os.WNOHANG)
        if pid:
            break
    os.set_blocking(read, False)  # a process that the child has left behind may hold the other end
    told = _read(read)
    code = os.waitstatus_to_exitcode(ended)
    if code:
        return code if code > 0 else 128 - code
    if told is None:
        print(
            "smp: the process of the session ended with exit code 0 before the session did: nothing is certified. "
            "The last property that was shown, or a thread, called exit or _exit",
            file=sys.stderr,
        )
        return int(pytest.ExitCode.TESTS_FAILED)
    return told


def _read(descriptor: int) -> int | None:
    try:
        text = os.read(descriptor, 16)
    except BlockingIOError:
        return None
    return int(text) if text else None
