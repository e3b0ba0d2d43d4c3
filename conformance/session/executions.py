"""Notes on the runs of a property's function, which the function itself makes.

A hook of another plugin may leave the function out, or keep its exception from the report. Hypothesis ends a
property of which no example ran with an exception, so the end of the function shows that there was one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conformance.session import amounts


class Execution:
    """The last run of a property's function.

    Args:
        item: the property, as it was collected.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._defined = _defined_function(item)
        self._drawn = _drawn_function(self._defined)
        self.completed = False  #: whether the function returned
        #: the names of fixtures of ours that others override
        self.replaced = _replaced_fixtures(item)
        self.few = False  #: whether its settings allowed fewer examples than every property draws

    @contextlib.contextmanager
    def watch(
        self, item: pytest.Item, on_failure: Callable[[BaseException], None]
    ) -> Iterator[None]:
        """Note the run of the function inside, and call ``on_failure`` with the exception that it raises."""
        self.completed = False
        with pytest.MonkeyPatch.context() as patch:
            # The end of a function in its place says nothing, nor does that of a decorator, which may catch exceptions.
            if _function(getattr(item, "obj", None)) is self._defined:
                patch.setattr(item, "obj", self._noted(item.obj, on_failure))  # type: ignore[attr-defined]
            yield

    def _noted(self, test: Any, on_failure: Callable[[BaseException], None]) -> Any:
        @functools.wraps(test)
        def noted(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            drawn = _drawn_function(self._defined)
            self.few = _draws_few(self._defined)
            try:
                result = test(*args, **kwargs)
            except BaseException as error:
                on_failure(error)
                raise
            self.completed = drawn is self._drawn
            return result

        return noted


def _function(test: Any) -> Any:
    return getattr(test, "__func__", test)


def _defined_function(item: Any) -> Any:
    """The function of an item as its module defines it, whatever a hook has put in its place since."""
    parent = getattr(item, "parent", None)
    return _function(item.obj if parent is None else getattr(parent.obj, item.originalname))


def _drawn_function(test: Any) -> Any:
    """The function that Hypothesis calls for each example, which a hook may replace; None of another test."""
    return getattr(getattr(test, "hypothesis", None), "inner_test", None)


def _replaced_fixtures(item: Any) -> list[str]:
    info = getattr(item, "_fixtureinfo", None)
    ours = ("pytest_smp.", "conformance.")
    return [
        name
        for name, made in (info.name2fixturedefs if info else {}).items()
        if made[0].func.__module__.startswith(ours)
        and not made[-1].func.__module__.startswith(ours)
    ]


def _draws_few(test: Any) -> bool:
    if _drawn_function(test) is None:
        return False
    from hypothesis import Phase, settings

    used = getattr(test, "_hypothesis_internal_use_settings", None) or settings()  # private
    return used.max_examples < 1 + amounts.LEAST_DRAWS or Phase.generate not in used.phases
