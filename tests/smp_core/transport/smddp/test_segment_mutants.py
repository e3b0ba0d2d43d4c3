"""Bugs planted in segment.py: each must be caught by the test that it names."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from smp_core.transport.smddp import segment
from tests.smp_core.transport.smddp import test_inter_machine, test_process_group, test_segment
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught

BUGS = Bugs()


@BUGS.caught_by(lambda _: test_segment.test_the_sizes_of_a_thousand_members_have_room())
def all_groups_have_the_same_room_for_sizes(patch: Patch) -> None:
    patch.setattr(segment, "DESCRIPTION_BYTES_PER_MEMBER", 0)


@BUGS.caught_by(test_segment.test_the_end_of_a_rank_ends_the_waits_for_it, "all_reduce")
def a_killed_rank_may_still_come(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "departure", lambda self, member: "")


@BUGS.caught_by(test_process_group.test_a_rank_that_leaves_the_group_ends_the_waits_for_it)
def a_rank_leaves_unannounced(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "leave", segment.SharedSegment.release)


@BUGS.caught_by(test_process_group.test_a_hundred_groups_leave_nothing_behind)
def a_group_s_descriptor_stays_open(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "release", lambda self: None)


@BUGS.caught_by(test_process_group.test_a_hundred_groups_leave_nothing_behind)
def a_group_s_memory_stays_mapped(patch: Patch) -> None:
    patch.setattr(segment, "_munmap", lambda address, size: None)


@BUGS.caught_by(test_segment.test_no_room_for_shared_memory_is_an_error_of_every_rank)
def a_failure_to_make_the_memory_is_not_announced(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "refuse", lambda self, error: None)


@BUGS.caught_by(test_segment.test_the_end_of_a_rank_that_has_not_mapped_the_memory_ends_the_start)
def a_member_is_known_once_it_has_mapped_the_memory(patch: Patch) -> None:
    def process(self: Any, member: int) -> tuple[int, int]:
        row = self.layout.member(member)
        return self.count(row.process).value, self.count(row.process_start).value

    patch.setattr(segment.SharedSegment, "_process", process)


@BUGS.caught_by(test_segment.test_a_rank_may_map_the_memory_and_end_while_another_looks_for_it)
def a_member_is_absent_as_it_was_before(patch: Patch) -> None:
    def ended(self: Any) -> str:
        absent = [each for each in range(self.size) if not self._has_mapped(each)]
        return "; ".join(why for each in absent if (why := self._process_end(each)))

    patch.setattr(segment.SharedSegment, "_ended_before_mapping", ended)


@BUGS.caught_by(test_segment.test_all_members_hear_of_one_that_cannot_begin)
def only_the_first_member_waits_for_all(patch: Patch) -> None:
    wait = segment.SharedSegment.wait_for_all

    def first(self: Any, timeout: datetime.timedelta) -> None:
        if self.me == 0:
            wait(self, timeout)

    patch.setattr(segment.SharedSegment, "wait_for_all", first)


@BUGS.caught_by(test_segment.test_a_member_that_is_joining_has_not_ended)
def half_of_a_row_is_a_row(patch: Patch) -> None:
    def departure(self: Any, member: int) -> str:
        row = self.layout.member(member)
        pid, start = self.count(row.process).value, self.count(row.process_start).value
        return "has ended" if pid and segment._start_time(pid) != start else ""

    patch.setattr(segment.SharedSegment, "departure", departure)


@BUGS.caught_by(test_segment.test_a_start_that_fails_leaves_no_descriptor)
def a_descriptor_is_closed_when_all_have_come(patch: Patch) -> None:
    def wait(self: Any, timeout: datetime.timedelta) -> None:
        self._wait_for_all(timeout)
        self.release()

    patch.setattr(segment.SharedSegment, "wait_for_all", wait)


@BUGS.caught_by(
    test_inter_machine.test_the_end_of_a_rank_inside_of_an_operation_is_an_error_on_all_machines,
    "all_gather",
)
def rows_that_went_to_a_killed_rank_may_still_come(patch: Patch) -> None:
    def lost(self: Any, number: int) -> dict[int, str]:
        return {member: why for member, why in self.absent(number).items() if why}

    patch.setattr(segment.SharedSegment, "blocking_departures", lost)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
