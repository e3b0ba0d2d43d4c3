"""Files that are whole or not there: written under another name and then renamed, read without
running anything.

Format. `torch.save`'s zip archives, so that `torch.load` reads them everywhere.

Writing. A file gets its name when all of it is on the disk; until then it is called
``.NAME.UNIQUE.smp-part``, and its writer holds a lock on it. A crash leaves such a file; the next
save of the same name removes those whose lock nobody holds, which a save beside it does hold.

Reading. ``weights_only=True``, unless the script trusts its files (trust.py): a pickle that names
anything but tensors, plain containers and data objects (data_objects.py) is refused, and nothing of
it is called. Before that every
entry's checksum is verified, which torch itself does not do, so that a damaged number is no silent
change of a weight.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pickle
import re
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

from smp_core.torch.checkpoint import data_objects
from smp_core.torch.checkpoint.trust import trusted
from smp_core.torch.exceptions import CheckpointError

_PART = ".smp-part"
_ARCHIVE = b"PK\x03\x04"  # how a zip archive begins


def save(path: Path, obj: object) -> None:
    """Write ``obj`` as `torch.save` does. ``path`` holds all of it when this returns.

    By pickle's protocol 2, the only one that can be read without running code.

    Raises CheckpointError, naming the path, if it cannot be written: a full disk, no such folder, no
    permission, an object that cannot be pickled. A file that was there before is then unchanged.
    """

    def fill(file: IO[bytes]) -> None:
        noting = _Noting(file)
        try:
            torch.save(obj, cast("IO[bytes]", noting), pickle_protocol=2)
        except RuntimeError:
            if noting.error is not None:
                raise noting.error from None
            raise
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: cannot be written: an object in it cannot be pickled ({error}). What was there "
                "before is unchanged"
            ) from error

    _write(path, fill)


def save_text(path: Path, text: str) -> None:
    """Write a text file, in UTF-8. Raises CheckpointError as :func:`save` does."""
    _write(path, lambda file: file.write(text.encode()))


def load(
    path: Path,
    what: str,
    map_location: Any = None,
    *,
    weights_only: bool | None = None,
    **options: Any,
) -> Any:
    """Read a file of :func:`save`, or of `torch.save`. Runs no code of the file, unless it is trusted.

    Args:
        what: what the file should hold, for messages: ``"the model of pp_rank 0"``.
        map_location: as of `torch.load`.
        weights_only: None: as the script trusts its files (trust.py).
        options: others of `torch.load`.

    Raises CheckpointError, naming the path, if the file is missing, torn, damaged, foreign, or holds
    objects that cannot be read without running code.
    """
    safe = not trusted() if weights_only is None else weights_only
    with _opened(path, what) as file:
        start = file.read(len(_ARCHIVE))
        size = file.seek(0, os.SEEK_END)
        if start == _ARCHIVE:
            _verify(file, path, what, size)
        elif _ARCHIVE.startswith(start):
            raise _torn(path, what, f"it ends after {size} bytes")
        file.seek(0)
        try:
            with warnings.catch_warnings():  # of other protocols of pickle, which it then refuses
                warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
                read = functools.partial(
                    torch.load, file, map_location, weights_only=safe, **options
                )
                return data_objects.load(file, read) if safe else read()
        except OSError as error:
            raise _unreadable(path, what, error) from error
        except Exception as error:
            if start != _ARCHIVE:
                reason = "it is no file that torch.save wrote"
            elif isinstance(error, pickle.UnpicklingError):
                reason = f"it cannot be read without running code ({why_not(error)})"
            else:
                reason = f"torch.load refuses it ({type(error).__name__}: {why_not(error)})"
            raise CheckpointError(
                f"{path}: expected {what}, but {reason}. {_RUN[not safe]}Give the path of a checkpoint of "
                "smp.save or smp.save_checkpoint"
            ) from error


#: The advice in the message about a file that cannot be read, by whether files may run code.
_RUN = {
    False: "Nothing of it was run. For a file that you trust: with smp.trust_checkpoints(). ",
    True: "",
}


def load_text(path: Path, what: str) -> str:
    """Read a text file. Raises CheckpointError if it is missing, or no text."""
    with _opened(path, what) as file:
        try:
            text: str = file.read().decode()
            return text
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{path}: expected {what}, found bytes that are no text ({error}). Remove the file, or "
                "give the path of another checkpoint"
            ) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it; one that is there already is fine."""
    with named(path, "cannot be made"):
        path.mkdir(parents=True, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Let the disk know the names in a folder: without it a rename may be lost in a power failure."""
    with contextlib.suppress(OSError):  # some file systems sync no folders
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clean(path: Path) -> None:
    """Remove the unfinished files beside ``path`` that interrupted saves have left."""
    with contextlib.suppress(OSError):
        start = f".{path.name}."
        for name in os.listdir(path.parent):
            if name.startswith(start) and name.endswith(_PART):
                _remove_if_dead(path.with_name(name))


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    clean(path)
    with named(path, "cannot be written"):
        file, part = _new_part(path)
        try:
            with file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        sync_folder(path.parent)


class _Noting:
    """A file that remembers its error: torch's writer in C++ goes on after one, and then raises
    another, of a wrong position, which names neither file nor cause.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _new_part(path: Path) -> tuple[IO[bytes], Path]:
    """A new file beside ``path``, locked for as long as it is open."""
    while True:
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PART}")
        file = open(part, "xb")  # noqa: SIM115  the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return file, part
        except BlockingIOError:
            pass  # somebody cleans at this moment, and will have removed it
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                return file, part  # no locks here: nothing is cleaned either
            file.close()
            raise
        file.close()


