"""Processes that a script starts by ``multiprocessing``, such as workers of a DataLoader, know what the script knows.

By the start methods ``spawn`` and ``forkserver`` a child is a new Python, which imports the script as ``__mp_main__``.
Before, it installs the import names, and the stand-in for ``torch.cuda`` if its parent has that.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
from collections.abc import Callable
from typing import Any


class _Preparation:
    """A part of the data that a child reads before it imports the script: reading it calls ``prepare_child``."""

    def __init__(self, devices: int | None) -> None:
        self._devices = devices

    def __reduce__(self) -> tuple[Callable[[int | None], None], tuple[int | None]]:
        return prepare_child, (self._devices,)


def prepare_child(devices: int | None) -> None:
    """Install the import names in this process, and the stand-in with so many devices, if there is a number."""
    from smp_core.import_names import install_import_names

    install_import_names()
    prepare_children(devices)
    if devices is not None:
        from smp_core.torch import cuda_stand_in

        cuda_stand_in.install(devices)


def prepare_children(devices: int | None) -> Callable[[], None]:
    """Have children that this process starts from now on call ``prepare_child``. The result undoes it."""
    original: Any = multiprocessing.spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "smp_core": _Preparation(devices)}

    def undo() -> None:
        multiprocessing.spawn.get_preparation_data = original

    multiprocessing.spawn.get_preparation_data = get_preparation_data
    return undo
