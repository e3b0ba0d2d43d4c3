"""Bugs planted in the `smddp` process group: each must be caught by the test of the group that it names.

A bug is planted before the ranks are forked, so that each rank has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hmac
import threading
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp_core.errors import UnsupportedError
from smp_core.transport.checked_group import CheckedGroup
from smp_core.transport.smddp import (
    collectives,
    flat,
    folding,
    futex,
    inter_machine,
    point_to_point,
    process_group,
    progress,
    rounds,
    segment,
    streams,
    work,
)
from tests.smp_core.transport.smddp import rank_processes
from tests.smp_core.transport.smddp import test_folding as fold_tests
from tests.smp_core.transport.smddp import test_helper_thread as progress_tests
from tests.smp_core.transport.smddp import test_machines as machine_tests
from tests.smp_core.transport.smddp import test_process_group as tests
from tests.smp_core.transport.smddp import test_streams as stream_tests

Patch = pytest.MonkeyPatch
Caught = Callable[[Path], None]


@dataclasses.dataclass(frozen=True)
class _Bug:
    plant: Callable[[Patch], None]
    by: Caught


class _NoLock(contextlib.nullcontext[None]):
    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass


BUGS: list[Any] = []


def caught_by(test: Callable[..., None], *args: Any) -> Callable[[Callable[[Patch], None]], None]:
    """Enter a bug that a test must catch; its arguments after the folder are ``args``."""

    def enter(plant: Callable[[Patch], None]) -> None:
        bug = _Bug(plant, lambda folder: test(folder, *args))
        BUGS.append(pytest.param(bug, id=plant.__name__))

    return enter


def values(check: Callable[[int], None]) -> tuple[Any, ...]:
    return tests.test_values, check


# Sums.


def _all_bits(op: str, dtype: str) -> Callable[[Path], None]:
    return lambda _: fold_tests.test_the_bits_are_those_of_the_published_order(op, dtype)


@caught_by(_all_bits("SUM", "float32"))
def sums_go_from_the_first_rank_to_the_last(patch: Patch) -> None:
    def fold(rows: Any, combine: Any, result: Any) -> None:
        result[:] = rows[0]
        for row in rows[1:]:
            combine(result, row, out=result)

    patch.setattr(folding, "_fold", fold)


@caught_by(_all_bits("SUM", "bfloat16"))
def halves_are_added_as_halves(patch: Patch) -> None:
    patch.setattr(folding, "_HALVES", ())
    reduced = folding.reduce_tensors

    def in_halves(tensors: Any, op: str) -> Any:
        first, *rest = tensors
        for each in rest:
            first = first + each
        return first if first.dtype is torch.bfloat16 else reduced(tensors, op)

    patch.setattr(folding, "reduce_tensors", in_halves)


@caught_by(_all_bits("AVG", "float32"))
def a_mean_is_a_sum(patch: Patch) -> None:
    fold = folding.fold_rows
    patch.setattr(
        fold_tests,
        "fold_rows",
        lambda rows, dtype, op, target: fold(rows, dtype, "SUM" if op == "AVG" else op, target),
    )


@caught_by(_all_bits("BOR", "int32"))
def a_bitwise_or_is_exclusive(patch: Patch) -> None:
    patch.setitem(folding._COMBINE, "BOR", np.bitwise_xor)


# Rounds, and the bytes in them.


@caught_by(*values(tests.check_reductions))
def the_last_part_of_a_reduction_is_cut(patch: Patch) -> None:
    two_hops = collectives._two_hops

    def cut(group: Any, mine: Any, target: Any, dtype: Any, op: str) -> Any:
        return two_hops(group, mine[:-64], target[:-64], dtype, op)

    patch.setattr(collectives, "_two_hops", cut)


@caught_by(*values(tests.check_reductions))
def parts_end_inside_of_an_element(patch: Patch) -> None:
    patch.setattr(collectives, "_LINE", 1)


@caught_by(*values(tests.check_moves))
def what_is_written_in_place_is_sent(patch: Patch) -> None:
    patch.setattr(collectives, "copied_if_shared", lambda source, targets, same: source)


@caught_by(*values(tests.check_moves))
def a_row_is_the_next_member_s(patch: Patch) -> None:
    scatter = collectives._scatter_rows

    def shifted(group: Any, rows: Any, target: Any) -> Any:
        return scatter(group, None if rows is None else np.roll(rows, 1, axis=0), target)

    patch.setattr(collectives, "_scatter_rows", shifted)


@caught_by(*values(tests.check_moves))
def every_member_writes_a_broadcast(patch: Patch) -> None:
    broadcast = collectives._broadcast_slot

    def written(group: Any, mine: Any, length: int, target: Any) -> Any:
        nothing = np.zeros(length, np.uint8)
        return broadcast(group, nothing if mine is None else mine, length, target)

    patch.setattr(collectives, "_broadcast_slot", written)


@caught_by(*values(tests.check_moves))
def a_long_operation_has_a_round_too_few(patch: Patch) -> None:
    patch.setattr(collectives, "_rounds_of", lambda length, piece: max(length // piece, 1))


@caught_by(*values(tests.check_uneven))
def the_longest_part_is_this_member_s(patch: Patch) -> None:
    def own(group: Any, call: Any, sizes: Any, gathers: bool) -> int:
        return max(each.numel() for each in call.brings)

    patch.setattr(collectives, "_check_pairs", own)


@caught_by(*values(tests.check_uneven))
def the_first_round_of_an_uneven_operation_is_its_last(patch: Patch) -> None:
    patch.setattr(collectives, "_pairwise", lambda group, transfer, check, piece: transfer)


@caught_by(*values(tests.check_many_at_once))
def every_slot_is_the_first(patch: Patch) -> None:
    write = rounds.Rounds._write_round

    def first(self: Any, operation: Any) -> None:
        self._slots = [self._slots[0]] * len(self._slots)
        write(self, operation)

    patch.setattr(rounds.Rounds, "_write_round", first)


@caught_by(tests.test_a_wait_has_a_limit_and_names_late_ranks)
def a_work_is_done_when_it_is_issued(patch: Patch) -> None:
    patch.setattr(work.SmddpWork, "wait", lambda self, timeout=None: True)


@caught_by(*values(tests.check_nothing_is_written_to_tensors_without_elements))
def a_tensor_without_elements_has_one(patch: Patch) -> None:
    def as_bytes(tensor: Any) -> Any:
        view = tensor.view(-1)
        if view.stride(0) != 1:
            view = view.as_strided((1,), (1,))
        return view.view(torch.uint8).numpy()

    patch.setattr(flat, "_bytes", as_bytes)


@caught_by(*values(tests.check_any_source))
def a_transposed_output_is_not_written(patch: Patch) -> None:
    patch.setattr(flat.Target, "finish", lambda self: None)


@caught_by(*values(tests.check_views))
def a_negative_view_is_read_as_it_lies(patch: Patch) -> None:
    patch.setattr(flat, "_plain", lambda tensor: tensor.is_contiguous())


@caught_by(*values(tests.check_mixed_dtypes))
def all_outputs_of_a_call_have_the_dtype_of_the_first(patch: Patch) -> None:
    def as_the_first(group: Any, rows: Any, target: Any, call: Any) -> Any:
        sink = collectives._folded(target.bytes, call.gets[0].dtype, call.op)
        return collectives._then(
            collectives._exchange_blocks(group, rows, target.bytes.size, sink), target
        )

    patch.setattr(collectives, "_exchange_mixed", as_the_first)


@caught_by(*values(tests.check_storages_can_be_resized))
def the_storage_of_a_tensor_is_numpy_s(patch: Patch) -> None:
    patch.setattr(flat, "_bytes", lambda tensor: tensor.view(-1).view(torch.uint8).numpy())


@caught_by(*values(tests.check_equal_sizes_without_room))
def equal_sizes_are_read_where_they_are_cut(patch: Patch) -> None:
    gathered = rounds.Rounds.gathered_sizes

    def read(self: Any) -> Any:
        self.sizes_equal = False
        return gathered(self)

    patch.setattr(rounds.Rounds, "gathered_sizes", read)


@caught_by(*values(tests.check_memory_of_large_tensors))
def tensors_are_copied_before_they_are_sent(patch: Patch) -> None:
    patch.setattr(collectives, "read", lambda tensors: flat.read(tensors).copy())


@caught_by(tests.test_a_step_of_fsdp_is_that_of_the_whole_model)
def a_part_of_a_scattered_sum_is_the_next_member_s(patch: Patch) -> None:
    exchange = collectives._exchange_blocks

    def shifted(group: Any, rows: Any, *rest: Any) -> Any:
        return exchange(group, None if rows is None else np.roll(rows, 1, axis=0), *rest)

    patch.setattr(collectives, "_exchange_blocks", shifted)


# Calls that differ.


@caught_by(tests.test_every_rank_learns_of_calls_that_differ)
def calls_are_not_compared(patch: Patch) -> None:
    def nothing(self: Any, operation: Any) -> None:
        self._calls += 1
        self.sizes_equal = False

    patch.setattr(rounds.Rounds, "_check_call", nothing)


@caught_by(tests.test_every_rank_learns_of_calls_that_differ)
def a_size_that_differs_is_no_error(patch: Patch) -> None:
    patch.setattr(collectives, "_fits", lambda sent, expected: True)


@caught_by(tests.test_calls_of_different_lengths_differ_and_the_group_serves_on)
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


@caught_by(tests.test_lists_of_different_lengths_differ)
def the_number_of_tensors_is_not_compared(patch: Patch) -> None:
    def without(name: str, fields: Any, *rest: Any) -> Any:
        kept = tuple(each for each in fields if each[0] != "number of tensors")
        return rounds.RoundsOperation(name, kept, *rest)

    patch.setattr(process_group, "RoundsOperation", without)


@caught_by(tests.test_different_sizes_without_room_are_an_error_of_every_rank)
def sizes_that_are_too_long_are_an_error_of_one_rank(patch: Patch) -> None:
    described = rounds._encode

    def refused(*call: Any) -> Any:
        digest, head = described(*call)
        if len(head) > segment.DESCRIPTION_BYTES:
            raise UnsupportedError("too long")
        return digest, head

    patch.setattr(rounds, "_encode", refused)


@caught_by(lambda _: tests.test_the_sizes_of_a_thousand_members_have_room())
def all_groups_have_the_same_room_for_sizes(patch: Patch) -> None:
    patch.setattr(segment, "DESCRIPTION_BYTES_PER_MEMBER", 0)


# Messages.


@caught_by(*values(tests.check_messages))
def a_receive_takes_any_tag(patch: Patch) -> None:
    def matches(self: Any, packet: Any) -> bool:
        return self.peer in (point_to_point.ANY, packet.source)

    patch.setattr(point_to_point.InboundMessage, "matches", matches)


@caught_by(*values(tests.check_receives_are_matched_in_order))
def receives_are_matched_from_the_last(patch: Patch) -> None:
    receive = point_to_point.PointToPoint.receive

    def at_the_front(self: Any, inbound: Any) -> None:
        before = list(self._posted)
        receive(self, inbound)
        if len(self._posted) > len(before):
            self._posted[:] = [inbound, *before]

    patch.setattr(point_to_point.PointToPoint, "receive", at_the_front)


@caught_by(*values(tests.check_more_messages_than_the_ring_has))
def a_full_ring_is_written_again(patch: Patch) -> None:
    patch.setattr(point_to_point, "PACKET_SLOTS", point_to_point.PACKET_SLOTS * 2)
    link = point_to_point._Link.__init__

    def doubled(self: Any, *args: Any) -> None:
        patch.setattr(point_to_point, "PACKET_SLOTS", point_to_point.PACKET_SLOTS // 2)
        link(self, *args)
        patch.setattr(point_to_point, "PACKET_SLOTS", point_to_point.PACKET_SLOTS * 2)
        self.ring = self.ring * 2

    patch.setattr(point_to_point._Link, "__init__", doubled)


@caught_by(*values(tests.check_messages))
def a_long_message_is_its_first_piece(patch: Patch) -> None:
    init = point_to_point.OutboundMessage.__init__

    def short(self: Any, *args: Any) -> None:
        init(self, *args)
        self.payload = self.payload.copy()
        self.payload[point_to_point.PIECE_BYTES :] = 0

    patch.setattr(point_to_point.OutboundMessage, "__init__", short)


@caught_by(tests.test_a_message_that_differs_is_an_error_on_both_sides)
def the_sender_does_not_learn_what_was_received(patch: Patch) -> None:
    def taken(self: Any, member: int, send: Any, note: str) -> None:
        send.done = True

    patch.setattr(point_to_point.PointToPoint, "_on_ack", taken)


# Ends.


@caught_by(tests.test_the_end_of_a_rank_ends_the_waits_for_it, "all_reduce")
def a_killed_rank_may_still_come(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "departure", lambda self, member: "")


@caught_by(tests.test_the_end_of_a_rank_ends_the_waits_for_it, "recv")
def a_killed_sender_may_still_send(patch: Patch) -> None:
    patch.setattr(point_to_point.PointToPoint, "check", lambda self: None)


@caught_by(tests.test_a_rank_that_leaves_the_group_ends_the_waits_for_it)
def a_rank_leaves_unannounced(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "leave", segment.SharedSegment.release)


@caught_by(tests.test_a_rank_that_dies_before_it_arrives_has_not_come)
def a_rank_is_counted_before_it_has_arrived(patch: Patch) -> None:
    write = rounds.Rounds._write_round

    def early(self: Any, operation: Any) -> None:
        self.segment.rounds[self.me].value += 1
        write(self, operation)

    patch.setattr(rounds.Rounds, "_write_round", early)


@caught_by(tests.test_what_fails_inside_of_an_operation_on_one_rank_ends_it_on_all)
def a_failed_rank_announces_nothing(patch: Patch) -> None:
    patch.setattr(rounds.Rounds, "_fail", rounds.Rounds._break)


@caught_by(tests.test_a_wait_has_a_limit_and_names_late_ranks)
def nobody_is_named(patch: Patch) -> None:
    patch.setattr(process_group.SmddpProcessGroup, "missing", lambda self, operation: "")


@caught_by(tests.test_a_fork_of_a_rank_is_refused)
def a_fork_passes_for_its_parent(patch: Patch) -> None:
    patch.setattr(process_group.SmddpProcessGroup, "check_process", lambda self, call: None)


@caught_by(tests.test_a_hundred_groups_leave_nothing_behind)
def a_group_s_descriptor_stays_open(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "release", lambda self: None)


@caught_by(tests.test_a_hundred_groups_leave_nothing_behind)
def a_group_s_memory_stays_mapped(patch: Patch) -> None:
    patch.setattr(segment, "_munmap", lambda address, size: None)


@caught_by(tests.test_no_room_for_shared_memory_is_an_error_of_every_rank)
def a_failure_to_make_the_memory_is_not_announced(patch: Patch) -> None:
    patch.setattr(segment.SharedSegment, "refuse", lambda self, error: None)


@caught_by(tests.test_the_end_of_a_sender_that_was_not_answered_ends_the_receive)
def an_ack_begins_again_what_has_ended(patch: Patch) -> None:
    def sent(receive: Any) -> None:
        receive.done = not receive.long

    patch.setattr(point_to_point.PointToPoint, "_on_ack_sent", staticmethod(sent))


@caught_by(tests.test_the_end_of_a_rank_that_has_not_used_a_group_ends_the_waits_for_it)
def a_member_is_known_once_it_has_mapped_the_memory(patch: Patch) -> None:
    def process(self: Any, member: int) -> tuple[int, int]:
        row = self.layout.member(member)
        return self.count(row.process).value, self.count(row.process_start).value

    patch.setattr(segment.SharedSegment, "_process", process)


@caught_by(tests.test_a_member_that_is_joining_has_not_ended)
def half_of_a_row_is_a_row(patch: Patch) -> None:
    def gone(self: Any, member: int) -> str:
        row = self.layout.member(member)
        pid, start = self.count(row.process).value, self.count(row.process_start).value
        return "has ended" if pid and segment._start_time(pid) != start else ""

    patch.setattr(segment.SharedSegment, "departure", gone)


@caught_by(tests.test_a_wait_that_is_woken_for_other_things_finds_who_has_ended)
def the_others_are_polled_when_a_sleep_was_long(patch: Patch) -> None:
    def wait(self: Any, done: Callable[[], bool], *_: object) -> bool:
        while not done():
            if not futex.sleep(self.progress(), progress._POLL_INTERVAL):
                self._poll()
        return True

    patch.setattr(progress.ProgressLoop, "_wait", wait)


@caught_by(tests.test_a_start_that_fails_leaves_no_descriptor)
def a_descriptor_is_closed_when_all_have_come(patch: Patch) -> None:
    def wait(self: Any, timeout: datetime.timedelta) -> None:
        self._wait_for_all(timeout)
        self.release()

    patch.setattr(segment.SharedSegment, "wait_for_all", wait)


@caught_by(tests.test_threads_that_use_a_group_first_at_once_open_it_once)
def two_threads_open_a_group(patch: Patch) -> None:
    patch.setattr(process_group, "threading", types.SimpleNamespace(Lock=_NoLock))


@caught_by(tests.test_a_monitored_barrier_has_a_limit_of_its_own)
def a_monitored_barrier_waits_as_long_as_any_other(patch: Patch) -> None:
    barrier = CheckedGroup.monitored_barrier
    patch.setattr(process_group.SmddpProcessGroup, "monitored_barrier", barrier)


def _refused_futex(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        tests.test_a_futex_call_that_fails_is_an_error(patch)


@caught_by(_refused_futex)
def the_kernel_s_answer_is_not_read(patch: Patch) -> None:
    patch.setattr(futex, "_check", lambda result: None)


@caught_by(tests.test_a_rank_that_cannot_arrive_ends_the_operation_on_all)
def a_rank_that_cannot_arrive_announces_nothing(patch: Patch) -> None:
    patch.setattr(rounds.Rounds, "_fail", rounds.Rounds._break)


# The progress thread.


def _nothing(*_: Any) -> None:
    pass


@caught_by(progress_tests.test_an_operation_is_done_though_nobody_waits_for_it)
def the_progress_thread_is_not_woken(patch: Patch) -> None:
    patch.setattr(progress._ProgressThread, "wake", _nothing)


@caught_by(progress_tests.test_an_operation_goes_on_beside_a_thread_that_waits_for_another)
def a_thread_that_waits_knows_all_channels(patch: Patch) -> None:
    patch.setattr(progress.ProgressLoop, "_has_waiter", lambda self: bool(self._waiting))


@caught_by(progress_tests.test_a_signal_s_handler_takes_the_lock_that_its_thread_waits_for)
def a_handler_waits_for_its_own_thread(patch: Patch) -> None:
    init = progress._PriorityLock.__init__

    def plain(self: Any) -> None:
        init(self)
        self._wanted = threading.Lock()

    patch.setattr(progress._PriorityLock, "__init__", plain)


@caught_by(machine_tests.test_a_sender_that_leaves_is_known_though_its_relay_has_left)
def a_departure_announced_by_the_member_itself_is_ignored(patch: Patch) -> None:
    def gone(self: Any, member: int) -> str:
        if self._shared.streams.connections[self._peers[member].identity]:
            return self.segment.departure(member) if member in self._departures else ""
        return find(self, member)

    find = inter_machine.InterMachineTransport.departure
    patch.setattr(inter_machine.InterMachineTransport, "departure", gone)


@caught_by(progress_tests.test_an_operation_keeps_the_memory_that_its_tensor_gives_up)
def an_operation_keeps_its_tensor_alone(patch: Patch) -> None:
    class Kept(flat._Memory):
        def __init__(self, tensor: torch.Tensor, count: int) -> None:
            super().__init__(tensor, count)
            self._storage: Any = tensor

    patch.setattr(flat, "_Memory", Kept)


@caught_by(progress_tests.test_a_rank_that_waits_for_a_call_advances_all_that_is_in_flight)
def a_call_that_is_waited_for_knows_its_own_group_alone(patch: Patch) -> None:
    begin = progress.ProgressLoop.begin

    def begun(self: Any, channel: Any, waits: bool = False) -> Any:
        blockers = begin(self, channel, waits)
        words = channel.progress() if waits and blockers is None else None
        return progress.Blockers(words, self._begun) if words else blockers

    patch.setattr(progress.ProgressLoop, "begin", begun)


@caught_by(*values(tests.check_moves))
def a_call_is_described_once_in_a_slot(patch: Patch) -> None:
    describe = rounds.Rounds._describe

    def described(self: Any, operation: Any) -> None:
        slot = self._written % segment.ROUND_SLOTS
        if not self._slot_digests[slot]:
            describe(self, operation)

    patch.setattr(rounds.Rounds, "_describe", described)


@caught_by(
    progress_tests.test_an_ack_of_a_member_that_was_given_up_does_not_end_the_progress_thread
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


@caught_by(tests.test_what_is_interrupted_inside_of_an_operation_ends_the_group)
def an_interruption_is_not_announced(patch: Patch) -> None:
    fail = rounds.Rounds._fail

    def failed(self: Any, error: BaseException) -> None:
        if isinstance(error, Exception):
            fail(self, error)

    patch.setattr(rounds.Rounds, "_fail", failed)


@caught_by(progress_tests.test_a_message_arrives_though_its_ranks_wait_elsewhere)
def the_progress_thread_advances_no_messages(patch: Patch) -> None:
    begin = progress.ProgressLoop.begin

    def begun(self: Any, channel: Any, waits: bool = False) -> None:
        if not isinstance(channel, point_to_point.PointToPoint):
            begin(self, channel, waits)
        elif channel.progress():
            self._busy[channel] = None

    patch.setattr(progress.ProgressLoop, "begin", begun)


@caught_by(
    progress_tests.test_the_first_bucket_of_a_gradient_is_reduced_before_the_last_is_computed
)
def a_future_is_waited_for_as_it_is_asked_for(patch: Patch) -> None:
    future = work.SmddpWork.get_future

    def waited(self: Any) -> Any:
        self.wait()
        return future(self)

    patch.setattr(work.SmddpWork, "get_future", waited)


@caught_by(progress_tests.test_a_callback_issues_an_operation)
def callbacks_are_called_inside_of_a_step(patch: Patch) -> None:
    fail = rounds.RoundsOperation.fail

    def failed(self: Any, error: Exception | None) -> None:
        fail(self, error)
        progress.PROGRESS._settle()

    patch.setattr(rounds.RoundsOperation, "fail", failed)


@caught_by(progress_tests.test_a_future_of_an_operation_that_fails_has_its_error)
def a_future_has_the_outputs_of_what_failed(patch: Patch) -> None:
    patch.setattr(work._FutureResult, "_value", lambda self, _: self._work._outputs)


@caught_by(progress_tests.test_a_rank_that_ends_in_a_backward_pass_of_ddp_is_an_error)
def a_future_has_an_exception_as_its_result(patch: Patch) -> None:
    patch.setattr(work._FutureResult, "_value", lambda self, _: self._error or self._work.result())


@caught_by(progress_tests.test_a_future_learns_of_the_end_of_a_rank)
def the_progress_thread_does_not_poll(patch: Patch) -> None:
    patch.setattr(progress.ProgressLoop, "poll", _nothing)


@caught_by(progress_tests.test_a_future_has_the_limit_of_its_group)
def a_future_never_expires(patch: Patch) -> None:
    patch.setattr(work._FutureResult, "expire", _nothing)


@caught_by(progress_tests.test_there_is_one_progress_thread_from_the_first_group_to_the_last)
def the_progress_thread_stays_when_the_last_group_is_destroyed(patch: Patch) -> None:
    patch.setattr(progress._ProgressThread, "end", _nothing)


# Between machines.


def between(check: Callable[[int], None]) -> tuple[Any, ...]:
    return machine_tests.test_values, check, "aba"


def streams_of(test: Callable[..., None], *args: Any) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        with stream_tests.two_processes() as made:
            test(made, *args)

    return run


def _sent(patch: Patch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Have the rounds sent with other arguments."""
    send = inter_machine.InterMachineTransport.send_round

    def changed(self: Any, *args: Any) -> None:
        send(self, *change(self, *args))

    patch.setattr(inter_machine.InterMachineTransport, "send_round", changed)


