"""Files and folders of this machine, where SageMaker's arguments may also name objects of S3."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from smp_core.errors import ArgumentError, ArgumentTypeError

#: The channel of inputs that are no dict, as SageMaker names it.
_CHANNEL = "training"


def is_remote(given: object) -> bool:
    """Return whether an argument is a URI of S3."""
    return isinstance(given, str) and given.startswith("s3://")


def local_path(given: object, what: str) -> Path:
    """The absolute path that an argument names, as a path or a ``file://`` URI.

    Raises ArgumentError for a URI of another kind, and ArgumentTypeError for what is neither; ``what`` names the
    argument.
    """
    if not isinstance(given, str | os.PathLike):
        raise ArgumentTypeError(
            f"{what} is a {type(given).__name__}: give a path or a file:// URI of this machine"
        )
    if is_remote(given):
        raise ArgumentError(
            f"{what} is {given}: nothing is fetched from S3 here. Copy it first "
            f"(aws s3 sync {given} FOLDER) and give the folder"
        )
    if isinstance(given, str) and "://" in given:
        uri = urlsplit(given)
        if uri.scheme != "file" or uri.netloc not in ("", "localhost"):
            raise ArgumentError(f"{what} is {given}: give a path or a file:// URI of this machine")
        given = unquote(uri.path)
    return Path(given).resolve()


def local_folder(given: object, what: str) -> str:
    """The absolute path of a folder that an argument names. Raises ArgumentError if there is none, as `local_path`."""
    path = local_path(given, what)
    if not path.is_dir():
        found = "is no folder" if path.exists() else "does not exist"
        raise ArgumentError(f"{what} is {given}: {path} {found}")
    return str(path)


def channel_folders(inputs: object) -> dict[str, str]:
    """The folder of each channel that the inputs of ``fit`` name: one for all, or a dict by channel."""
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        return {name: local_folder(each, f"inputs[{name!r}]") for name, each in inputs.items()}
    return {_CHANNEL: local_folder(inputs, "inputs")}