def _remove_if_dead(part: Path) -> None:
    with contextlib.suppress(OSError), open(part, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held while the writer lives
        os.unlink(part)


@contextlib.contextmanager
def named(path: Path, what: str) -> Iterator[None]:
    """Say of errors of the file system which file they are about."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path}: {what}: {error.strerror or error}. What was there before is unchanged. "
            f"{_ADVICE.get(error.errno or 0, 'Look at the folder, and save again')}"
        ) from error
    except RuntimeError as error:
        # So torch says that a write failed in C++. Others are bugs, and pass.
        if "write" not in str(error) and "writ" not in str(error):
            raise
        raise CheckpointError(
            f"{path}: {what}: {why_not(error)}. What was there before is unchanged"
        ) from error


_ADVICE = {
    errno.ENOSPC: "Make room, or give another path, and save again",
    errno.EDQUOT: "Make room, or give another path, and save again",
    errno.ENOENT: "Make the folder first, or give another path",
    errno.ENOTDIR: "A part of the path is a file: give another path",
    errno.EACCES: "Give a path that this process may write to",
    errno.EROFS: "Give a path that this process may write to",
    errno.EISDIR: "A folder has that name: give another one",
}


@contextlib.contextmanager
def _opened(path: Path, what: str) -> Iterator[IO[bytes]]:
    try:
        file = open(path, "rb")  # noqa: SIM115  closed below
    except FileNotFoundError as error:
        near = _neighbours(path)
        raise CheckpointError(
            f"{path}: expected {what}, and there is no such file ({near}). Give the path and tag of a "
            "checkpoint that was saved with these parallel degrees"
        ) from error
    except OSError as error:
        raise _unreadable(path, what, error) from error
    with file:
        yield file


class _Foreign(Exception):
    """An archive that torch.save would not have written."""


def _verify(file: IO[bytes], path: Path, what: str, size: int) -> None:
    """Raise CheckpointError unless every entry of the archive is as it was written."""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            packed = next((each for each in entries if each.compress_type), None)
            # Before anything is read: a small file may unpack to any size.
            if packed is None and sum(each.file_size for each in entries) <= size:
                damaged = archive.testzip()
            else:
                raise _Foreign
    except OSError as error:
        raise _unreadable(path, what, error) from error
    except _Foreign:
        raise CheckpointError(
            f"{path}: expected {what}, but the archive is compressed, or claims more than its {size} "
            "bytes: torch.save writes no such files. Give the path of a checkpoint of smp.save or "
            "smp.save_checkpoint"
        ) from None
    except Exception as error:
        # zipfile lets errors of many kinds through for an archive with damaged tables.
        raise _torn(path, what, f"after {size} bytes it is not whole ({error})") from error
    if damaged is not None:
        raise _torn(path, what, f"the checksum of its entry {damaged!r} is wrong")


def _torn(path: Path, what: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected {what}, but the file is torn or damaged: {reason}. Remove this checkpoint and "
        "resume from an older one"
    )


def _unreadable(path: Path, what: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected {what}, and it cannot be read: {error.strerror or error}"
    )


def _neighbours(path: Path) -> str:
    """The names in the folder of a path that does not exist, in words for a message."""
    try:
        names = sorted(name for name in os.listdir(path.parent) if not name.startswith("."))
    except OSError:
        return f"there is no folder {path.parent}"
    if not names:
        return f"{path.parent} is empty"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{path.parent} holds {', '.join(names[:8])}{more}"


def why_not(error: BaseException) -> str:
    """The reason of `torch.load`'s error, without its long advice."""
    text = str(error)
    named = re.search(r"GLOBAL (\S+)", text)
    if named is not None:
        return f"it names {named[1]}"
    advice, found, reason = text.partition("WeightsUnpickler error: ")
    return (reason if found else advice).strip().split("\n")[0].split(". ")[0].rstrip(".")
