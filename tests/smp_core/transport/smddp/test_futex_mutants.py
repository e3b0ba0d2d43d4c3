"""Bugs planted in futex.py: each must be caught by the test that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_core.transport.smddp import futex
from tests.smp_core.transport.smddp import test_futex
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught

BUGS = Bugs()


def _refused_futex(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_futex.test_a_futex_call_that_fails_is_an_error(patch)


@BUGS.caught_by(_refused_futex)
def the_kernel_s_answer_is_not_read(patch: Patch) -> None:
    patch.setattr(futex, "_check", lambda result: None)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
