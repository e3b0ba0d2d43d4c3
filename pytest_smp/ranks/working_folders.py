"""The working folder: a process has one, and on `sim` each rank its own.

A folder is kept by a descriptor, for it may be deleted while a rank is in it, and then has no path:
``with TemporaryDirectory() as folder: os.chdir(folder)`` ends so. Only ranks that change theirs
have one, and ranks in the same folder share it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

#: Descriptors that are kept at the same time: a process often has 1,024, and most are the bodies'.
_MOST = 256

_O_PATH = getattr(os, "O_PATH", os.O_RDONLY)  # where there is it, the folder need not be readable
_open, _close, _stat = os.open, os.close, os.stat  # as no body has replaced them

Folder = int | str  # a descriptor; beyond _MOST of them a path


class WorkingFolders:
    """The working folders of the ranks of one run, by rank, and of the controller, by None."""

    def __init__(self) -> None:
        self.now: int | None = None  # whose turn it is
        self.changed = False  # whether a rank has ever changed its own
        self._chdir, self._fchdir = os.chdir, os.fchdir
        self._of: dict[int | None, Folder] = {}
        self._descriptors: dict[tuple[int, int], int] = {}  # by device and inode
        self._here: Folder = -1  # where the process is

    def enter(self) -> None:
        """Go where the rank was whose turn it is. Raises OSError if there is no way back."""
        wanted = self._of.get(self.now, self._of[None])
        if wanted != self._here:
            self._chdir(wanted)
            self._here = wanted

    def watch(self) -> None:
        """Let ranks that change the working folder from now on change their own."""
        os.chdir, os.fchdir = self._watched(os.chdir), self._watched(os.fchdir)

    def close(self) -> None:
        """Give os.chdir and os.fchdir back, and every descriptor; the controller is where it was."""
        os.chdir, os.fchdir = self._chdir, self._fchdir
        try:
            if self.changed:
                self.now = None
                self.enter()
        finally:
            self.changed = False
            self._of.clear()
            for descriptor in self._descriptors.values():
                with contextlib.suppress(OSError):  # a body that closes all descriptors
                    _close(descriptor)
            self._descriptors.clear()

    def _watched(self, function: Callable[..., None]) -> Callable[..., None]:
        def move(*args: Any, **kwargs: Any) -> None:
            if not self.changed:
                self._here = self._of[None] = self._keep()
                self.changed = True
            function(*args, **kwargs)
            self._here = -1  # unknown, should the next line raise
            before = self._of.get(self.now)
            self._here = self._of[self.now] = self._keep()
            self._forget(before)

        return move

    def _keep(self) -> Folder:
        """The folder that the process is in."""
        found = _stat(".")
        key = found.st_dev, found.st_ino
        if key not in self._descriptors:
            if len(self._descriptors) >= _MOST:
                return os.getcwd()
            try:
                self._descriptors[key] = _open(".", _O_PATH)
            except OSError:  # the bodies have used them all
                return os.getcwd()
        return self._descriptors[key]

    def _forget(self, folder: Folder | None) -> None:
        """Close it if nobody is there any more."""
        if isinstance(folder, int) and folder not in self._of.values():
            self._descriptors = {
                key: each for key, each in self._descriptors.items() if each != folder
            }
            _close(folder)
