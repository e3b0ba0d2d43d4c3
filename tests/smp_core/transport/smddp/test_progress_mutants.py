"""Bugs planted in progress.py: each must be caught by the test that it names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_core.transport.smddp import futex, point_to_point, progress
from tests.smp_core.transport.smddp import test_progress, test_work
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught, do_nothing

BUGS = Bugs()


@BUGS.caught_by(test_progress.test_a_wait_that_is_woken_for_other_things_finds_who_has_ended)
def the_others_are_polled_when_a_sleep_was_long(patch: Patch) -> None:
    def wait(self: Any, done: Callable[[], bool], *_: object) -> bool:
        while not done():
            if not futex.sleep(self.progress(), progress._POLL_INTERVAL):
                self._poll()
        return True

    patch.setattr(progress.ProgressLoop, "_wait", wait)


@BUGS.caught_by(test_progress.test_an_operation_is_done_though_nobody_waits_for_it)
def the_progress_thread_is_not_woken(patch: Patch) -> None:
    patch.setattr(progress._ProgressThread, "wake", do_nothing)


@BUGS.caught_by(test_progress.test_an_operation_goes_on_beside_a_thread_that_waits_for_another)
def a_thread_that_waits_knows_all_channels(patch: Patch) -> None:
    patch.setattr(progress.ProgressLoop, "_has_waiter", lambda self: bool(self._waiting))


@BUGS.caught_by(test_progress.test_a_signal_s_handler_takes_the_lock_that_its_thread_waits_for)
def a_handler_waits_for_its_own_thread(patch: Patch) -> None:
    init = progress._PriorityLock.__init__

    def plain(self: Any) -> None:
        init(self)
        self._wanted = threading.Lock()

    patch.setattr(progress._PriorityLock, "__init__", plain)


@BUGS.caught_by(test_progress.test_a_rank_that_waits_for_a_call_advances_all_that_is_in_flight)
def a_call_that_is_waited_for_knows_its_own_group_alone(patch: Patch) -> None:
    begin = progress.ProgressLoop.begin

    def begun(self: Any, channel: Any, waits: bool = False) -> Any:
        blockers = begin(self, channel, waits)
        words = channel.progress() if waits and blockers is None else None
        return progress.Blockers(words, self._begun) if words else blockers

    patch.setattr(progress.ProgressLoop, "begin", begun)


@BUGS.caught_by(test_progress.test_a_message_arrives_though_its_ranks_wait_elsewhere)
def the_progress_thread_advances_no_messages(patch: Patch) -> None:
    begin = progress.ProgressLoop.begin

    def begun(self: Any, channel: Any, waits: bool = False) -> None:
        if not isinstance(channel, point_to_point.PointToPoint):
            begin(self, channel, waits)
        elif channel.progress():
            self._busy[channel] = None

    patch.setattr(progress.ProgressLoop, "begin", begun)


@BUGS.caught_by(test_work.test_a_future_learns_of_the_end_of_a_rank)
def the_progress_thread_does_not_poll(patch: Patch) -> None:
    patch.setattr(progress.ProgressLoop, "poll", do_nothing)


@BUGS.caught_by(test_progress.test_there_is_one_progress_thread_from_the_first_group_to_the_last)
def the_progress_thread_stays_when_the_last_group_is_destroyed(patch: Patch) -> None:
    patch.setattr(progress._ProgressThread, "end", do_nothing)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
