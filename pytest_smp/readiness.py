"""What is ready before Hypothesis draws a property's first example, so that a slow or busy machine
fails no test that is correct.

Hypothesis takes the time of drawing (its health check ``too_slow``) and of each example (its setting
``deadline``). Ranks, imports and Hypothesis's own search for constants happen once in a session, and
would be timed with whichever example comes first.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
from collections.abc import Iterator
from typing import Any

import hypothesis
from hypothesis.internal.conjecture import providers

from pytest_smp.ranks.protocols import Executor, Job

_SETTINGS = "_hypothesis_internal_use_settings"

#: What is imported on first use: of ours, and of torch by DDP, FSDP2, checkpoints. The latter takes
#: seconds, so it is for properties with a deadline alone; a version of torch need not have them all.
_OURS = ("smp_core.torch", "pytest_smp.marker")
_TORCHS = ("torch._dynamo", "torch.profiler._cupti_monitor", "torch.utils.serialization.config")


def _nothing() -> None:
    """The body of a run that brings the ranks to life."""


def prepare(executor: Executor, ranks: int, function: Any, timeout: float) -> None:
    """Bring ``ranks`` ranks to life, and whatever examples of the property ``function`` would load.

    ``timeout`` is in seconds. Where ranks are processes their start is timed by nobody, and is left to
    the first example.
    """
    for name in _OURS:
        importlib.import_module(name)
    if executor.steady:
        if deadline_of(function) is not None:
            for name in _TORCHS:
                with contextlib.suppress(Exception):  # who does not use it needs no reason
                    importlib.import_module(name)
        executor.open(ranks).run(Job(body=_nothing, arguments=lambda _: ((), {}), timeout=timeout))
    # Numbers and strings in the source of local modules, of which all are drawn from now on. Searched
    # for in the middle of a draw, whenever modules have been imported since.
    search = getattr(providers, "_get_local_constants", None)  # private
    if search is not None:
        search()


def deadline_of(function: Any) -> datetime.timedelta | None:
    """The deadline that the property's author asked for, by ``@settings`` or in a profile; else None.

    Settings pass a deadline that they do not set themselves on as the same object. So an inherited one is known,
    and 200 ms that somebody wrote down are not mistaken for it.
    """
    settings = getattr(function, _SETTINGS, None)
    if settings is None or settings.deadline is _builtin_deadline():
        return None
    deadline: datetime.timedelta | None = settings.deadline
    return deadline


def _builtin_deadline() -> datetime.timedelta | None:
    builtin = getattr(
        hypothesis._settings, "default", None
    )  # private; get_profile("default") may be the user's
    if builtin is None:
        builtin = hypothesis.settings.get_profile("default")
    deadline: datetime.timedelta | None = builtin.deadline
    return deadline


@contextlib.contextmanager
def deadline_in_force(executor: Executor, function: Any) -> Iterator[None]:
    """Leave out a deadline that nobody asked for; every one where ranks are started and replaced
    within examples.
    """
    function = getattr(function, "__func__", function)  # a method's attributes are its function's
    settings = getattr(function, _SETTINGS, None)
    asked = deadline_of(function) if executor.steady else None
    if settings is None or asked is not None:
        yield
        return
    setattr(function, _SETTINGS, hypothesis.settings(settings, deadline=None))
    try:
        yield
    finally:
        setattr(function, _SETTINGS, settings)
