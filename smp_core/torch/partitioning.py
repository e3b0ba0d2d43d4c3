"""A script's wishes for its model before the model is partitioned: the partition of each module, and the way
of creating the modules (API 1.9).

An index is left on the module object itself, so it stays with a module that is assigned to its parent
later, copied, or pickled.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import warnings
from collections.abc import Iterator
from typing import SupportsIndex

import torch
from torch import nn

from smp_core.config import IgnoredKeyWarning
from smp_core.errors import ArgumentTypeError
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import PartitionError, UnsupportedTrainingError
from smp_core.torch.parameters import creation
from smp_core.torch.pipeline.placement import MARK


class _Inside(threading.local):
    """The partitions that this thread is inside of, innermost last. Ranks may be threads."""

    def __init__(self) -> None:
        self.indices: list[int] = []


_inside = _Inside()


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Modules created inside go to partition ``index``, the pipeline rank that will own them.

    Where several are nested the innermost counts. "Created" is constructed, deep-copied or unpickled
    in this thread, whether or not the module is given to its parent inside. Without any, a module
    goes to ``default_partition``. Ignored under ``auto_partition``.

    Raises PartitionError at once for an index that is no partition, ArgumentTypeError for one that is
    no int, NotInitializedError before ``smp.init``. (API 1.9)
    """
    chosen = _index("smp.partition", index)
    if chosen is None:
        yield
        return
    _inside.indices.append(chosen)
    try:
        with _marking():
            yield
    finally:
        _inside.indices.pop()


def set_partition(module: nn.Module, index: int) -> None:
    """Assign an existing module, with everything below it, to partition ``index``.

    The last word counts: it overrides ``smp.partition``, and an earlier call for a module above. Used
    with ``auto_partition: False``, also after the model is wrapped, until it is partitioned (at the
    first step; at pipeline degree 1 there is nothing to choose). Ignored under ``auto_partition``.

    Raises PartitionError for an index that is no partition, and if the module's model is partitioned
    already; ArgumentTypeError for a value that is no module, or no int. (API 1.9)
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"smp.set_partition: module is a {type(module).__name__}, not a torch.nn.Module"
        )
    chosen = _index("smp.set_partition", index)
    session = sessions.current("smp.set_partition")
    model = session.model
    if (
        chosen is not None
        and session.runtime.config.pipeline_parallel_degree > 1
        and model is not None
        and model.partitioned
        and any(each is module for each in model.modules())
    ):
        raise PartitionError(
            f"smp.set_partition: the model that holds this {type(module).__name__} is partitioned already; "
            "assign modules before the first step"
        )
    if chosen is not None:
        for child in module.modules():
            vars(child)[MARK] = chosen


def _index(call: str, index: object) -> int | None:
    """The checked index; None under ``auto_partition``, where it says nothing."""
    if isinstance(index, bool) or not isinstance(index, SupportsIndex):
        raise ArgumentTypeError(f"{call}: index must be an int, not {index!r}")
    config = sessions.current(call).runtime.config
    if config.auto_partition:
        return None
    chosen, degree = operator.index(index), config.pipeline_parallel_degree
    if not 0 <= chosen < degree:
        raise PartitionError(
            f"{call}: partition {chosen} does not exist: with pipeline_parallel_degree {degree} "
            f"partitions run from 0 to {degree - 1}"
        )
    return chosen


class _Marking:
    """``nn.Module.__init__`` and ``__setstate__``, while any thread is in a partition."""

    lock = threading.Lock()
    users = 0


@contextlib.contextmanager
def _marking() -> Iterator[None]:
    """While entered, new modules get the mark of their thread. The class is patched while it has
    users, and afterwards is as before; a patch that somebody made on top of ours is left, with ours
    below it, which does nothing outside of partitions.
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
        if _inside.indices:
            vars(self)[MARK] = _inside.indices[-1]

    marked._smp_marks = True  # type: ignore[attr-defined]
    setattr(nn.Module, name, marked)


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters and buffers that are made inside get their memory and values only when the model is
    partitioned, on the ranks that own them; until then they are on the ``meta`` device.

    The values are those that the same code would have given without the context, bit for bit: see
    ``smp_core.torch.parameters.creation``. Nested contexts are one; ``enabled=False`` does nothing, and does not
    end an outer one. (API 1.9)
    """
    if not enabled:
        yield
        return
    with creation.delayed():
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: object,
) -> Iterator[None]:
    """The context to create a model in: ``dtype`` is torch's default dtype inside (None: as it is),
    and initialisation is delayed if the configuration has ``delayed_parameter_initialization``
    (API 8.21: the key and the context mean the same).

    ``tensor_parallel_config`` is not looked at unless ``tensor_parallelism`` is true (1.9), which is
    refused, with UnsupportedTrainingError, where ``tensor_parallel_degree`` is above 1, and warned of
    (IgnoredKeyWarning) where it is 1. Raises
    ArgumentTypeError if ``dtype`` is no floating-point dtype.
    """
    config = sessions.current("smp.model_creation").runtime.config
    if tensor_parallelism and config.tensor_parallel_degree > 1:
        raise UnsupportedTrainingError(
            "smp.model_creation: distributed modules (tensor_parallelism=True) are not available; each "
            "tensor-parallel rank holds a replica. Leave tensor_parallelism out"
        )
    if tensor_parallelism:
        warnings.warn(
            "smp.model_creation: tensor_parallelism=True has no effect: tensor_parallel_degree is 1",
            IgnoredKeyWarning,
            stacklevel=3,  # the with statement, above contextlib's frame
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(
            f"smp.model_creation: dtype must be a floating-point torch.dtype or None, not {dtype!r}"
        )
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with delay_param_initialization(config.delayed_parameter_initialization):
            yield
    finally:
        torch.set_default_dtype(before)


def is_tracing() -> bool:
    """Return whether the first step runs the whole model on this rank to learn how to cut it
    (API 1.2).
    """
    return sessions.current("smp.is_tracing").tracing


def num_microbatches() -> int:
    """The ``microbatches`` of the configuration (API 1.9)."""
    return sessions.current("smp.num_microbatches").runtime.config.microbatches
