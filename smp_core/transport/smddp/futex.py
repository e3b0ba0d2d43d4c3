"""Words of shared memory that ranks add to, and sleep on, by the kernel's futex calls.

Python has no atomic addition: ``FUTEX_WAKE_OP`` is one, made by the kernel. A sleep releases the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

from smp_core.errors import BackendError

_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_WAITV = 449  # the same on all architectures; Linux 5.16
_MACHINE = "x86_64"  # other processors may show a word before the bytes that were written before it
_ADD_ONE = 1 << 28 | 1 << 12  # operation ADD, operand 1
_NEVER = 2 << 24 | 0x800  # comparison LT with -2048
_ALL = 2**31 - 1
_WORD_OF_32_BITS = 2
_MAX_WORDS = 128  # words of one futex_waitv
_RECHECK_INTERVAL = 0.001  # seconds between two checks, if the kernel waits for one word alone

Word = tuple[int, int]  # its address, and the value that was seen there


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX = 202


def _futex_of(library: ctypes.CDLL) -> Any:
    call = library["syscall"]
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    call.restype = ctypes.c_long
    return call


_futex = _futex_of(_libc)
# For calls that return at once: the thread keeps the GIL, so that no other thread of the rank takes it meanwhile.
_futex_at_once = _futex_of(ctypes.PyDLL(None, use_errno=True))
_waitv = _libc["syscall"]
_waitv.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_int,
]
_waitv.restype = ctypes.c_long
_several = True  # until futex_waitv turns out to be missing or forbidden


def require() -> None:
    """Raise BackendError on a system whose futexes cannot be called."""
    if platform.system() != "Linux" or platform.machine() != _MACHINE:
        raise BackendError(
            f"the smddp backend waits by futexes of Linux on {_MACHINE}; this is "
            f"{platform.system()} on {platform.machine()}. Take gloo"
        )


def add_one(address: int, idle: int) -> None:
    """Add one to a word, atomically. ``idle``: the address of a word on which no thread sleeps."""
    _check(_futex_at_once(_FUTEX, idle, _WAKE_OP, 0, None, address, _ADD_ONE | _NEVER))


def add_and_wake(address: int) -> None:
    """Add one to a word, atomically, and wake all that sleep on it."""
    _check(_futex_at_once(_FUTEX, address, _WAKE_OP, _ALL, None, address, _ADD_ONE | _NEVER))


def wake(address: int) -> None:
    """Wake all that sleep on a word."""
    _check(_futex_at_once(_FUTEX, address, _WAKE, _ALL, None, None, 0))


def sleep(words: Sequence[Word], seconds: float) -> bool:
    """Sleep until one of the words was woken, or differs from the value that was seen. False after ``seconds``."""
    global _several
    if len(words) > 1 and _several:
        waiters = (_Waiter * min(len(words), _MAX_WORDS))()
        for waiter, (address, value) in zip(waiters, words, strict=False):
            waiter.value, waiter.address, waiter.flags = value, address, _WORD_OF_32_BITS
        if len(words) > _MAX_WORDS:
            seconds = min(seconds, _RECHECK_INTERVAL)
        limit = _timespec(time.monotonic() + seconds)  # an end, where _WAIT takes a duration
        if _waitv(_WAITV, waiters, len(waiters), 0, ctypes.byref(limit), time.CLOCK_MONOTONIC) >= 0:
            return True
        problem = ctypes.get_errno()
        # EPERM: a seccomp filter that does not know the call.
        if problem not in (errno.ENOSYS, errno.EPERM):
            return _woken(problem)
        _several = False
    address, value = words[0]
    limit = _timespec(seconds if len(words) == 1 else min(seconds, _RECHECK_INTERVAL))
    if _futex(_FUTEX, address, _WAIT, value, ctypes.byref(limit), None, 0) == 0:
        return True
    return _woken(ctypes.get_errno())


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def _woken(problem: int) -> bool:
    # EFAULT: the memory of a group that another thread has destroyed. The words are read anew.
    if problem in (errno.EAGAIN, errno.EINTR, errno.EFAULT):
        return True
    if problem == errno.ETIMEDOUT:
        return False
    raise _refused(problem)


def _check(result: int) -> None:
    if result < 0:
        raise _refused(ctypes.get_errno())


def _refused(problem: int) -> BackendError:
    return BackendError(
        f"the kernel refuses a futex call: {os.strerror(problem)}. The smddp backend waits by futexes; a filter of "
        "system calls (seccomp) may forbid them. Take gloo"
    )
