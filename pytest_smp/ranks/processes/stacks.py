"""The stacks of a rank process that does not come back: its own signal handler writes them to a
file, whatever it is doing, in C or in Python; here they are read.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import threading
import time
from pathlib import Path

from smp_core.transport import stack_frames

STACKS = signal.SIGUSR2  # asks a rank for its stacks, whatever it is doing
_FRAME = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')
_HEADER = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_SERVER, _LISTENER = "rank.py", "_listen"  # what runs bodies, and the thread beside it
_ENOUGH = "in serve"
_PATIENCE = 5.0  # seconds for the handler to have run
_QUIET = 0.05  # seconds without a new line: it is done


def stacks_file(folder: str, pid: int) -> Path:
    """The file that a rank process writes its stacks to."""
    return Path(folder, f"{pid}.stacks")


class Stacks:
    """Lets the signal STACKS write every thread's stack to a file. A body may take the signal away."""

    def __init__(self, folder: str) -> None:
        self._file = open(stacks_file(folder, os.getpid()), "w")  # noqa: SIM115
        self.renew()

    def renew(self) -> None:
        """Register the signal again, which a body may have taken away."""
        faulthandler.unregister(STACKS)
        faulthandler.register(STACKS, file=self._file, all_threads=True)


def read_stacks(folder: str, pid: int) -> list[str]:
    """The stacks of all Python threads that run a user's code, outermost line first; may be empty.

    The rank's own thread is the first; the others have a line above that says so.
    """
    path = stacks_file(folder, pid)
    deadline = time.monotonic() + _PATIENCE
    text, quiet_since = "", time.monotonic()
    while time.monotonic() < deadline:
        try:
            now = path.read_text(errors="replace")
        except OSError:
            return []
        if now != text:
            text, quiet_since = now, time.monotonic()
        elif _ENOUGH in text and time.monotonic() - quiet_since > _QUIET:
            break  # the handler writes thread by thread: the one that runs bodies is there
        time.sleep(0.005)
    return render_stacks(text)


def render_stacks(text: str) -> list[str]:
    """The stacks of a dump of ``faulthandler``: see read_stacks."""
    parts = [*filter(str.strip, _HEADER.split(text))]
    own = [part for part in parts if _ENOUGH in part]
    stacks = [_render(part) for part in own]
    others = [_render(part) for part in parts if part not in own]
    return [*filter(None, stacks), *(f"  another thread:\n{stack}" for stack in others if stack)]


def _render(part: str) -> str:
    """One thread's stack, outermost line first, from where the body begins to the user's last line."""
    found = [match.groups() for match in map(_FRAME.match, part.splitlines()) if match]
    places = [(file, int(line), function) for file, line, function in reversed(found)]
    start = 0
    for index, (file, _, function) in enumerate(places):
        if os.path.basename(file) == _SERVER and stack_frames.is_ours(file):
            if function == _LISTENER:
                return ""
            start = index + 1
    places = places[start:]
    while places and places[0][0] == threading.__file__:
        places.pop(0)
    while places and stack_frames.is_ours(places[-1][0]):
        places.pop()
    lines = []
    for file, line, function in places:
        lines.append(f'  File "{stack_frames.relative(file)}", line {line}, in {function}')
        source = linecache.getline(file, line).strip()
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)
