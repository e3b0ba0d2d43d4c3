"""``smp.utils``: functions that public scripts import from the library's inside (API 1.1)."""

from __future__ import annotations

import torch

from smp_core import runtime
from smp_core.errors import ArgumentTypeError
from smp_core.torch.parameters.split import split_of

__all__ = ["get_distribution_axis", "hvd_average_grads", "rmsg"]


def hvd_average_grads() -> None:
    """Do nothing, since a step leaves averages over all replicas in ``p.grad``, whatever averages them: scripts of 2020
    call this between the step and the update. (INF, API 1.9: the sources have the name alone.)

    Raises NotInitializedError before ``smp.init``.
    """
    runtime.current("smp.hvd_average_grads")


def rmsg(message: object) -> str:
    """The message for a log, with this rank in front: ``[3] loss 0.5``. (INF, API 1.1: the sources have its name.)

    Raises NotInitializedError before ``smp.init``.
    """
    return f"[{runtime.current('smp.utils.rmsg').rank}] {message}"


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """The axis along which each tp rank has a slice of the parameter; None for one that each rank holds whole.

    ``torch.cat(smp.allgather(param, smp.TP_GROUP), axis)`` is the full parameter. Masters of 16-bit runs have their
    axis in ``optimizer.master_distribution_axis``. (INF, API 1.1: the sources name the function and its argument.)

    Raises ArgumentTypeError for a value that is no tensor.
    """
    if not isinstance(param, torch.Tensor):
        raise ArgumentTypeError(
            f"smp.utils.get_distribution_axis: param is a {type(param).__name__}, not a parameter"
        )
    split = split_of(param)
    return None if split is None else split.axis
