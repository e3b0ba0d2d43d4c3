"""Bugs planted in work.py: each must be caught by the test that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_core.transport.smddp import work
from tests.smp_core.transport.smddp import test_progress, test_work
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught, do_nothing

BUGS = Bugs()


@BUGS.caught_by(test_work.test_a_wait_has_a_limit_and_names_late_ranks)
def a_work_is_done_when_it_is_issued(patch: Patch) -> None:
    patch.setattr(work.SmddpWork, "wait", lambda self, timeout=None: True)


@BUGS.caught_by(
    test_progress.test_the_first_bucket_of_a_gradient_is_reduced_before_the_last_is_computed
)
def a_future_is_waited_for_as_it_is_asked_for(patch: Patch) -> None:
    future = work.SmddpWork.get_future

    def waited(self: Any) -> Any:
        self.wait()
        return future(self)

    patch.setattr(work.SmddpWork, "get_future", waited)


@BUGS.caught_by(test_work.test_a_future_of_an_operation_that_fails_has_its_error)
def a_future_has_the_outputs_of_what_failed(patch: Patch) -> None:
    patch.setattr(work._FutureResult, "_value", lambda self, _: self._work.outputs)


@BUGS.caught_by(test_work.test_a_rank_that_ends_in_a_backward_pass_of_ddp_is_an_error)
def a_future_has_an_exception_as_its_result(patch: Patch) -> None:
    patch.setattr(work._FutureResult, "_value", lambda self, _: self._error or self._work.result())


@BUGS.caught_by(test_work.test_a_future_has_the_limit_of_its_group)
def a_future_never_expires(patch: Patch) -> None:
    patch.setattr(work._FutureResult, "expire", do_nothing)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
