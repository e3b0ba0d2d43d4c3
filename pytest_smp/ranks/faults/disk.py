"""A full disk, for one rank's files below a folder.

While the body runs, files that Python opens are of the class ``_File``, which raises ENOSPC when the
room is used up. ``torch.save`` writes in C++: while its writer is open, no file of the process may grow
beyond the room that is left (RLIMIT_FSIZE), so that a write fails there as on a full disk. Simulated
ranks take turns, and no turn ends while a file is written, so that their files are told apart too.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

from pytest_smp.ranks.faults import FullDisk
from smp_core.transport import current_rank

#: The switches by which shutil lets the kernel copy from descriptor to descriptor, past the file's write.
_SHORT_CUTS = {"_USE_CP_SENDFILE", "_USE_CP_COPY_FILE_RANGE"}


class _Room:
    """The number of bytes that still find room below one folder."""

    def __init__(self, fault: FullDisk) -> None:
        self._below = os.path.realpath(fault.below)
        self.left = fault.after

    def holds(self, path: str) -> bool:
        """Return whether the file lies below the folder."""
        real = os.path.realpath(path)
        return real == self._below or real.startswith(self._below + os.sep)


class _File(io.FileIO):
    """A file that takes bytes from the room, and raises OSError (ENOSPC) when there is none."""

    def __init__(self, room: _Room, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")[: self._room.left]
        if not part and len(memoryview(data)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.name))
        written = super().write(part)
        self._room.left -= written
        return written


class Quota:
    """While entered, this rank's files find no more room than these faults leave."""

    #: Those of all ranks of the process: the first to come patches, the last to go restores.
    _entered: ClassVar[list[Quota]] = []
    _patches = contextlib.ExitStack()

    def __init__(self, faults: Sequence[FullDisk]) -> None:
        self._rooms = [_Room(fault) for fault in faults]
        self._rank = current_rank.current()

    def __enter__(self) -> Self:
        if self._rooms:
            if not self._entered:
                self._patches.enter_context(_patched())
            self._entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._rooms:
            self._entered.remove(self)
            if not self._entered:
                self._patches.close()

    @classmethod
    def room(cls, file: object) -> _Room | None:
        """Return the room that the calling rank has for this file, where that is limited."""
        if not isinstance(file, str | os.PathLike):
            return None
        path = os.fspath(file)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        rank = current_rank.current()
        rooms = (room for quota in cls._entered if quota._rank is rank for room in quota._rooms)
        return next((room for room in rooms if room.holds(path)), None)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """While entered, what opens files asks for the calling rank's room."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        put(builtins, "open", _opening(io.open))
        put(io, "open", builtins.open)
        for name in _SHORT_CUTS & vars(shutil).keys():
            put(shutil, name, False)
        serialization = sys.modules.get("torch.serialization")
        if serialization is not None:
            writer = serialization._open_zipfile_writer_file
            put(writer, "__init__", _native(writer.__init__))
            put(writer, "__exit__", _ending(writer.__exit__))
        yield


def _opening(original: Any) -> Any:
    def open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        room = Quota.room(file) if set(mode) & set("wax+") else None
        if room is None:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _File(room, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    return open


def _native(original: Any) -> Any:
    def __init__(writer: Any, name: str) -> None:
        room = Quota.room(name)
        if room is not None:
            writer._smp_limits = room, resource.getrlimit(resource.RLIMIT_FSIZE)
            _limit(room.left, writer._smp_limits[1])
        try:
            original(writer, name)
        except BaseException:
            _lift(writer)
            raise

    return __init__


def _ending(original: Any) -> Any:
    def __exit__(writer: Any, *args: Any) -> None:
        failed = True
        try:
            original(writer, *args)
            failed = any(args)
        finally:
            if failed and hasattr(writer, "_smp_limits"):
                _cut_off(writer.name)
            _lift(writer)

    return __exit__


def _lift(writer: Any) -> None:
    limits = getattr(writer, "_smp_limits", None)
    if limits is not None:
        room, before = limits
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with contextlib.suppress(OSError):
            room.left = max(0, room.left - os.path.getsize(writer.name))


def _cut_off(path: str) -> None:
    """Let what a writer in C++ still holds go nowhere: it would write it when it is destroyed."""
    real = os.path.realpath(path)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            if os.readlink(f"/proc/self/fd/{name}") == real:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, int(name))
                os.close(null)


def _limit(size: int, before: tuple[int, int]) -> None:
    soft, hard = before
    resource.setrlimit(resource.RLIMIT_FSIZE, (size if soft < 0 or size < soft else soft, hard))
