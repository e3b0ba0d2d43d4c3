"""Calls that reach a process group in C++."""

from __future__ import annotations

from smp_core.backends.board.groups import Registry
from smp_core.backends.board.recorder import Recorder
from smp_core.backends.board.works import Works


class Dispatched:
    """Later."""

    def __init__(self, recorder: Recorder, registry: Registry, works: Works) -> None:
        pass

    def install(self) -> None:
        """Later."""

    def uninstall(self) -> None:
        """Later."""
