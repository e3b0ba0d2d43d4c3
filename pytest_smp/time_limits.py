"""The time limits of runs.

A run has the whole limit (``--smp-timeout``, or the call's own). On rank processes Hypothesis shrinks
an example that hangs, and each attempt that hangs as well would take the whole limit again. So once an
example of a property has hung, further examples of that property in that test get less.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hypothesis import currently_in_test_context

_LEAST = 1.0  # seconds; an attempt of the shrinker that takes as long counts as hanging, too
_TIMES_SLOWEST = 10


@dataclasses.dataclass(slots=True)
class _Learnt:
    """About the runs of one body in the examples of one test."""

    slowest: float = 0.0  # seconds, of the runs that passed
    hung: bool = False


class TimeLimits:
    """The limits of a session's runs, and what the runs of the current test have taught."""

    def __init__(self) -> None:
        self._learnt: dict[object, _Learnt] = {}

    def new_test(self) -> None:
        """Forget the last test's runs: they say nothing of the next one's."""
        self._learnt.clear()

    def of(self, body: Callable[..., Any], timeout: float) -> float:
        """The limit of a run of ``body`` that may take ``timeout`` seconds.

        Outside of a property's examples nothing is tried again, and every run has its whole limit.
        """
        learnt = self._learnt.get(_identity(body))
        if learnt is None or not learnt.hung or not currently_in_test_context():
            return timeout
        return min(timeout, max(_LEAST, _TIMES_SLOWEST * learnt.slowest))

    def passed(self, body: Callable[..., Any], seconds: float) -> None:
        """A run of ``body`` passed."""
        learnt = self._learnt.setdefault(_identity(body), _Learnt())
        learnt.slowest = max(learnt.slowest, seconds)

    def hung(self, body: Callable[..., Any]) -> None:
        """A run of ``body`` took longer than its limit."""
        self._learnt.setdefault(_identity(body), _Learnt()).hung = True


def _identity(body: Callable[..., Any]) -> object:
    """A key that stays the same for a function that each example defines anew."""
    while isinstance(body, functools.partial):
        body = body.func
    return getattr(body, "__code__", type(body))
