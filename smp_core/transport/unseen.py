"""Computations of a backend that the user's modes do not see.

A TorchDispatchMode or a TorchFunctionMode that a body has entered would count a backend's copies as the body's own
operations, and change the backend's results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_C: Any = torch._C
_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = _C._len_torch_function_stack


def unseen(function: Function) -> Function:
    """Run ``function`` apart from the modes of the calling thread. Without modes it costs two looks."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _dispatch_modes() and not _function_modes():
            return function(*args, **kwargs)
        with _C._DisableTorchDispatch(), _C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def hide(cls: type, names: Iterable[str]) -> None:
    """Make these methods of a class ``unseen``."""
    for name in names:
        setattr(cls, name, unseen(vars(cls)[name]))
