"""A temporary folder that is removed with the process that made it, also if the process is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: A script that reads until the process and all its forks have closed the pipe, and removes the folder.
_REMOVER = (
    "import shutil, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder, which is removed when the block ends, or when this process and its forks have ended."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        remover = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this process's group must not reach the remover
        )
        try:
            yield Path(folder)
        finally:
            assert remover.stdin is not None
            remover.stdin.close()
            remover.wait()
