"""A parent for a session that certifies: the exit status is the session's, whatever ends its process.

A backend in C, or a library, may call ``exit(0)`` while a property runs. The process would end with the status of a
session that passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from types import FrameType
from typing import NoReturn

import _pytest.config
import pytest

from pytest_smp import launch

_SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
_SI_KERNEL = 0x80  # si_code of a signal from the terminal, which the child gets as well
_PR_SET_PDEATHSIG = 1
#: The variable that names the pipe to the parent, in a process started anew.
_DESCRIPTOR = "_SMP_SUPERVISED"

#: The judgement of the suite in a session that certifies; no exit status of a plugin replaces it.
CERTIFIED: pytest.StashKey[bool] = pytest.StashKey()


def supervise(config: pytest.Config) -> None:
    """Fork the process that is to run the session, and return in it.

    The parent ends with the exit status of the session, once the child has ended. With other threads, which a fork
    would lose, the command is started anew instead. Does nothing without --smp-certify, in a worker of xdist, under a
    launcher, or where a program has called ``pytest.main``, whose own end is not ours.
    """
    inherited = os.environ.pop(_DESCRIPTOR, None)
    if not _is_asked(config) or hasattr(config, "workerinput") or launch.job_size() is not None:
        return
    if not _is_command(sys._getframe()):
        return
    if inherited is not None:
        _begin(config, int(inherited))
        return
    if threading.active_count() > 1:
        _start_anew(config)
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
    os.close(read)
    _begin(config, write)


def _begin(config: pytest.Config, descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    config.pluginmanager.register(_Session(descriptor), "smp-supervised")


def _start_anew(config: pytest.Config) -> NoReturn:
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        cwd=config.invocation_params.dir,
        env=os.environ | {_DESCRIPTOR: str(write)},
        pass_fds=[write],
    )
    os.close(write)
    # Other threads take signals, too: sigwaitinfo would miss those. The child gets the terminal's by itself.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    status = _judged(read, code)
    sys.stderr.flush()
    os._exit(status)


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
    return _judged(read, os.waitstatus_to_exitcode(ended))


def _judged(read: int, code: int) -> int:
    """The exit status for this process, by what the child has written and how it has ended."""
    os.set_blocking(read, False)  # a process that the child has left behind may hold the other end
    told = _read(read)
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
