"""Wrapping a method that torch has in C++, so that C++ does not take the wrapper for an override.

A Python subclass that lacks an operation inherits the wrapper, which calls torch's method. There
pybind11 asks the instance for its attribute of that name: a Python function is an override, to be
called, and a function of C++ is none. If it found the wrapper, the two would call each other without
end; so it is shown torch's own method, and torch's own error comes out.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


class _Calling(threading.local):
    """The object one of whose methods this thread is in, in C++."""

    instance: object = None


_calling = _Calling()


def native_call(original: Any) -> Method:
    """``original``, a method in C++, as a function that says on which object it is called."""
    calling = _calling

    @functools.wraps(original)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        before, calling.instance = calling.instance, self
        try:
            return original(self, *args, **kwargs)
        finally:
            calling.instance = before

    return call


class NativeMethod:
    """A method of a class: ``wrapped``, but ``original`` to C++ that is asked to carry it out."""

    __slots__ = ("_original", "_wrapped")

    def __init__(self, original: Any, wrapped: Method) -> None:
        self._original, self._wrapped = original, wrapped

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self._wrapped
        if _calling.instance is instance:
            return self._original.__get__(instance, owner)
        return types.MethodType(self._wrapped, instance)
