"""The agreement of all ranks on a failure, which travels in the form of failures.py.

At the end of a step the ranks agree in another exchange, in which a failure is part of a report (agreement.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from smp_core import collective_try as tries
from smp_core.runtime import Runtime
from smp_core.torch.execution import failures

T = TypeVar("T")


def collective_try(
    runtime: Runtime, action: Callable[[], T], when: str, *, same: bool = False
) -> list[T]:
    """Run ``action`` on this rank, and agree with all ranks of the world that it went well; gives the values of all
    ranks, of which equal ones may be one object. Every rank of the world calls it.

    A rank whose ``action`` failed raises its own error. Every other rank raises ``failures.remote_failure`` of the
    lowest failed rank: an error of this package as such, a user's as StepAbortedError, which says ``when``. With
    ``same``, failed ranks above the lowest raise that error, too.
    """
    return tries.collective_try(
        runtime,
        action,
        functools.partial(failures.failure_of, runtime, None),
        functools.partial(failures.remote_failure, when=when),
        same=same,
    )
