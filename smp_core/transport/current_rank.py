"""The rank that the calling thread is, or the whole process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from smp_core.errors import BackendError, ThreadError


class CurrentJob(Protocol):
    """The job that a rank runs, as ``smp.init`` sees it.

    Attributes:
        parameters: those of ``smp.init``, if the body does not call it.
        automatic_init: whether the first call of the API initialises, with ``parameters``.
    """

    parameters: Mapping[str, Any] | None
    automatic_init: bool


class CurrentRank(Protocol):
    """The rank that a thread or a process is while it runs a body: the *context* that an executor makes.

    Attributes:
        rank: its position in the world.
        size: the number of ranks.
        job: the job that it runs.
        fabric: its part of the backend.
        runtime: the Runtime that ``smp.init`` makes; None before.
    """

    rank: int
    size: int
    fabric: Any
    runtime: Any

    @property
    def job(self) -> CurrentJob: ...


@runtime_checkable
class ReplaceableRank(CurrentRank, Protocol):
    """A rank in a process of its own, which can be replaced after the run.

    Attributes:
        retire: the reason why the process is not to serve another run; empty if it is to.
    """

    retire: str


_local = threading.local()
_PARENT = "_smp_started_by_rank"


class _Process:
    """The rank that a rank process is, in all of its threads, while it runs a body."""

    context: CurrentRank | None = None


def current() -> CurrentRank | None:
    """The rank that this thread is, or None where there is none."""
    context: CurrentRank | None = getattr(_local, "context", None)
    if context is not None:
        return context
    lent = getattr(_local, "adopted", None)
    if lent is not None and lent[1]():
        adopted_rank: CurrentRank = lent[0]
        return adopted_rank
    return _Process.context


@contextlib.contextmanager
def adopted(context: CurrentRank, lasts: Callable[[], bool]) -> Iterator[None]:
    """While entered, and ``lasts`` is true, the calling thread, which a rank has started, is that rank too."""
    outer = getattr(_local, "adopted", None)
    _local.adopted = context, lasts
    try:
        yield
    finally:
        _local.adopted = outer


def ranks_are_threads() -> bool:
    """Return whether the calling thread is a rank among others of this process."""
    return _Process.context is None and current() is not None


def retire(reason: str) -> None:
    """Have this rank's process replaced after the run; ``reason`` says why, in the log.

    Raises BackendError where the rank is no process of its own, or the run is nobody's.
    """
    context = current()
    if not isinstance(context, ReplaceableRank):
        why = (
            "ranks are threads of this one. Use a backend whose ranks are processes: --smp-backend=gloo"
            if ranks_are_threads()
            else "nobody replaces this one after a run. Start another one"
        )
        raise BackendError(f"a fresh process is needed ({reason}), and {why}")
    context.retire = reason


def set_process(context: CurrentRank | None) -> None:
    """Say which rank this process is from now on."""
    _Process.context = context


def set_current(context: CurrentRank | None) -> None:
    """Say which rank this thread is from now on."""
    _local.context = context


def parent_rank(thread: threading.Thread | None = None) -> int | None:
    """The rank that started this thread, or None."""
    rank: int | None = getattr(thread or threading.current_thread(), _PARENT, None)
    return rank


def refuse_child_thread() -> None:
    """Raise ThreadError in a thread that a rank started in a run that is over."""
    rank = parent_rank()
    if rank is not None:
        raise ThreadError(
            f"thread {threading.current_thread().name!r} was started by rank {rank}, whose run is over: "
            "where ranks are threads, smp and torch.distributed calls end with the run"
        )


class child_threads:
    """While entered, threads know the rank that started them.

    Args:
        adopt: called with the rank and the thread in a thread of a rank that is about to start another one.
    """

    def __init__(
        self, adopt: Callable[[CurrentRank, threading.Thread], None] | None = None
    ) -> None:
        self._adopt = adopt

    def __enter__(self) -> None:
        self._start = start = threading.Thread.start

        def start_and_tell(thread: threading.Thread) -> None:
            context = current()
            rank = context.rank if context is not None else parent_rank()
            if rank is not None:
                setattr(thread, _PARENT, rank)
            if context is not None and self._adopt is not None:
                self._adopt(context, thread)
            start(thread)

        threading.Thread.start = start_and_tell  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        threading.Thread.start = self._start  # type: ignore[method-assign]
