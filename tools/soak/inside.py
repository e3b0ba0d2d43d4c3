"""A rank that dies inside a collective: the kernel kills it after a drawn time, while others enter
the collective sooner or later.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import signal
import time
from pathlib import Path
from typing import NoReturn

_LONGEST_LATE = 0.02  # seconds by which a rank comes late, at most
_LONGEST_LIFE = 0.01  # seconds for which the rank lives on in the collective, at most
_LOOK = 0.0005  # seconds


@dataclasses.dataclass(frozen=True)
class Inside:
    """Kill ``rank`` in step number ``step`` (from 0), so many ``seconds`` after it begins that step.

    Attributes:
        late: for each rank, how many seconds after that it begins the step; None: whenever it comes
            there.
        token: names the file by which the rank says that it begins.
    """

    rank: int
    step: int
    seconds: float
    late: tuple[float | None, ...]
    token: str

    @classmethod
    def draw(cls, rng: random.Random, rank: int, size: int, steps: int, token: str) -> Inside:
        """Draw the death of ``rank`` in one of ``steps`` steps, and the delays of the other ranks."""
        late = tuple(
            rng.uniform(0.0, _LONGEST_LATE) if each != rank and rng.random() < 0.5 else None
            for each in range(size)
        )
        seconds = rng.choice((1e-6, 1e-4, rng.uniform(0.0, _LONGEST_LIFE)))
        return cls(rank, rng.randrange(steps), seconds, late, token)

    def marker(self, folder: str) -> Path:
        """The file that the rank makes."""
        return Path(folder, f"inside-{self.token}")

    def before(self, rank: int, folder: str) -> None:
        """A rank is to begin the step."""
        late = self.late[rank]
        if rank == self.rank:
            self.marker(folder).touch()
            kill_after(self.seconds)
        elif late is not None:
            while not self.marker(folder).exists():
                time.sleep(_LOOK)
            time.sleep(late)

    def after(self, rank: int) -> None:
        """A rank has come through the step."""
        if rank == self.rank:
            _wait_for_the_end()


def _wait_for_the_end() -> NoReturn:
    while True:
        signal.pause()


class _SignalEvent(ctypes.Structure):
    """``struct sigevent``: SIGEV_SIGNAL (0) is how to notify."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _TimerSetting(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


def kill_after(seconds: float) -> None:
    """Have the kernel send SIGKILL to this process: no thread and no other process takes part.

    Raises OSError if the kernel makes no timer.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    event = _SignalEvent(signal=signal.SIGKILL)
    timer = ctypes.c_void_p()
    nanoseconds = max(1, int(seconds * 1e9))
    setting = _TimerSetting(0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) or (
        libc.timer_settime(timer, 0, ctypes.byref(setting), None)
    ):
        raise OSError(ctypes.get_errno(), "no timer could be made")
