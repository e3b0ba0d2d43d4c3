"""Bugs planted in streams.py: each must be caught by the test that it names."""

from __future__ import annotations

import hmac
import socket
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_core.transport.smddp import streams
from tests.smp_core.transport.smddp import test_inter_machine, test_streams
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught

BUGS = Bugs()


def streams_of(test: Callable[..., None], *args: Any) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        with test_streams.two_processes() as made:
            test(made, *args)

    return run


@BUGS.caught_by(streams_of(test_streams.test_bytes_come_in_order_and_before_the_end))
def bytes_that_wait_are_sent_from_the_last(patch: Patch) -> None:
    class Stack(deque[memoryview]):
        def extend(self, pieces: Any) -> None:
            self.extendleft(pieces)

    patch.setattr(streams, "deque", Stack)


@BUGS.caught_by(lambda _: test_streams.test_what_waits_is_sent_before_the_streams_close())
def a_process_ends_before_its_bytes_are_sent(patch: Patch) -> None:
    patch.setattr(streams.Streams, "_is_drained", lambda self: bool(self.closing))


@BUGS.caught_by(test_inter_machine.test_the_end_of_a_rank_that_has_forked_is_noticed)
def a_child_keeps_the_connections_of_its_parent(patch: Patch) -> None:
    patch.setattr(streams.Streams, "close_after_fork", lambda self: None)


@BUGS.caught_by(streams_of(test_streams.test_a_stranger_is_dropped_with_no_effect, "no proof"))
def a_connection_needs_no_proof(patch: Patch) -> None:
    patch.setattr(
        streams, "hmac", types.SimpleNamespace(digest=hmac.digest, compare_digest=lambda *_: True)
    )


@BUGS.caught_by(streams_of(test_streams.test_another_listener_is_refused))
def a_listener_needs_no_proof(patch: Patch) -> None:
    patch.setattr(
        streams, "hmac", types.SimpleNamespace(digest=hmac.digest, compare_digest=lambda *_: True)
    )


@BUGS.caught_by(streams_of(test_streams.test_a_stranger_is_dropped_with_no_effect, "an echo"))
def both_sides_prove_the_same(patch: Patch) -> None:
    def prove(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.digest(secret, hello + nonce, "sha256")

    patch.setattr(streams, "_proof_of", prove)


def _silence(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        streams_of(lambda made: test_streams.test_silence_is_dropped(patch, made))(_)


@BUGS.caught_by(_silence)
def silence_is_waited_for(patch: Patch) -> None:
    patch.setattr(streams.Streams, "_expire", lambda self, now: None)


@BUGS.caught_by(streams_of(test_streams.test_many_strangers_do_not_keep_a_member_out))
def strangers_are_kept(patch: Patch) -> None:
    patch.setattr(streams, "_MAX_UNAUTHENTICATED", 10**6)


def _stopped(name: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_streams, "LIMIT", 60)  # it takes some seconds without the bug, too
            test_streams.test_a_process_that_is_stopped_is_not_given_up(patch, name)

    return run


@BUGS.caught_by(_stopped("all at once"))
def no_room_is_taken_for_silence(patch: Patch) -> None:
    def limited(connection: socket.socket) -> None:
        prepare(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1600)

    prepare = streams._prepare
    patch.setattr(streams, "_prepare", limited)


def _see(patch: Patch, change: Callable[..., tuple[int, ...]]) -> None:
    """Have a look find other numbers."""
    info = streams._TCP_INFO
    changed = types.SimpleNamespace(
        size=info.size, unpack=lambda *args: change(*info.unpack(*args))
    )
    patch.setattr(streams, "_TCP_INFO", changed)


@BUGS.caught_by(_stopped("all at once"))
def each_silence_is_the_lack_of_an_answer(patch: Patch) -> None:
    _see(patch, lambda questions, *rest: (2, *rest))


@BUGS.caught_by(_stopped("one by one"))
def bytes_without_room_have_no_answer(patch: Patch) -> None:
    _see(patch, lambda questions, segments, sent, answered: (questions, segments, -1, answered))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
