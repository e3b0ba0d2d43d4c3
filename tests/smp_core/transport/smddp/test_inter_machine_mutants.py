"""Bugs planted in inter_machine.py: each must be caught by the test that it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_core.transport.smddp import inter_machine, point_to_point, segment
from tests.smp_core.transport.smddp import (
    test_collectives,
    test_inter_machine,
    test_point_to_point,
    test_process_group,
    test_rounds,
)
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, between, check_caught

BUGS = Bugs()


@BUGS.caught_by(test_inter_machine.test_a_sender_that_leaves_is_known_though_its_relay_has_left)
def a_departure_announced_by_the_member_itself_is_ignored(patch: Patch) -> None:
    def departure(self: Any, member: int) -> str:
        if self._shared.streams.connections[self._peers[member].identity]:
            return self.segment.departure(member) if member in self._departures else ""
        return find(self, member)

    find = inter_machine.InterMachineTransport.departure
    patch.setattr(inter_machine.InterMachineTransport, "departure", departure)


def _sent(patch: Patch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Have the rounds sent with other arguments."""
    send = inter_machine.InterMachineTransport.send_round

    def changed(self: Any, *args: Any) -> None:
        send(self, *change(self, *args))

    patch.setattr(inter_machine.InterMachineTransport, "send_round", changed)


@BUGS.caught_by(*between(test_collectives.check_moves))
def the_row_that_is_sent_is_the_next_member_s(patch: Patch) -> None:
    def next_row(self: Any, number: int, length: int, ranges: Any) -> tuple[Any, ...]:
        most = self.segment.layout.row_bytes * self.segment.size

        def shifted(members: Any) -> Any:
            at = self.segment.layout.row_bytes
            return [(b + at, e + at) for b, e in ranges(members) if e + at <= most]

        return number, length, shifted

    _sent(patch, next_row)


@BUGS.caught_by(*between(test_collectives.check_moves))
def the_parts_that_are_sent_are_those_of_this_machine(patch: Patch) -> None:
    def others(self: Any, number: int, length: int, ranges: Any) -> tuple[Any, ...]:
        members = range(self.segment.size)
        return number, length, lambda there: ranges([m for m in members if m not in there])

    _sent(patch, others)


@BUGS.caught_by(
    test_inter_machine.test_bytes_go_once_to_each_machine_whose_members_read_them, "all_to_all"
)
def the_parts_of_all_members_are_sent(patch: Patch) -> None:
    def everything(self: Any, number: int, length: int, ranges: Any) -> tuple[Any, ...]:
        return number, length, lambda there: ranges(range(self.segment.size))

    _sent(patch, everything)


@BUGS.caught_by(*between(test_rounds.check_many_at_once))
def a_row_is_sent_from_the_slot_of_another_round(patch: Patch) -> None:
    patch.setattr(inter_machine, "ROUND_SLOTS", segment.ROUND_SLOTS // 2)


@BUGS.caught_by(*between(test_collectives.check_uneven))
def the_sizes_of_a_call_are_not_sent(patch: Patch) -> None:
    _sent(patch, lambda self, number, length, ranges: (number, 0, ranges))


@BUGS.caught_by(*between(test_point_to_point.check_more_messages_than_the_ring_has))
def the_sender_does_not_learn_that_messages_were_taken(patch: Patch) -> None:
    send = inter_machine.InterMachineTransport.send_link

    def without(self: Any, member: int, written: Any, counts: Any) -> None:
        send(self, member, written, [*counts[:2], 0, 0])

    patch.setattr(inter_machine.InterMachineTransport, "send_link", without)


@BUGS.caught_by(*between(test_point_to_point.check_messages))
def a_piece_of_a_message_is_not_sent(patch: Patch) -> None:
    send = inter_machine.InterMachineTransport.send_link

    def without(self: Any, member: int, written: Any, counts: Any) -> None:
        send(
            self,
            member,
            [each for each in written if each[1] - each[0] < point_to_point.PIECE_BYTES],
            counts,
        )

    patch.setattr(inter_machine.InterMachineTransport, "send_link", without)


@BUGS.caught_by(test_inter_machine.test_the_end_of_a_rank_that_has_forked_is_noticed)
def the_end_of_a_connection_is_not_announced(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "on_end", lambda self, identity: None)


@BUGS.caught_by(test_inter_machine.test_the_end_of_a_rank_ends_the_waits_for_it, "recv", "aba")
def a_receiver_of_another_machine_waits_for_ever(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "departure", lambda self, member: "")


def _left(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test = test_process_group.test_a_rank_that_leaves_the_group_ends_the_waits_for_it
        test_inter_machine.test_between_machines(folder, patch, test)


@BUGS.caught_by(_left)
def a_rank_leaves_unannounced_to_other_machines(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "announce", lambda self, why: None)


@BUGS.caught_by(test_inter_machine.test_twenty_groups_leave_nothing_behind)
def the_streams_stay_when_the_last_group_goes(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "leave", lambda self: None)


@BUGS.caught_by(
    test_inter_machine.test_a_member_that_writes_where_it_may_not_is_cut_off, "the end of another"
)
def a_process_may_speak_for_any_member(patch: Patch) -> None:
    receive = inter_machine.InterMachineTransport.receive

    def any_member(self: Any, identity: str, frame: Any) -> Any:
        return receive(self, self._peers[frame[2]].identity, frame)

    patch.setattr(inter_machine.InterMachineTransport, "receive", any_member)


@BUGS.caught_by(
    test_inter_machine.test_a_member_that_writes_where_it_may_not_is_cut_off, "the table of members"
)
def a_member_may_write_anywhere(patch: Patch) -> None:
    patch.setattr(
        inter_machine.InterMachineTransport,
        "_writable",
        lambda self, kind, member: (0, self.segment.layout.end),
    )


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
