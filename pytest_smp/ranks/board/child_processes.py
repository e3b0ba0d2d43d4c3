"""Child processes of a rank, which may set keys of a store that no record tells of."""

from __future__ import annotations

import os
import resource


class ChildProcesses:
    """A watch for child processes of this process, from now on."""

    def __init__(self) -> None:
        self._ended = _ended_children()

    def any_since(self) -> bool:
        """Return whether there is a child process now, or one has ended and been waited for meanwhile."""
        return _ended_children() != self._ended or has_children()


def _ended_children() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_CHILDREN)


def has_children() -> bool:
    """Return whether this process has any child, ended ones that nobody waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
