"""The state of another process of this machine, as the kernel tells it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

_PF_EXITING = 0x4
_SIGKILL = 1 << 8  # in a mask of signals
_GONE = frozenset("ZX")  # ended, and not yet waited for


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of a process in ``/proc/PID/stat``.

    Attributes:
        exists: there is such a process, ended ones that nobody waited for included.
        ends: the process has ended or is ending. The kernel says so before it closes the process's
            first descriptor, so a peer sees nothing of the end that this does not show.
        main_thread_ended: the main thread alone has: others go on, and hold the process's descriptors.
        stopped: a signal (SIGSTOP) or a debugger has stopped the process.
    """

    exists: bool = True
    ends: bool = False
    main_thread_ended: bool = False
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
        if ends and _has_other_threads(pid):
            return cls(main_thread_ended=True)
        return cls(ends=ends, stopped=letter in "Tt")


def _has_other_threads(pid: int) -> bool:
    """Return whether a thread beside the main one goes on: it does not end, and nobody has killed it."""
    folders: list[Path] = []
    with contextlib.suppress(OSError):  # the whole process has ended since
        folders += Path(f"/proc/{pid}/task").glob("[0-9]*")
    for folder in folders:
        with contextlib.suppress(OSError):  # it has ended
            if folder.name == str(pid):
                continue
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            status = (folder / "status").read_text(errors="replace")
            pending = int(status.partition("SigPnd:")[2].split()[0], 16)
            if not (fields[0] in _GONE or int(fields[6]) & _PF_EXITING or pending & _SIGKILL):
                return True
    return False


def _tells() -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc/self/stat").exists()
    return False
