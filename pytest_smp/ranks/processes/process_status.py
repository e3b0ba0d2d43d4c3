"""The state of another process of this machine, as the kernel tells it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

_PF_EXITING = 0x4
_GONE = frozenset("ZX")  # ended, and not yet waited for


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of a process in ``/proc/PID/stat``.

    Attributes:
        exists: there is such a process, ended ones that nobody waited for included.
        ends: the process has ended or is ending. The kernel says so before it closes the process's
            first descriptor, so a peer sees nothing of the end that this does not show.
        stopped: a signal (SIGSTOP) or a debugger has stopped the process.
    """

    exists: bool = True
    ends: bool = False
    stopped: bool = False

    @classmethod
    def of(cls, pid: int) -> ProcessStatus | None:
        """The state of a process; None where the kernel does not tell (no Linux)."""
        if not _tells():
            return None
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return cls(exists=False, ends=True)
        fields = text.rpartition(")")[2].split()  # a command's name may hold anything
        letter, flags = fields[0], int(fields[6])
        ends = letter in _GONE or bool(flags & _PF_EXITING)
        return cls(ends=ends, stopped=letter in "Tt")


def _tells() -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc/self/stat").exists()
    return False
