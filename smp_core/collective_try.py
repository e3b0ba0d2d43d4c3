"""The protocol by which all ranks agree on a failure: either the action went well on every rank, or every rank raises.

Each rank tries the action, and tells all ranks how it went. A rank that failed takes part in this exchange, too, so
that no rank waits for it. Each front end gives the form in which a failure travels, and the error that the other ranks
raise for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from smp_core.errors import SmpError, VerdictError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.transport.payload import allgather_alike

T = TypeVar("T")
F = TypeVar("F")


def text_of(error: BaseException) -> str:
    """The text of an error, or a sentence in its place if the error's class raises: a rank must be able to tell it."""
    try:
        return "".join(["", str(error)])  # of no class of the user's
    except Exception as why:
        return f"(its text cannot be had: str() raised {type(why).__name__})"


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

    A rank whose ``action`` failed raises its own error. Every other rank raises ``remote_error`` of the lowest failed
    rank. With ``same``, failed ranks above the lowest raise that error, too.

    Args:
        runtime: the rank's place in the world.
        action: the work of this rank.
        failure_of: gives an error of this rank in a form that can be pickled and compared.
        remote_error: gives the error that a rank raises for another rank's failure.
        same: whether failed ranks, too, raise the error of the lowest rank that failed.
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
    source, first = next(
        ((rank, each) for rank, (each, _) in enumerate(gathered) if each is not None), (None, None)
    )
    if first is None:
        return [each for _, each in gathered]
    if raised is not None and (failure == first or not same):
        raise raised
    remote = remote_error(first)
    if isinstance(remote, SmpError):
        remote.raised_by = source
    raise remote from raised
