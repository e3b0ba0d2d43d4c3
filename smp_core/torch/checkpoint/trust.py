"""The permission that lets checkpoints run code when they are loaded: not given, unless the script gives it.

A pickle can name any function. So the objects that are saved are limited to those that need none, and files
are read without calling any. A script that keeps objects of its own classes in checkpoints, and trusts
everybody who can write to the folder, lifts both limits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

from smp_core.variables import TRUST_CHECKPOINTS

_trusted: ContextVar[bool | None] = ContextVar("_trusted", default=None)


@contextlib.contextmanager
def trust_checkpoints(enabled: bool = True) -> Iterator[None]:
    """Inside, ``smp.save`` and ``smp.save_checkpoint`` take any object that can be pickled, and
    ``smp.load`` and ``smp.resume_from_checkpoint`` run what files say. Every rank enters it.

    Only for files that nobody else can write: loading one runs its code with the rights of the script.
    ``SMP_TRUST_CHECKPOINTS=1`` in the environment says the same for a whole script; ``enabled=False``
    takes it back inside.
    """
    token = _trusted.set(bool(enabled))
    try:
        yield
    finally:
        _trusted.reset(token)


def trusted() -> bool:
    """Return whether files may run code now."""
    said = _trusted.get()
    return os.environ.get(TRUST_CHECKPOINTS) == "1" if said is None else said
