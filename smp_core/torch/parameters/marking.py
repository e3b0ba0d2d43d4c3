"""Marks on modules that are created inside of a context: the way in which ``smp.partition`` and
``smp.tensor_parallelism`` know their modules.

A mark is left on the module object itself, so it stays with a module that is assigned to its parent later, copied, or
pickled.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import nn

T = TypeVar("T")


class _Marking:
    """``nn.Module.__init__`` and ``__setstate__``, while any thread is in a context of any mark."""

    lock = threading.Lock()
    users = 0
    marks: list[Mark[object]] = []  # noqa: RUF012 - the marks of the process


class Mark(threading.local, Generic[T]):
    """One kind of mark: an attribute of modules, and the contexts that this thread is inside of, innermost last.

    Ranks may be threads, so each thread has contexts of its own.
    """

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute
        self.values: list[T] = []

    @contextlib.contextmanager
    def inside(self, value: T) -> Iterator[None]:
        """While entered, modules that this thread creates, copies or unpickles are marked with ``value``."""
        self.values.append(value)
        try:
            with _marking():
                yield
        finally:
            self.values.pop()

    def set(self, module: nn.Module, value: T) -> None:
        """Mark one module."""
        vars(module)[self.attribute] = value

    def of(self, module: nn.Module) -> T | None:
        """The value of a module's mark; None if it has none."""
        found: T | None = vars(module).get(self.attribute)
        return found

    def remove(self, module: nn.Module) -> None:
        """Remove the mark of one module."""
        vars(module).pop(self.attribute, None)


def new_mark(attribute: str) -> Mark[T]:
    """A kind of mark; one for each attribute in a process."""
    mark: Mark[T] = Mark(attribute)
    _Marking.marks.append(mark)  # type: ignore[arg-type]
    return mark


@contextlib.contextmanager
def _marking() -> Iterator[None]:
    """While entered, new modules get the marks of their thread. The class is patched while it has
    users, and afterwards is as before. If somebody has made a patch on top of this module's, both stay, and this
    module's does nothing outside of contexts.
    """
    with _Marking.lock:
        _Marking.users += 1
        if _Marking.users == 1:
            for name in ("__init__", "__setstate__"):
                _wrap(name)
    try:
        yield
    finally:
        with _Marking.lock:
            _Marking.users -= 1
            if _Marking.users == 0:
                for name in ("__init__", "__setstate__"):
                    mine = vars(nn.Module)[name]
                    if getattr(mine, "_smp_marks", False):
                        setattr(nn.Module, name, mine.__wrapped__)


def _wrap(name: str) -> None:
    original = vars(nn.Module)[name]

    @functools.wraps(original)
    def marked(self: nn.Module, /, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        for mark in _Marking.marks:
            if mark.values:
                mark.set(self, mark.values[-1])

    marked._smp_marks = True  # type: ignore[attr-defined]
    setattr(nn.Module, name, marked)
