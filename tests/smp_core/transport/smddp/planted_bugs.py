"""Bugs that are planted in modules of `smddp`, and the tests that must catch them.

A bug is planted before the ranks are forked, so that each rank has it.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.smp_core.transport.smddp import rank_processes, test_streams
from tests.smp_core.transport.smddp.rank_processes import check_values

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Bug:
    """A bug and its test, which is called with a folder."""

    plant: Callable[[Patch], None]
    by: Callable[[Path], None]


class Bugs(list[Any]):
    """The bugs of a module, as parameters of a test."""

    def caught_by(
        self, test: Callable[..., None], *args: Any
    ) -> Callable[[Callable[[Patch], None]], None]:
        """Enter a bug that a test must catch; its arguments after the folder are ``args``."""

        def enter(plant: Callable[[Patch], None]) -> None:
            bug = Bug(plant, lambda folder: test(folder, *args))
            self.append(pytest.param(bug, id=plant.__name__))

        return enter


def values(check: Callable[[int], None]) -> tuple[Any, ...]:
    """The arguments of ``caught_by`` for a check of ranks on one machine."""
    return check_values, check


def between(check: Callable[[int], None]) -> tuple[Any, ...]:
    """The arguments of ``caught_by`` for a check of ranks on two machines."""
    return check_values, check, "aba"


def do_nothing(*_: Any) -> None:
    """The body of a function whose work a bug leaves out."""


def check_caught(bug: Bug, patch: Patch, folder: Path) -> None:
    """Plant a bug; its test must fail."""
    patch.setattr(rank_processes, "LIMIT", datetime.timedelta(seconds=15))
    patch.setattr(test_streams, "LIMIT", 3)
    bug.plant(patch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        bug.by(folder)
