"""``smp.utils``: the files of checkpoints from one rank to another, where the folder may be another (API 2)."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from smp_core.comm import RankType, recv_from, send
from smp_core.errors import CheckpointError

__all__ = ["receive_checkpoint_files", "send_checkpoint_files"]


def send_checkpoint_files(folder: str | os.PathLike[str], rank: int) -> None:
    """Send all files below ``folder`` to the world rank ``rank``, which calls ``receive_checkpoint_files``.

    Raises CheckpointError if there is no such folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"smp.utils.send_checkpoint_files: there is no folder {root}")
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    send(files, rank, RankType.WORLD_RANK)


def receive_checkpoint_files(folder: str | os.PathLike[str], rank: int) -> None:
    """Write below ``folder`` the files that the world rank ``rank`` sends; those of the same names are replaced.

    Raises CheckpointError, and writes nothing, for a file that would be outside of the folder.
    """
    files: dict[str, bytes] = recv_from(rank, RankType.WORLD_RANK)
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                f"smp.utils.receive_checkpoint_files: rank {rank} sent a file {name!r}, which is not below its folder"
            )
    for name, content in files.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
