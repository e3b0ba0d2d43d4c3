"""The protocol by which all ranks agree on a failure: each tries, all hear how it went, and all go on or none does.

A rank that failed says so where the others wait for it, so nobody waits for what does not come. Each front end says in
which form a failure travels, and as which error the other ranks raise it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smp_core.errors import VerdictError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.transport.payload import allgather_alike

T = TypeVar("T")
F = TypeVar("F")


def collective_try(
    runtime: Runtime,
    action: Callable[[], T],
    failure_of: Callable[[Exception], F],
    remote_error: Callable[[F], Exception],
    *,
    same: bool = False,
) -> list[T]:
    """Run ``action`` on this rank, and agree with all ranks of the world that it went well. Every rank calls it.

    Returns the values of all ranks by world rank, of which equal ones may be one object.

    A rank on which ``action`` raised raises the same error; the others raise that of the lowest rank that failed, in
    another form. If several ranks fail, their errors may differ; with ``same`` they all raise that of the lowest one.

    Args:
        runtime: the rank's place in the world.
        action: the work of this rank.
        failure_of: gives an error of this rank in a form that can be pickled and compared.
        remote_error: gives the error that a rank raises for another rank's failure.
        same: whether all ranks raise the error of the lowest rank that failed.
    """
    value: T | None = None
    raised: Exception | None = None
    try:
        value = action()
    except VerdictError:
        raise  # of the whole world, which has ended: nobody is left to agree with
    except Exception as error:
        raised = error
    failure = None if raised is None else failure_of(raised)
    world = runtime.group(GroupKind.WORLD)
    gathered = allgather_alike(runtime.fabric.objects, (failure, value), world)
    first = next((each for each, _ in gathered if each is not None), None)
    if first is None:
        return [each for _, each in gathered]
    if raised is not None and (failure == first or not same):
        raise raised
    raise remote_error(first) from raised
