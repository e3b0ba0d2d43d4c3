"""A script's wishes for its model before the model is partitioned: the partition of each module, and the way
of creating the modules (API 1.9).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import SupportsIndex

import torch
from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import PartitionError
from smp_core.torch.parameters import creation
from smp_core.torch.pipeline.placement import PARTITION
from smp_core.torch.tensor_parallel import wishes


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
    with PARTITION.inside(chosen):
        yield


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
            PARTITION.set(child, chosen)


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

    With ``tensor_parallelism`` it is ``smp.tensor_parallelism(**tensor_parallel_config)``, too; without, the
    ``tensor_parallel_config`` is not looked at (1.9).

    Raises ArgumentTypeError if ``dtype`` is no floating-point dtype, and as ``smp.tensor_parallelism`` does.
    """
    config = sessions.current("smp.model_creation").runtime.config
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(
            f"smp.model_creation: dtype must be a floating-point torch.dtype or None, not {dtype!r}"
        )
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with contextlib.ExitStack() as contexts:
            if tensor_parallelism:
                contexts.enter_context(wishes.tensor_parallelism(True, **tensor_parallel_config))
            contexts.enter_context(
                delay_param_initialization(config.delayed_parameter_initialization)
            )
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
