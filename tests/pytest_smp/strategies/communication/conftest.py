"""The common parts of the tests of communication programs: steps written by hand, and running a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job, Report
from pytest_smp.strategies.communication import Program, Step
from pytest_smp.strategies.communication.program import Runnable


def _program(ranks: int, *calls: dict[str, Any], **groups: tuple[int, ...]) -> Program:
    steps = []
    for number, call in enumerate(calls):
        group = call.get("group", "")
        members = groups[group] if group in groups else tuple(range(ranks))
        step = Step(number, members=members, **{"shape": (1,), **call})
        lags = step.lags or (None,) * len(step.participants)
        steps.append(Step(**{**vars(step), "lags": lags}))
    return Program(ranks, tuple(steps), groups)


@pytest.fixture(scope="session")
def program() -> Callable[..., Program]:
    """A program from the keywords of its steps; of a synchronous call on all ranks only the
    operation has to be given.
    """
    return _program


@pytest.fixture(scope="session")
def report() -> Iterator[Callable[[Runnable], Report]]:
    """Run a program on `sim`."""
    executor = open_backend("sim")

    def run(program: Runnable) -> Report:
        job = Job(body=program.run, arguments=lambda rank: ((), {}), timeout=60)
        return executor.open(program.ranks).run(job)

    yield run
    executor.close()
