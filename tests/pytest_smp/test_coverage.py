"""pytest-cov and coverage see the lines that run on ranks, whatever the ranks are."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

pytest.importorskip("pytest_cov", reason="the figures are pytest-cov's")
pytestmark = pytest.mark.timeout(900)

#: Only some ranks come to some lines, a line is in one example alone, and one is never reached.
MODULE = """
import torch.distributed as dist

def lead():
    return "lead"

def follow(number):
    if number > 100:
        return "far"
    return "near"

def work(rank, number):
    if rank == 0:
        return lead()
    return follow(number)

def after():
    return "on a new rank"

def never():
    return "never"
"""

TESTS = """
import pytest
from hypothesis import example, given, settings, strategies as st

import mine

@pytest.mark.smp(ranks=2)
@settings(max_examples=3)
@example(number=1000)
@example(number=1)
@given(number=st.integers(0, 5))
def test_property(smp, number):
    mine.work(smp.rank(), number)

def body(crash):
    import os
    if crash and mine.dist.get_rank() == 1:
        os._exit(9)

def test_a_rank_is_replaced(smp_world, pytestconfig):
    if pytestconfig.getoption("smp_backend") == "gloo":
        assert str(smp_world.report(body, True, ranks=2).verdict) == "crashed"
    smp_world.run(mine.after, ranks=2)
"""


def backends() -> list[str]:
    return ["sim", "gloo", "mpi"]


def project(session: Session) -> None:
    session.pytester.makepyfile(mine=MODULE)
    session.pytester.makepyfile(test_it=TESTS)


def missed(session: Session, data: str = "coverage.json") -> dict[str, object]:
    """Missing lines and branches of the module, by line."""
    told = json.loads((session.pytester.path / data).read_text())["files"]["mine.py"]
    return {"lines": told["missing_lines"], "branches": told.get("missing_branches", [])}


NEVER = {"lines": [MODULE.strip().splitlines().index('    return "never"') + 1], "branches": []}


@pytest.mark.parametrize("backend", backends())
def test_lines_and_branches_on_ranks_are_covered(session: Session, backend: str) -> None:
    if backend == "mpi":
        pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    project(session)
    options = ["--cov=mine", "--cov-branch", "--cov-report=json", f"--smp-backend={backend}"]
    ended = session.run_apart("-p", "no:cacheprovider", *options, "--smp-ranks=2")
    assert ended.counts == {"passed": 2}
    assert missed(session) == NEVER
    # The last report says all: no file of a rank is left to be combined.
    assert [each.name for each in session.pytester.path.glob(".coverage*")] == [".coverage"]


def test_workers_of_xdist_give_their_ranks_lines(session: Session) -> None:
    project(session)
    options = ["--cov=mine", "--cov-report=json", "--smp-backend=gloo", "--smp-ranks=2", "-n1"]
    ended = session.run_apart("-p", "no:cacheprovider", *options)
    assert ended.counts == {"passed": 2}
    assert missed(session) == NEVER


def test_coverage_run_sees_them_too(session: Session) -> None:
    project(session)
    python = sys.executable
    run = ["-m", "coverage", "run", "--branch", "--source=.", "-m", "pytest"]
    options = ["-p", "no:cacheprovider", "--smp-backend=gloo", "--smp-ranks=2"]
    session.pytester.run(python, *run, *options).assert_outcomes(passed=2)
    session.pytester.run(python, "-m", "coverage", "json")
    assert missed(session) == NEVER
