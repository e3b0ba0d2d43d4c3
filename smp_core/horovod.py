"""The names of ``horovod.tensorflow`` for scripts that train with ``"horovod": True`` where Horovod is not installed.

Replicas are Horovod's ranks: a script of SMP averages over them, and reads its share of the data by them. Gradients are
averages already when a step ends, so the wrappers that average them are refused by name (API 2: no
``hvd.DistributedOptimizer``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, Protocol

from smp_core.comm import (
    CommGroup,
    allgather,
    local_rank,
    local_size,
)
from smp_core.comm import (
    dp_rank as rank,
)
from smp_core.comm import (
    dp_size as size,
)
from smp_core.errors import RankError
from smp_core.runtime import is_initialized

__all__ = [
    "broadcast_variables",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


class _Variable(Protocol):
    """A variable of TensorFlow, as far as it is used."""

    def numpy(self) -> object: ...

    def assign(self, value: object) -> object: ...


def init(*args: object, **kwargs: object) -> None:
    """Do nothing: ``smp.init`` joins the ranks."""


def shutdown() -> None:
    """Do nothing: the ranks leave when the script ends."""


def broadcast_variables(variables: Iterable[_Variable], root_rank: int) -> None:
    """Assign the values of the replica ``root_rank`` to the variables of all replicas; each rank of them calls it.

    Args:
        variables: variables of TensorFlow, as many and in the same order on all replicas.
        root_rank: the ``smp.dp_rank()`` of the replica.

    Raises RankError if there is no such replica.
    """
    if root_rank not in range(size()):
        raise RankError(
            f"hvd.broadcast_variables: root_rank={root_rank!r}: there are {size()} replicas, so it is one of "
            f"0 to {size() - 1}"
        )
    own = list(variables)
    values = [variable.numpy() for variable in own] if rank() == root_rank else None
    values = allgather(values, CommGroup.DP_GROUP)[root_rank]
    for variable, value in zip(own, values, strict=True):
        variable.assign(value)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"horovod.tensorflow has no {name!r} here: Horovod is not installed, and these names stand in for it: "
        f"{', '.join(__all__)}. Gradients of a step are averages over replicas already; for "
        "other values take smp.allgather"
    )
