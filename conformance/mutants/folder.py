"""A temporary folder that goes with the process that made it, also if that is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: Reads until nobody holds the other end of the pipe: the process, and those that it forked.
_REMOVER = (
    "import shutil, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder, which is removed when the block ends, or when this process and its forks do."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        remover = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what kills this process's group spares it
        )
        try:
            yield Path(folder)
        finally:
            assert remover.stdin is not None
            remover.stdin.close()
            remover.wait()
