"""Notes on the runs of a property's function, which the function itself makes.

A hook of another plugin may leave the function out, or keep its exception from the report. Hypothesis ends a
property of which no example ran with an exception, so the end of the function shows that there was one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class Execution:
    """The last run of a property's function.

    Args:
        item: the property, as it was collected.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._function = _function(item)
        self.completed = False  #: whether the function returned

    @contextlib.contextmanager
    def watch(
        self, item: pytest.Item, on_failure: Callable[[BaseException], None]
    ) -> Iterator[None]:
        """Note the run of the function inside, and call ``on_failure`` with the exception that it raises."""
        self.completed = False
        with pytest.MonkeyPatch.context() as patch:
            # The end of another function, which a hook has put in its place, says nothing.
            if _function(item) is self._function:
                patch.setattr(item, "obj", self._noted(item.obj, on_failure))  # type: ignore[attr-defined]
            yield

    def _noted(self, test: Any, on_failure: Callable[[BaseException], None]) -> Any:
        @functools.wraps(test)
        def noted(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            try:
                result = test(*args, **kwargs)
            except BaseException as error:
                on_failure(error)
                raise
            self.completed = True
            return result

        return noted


def _function(item: pytest.Item) -> Any:
    """The function of an item below its decorators."""
    test: Any = getattr(item, "obj", None)
    return inspect.unwrap(getattr(test, "__func__", test))
