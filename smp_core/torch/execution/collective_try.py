"""The agreement of all ranks on a failure, which travels in the form of failures.py.

At the end of a step the same holds: there the failure is part of a report (agreement.py).
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

    A rank on which ``action`` raised raises the same; the others raise ``failures.remote_failure`` of the lowest
    rank that failed: an error of ours as such, a user's as StepAbortedError, which says ``when``. If several ranks
    fail, their errors may differ; with ``same`` they all raise that of the lowest one.
    """
    return tries.collective_try(
        runtime,
        action,
        functools.partial(failures.failure_of, runtime, None),
        functools.partial(failures.remote_failure, when=when),
        same=same,
    )
