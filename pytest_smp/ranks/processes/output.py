"""The output of a rank process: descriptors 1 and 2 are files in the run's folder, so that output from
C++ of a dying process is kept as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any


def output_files(folder: str, pid: int) -> tuple[Path, Path]:
    """The files that a rank process writes its standard output and its standard error to."""
    return Path(folder, f"{pid}.out"), Path(folder, f"{pid}.err")


def read_output(folder: str, pid: int) -> tuple[str, str]:
    """The text that a rank process has written in its run, to standard output and to standard error."""
    texts = []
    for path in output_files(folder, pid):
        try:
            texts.append(path.read_text(errors="replace"))
        except OSError:
            texts.append("")
    return texts[0], texts[1]


class Output:
    """Descriptors 1 and 2 as files in the run's folder. A body may close or redirect them, and the
    streams over them: each run begins with new ones.
    """

    def __init__(self, folder: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._files = [os.open(each, flags, 0o600) for each in output_files(folder, os.getpid())]
        self._streams: list[Any] = []
        self.renew()

    def renew(self) -> None:
        """Empty files, on descriptors 1 and 2."""
        self._flush()
        for descriptor, file in zip((1, 2), self._files, strict=True):
            if os.fstat(file).st_size:
                os.ftruncate(file, 0)
            os.dup2(file, descriptor)
        if not self._streams or any(map(_is_spoilt, self._streams)):
            self._streams = [open(each, "w", buffering=1, closefd=False) for each in (1, 2)]  # noqa: SIM115
            sys.__stdout__, sys.__stderr__ = self._streams  # type: ignore[misc]
        sys.stdout, sys.stderr = self._streams

    def written(self) -> tuple[str, str]:
        """The text written since the last renewal, to standard output and to standard error."""
        self._flush()
        out, err = (_whole(file) for file in self._files)
        return out, err

    def _flush(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(ValueError, OSError):  # the body closed it
                stream.flush()


def _is_spoilt(stream: Any) -> bool:
    """Return whether a body has closed, detached or reconfigured the stream."""
    try:
        return bool(stream.closed) or (stream.errors, stream.line_buffering) != ("strict", True)
    except ValueError:  # detached: it has no buffer to ask
        return True


def _whole(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, size, 0).decode(errors="replace") if size else ""
