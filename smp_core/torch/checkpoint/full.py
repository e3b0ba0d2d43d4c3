"""The two files of a full checkpoint, put in place together.

``PATH/TAG`` holds the state and ``PATH/user_content_TAG`` the user's content. No call of the system
renames two files at once, so a save fills the folder ``.TAG.smp-filling``, renames it to ``.TAG.smp-ready``,
and moves its files out, one after the other. From the renaming on the new checkpoint is there, whole:
a file that is still in the folder counts, and the next save moves it out before it does anything else.

One rank writes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from smp_core.torch.checkpoint import files

USER_CONTENT = "user_content_"


def write(path: Path, tag: str, state: object, user_content: object) -> None:
    """Replace the checkpoint of a tag; ``path`` is made if need be.

    Raises CheckpointError if it cannot be written; the one before is then still there.
    """
    files.make_folder(path)
    filling, ready = _folder(path, tag, "filling"), _folder(path, tag, "ready")
    settle(path, tag)
    with files.named(filling, "cannot be made"):
        shutil.rmtree(filling, ignore_errors=True)  # of a save that was cut off
        filling.mkdir()
    try:
        files.save(filling / tag, state)
        files.save(filling / f"{USER_CONTENT}{tag}", user_content)
        with files.named(path, "the checkpoint cannot be put in place"):
            filling.rename(ready)
    except BaseException:
        shutil.rmtree(filling, ignore_errors=True)
        raise
    files.sync_folder(path)
    settle(path, tag)


def settle(path: Path, tag: str) -> None:
    """Move out the files that an interrupted save has left ready."""
    ready = _folder(path, tag, "ready")
    if not ready.is_dir():
        return
    with files.named(path, "the checkpoint cannot be put in place"):
        for name in sorted(os.listdir(ready)):
            os.replace(ready / name, path / name)
        files.sync_folder(path)
        ready.rmdir()


def find(path: Path, tag: str) -> tuple[Path, Path | None]:
    """The file of the state, which may be missing, and that of the user's content, if there is one."""
    content = _place(path, tag, f"{USER_CONTENT}{tag}")
    return _place(path, tag, tag), content if content.exists() else None


def _place(path: Path, tag: str, name: str) -> Path:
    ready = _folder(path, tag, "ready") / name
    return ready if ready.exists() else path / name


def _folder(path: Path, tag: str, kind: str) -> Path:
    return path / f".{tag}.smp-{kind}"
