"""The failed rank's identity for a debugger, which runs in the controller after the run.

While the debugger runs, this thread is the failed rank: its number and groups can be asked for, and
communication raises ThreadError, since the run is over.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

from pytest_smp.failures import Failure
from pytest_smp.proxies import the_smp
from smp_core import runtime
from smp_core.errors import ThreadError
from smp_core.transport import current_rank

_ELSEWHERE = "external"  # its ranks may be spread over machines


class _Gone:
    """Stands for an object that ended with the run: each access to an attribute raises ThreadError."""

    def __init__(self, rank: int, why: str) -> None:
        self._rank, self._why = rank, why

    def __getattr__(self, name: str) -> NoReturn:
        raise ThreadError(f"post-mortem of rank {self._rank}: {self._why} (`{name}` was asked for)")


class _Runtime(_Gone):
    """The runtime of a rank whose configuration is not known: the body may have given its own to smp.init."""

    def __init__(self, fabric: Any) -> None:
        super().__init__(fabric.rank, "which configuration the body gave smp.init is not known")
        self.rank, self.size, self.fabric, self.training = fabric.rank, fabric.size, fabric, None


class _Fabric(_Gone):
    """The fabric of a run that is over."""

    def __init__(self, failure: Failure) -> None:
        assert failure.root is not None
        super().__init__(failure.root, "the run is over, and its ranks cannot communicate")
        self.rank, self.size = failure.root, failure.ranks
        if failure.backend != _ELSEWHERE:
            self.local_rank, self.local_size = failure.root, failure.ranks
        self.objects = _Gone(failure.root, "the run is over, and its ranks cannot communicate")


def _name_globals(entry: types.TracebackType | None) -> None:
    """Give frames that came from a rank process, without their variables, the names of their
    modules, and ``smp``.
    """
    while entry is not None:
        names = entry.tb_frame.f_globals
        module = sys.modules.get(str(names.get("__name__")))
        if module is not None and vars(module) is not names:
            for name, value in {"smp": the_smp(), **vars(module)}.items():
                names.setdefault(name, value)
        entry = entry.tb_next


def _runtime_of(failure: Failure, fabric: Any) -> Any:
    """The failed rank's runtime, as far as it can be told now."""
    if failure.config:
        # An error here would end the session, and nobody would see the failure.
        with contextlib.suppress(Exception):
            return runtime.of_rank(failure.config, fabric)
    return _Runtime(fabric)


@contextlib.contextmanager
def of(failure: Failure, error: BaseException) -> Iterator[None]:
    """While entered, this thread is the rank that the failure is of, and ``error`` its exception."""
    _name_globals(error.__traceback__)
    if failure.root is None or current_rank.current() is not None:
        yield
        return
    fabric: Any = _Fabric(failure)
    context: Any = SimpleNamespace(
        rank=failure.root,
        size=failure.ranks,
        fabric=fabric,
        job=SimpleNamespace(parameters=None, automatic_init=False),
        runtime=_runtime_of(failure, fabric),
    )
    current_rank.set_current(context)
    try:
        yield
    finally:
        current_rank.set_current(None)
