"""Bugs planted in rounds.py: each must be caught by the test that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_core.errors import UnsupportedError
from smp_core.transport.smddp import progress, rounds, segment
from tests.smp_core.transport.smddp import (
    test_collectives,
    test_inter_machine,
    test_progress,
    test_rounds,
)
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught, values

BUGS = Bugs()


@BUGS.caught_by(*values(test_rounds.check_many_at_once))
def every_slot_is_the_first(patch: Patch) -> None:
    write = rounds.Rounds._write_round

    def first(self: Any, operation: Any) -> None:
        self._slots = [self._slots[0]] * len(self._slots)
        write(self, operation)

    patch.setattr(rounds.Rounds, "_write_round", first)


@BUGS.caught_by(*values(test_rounds.check_equal_sizes_without_room))
def equal_sizes_are_read_where_they_are_cut(patch: Patch) -> None:
    gathered = rounds.Rounds.gathered_sizes

    def read(self: Any) -> Any:
        self.sizes_equal = False
        return gathered(self)

    patch.setattr(rounds.Rounds, "gathered_sizes", read)


@BUGS.caught_by(test_rounds.test_every_rank_learns_of_calls_that_differ)
def calls_are_not_compared(patch: Patch) -> None:
    def nothing(self: Any, operation: Any) -> None:
        self._calls += 1
        self.sizes_equal = False

    patch.setattr(rounds.Rounds, "_check_call", nothing)


@BUGS.caught_by(test_rounds.test_calls_of_different_lengths_differ_and_the_group_serves_on)
def the_second_round_is_written_before_the_first_was_compared(patch: Patch) -> None:
    def early(self: Any) -> Any:
        last = self._in_flight[-1] if self._in_flight else None
        if (
            last
            and last.rounds_written < last.transfer.rounds
            and self._written - self._read < rounds.AHEAD
        ):
            return last
        return after(self)

    after = rounds.Rounds._next
    patch.setattr(rounds.Rounds, "_next", early)


@BUGS.caught_by(test_rounds.test_different_sizes_without_room_are_an_error_of_every_rank)
def sizes_that_are_too_long_are_an_error_of_one_rank(patch: Patch) -> None:
    encode = rounds._encode

    def refused(*call: Any) -> Any:
        digest, description = encode(*call)
        if len(description) > segment.DESCRIPTION_BYTES:
            raise UnsupportedError("too long")
        return digest, description

    patch.setattr(rounds, "_encode", refused)


@BUGS.caught_by(test_rounds.test_a_rank_that_dies_before_it_arrives_has_not_come)
def a_rank_is_counted_before_it_has_arrived(patch: Patch) -> None:
    write = rounds.Rounds._write_round

    def early(self: Any, operation: Any) -> None:
        self.segment.rounds[self.me].value += 1
        write(self, operation)

    patch.setattr(rounds.Rounds, "_write_round", early)


@BUGS.caught_by(test_rounds.test_what_fails_inside_of_an_operation_on_one_rank_ends_it_on_all)
def a_failed_rank_announces_nothing(patch: Patch) -> None:
    patch.setattr(rounds.Rounds, "_fail", rounds.Rounds._break)


@BUGS.caught_by(test_rounds.test_a_rank_that_cannot_arrive_ends_the_operation_on_all)
def a_rank_that_cannot_arrive_announces_nothing(patch: Patch) -> None:
    patch.setattr(rounds.Rounds, "_fail", rounds.Rounds._break)


@BUGS.caught_by(*values(test_collectives.check_moves))
def a_call_is_described_once_in_a_slot(patch: Patch) -> None:
    describe = rounds.Rounds._describe

    def described(self: Any, operation: Any) -> None:
        slot = self._written % segment.ROUND_SLOTS
        if not self._slot_digests[slot]:
            describe(self, operation)

    patch.setattr(rounds.Rounds, "_describe", described)


@BUGS.caught_by(test_rounds.test_what_is_interrupted_inside_of_an_operation_ends_the_group)
def an_interruption_is_not_announced(patch: Patch) -> None:
    fail = rounds.Rounds._fail

    def failed(self: Any, error: BaseException) -> None:
        if isinstance(error, Exception):
            fail(self, error)

    patch.setattr(rounds.Rounds, "_fail", failed)


@BUGS.caught_by(test_progress.test_a_callback_issues_an_operation)
def callbacks_are_called_inside_of_a_step(patch: Patch) -> None:
    fail = rounds.RoundsOperation.fail

    def failed(self: Any, error: Exception | None) -> None:
        fail(self, error)
        progress.PROGRESS._settle()

    patch.setattr(rounds.RoundsOperation, "fail", failed)


@BUGS.caught_by(
    test_inter_machine.test_a_rank_sends_at_most_the_rounds_of_all_slots_before_they_are_received
)
def rounds_are_sent_before_there_is_room_for_them(patch: Patch) -> None:
    patch.setattr(rounds, "AHEAD", 2 * rounds.AHEAD)
    transfer = rounds.Transfer.__init__

    def further(self: Any, *args: Any, **options: Any) -> None:
        transfer(self, *args, **options)
        self.ahead = rounds.AHEAD

    patch.setattr(rounds.Transfer, "__init__", further)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
