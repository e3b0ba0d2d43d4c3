"""Exceptions after which a test would not count: no executor, and no rank of a property, may end one by them."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis.errors import UnsatisfiedAssumption
from torch import distributed as dist

from conformance.session.verdicts import not_supported
from pytest_smp.plugin import controller_of
from pytest_smp.ranks.sim.executor import ThreadWorld
from smp_core.errors import BackendError

if TYPE_CHECKING:
    from pytest_smp import SmpWorld


def leave_by(error: BaseException) -> NoReturn:
    raise error


EXITS: dict[str, Callable[[], Any]] = {
    "reject": lambda: leave_by(UnsatisfiedAssumption("planted")),
    "SkipTest": lambda: leave_by(unittest.SkipTest("planted")),
    "skip": lambda: pytest.skip("planted"),
    "xfail": lambda: pytest.xfail("planted"),
    "not_supported": lambda: not_supported("planted"),
}


@pytest.mark.parametrize("leave", EXITS.values(), ids=EXITS)
def test_executor_ends_no_test(
    smp_world: SmpWorld, monkeypatch: pytest.MonkeyPatch, leave: Callable[[], Any]
) -> None:
    monkeypatch.setattr(ThreadWorld, "run", lambda *_: leave())
    with pytest.raises(BackendError, match="the executor of sim has raised"):
        smp_world.run(lambda: None, ranks=2)


@pytest.mark.parametrize("leave", EXITS.values(), ids=EXITS)
def test_rank_ends_no_property_of_the_suite(
    smp_world: SmpWorld,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    leave: Callable[[], Any],
) -> None:
    def body(fails: bool) -> None:
        if dist.get_rank() == 1:
            leave()
        assert not fails

    monkeypatch.setattr(controller_of(pytestconfig), "counts_every_example", True)
    with pytest.raises(BackendError, match="rank 1 has raised"):
        smp_world.run(body, False, ranks=2)
    with pytest.raises(AssertionError):
        smp_world.run(body, True, ranks=2)