@caught_by(*between(tests.check_moves))
def the_row_that_is_sent_is_the_next_member_s(patch: Patch) -> None:
    def next_row(self: Any, number: int, described: int, parts: Any) -> tuple[Any, ...]:
        most = segment.ROW_BYTES * self.segment.size

        def shifted(members: Any) -> Any:
            at = segment.ROW_BYTES
            return [(b + at, e + at) for b, e in parts(members) if e + at <= most]

        return number, described, shifted

    _sent(patch, next_row)


@caught_by(*between(tests.check_moves))
def the_parts_that_are_sent_are_those_of_this_machine(patch: Patch) -> None:
    def others(self: Any, number: int, described: int, parts: Any) -> tuple[Any, ...]:
        members = range(self.segment.size)
        return number, described, lambda there: parts([m for m in members if m not in there])

    _sent(patch, others)


@caught_by(machine_tests.test_bytes_go_once_to_each_machine_whose_members_read_them, "all_to_all")
def the_parts_of_all_members_are_sent(patch: Patch) -> None:
    def everything(self: Any, number: int, described: int, parts: Any) -> tuple[Any, ...]:
        return number, described, lambda there: parts(range(self.segment.size))

    _sent(patch, everything)


@caught_by(*between(tests.check_many_at_once))
def a_row_is_sent_from_the_slot_of_another_round(patch: Patch) -> None:
    patch.setattr(inter_machine, "ROUND_SLOTS", segment.ROUND_SLOTS // 2)


@caught_by(*between(tests.check_uneven))
def the_sizes_of_a_call_are_not_sent(patch: Patch) -> None:
    _sent(patch, lambda self, number, described, parts: (number, 0, parts))


@caught_by(machine_tests.test_a_rank_sends_at_most_the_rounds_of_all_slots_before_they_are_received)
def rounds_are_sent_before_there_is_room_for_them(patch: Patch) -> None:
    patch.setattr(rounds, "AHEAD", 2 * rounds.AHEAD)
    transfer = rounds.Transfer.__init__

    def further(self: Any, *args: Any, **options: Any) -> None:
        transfer(self, *args, **options)
        self.ahead = rounds.AHEAD

    patch.setattr(rounds.Transfer, "__init__", further)


@caught_by(*between(tests.check_more_messages_than_the_ring_has))
def the_sender_does_not_learn_that_messages_were_taken(patch: Patch) -> None:
    send = inter_machine.InterMachineTransport.send_link

    def without(self: Any, member: int, written: Any, counts: Any) -> None:
        send(self, member, written, [*counts[:2], 0, 0])

    patch.setattr(inter_machine.InterMachineTransport, "send_link", without)


@caught_by(*between(tests.check_messages))
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


@caught_by(streams_of(stream_tests.test_bytes_come_in_order_and_before_the_end))
def bytes_that_wait_are_sent_from_the_last(patch: Patch) -> None:
    class Stack(deque[memoryview]):
        def extend(self, pieces: Any) -> None:
            self.extendleft(pieces)

    patch.setattr(streams, "deque", Stack)


@caught_by(lambda _: stream_tests.test_what_waits_is_sent_before_the_streams_close())
def a_process_ends_before_its_bytes_are_sent(patch: Patch) -> None:
    patch.setattr(streams.Streams, "_is_drained", lambda self: bool(self.closing))


@caught_by(machine_tests.test_the_end_of_a_rank_ends_the_waits_for_it, "all_reduce", "abc")
def the_end_of_a_connection_is_not_announced(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "on_end", lambda self, identity: None)


@caught_by(machine_tests.test_the_end_of_a_rank_ends_the_waits_for_it, "recv", "aba")
def a_receiver_of_another_machine_waits_for_ever(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "departure", lambda self, member: "")


@caught_by(
    machine_tests.test_the_end_of_a_rank_inside_of_an_operation_is_an_error_on_all_machines,
    "all_gather",
)
def rows_that_went_to_a_killed_rank_may_still_come(patch: Patch) -> None:
    def lost(self: Any, number: int) -> dict[int, str]:
        return {member: why for member, why in self.absent(number).items() if why}

    patch.setattr(segment.SharedSegment, "blocking_departures", lost)


def _left(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test = tests.test_a_rank_that_leaves_the_group_ends_the_waits_for_it
        machine_tests.test_between_machines(folder, patch, test)


@caught_by(_left)
def a_rank_leaves_unannounced_to_other_machines(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "announce", lambda self, why: None)


@caught_by(machine_tests.test_the_end_of_a_rank_that_has_forked_is_noticed)
def a_child_keeps_the_connections_of_its_parent(patch: Patch) -> None:
    patch.setattr(streams.Streams, "close_after_fork", lambda self: None)


@caught_by(machine_tests.test_twenty_groups_leave_nothing_behind)
def the_streams_stay_when_the_last_group_goes(patch: Patch) -> None:
    patch.setattr(inter_machine.InterMachineTransport, "leave", lambda self: None)


@caught_by(machine_tests.test_a_group_below_two_machines_uses_no_stream)
def every_group_has_connections(patch: Patch) -> None:
    find = process_group.SmddpProcessGroup._find_machines

    def several(self: Any) -> list[str]:
        return [f"{number} {each}" for number, each in enumerate(find(self))]

    patch.setattr(process_group.SmddpProcessGroup, "_find_machines", several)


# Strangers.


@caught_by(streams_of(stream_tests.test_a_stranger_is_dropped_with_no_effect, "no proof"))
def a_connection_needs_no_proof(patch: Patch) -> None:
    patch.setattr(
        streams, "hmac", types.SimpleNamespace(digest=hmac.digest, compare_digest=lambda *_: True)
    )


@caught_by(streams_of(stream_tests.test_another_listener_is_refused))
def a_listener_needs_no_proof(patch: Patch) -> None:
    patch.setattr(
        streams, "hmac", types.SimpleNamespace(digest=hmac.digest, compare_digest=lambda *_: True)
    )


@caught_by(streams_of(stream_tests.test_a_stranger_is_dropped_with_no_effect, "an echo"))
def both_sides_prove_the_same(patch: Patch) -> None:
    def prove(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.digest(secret, hello + nonce, "sha256")

    patch.setattr(streams, "_proof_of", prove)


def _silence(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        streams_of(lambda made: stream_tests.test_silence_is_dropped(patch, made))(_)


@caught_by(_silence)
def silence_is_waited_for(patch: Patch) -> None:
    patch.setattr(streams.Streams, "_expire", lambda self, now: None)


@caught_by(streams_of(stream_tests.test_many_strangers_do_not_keep_a_member_out))
def strangers_are_kept(patch: Patch) -> None:
    patch.setattr(streams, "_MAX_UNAUTHENTICATED", 10**6)


@caught_by(
    machine_tests.test_a_member_that_writes_where_it_may_not_is_cut_off, "the end of another"
)
def a_process_may_speak_for_any_member(patch: Patch) -> None:
    receive = inter_machine.InterMachineTransport.receive

    def any_member(self: Any, identity: str, frame: Any) -> Any:
        return receive(self, self._peers[frame[2]].identity, frame)

    patch.setattr(inter_machine.InterMachineTransport, "receive", any_member)


@caught_by(
    machine_tests.test_a_member_that_writes_where_it_may_not_is_cut_off, "the table of members"
)
def a_member_may_write_anywhere(patch: Patch) -> None:
    patch.setattr(
        inter_machine.InterMachineTransport,
        "_writable",
        lambda self, kind, member: (0, self.segment.layout.end),
    )


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: _Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(rank_processes, "LIMIT", datetime.timedelta(seconds=15))
    monkeypatch.setattr(stream_tests, "LIMIT", 3)
    bug.plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        bug.by(tmp_path)
