"""The folder of a partial checkpoint: filled under another name, then put in place whole.

``PATH/TAG_partial`` holds the files that API 1.11 lists, and ``manifest.json``: the names and sizes of the files,
the degrees, and the position of the checkpoint in the order of saving (clocks and the times of files
change when folders are copied).

A save fills ``.TAG_partial.smp-new``. If a checkpoint has that tag already, it steps aside as
``.TAG_partial.smp-old`` in the moment of the change, and a crash in just that moment leaves it there, whole:
it is found under this name, too, and the next save puts it back before it does anything else.

One rank makes, puts in place and removes folders; the others write files into it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from smp_core.torch.checkpoint import files
from smp_core.torch.exceptions import CheckpointError

SUFFIX = "_partial"
MANIFEST = "manifest.json"
USER_CONTENT = "user_content.pt"
_FORMAT = "smp_core partial checkpoint, version 1"
_NONCE = ".being-written"
_OURS = re.compile(r"(model|optimizer|fp16_states)_\d+(_\d+){0,2}\.pt")


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a checkpoint that lies in its folder.

    ``degrees`` maps keys of the configuration to their values at the save. ``files`` maps names to sizes in
    bytes. ``order`` counts the checkpoints of one path. ``save`` identifies the save, and its files repeat
    the value, so that a file of another save is found.
    """

    order: int
    degrees: Mapping[str, int]
    files: Mapping[str, int]
    save: str | None = None

    def holds(self, kind: str) -> bool:
        """Return whether there are files of this kind: model, optimizer."""
        return any(name.startswith(f"{kind}_") for name in self.files)


def begin(path: Path, tag: str) -> str:
    """Make an empty folder to fill, and ``path`` if need be. Returns a value that identifies this save."""
    files.make_folder(path)
    with _said(path):
        _settle(path, tag)
        new = _new(path, tag)
        if new.exists():
            shutil.rmtree(new)  # of a save that was cut off
        new.mkdir()
    nonce = uuid.uuid4().hex
    files.save_text(new / _NONCE, nonce)
    return nonce


def to_fill(path: Path, tag: str, nonce: str) -> Path:
    """The folder that :func:`begin` made. Raises CheckpointError if this rank does not see it."""
    new = _new(path, tag)
    try:
        seen = (new / _NONCE).read_text()
    except OSError:
        seen = ""
    if seen != nonce:
        raise CheckpointError(
            f"{new}: made by world rank 0 and not seen here: either path={os.fspath(path)!r} is not one "
            "folder for all ranks, or two programs save the same tag at once. Give a path on a file "
            "system that all ranks share"
        )
    return new


def finish(path: Path, tag: str, degrees: Mapping[str, int], save: str | None = None) -> None:
    """Put the folder in place, once every rank has written its files. ``save``: the save's identity in the files."""
    new, final, old = _new(path, tag), path / f"{tag}{SUFFIX}", _old(path, tag)
    with _said(path):
        sizes = {
            name: (new / name).stat().st_size
            for name in sorted(os.listdir(new))
            if _OURS.fullmatch(name) or name == USER_CONTENT
        }
        order = 1 + max((each.order for _, each in _all(path)), default=0)
        text = {
            "format": _FORMAT,
            "order": order,
            "save": save,
            "degrees": dict(degrees),
            "files": sizes,
        }
        files.save_text(new / MANIFEST, json.dumps(text, indent=1) + "\n")
        (new / _NONCE).unlink()
        files.sync_folder(new)
        if final.exists():
            final.rename(old)
        new.rename(final)
        files.sync_folder(path)
        if old.exists():
            shutil.rmtree(old)


def discard(path: Path, tag: str) -> None:
    """Remove a folder that is not to be put in place."""
    shutil.rmtree(_new(path, tag), ignore_errors=True)


def find(path: Path, tag: str) -> tuple[Path, Manifest]:
    """The folder of a tag. Raises CheckpointError if there is none, or it is not whole."""
    final, old = path / f"{tag}{SUFFIX}", _old(path, tag)
    folder = old if not final.exists() and old.exists() else final
    if not folder.is_dir():
        raise CheckpointError(
            f"{final}: expected the folder of a partial checkpoint, and there is none: {path} has "
            f"{_there(path)}. Give the tag of one of them, or partial=False for a full checkpoint"
        )
    manifest = read_manifest(folder)
    for name, size in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(
                f"{folder / name}: missing, though the checkpoint's {MANIFEST} lists it. Remove this "
                "checkpoint and resume from an older one"
            ) from None
        if found != size:
            raise CheckpointError(
                f"{folder / name}: torn: expected {size} bytes, found {found}. Remove this checkpoint "
                "and resume from an older one"
            )
    return folder, manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if the folder has none that we wrote."""
    path = folder / MANIFEST
    text = files.load_text(path, "the list of files of a partial checkpoint")
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        manifest = Manifest(found["order"], found["degrees"], found["files"], found.get("save"))
        numbers = (manifest.order, *manifest.degrees.values(), *manifest.files.values())
        if any(type(number) is not int for number in numbers):
            raise ValueError("it has values that are no numbers")
        # Joined to a folder: a name that leads elsewhere is none of ours.
        if any(not _OURS.fullmatch(name) and name != USER_CONTENT for name in manifest.files):
            raise ValueError("it names files that are none of ours")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected {_FORMAT!r}, found something else ({error}). Remove this checkpoint and "
            "resume from an older one"
        ) from error
    return manifest


def prune(path: Path, keep: int) -> list[str]:
    """Remove the oldest partial checkpoints until ``keep`` are left; returns their folders' names.

    Counts and removes only folders that hold nothing but files of ours.
    """
    mine = sorted((manifest.order, name) for name, manifest in _all(path))
    gone = [name for _, name in mine[: max(0, len(mine) - keep)]]
    with _said(path):
        for name in gone:
            # Under a hidden name first, so that half of one is never found.
            hidden = _new(path, name.removesuffix(SUFFIX))
            shutil.rmtree(hidden, ignore_errors=True)
            (path / name).rename(hidden)
            shutil.rmtree(hidden)
    return gone


def _all(path: Path) -> Iterator[tuple[str, Manifest]]:
    for name in os.listdir(path):
        folder = path / name
        if name.startswith(".") or not name.endswith(SUFFIX) or not folder.is_dir():
            continue
        inside = os.listdir(folder)
        known = all(_OURS.fullmatch(each) or each in (MANIFEST, USER_CONTENT) for each in inside)
        if known and MANIFEST in inside:
            with contextlib.suppress(CheckpointError):
                yield name, read_manifest(folder)


def _settle(path: Path, tag: str) -> None:
    """Undo a change that was cut off between its two renamings; finish one that was after them."""
    final, old = path / f"{tag}{SUFFIX}", _old(path, tag)
    if old.exists():
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


def _there(path: Path) -> str:
    try:
        tags = sorted(name.removesuffix(SUFFIX) for name, _ in _all(path))
    except OSError as error:
        return f"none (the folder cannot be read: {error.strerror})"
    return f"the tags {', '.join(map(repr, tags))}" if tags else "none"


def _new(path: Path, tag: str) -> Path:
    return path / f".{tag}{SUFFIX}.smp-new"


def _old(path: Path, tag: str) -> Path:
    return path / f".{tag}{SUFFIX}.smp-old"


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(
            f"{where}: the checkpoint cannot be put in place: {error.strerror or error}. The one before is "
            "unchanged. Look at the folder, and save again"
        ) from error
