"""Preparation before Hypothesis draws a property's first example, so that a slow or busy machine
fails no correct test.

Hypothesis times the drawing (its health check ``too_slow``) and each example (its setting
``deadline``). The start of ranks, imports and Hypothesis's own search for constants happen once in a
session, and would otherwise be timed with the first example.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hypothesis
from hypothesis.internal.conjecture import providers

from pytest_smp.ranks.protocols import Executor, Job

_SETTINGS = "_hypothesis_internal_use_settings"

#: Modules that are imported on first use: ours, and those of torch that DDP, FSDP2 and checkpoints
#: import. Torch's take seconds, so only properties with a deadline import them beforehand; a version
#: of torch need not have them all.
_OURS = ("smp_core.torch", "pytest_smp.marker")
#: Folders of modules whose use of optimizers says nothing of the tests.
_NOT_OF_TESTS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[1] / name) + os.sep for name in ("smp_core", "pytest_smp")),
)
_TORCHS = ("torch._dynamo", "torch.profiler._cupti_monitor", "torch.utils.serialization.config")


_OPTIMIZERS_IMPORT = "torch._dynamo"
_OPTIMIZER = re.compile(rb"\boptim\b|Optimizer")  # torch's module, or the name of a class


def modules_for(modules: Iterable[ModuleType]) -> tuple[str, ...]:
    """The modules to import before the first run of tests in ``modules``: a process's first optimizer imports
    ``torch._dynamo`` for seconds, which would count against the run's limit.

    A module uses optimizers if its source, or that of a module that it has imported, names any.
    """
    sources = {}
    for module in modules:
        for value in (module, *vars(module).values()):
            home = value if isinstance(value, ModuleType) else sys.modules.get(_home(value))
            file = getattr(home, "__file__", None) or ""
            if home is not None and not file.startswith(_NOT_OF_TESTS):
                sources[file] = home
    for file in filter(os.path.isfile, sources):
        with contextlib.suppress(OSError):
            if _OPTIMIZER.search(Path(file).read_bytes()):
                return (_OPTIMIZERS_IMPORT,)
    return ()


def _home(value: object) -> str:
    name = getattr(value, "__module__", "") if isinstance(value, FunctionType | type) else ""
    return name if isinstance(name, str) else ""


def _nothing() -> None:
    """The empty body of the run that starts the ranks."""


def prepare(executor: Executor, ranks: int, function: Any, timeout: float) -> None:
    """Start ``ranks`` ranks and import the modules that examples of the property ``function`` would import.

    ``timeout`` is in seconds. Where ranks are processes, no deadline is in force, so they start with
    the first example.
    """
    for name in _OURS:
        importlib.import_module(name)
    if executor.steady:
        if deadline_of(function) is not None:
            for name in _TORCHS:
                with contextlib.suppress(Exception):  # a property may not need it
                    importlib.import_module(name)
        executor.open(ranks).run(Job(body=_nothing, arguments=lambda _: ((), {}), timeout=timeout))
    # Hypothesis draws numbers and strings from the source of local modules, and searches for them in the
    # middle of a draw, whenever modules were imported since the last search.
    search = getattr(providers, "_get_local_constants", None)  # private
    if search is not None:
        search()


def deadline_of(function: Any) -> datetime.timedelta | None:
    """The deadline that the property's author asked for, by ``@settings`` or in a profile; else None.

    Settings inherit a deadline as the same object. So identity tells Hypothesis's default of 200 ms
    from 200 ms that the author wrote.
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
    """While entered, drop the property's deadline if its author did not ask for it, or if the executor
    starts and replaces ranks within examples.
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
