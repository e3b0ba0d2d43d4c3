"""One protocol by which ranks agree on a failure: each tries, all hear how it went, and all go on or none does.

A rank that failed says so where the others wait for it, so nobody waits for what does not come. The failure travels in
the form of failures.py. The same holds of the end of a step, where the failure is part of a report (agreement.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smp_core.errors import VerdictError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.execution import failures
from smp_core.transport.payload import allgather_alike

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
    value: T | None = None
    raised: Exception | None = None
    try:
        value = action()
    except VerdictError:
        raise  # on the whole world, and it has ended: nobody is left to agree with
    except Exception as error:
        raised = error
    failure = None if raised is None else failures.failure_of(runtime, None, raised)
    world = runtime.group(GroupKind.WORLD)
    gathered = allgather_alike(runtime.fabric.objects, (failure, value), world)
    first = next((each for each, _ in gathered if each is not None), None)
    if first is None:
        return [each for _, each in gathered]
    if raised is not None and (failure == first or not same):
        raise raised
    raise failures.remote_failure(first, when) from raised
