"""Files that are written whole or not at all: reports, and the file of expected failures."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, or nothing. A link stays, and its target is written.

    A pipe, a device or the standard output is not replaced: the text is written into it.
    """
    descriptor = _descriptor(path)
    if descriptor is not None:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, _mode(path))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def check_writable(path: Path) -> None:
    """Raise OSError if ``write_text`` could not write the file."""
    if is_stream(path):
        if not os.access(path, os.W_OK):  # to open a pipe is to wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    with contextlib.suppress(FileNotFoundError):
        path.stat()  # raises for links that go in circles
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def is_stream(path: Path) -> bool:
    """Return whether written text cannot be replaced: no regular file, or this process's own output."""
    try:
        found = path.stat()
    except OSError:
        return False
    ordinary = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return not ordinary or _standard(found) is not None


def _descriptor(path: Path) -> int | None:
    """A file descriptor to write into, for a stream."""
    if not is_stream(path):
        return None
    standard = _standard(path.stat())
    if standard is None:
        return os.open(path, os.O_WRONLY)
    # Opened anew by its name, a regular file would be written from its start, and a socket not be
    # opened at all.
    sys.stdout.flush()
    return os.dup(standard)


def _standard(found: os.stat_result) -> int | None:
    """The descriptor of this process's standard output or error that a file is, or None."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _mode(path: Path) -> int:
    """The permissions that an ordinary write would give the file; mkstemp makes its file private."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
