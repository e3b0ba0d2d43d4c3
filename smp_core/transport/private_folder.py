"""A folder of a run in which its processes meet."""

from __future__ import annotations

import tempfile


def private_folder() -> str:
    """A new folder that only this user can enter. Short: a Unix socket's path has 107 bytes."""
    return tempfile.mkdtemp(prefix="smp-", dir=None if len(tempfile.gettempdir()) < 60 else "/tmp")
