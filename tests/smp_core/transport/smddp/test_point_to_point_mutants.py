"""Bugs planted in point_to_point.py: each must be caught by the test that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_core.transport.smddp import point_to_point
from tests.smp_core.transport.smddp import test_point_to_point, test_segment
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught, values

BUGS = Bugs()


@BUGS.caught_by(*values(test_point_to_point.check_messages))
def a_receive_takes_any_tag(patch: Patch) -> None:
    def matches(self: Any, packet: Any) -> bool:
        return self.peer in (point_to_point.ANY, packet.source)

    patch.setattr(point_to_point.InboundMessage, "matches", matches)


@BUGS.caught_by(*values(test_point_to_point.check_receives_are_matched_in_order))
def receives_are_matched_from_the_last(patch: Patch) -> None:
    receive = point_to_point.PointToPoint.receive

    def at_the_front(self: Any, inbound: Any) -> None:
        before = list(self._posted)
        receive(self, inbound)
        if len(self._posted) > len(before):
            self._posted[:] = [inbound, *before]

    patch.setattr(point_to_point.PointToPoint, "receive", at_the_front)


@BUGS.caught_by(*values(test_point_to_point.check_more_messages_than_the_ring_has))
def a_full_ring_is_written_again(patch: Patch) -> None:
    patch.setattr(point_to_point, "PACKET_SLOTS", point_to_point.PACKET_SLOTS * 2)
    link = point_to_point._Link.__init__

    def doubled(self: Any, *args: Any) -> None:
        patch.setattr(point_to_point, "PACKET_SLOTS", point_to_point.PACKET_SLOTS // 2)
        link(self, *args)
        patch.setattr(point_to_point, "PACKET_SLOTS", point_to_point.PACKET_SLOTS * 2)
        self.ring = self.ring * 2

    patch.setattr(point_to_point._Link, "__init__", doubled)


@BUGS.caught_by(*values(test_point_to_point.check_messages))
def a_long_message_is_its_first_piece(patch: Patch) -> None:
    init = point_to_point.OutboundMessage.__init__

    def short(self: Any, *args: Any) -> None:
        init(self, *args)
        self.payload = self.payload.copy()
        self.payload[point_to_point.PIECE_BYTES :] = 0

    patch.setattr(point_to_point.OutboundMessage, "__init__", short)


@BUGS.caught_by(test_point_to_point.test_a_message_that_differs_is_an_error_on_both_sides)
def the_sender_does_not_learn_what_was_received(patch: Patch) -> None:
    def matched(self: Any, member: int, send: Any, signature: str) -> None:
        send.done = True

    patch.setattr(point_to_point.PointToPoint, "_on_ack", matched)


@BUGS.caught_by(test_segment.test_the_end_of_a_rank_ends_the_waits_for_it, "recv")
def a_killed_sender_may_still_send(patch: Patch) -> None:
    patch.setattr(point_to_point.PointToPoint, "check", lambda self: None)


@BUGS.caught_by(test_point_to_point.test_the_end_of_a_sender_that_was_not_answered_ends_the_receive)
def an_ack_begins_again_what_has_ended(patch: Patch) -> None:
    def sent(receive: Any) -> None:
        receive.done = not receive.long

    patch.setattr(point_to_point.PointToPoint, "_on_ack_sent", staticmethod(sent))


@BUGS.caught_by(
    test_point_to_point.test_an_ack_of_a_member_that_was_given_up_does_not_end_the_progress_thread
)
def every_ack_is_to_a_send_in_flight(patch: Patch) -> None:
    class Sends(dict[int, Any]):
        def pop(self, number: int, *_: Any) -> Any:
            return super().pop(number)

    made = point_to_point.PointToPoint.__init__

    def make(self: Any, *args: Any) -> None:
        made(self, *args)
        self._sends = Sends()

    patch.setattr(point_to_point.PointToPoint, "__init__", make)
    check = point_to_point.PointToPoint.check

    def checked(self: Any) -> None:
        check(self)
        self._sends = Sends(self._sends)

    patch.setattr(point_to_point.PointToPoint, "check", checked)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
