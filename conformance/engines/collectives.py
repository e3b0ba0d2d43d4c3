"""A recorder of exchanges, for engines that call the functions of torch.distributed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.engines.protocol import Exchange

#: Recorded functions of torch.distributed, with the operation that each one is noted as.
_FUNCTIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}

#: The recorder that each thread has entered; one for each thread, because ranks may be threads.
_entered = threading.local()


class CollectiveRecorder:
    """Notes each exchange that the current thread begins while the recorder is entered."""

    def __init__(self) -> None:
        self._found: list[Exchange] = []

    def take(self) -> list[Exchange]:
        """Return the exchanges noted since the last call, and forget them."""
        found, self._found = self._found, []
        return found

    def __enter__(self) -> None:
        _install()
        _entered.recorder = self

    def __exit__(self, *exception: object) -> None:
        _entered.recorder = None

    def note(self, operation: str, tensors: list[Any], group: Any) -> None:
        """Add one call to the exchanges; its largest argument gives the number of elements."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._found.append(Exchange(operation, tuple(ranks), max(map(_elements, tensors))))


@functools.cache
def _install() -> None:
    """Wrap the functions of torch.distributed, once in a process and for good.

    Without an entered recorder a wrapped function only calls the original.
    """
    for name, operation in _FUNCTIONS.items():
        if hasattr(dist, name):
            setattr(dist, name, _noted(getattr(dist, name), operation))


def _noted(function: Callable[..., Any], operation: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        recorder = getattr(_entered, "recorder", None)
        if recorder is None:
            return function(*args, **kwargs)
        given = (*args, *kwargs.values())
        groups = [each for each in given if isinstance(each, dist.ProcessGroup)]
        recorder.note(operation, list(given), groups[0] if groups else None)
        _entered.recorder = None  # a recorded function may call another one, which counts once
        try:
            return function(*args, **kwargs)
        finally:
            _entered.recorder = recorder

    return noted


def _elements(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.numel()
    return sum(map(_elements, given)) if isinstance(given, list | tuple) else 0
