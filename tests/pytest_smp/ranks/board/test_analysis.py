"""The findings from records made by hand: each class of fault, and records that only look like one."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from pytest_smp.ranks.board import Board, Finding
from pytest_smp.ranks.board.backward_passes import BackwardPasses
from pytest_smp.ranks.board.fingerprint import Key, describe
from pytest_smp.ranks.board.futures import Futures
from pytest_smp.ranks.board.recorder import Description
from smp_core.errors import BackendError, CollectiveMismatchError, DeadlockError
from smp_core.transport.helper_threads import HelperThread, count_other_threads
from smp_core.transport.peers import ANY, Source

from .streams import (
    ALL_REDUCE,
    ALL_REDUCE_MAX,
    BARRIER,
    BROADCAST,
    FLOAT4,
    REDUCE,
    SUM,
    TENSOR,
    Rank,
    world,
)

PATIENCE = 1.0  # seconds; the default
LONG = 100.0


def _exchange(gives: tuple[int, ...], takes: tuple[int, ...]) -> Key:
    """all_to_all_single of four rows, cut like this."""
    rows = ((torch.float32, torch.Size([4])),)
    return Key("all_to_all_single", None, None, rows, rows, (gives, takes))


def at_once(board: Board) -> Finding | None:
    """The finding of two looks that follow each other at once."""
    everybody = range(board.size)
    return board.look(everybody, 0.0) or board.look(everybody, 0.0)


def later(board: Board) -> Finding | None:
    """The finding after nothing has happened for long."""
    everybody = range(board.size)
    return board.look(everybody, 0.0) or board.look(everybody, LONG)


def deadlock(finding: Finding | None) -> str:
    """The message, after checking that this is one."""
    assert finding is not None
    assert isinstance(finding.error, DeadlockError)
    return str(finding.error)


def mismatch(finding: Finding | None) -> str:
    """The message, after checking that this is one."""
    assert finding is not None
    assert isinstance(finding.error, CollectiveMismatchError)
    return str(finding.error)


# ---- Mismatches ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (ALL_REDUCE, ALL_REDUCE_MAX, "reduce op"),
        (ALL_REDUCE, BARRIER, "operation"),
        (BROADCAST, BROADCAST._replace(fields=(("root", 1), *FLOAT4)), "root"),
        (REDUCE, REDUCE._replace(fields=(SUM, ("root", 0), ("dtype", "int8"), FLOAT4[1])), "dtype"),
        (ALL_REDUCE, ALL_REDUCE._replace(fields=(SUM, FLOAT4[0], ("shape", "[2, 2]"))), "shape"),
    ],
)
def test_calls_that_differ(one: Description, other: Description, what: str) -> None:
    board, ranks = world(3)
    for rank in ranks:
        rank.does(BARRIER)
    ranks[0].joins(one)
    ranks[1].joins(one)
    assert at_once(board) is None
    ranks[2].joins(other)
    finding = at_once(board)
    message = mismatch(finding)
    assert message.startswith(f"mismatch: call 2 on group WORLD differs in {what}\n")
    assert "ranks 0-1: " in message
    assert "rank 2: " in message
    assert finding is not None
    assert finding.root == 2
    assert {*finding.waits} == {0, 1, 2}


def test_a_mismatch_is_found_after_the_run_too() -> None:
    """Gloo adds SUM to MAX without a word (G9)."""
    board, ranks = world(2)
    for rank, call in zip(ranks, (ALL_REDUCE, ALL_REDUCE_MAX), strict=True):
        rank.does(call)
        rank.returns()
    assert "differs in reduce op" in mismatch(board.look((), 0.0))


def test_calls_that_a_death_has_failed_are_compared_and_later_ones_are_not() -> None:
    """Gloo ends a rank that gets a tensor of another size; a rank that comes late sees that alone."""
    board, ranks = world(4)
    failed = [rank.joins(ALL_REDUCE) for rank in ranks[:2]]
    in_call = ranks[2].calls(ALL_REDUCE)
    ranks[3].joins(ALL_REDUCE_MAX)
    board.gone(2)
    ranks[1].recorder.failed(failed[1:])
    ranks[1].joins(BARRIER)
    for rank in (0, 1, 3):
        board.gone(rank)
    finding = board.look((), 0.0)
    assert "ranks 0-2: all_reduce" in mismatch(finding)
    assert finding is not None
    assert (finding.root, finding.follows) == (3, False)
    ranks[2].recorder.withdrawn(in_call)


def test_a_call_that_the_backend_refuses_does_not_count() -> None:
    board, (one, other) = world(2)
    refused = one.calls(ALL_REDUCE_MAX)
    other.joins(ALL_REDUCE)
    assert at_once(board) is None  # it may still be refused
    one.recorder.withdrawn(refused)
    assert later(board) is None
    one.joins(ALL_REDUCE)
    assert later(board) is None


def test_a_mismatch_waits_a_moment_for_those_that_are_on_their_way() -> None:
    board, ranks = world(3)
    ranks[1].joins(ALL_REDUCE_MAX)
    ranks[2].joins(ALL_REDUCE)
    assert board.look(range(3), 0.0) is None
    ranks[0].joins(ALL_REDUCE)
    finding = board.look(range(3), 0.0)
    assert finding is not None
    assert finding.root == 1


def test_a_send_that_the_backend_refuses_does_not_count() -> None:
    board, (one, other) = world(2)
    other.posts("irecv", 0)
    other.posts("irecv", 0)
    wrong = TENSOR._replace(sent=(5,))
    refused = one.posts("isend", 1, what=wrong)
    assert "element count" in mismatch(at_once(board))
    one.recorder.withdrawn(refused)
    assert later(board) is None
    for _ in range(2):
        one.posts("isend", 1)
    assert later(board) is None
    assert "never matched" not in "\n".join(board.leaks(strict=False)[0])


def test_a_call_that_the_backend_never_comes_back_from_counts_in_the_end() -> None:
    board, (one, other) = world(2)
    one.calls(ALL_REDUCE_MAX)
    other.joins(ALL_REDUCE)
    assert at_once(board) is None
    assert "differs in reduce op" in mismatch(later(board))


def test_a_call_refused_after_all_had_come() -> None:
    board, (one, other) = world(2)
    other.starts(ALL_REDUCE)
    other.starts(BARRIER)
    one.recorder.withdrawn(one.calls(ALL_REDUCE))
    one.starts(ALL_REDUCE)
    one.starts(BARRIER)
    assert later(board) is None


def test_calls_of_other_groups_and_generations_do_not_meet() -> None:
    board, (one, other) = world(2)
    for rank, call in ((one, ALL_REDUCE), (other, ALL_REDUCE_MAX)):
        # The same name, but other members, or made anew.
        rank.starts(call, rank.group("1", (rank.rank,)))
        rank.starts(call, rank.group("2", (0, 1), generation=rank.rank))
    assert later(board) is None


def test_what_nobody_knows_is_not_compared() -> None:
    """C++ does not tell us the reduce op."""
    unknown = ALL_REDUCE._replace(fields=(("reduce op", "?"), *FLOAT4))
    board, ranks = world(3)
    for rank, call in zip(ranks, (ALL_REDUCE, unknown, ALL_REDUCE), strict=True):
        rank.joins(call)
    assert later(board) is None
    for rank, call in zip(ranks, (BARRIER, unknown, BARRIER), strict=True):
        rank.joins(call)
    message = mismatch(later(board))
    assert "rank 1: all_reduce(dtype=float32, shape=[4])" in message


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (TENSOR._replace(fields=(("dtype", "int8"), FLOAT4[1])), "dtype"),
        (TENSOR._replace(sent=(5,)), "element count"),
    ],
)
def test_a_send_and_its_receive(what: Description, said: str) -> None:
    board, (one, other) = world(2)
    one.posts("isend", 1)
    one.posts("isend", 1)
    other.posts("irecv", 0)
    assert at_once(board) is None
    other.posts("irecv", 0, what=what)
    assert f"a send and its receive on group WORLD differ in {said}" in mismatch(at_once(board))


def test_receives_from_anybody_are_not_compared() -> None:
    board, ranks = world(3)
    ranks[2].posts("irecv", ANY)
    ranks[2].posts("irecv", ANY)
    ranks[0].posts("isend", 2)
    ranks[1].posts("isend", 2, what=TENSOR._replace(sent=(5,)))
    assert later(board) is None


def test_members_that_disagree_on_sizes() -> None:
    exchange = Description(
        "all_to_all_single", FLOAT4[:1], sent=(2, 3), expected=(2, 3), elements=5
    )
    board, (one, other) = world(2)
    one.joins(exchange)
    other.joins(exchange._replace(sent=(4, 1), expected=(3, 1)))
    assert "rank 1 sends 4 elements to rank 0" in mismatch(at_once(board))


def test_gatherings_of_uneven_sizes() -> None:
    gathering = Description("all_gather", FLOAT4[:1], sent=(2,), expected=(2, 3), elements=2)
    board, (one, other) = world(2)
    one.joins(gathering)
    other.joins(gathering._replace(sent=(3,)))
    assert later(board) is None
    one.joins(gathering)
    other.joins(gathering._replace(sent=(4,)))
    message = mismatch(later(board))
    assert "rank 1 sends 4 elements to rank 0" in message
    assert "rank 0 expects 3 elements from rank 1" in message


def test_ranks_that_make_different_groups() -> None:
    board, ranks = world(3)
    for rank, members in zip(ranks, ([0, 1], [0, 1], [1, 2]), strict=True):
        makers = rank.group("WORLD", range(3), kind="new_group")
        what = Description("new_group", (("ranks", str(members)),), expected=(0,), elements=0)
        rank.starts(what, makers)
    message = mismatch(at_once(board))
    assert "new_group number 1 differs in its ranks\n  ranks 0-1: ranks [0, 1]" in message
    assert "rank 2: ranks [1, 2]" in message


# ---- Deadlocks -----------------------------------------------------------------------------------


def test_a_member_that_returned() -> None:
    board, ranks = world(3)
    ranks[0].joins(ALL_REDUCE)
    ranks[1].joins(ALL_REDUCE)
    assert later(board) is None  # rank 2 computes
    ranks[2].returns()
    finding = at_once(board)
    message = deadlock(finding)
    assert "deadlock: 2 of 3 ranks wait, and none can go on" in message
    assert "ranks 0-1 wait in all_reduce(reduce op=SUM, dtype=float32, shape=[4])" in message
    assert "[group WORLD, call 1] for rank 2" in message
    assert "which has returned without a matching call" in message
    assert finding is not None
    assert finding.root == 0
    assert {*finding.waits} == {0, 1}
    assert finding.waits[1].startswith("rank 1 waits in all_reduce(")


def _handling(error: Exception, act: Callable[[], object]) -> None:
    try:
        raise error
    except type(error):
        act()


class Talkative(Exception):
    """An exception whose text is made by a collective, which fails as the second argument says."""

    def __str__(self) -> str:
        self.args[0].enters("smp.allgather()")
        raise self.args[1]


def test_an_exception_that_a_rank_handles_is_told_with_its_wait() -> None:
    board, ranks = world(3)
    ranks[0].joins(ALL_REDUCE)
    _handling(RuntimeError("bad batch 17\nand more"), lambda: ranks[1].enters("smp.barrier"))
    ranks[2].returns()
    finding = later(board)
    call = r"smp\.barrier\(\) \[group WORLD, call 1\]"
    told = r", while it handles RuntimeError: bad batch 17 \(test_analysis.py:\d+\)"
    first = deadlock(finding).splitlines()[1]
    assert re.fullmatch(rf"  rank 1 waits in {call} for ranks 0, 2{told}", first)
    assert finding is not None
    assert finding.root == 1
    assert re.match(rf"in {call}, waiting for ranks 0, 2{told}\n", board.where(1))


def test_an_exception_that_all_ranks_handle_tells_nothing_of_the_root() -> None:
    """The root is the rank that waits for one that has returned, as without the exception."""
    board, ranks = world(3)
    handled = KeyError()
    _handling(handled, lambda: ranks[0].waits(ranks[0].posts("irecv", 1)))
    _handling(handled, lambda: ranks[1].waits(ranks[1].posts("irecv", 2)))
    ranks[2].returns()
    finding = later(board)
    assert "wait-for: rank 1 waits for rank 2" in deadlock(finding)
    assert finding is not None
    assert finding.root == 1


def test_of_ranks_that_handle_exceptions_one_left_behind_is_the_root() -> None:
    board, ranks = world(4)
    ranks[0].waits(ranks[0].posts("irecv", 3))
    for rank, peer in ((1, 2), (2, 3)):
        receive = ranks[rank].posts("irecv", peer)
        _handling(KeyError(), partial(ranks[rank].waits, receive))
    ranks[3].returns()
    finding = later(board)
    assert "wait-for: rank 2 waits for rank 3" in deadlock(finding)
    assert finding is not None
    assert finding.root == 2


def test_an_exception_is_told_of_the_calls_that_were_made_while_it_was_handled() -> None:
    board, (one, other) = world(2)
    _handling(KeyError(), lambda: one.does(BARRIER))
    other.does(BARRIER)
    one.joins(ALL_REDUCE)
    other.joins(ALL_REDUCE_MAX)
    assert "handles" not in mismatch(board.look((), 0.0))


@pytest.mark.parametrize("odd", range(2))
def test_calls_of_a_rank_that_handles_an_exception_are_the_odd_ones(odd: int) -> None:
    board, ranks = world(2)
    _handling(KeyError(), lambda: ranks[odd].joins(BARRIER))
    ranks[1 - odd].joins(ALL_REDUCE)
    finding = board.look((), 0.0)
    assert f"\n  rank {odd}: barrier(), while it handles KeyError (" in mismatch(finding)
    assert finding is not None
    assert finding.root == odd


@pytest.mark.parametrize("failure", [ValueError, SystemExit])
def test_the_text_of_an_exception_is_made_by_nobody_s_call(failure: type[BaseException]) -> None:
    board, ranks = world(2)
    error = Talkative(ranks[0], failure("no text"))
    _handling(error, lambda: ranks[0].enters("smp.barrier()"))
    assert "while it handles Talkative (" in board.where(0)


def test_one_look_is_not_enough() -> None:
    board, ranks = world(2)
    ranks[0].joins(BARRIER)
    ranks[1].returns()
    assert board.look(range(2), 0.0) is None
    deadlock(board.look(range(2), 0.0))


def test_a_rank_whose_outcome_came_before_its_records() -> None:
    """The rank is not running, but its last messages may still be on their way."""
    board, (one, other) = world(2)
    one.waits(one.posts("irecv", 1))
    assert board.look([0], 0.0) is None
    assert board.look([0], LONG) is None
    other.posts("isend", 0)
    other.returns()
    assert board.look([0], LONG) is None


def test_a_process_that_is_no_more() -> None:
    board, (one, _) = world(2)
    one.waits(one.posts("irecv", 1))
    board.gone(1)
    assert board.look([0], 0.0) is None
    deadlock(board.look([0], 0.0))


def test_a_cycle_of_receives() -> None:
    board, ranks = world(3)
    for rank in ranks:
        rank.waits(rank.posts("irecv", (rank.rank + 1) % 3))
    assert "wait-for cycle: rank 0 -> rank 1 -> rank 2 -> rank 0" in deadlock(at_once(board))


@pytest.mark.parametrize("tag", [0, 1])
def test_a_send_of_another_tag_is_of_no_use(tag: int) -> None:
    board, (one, other) = world(2)
    one.waits(one.posts("irecv", 1, tag))
    other.posts("isend", 0, 0)
    other.returns()
    assert (at_once(board) is not None) == (tag == 1)


def test_two_that_send_first() -> None:
    """Some backends buffer sends, so it takes patience; or the backend's word that it does not."""
    for synchronous in (False, True):
        board, ranks = world(2, synchronous_sends=synchronous)
        for rank in ranks:
            rank.waits(rank.posts("isend", 1 - rank.rank))
        assert (at_once(board) is not None) == synchronous
        assert "send to rank 1" in deadlock(later(board))


@pytest.mark.parametrize("flow", [BROADCAST, REDUCE])
def test_the_end_of_a_tree_may_go_on_early(flow: Description) -> None:
    """Of a broadcast the root may be gone before the others come; of a reduce all but the root."""
    gives, takes = (0, 1) if flow is BROADCAST else (1, 0)
    for waits, sure in ((gives, False), (takes, True)):
        board, ranks = world(2)
        ranks[waits].joins(flow)
        ranks[1 - waits].returns()
        assert (at_once(board) is not None) == sure
        deadlock(later(board))


def test_empty_tensors_need_nobody_for_sure() -> None:
    board, ranks = world(2)
    ranks[0].joins(ALL_REDUCE._replace(elements=0))
    ranks[1].returns()
    assert at_once(board) is None
    deadlock(later(board))


@pytest.mark.parametrize(
    "what",
    [
        # Each was seen to be refused by Gloo while the rank waits (torch 2.13).
        ALL_REDUCE._replace(fields=(SUM, ("dtype", "int16"), FLOAT4[1])),
        ALL_REDUCE._replace(fields=(SUM, ("dtype", "float32 int16"), FLOAT4[1])),
        ALL_REDUCE._replace(fields=(("reduce op", "BAND"), *FLOAT4)),
        ALL_REDUCE._replace(fields=(("reduce op", "PREMUL_SUM"), *FLOAT4)),
        ALL_REDUCE._replace(fields=(("reduce op", "?"), *FLOAT4)),  # may be one of those
        describe(_exchange((3, 2), (2, 2)), 2),
        describe(_exchange((2, 2), (3, 2)), 2),
        describe(_exchange((5, -1), (2, 2)), 2),
    ],
)
def test_a_call_that_may_be_refused_late_needs_nobody_for_sure(what: Description) -> None:
    board, ranks = world(2)
    ranks[0].joins(what)
    ranks[1].returns()
    assert at_once(board) is None
    deadlock(later(board))


@pytest.mark.parametrize(
    "what",
    [
        ALL_REDUCE,
        ALL_REDUCE._replace(fields=(("reduce op", "BAND"), ("dtype", "int64"), FLOAT4[1])),
        ALL_REDUCE._replace(fields=(("reduce op", "AVG"), ("dtype", "bfloat16"), FLOAT4[1])),
        BARRIER,
        describe(_exchange((3, 1), (2, 2)), 2),
        describe(_exchange((), ()), 2),
    ],
)
def test_a_plain_call_needs_its_members_for_sure(what: Description) -> None:
    board, ranks = world(2)
    ranks[0].joins(what)
    ranks[1].returns()
    deadlock(at_once(board))


def test_of_several_calls_one_that_may_be_refused_makes_the_wait_unsure() -> None:
    board, ranks = world(2)
    numbers = [ranks[0].starts(ALL_REDUCE)]
    numbers.append(
        ranks[0].starts(ALL_REDUCE._replace(fields=(SUM, ("dtype", "int16"), FLOAT4[1])))
    )
    ranks[0].waits(*numbers)
    ranks[1].returns()
    assert at_once(board) is None
    deadlock(later(board))


def test_patience_grows_with_what_may_be_on_its_way() -> None:
    board, ranks = world(2)
    ranks[0].joins(BROADCAST._replace(elements=100_000_000))
    ranks[1].returns()
    assert board.look(range(2), 0.0) is None
    assert board.look(range(2), 2 * PATIENCE) is None
    deadlock(board.look(range(2), 60.0))


def test_patience_starts_anew_with_each_record() -> None:
    board, ranks = world(3)
    ranks[0].joins(BROADCAST)
    ranks[1].returns()
    ranks[2].joins(BROADCAST)
    assert board.look(range(3), 0.0) is None
    ranks[2].done(1)
    assert board.look(range(3), LONG) is None
    ranks[2].returns()
    assert board.look(range(3), LONG) is None
    deadlock(board.look(range(3), LONG + 2 * PATIENCE))


def test_a_rank_that_is_no_member_does_not_hold_up_a_verdict_or_a_call() -> None:
    board, ranks = world(3)
    for rank in ranks[:2]:
        rank.does(ALL_REDUCE, rank.group("1", (1, 0)))
    ranks[2].waits(ranks[2].posts("irecv", 0))
    assert later(board) is None


def test_asynchronous_calls_do_not_block() -> None:
    board, (one, other) = world(2)
    number = one.starts(ALL_REDUCE)
    other.joins(BARRIER._replace(operation="all_reduce", fields=ALL_REDUCE.fields))
    one.waits(number)
    assert later(board) is None


def test_a_rank_that_waits_where_the_board_cannot_see() -> None:
    board, (one, other) = world(2)
    one.joins(ALL_REDUCE)
    other.starts(BARRIER, other.group("1", (1,)))
    assert later(board) is None


@pytest.mark.parametrize("when", ["beside a wait", "in a call", "behind the body"])
def test_threads_of_the_body_keep_a_deadlock_away(when: str) -> None:
    """Another thread may send what the rank waits for."""
    board, (one, other) = world(2)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    if when == "in a call":
        thread = threading.Thread(target=lambda: other.does(BARRIER, other.group("1", (1,))))
        thread.start()
        thread.join()
    elif when == "beside a wait":
        thread.start()
        one.waits(one.posts("irecv", 1))
        done.set()
        thread.join()
        other.returns()
        assert later(board) is None
        return
    else:
        thread.start()
    other.returns()
    done.set()
    thread.join()
    one.waits(one.posts("irecv", 1))
    assert later(board) is None


def test_a_helper_thread_keeps_no_deadlock_away() -> None:
    """A step's worker runs the body while the rank's own thread sleeps; others never communicate."""
    board, (one, other) = world(2)
    other.returns()
    done = threading.Event()
    beside = HelperThread(target=done.wait, daemon=True)
    beside.start()

    def turn() -> None:
        one.waits(one.posts("irecv", 1))

    worker = HelperThread(target=turn, stands_for=threading.get_ident())
    worker.start()
    worker.join()
    assert "rank 0 waits in recv from rank 1" in deadlock(at_once(board))
    done.set()
    beside.join()


def test_two_helper_threads_that_start_at_once_both_count() -> None:
    """The second starts while the first looks which helpers are no more, of which there is one."""
    before = count_other_threads()
    over, done = threading.Event(), threading.Event()
    second = HelperThread(target=done.wait, daemon=True)
    to_start: list[HelperThread] = []

    class Looked(HelperThread):
        def is_alive(self) -> bool:
            for thread in [to_start.pop()] if to_start else []:
                thread.start()
            return super().is_alive()

    ended = HelperThread(target=over.wait, daemon=True)
    ended.start()
    looked = Looked(target=done.wait, daemon=True)
    looked.start()
    over.set()
    ended.join()
    to_start.append(second)
    first = HelperThread(target=done.wait, daemon=True)
    first.start()
    assert second.ident is not None
    assert count_other_threads() == before
    done.set()
    for helper in (first, second, looked):
        helper.join()


def _hooks(rank: Rank) -> tuple[torch.futures.Future[int], Callable[..., Any], int]:
    """The future of an all_reduce of this rank, torch's ``then`` under the recorder, and the call."""
    futures = Futures(rank.recorder, BackwardPasses(rank.recorder))
    future = torch.futures.Future[int]()
    number = rank.starts(ALL_REDUCE)
    futures.add(future, [number])
    then = futures.method("then", torch._C.Future.then)
    assert then is not None
    return future, then, number


def test_callbacks_may_help_until_all_have_run() -> None:
    """Callbacks run in any thread once their call is over, which the main thread may learn before."""
    board, (one, other) = world(2)
    future, then, number = _hooks(one)
    findings: list[Finding | None] = []

    def look(future: Any) -> None:
        one.done(number)
        findings.append(later(board))

    then(then(future, look), look)
    then(future, look)
    other.starts(ALL_REDUCE)
    other.returns()
    one.waits(one.posts("irecv", 1))
    assert later(board) is None
    future.set_result(1)
    assert findings == [None] * 3
    assert "rank 0 waits in recv from rank 1" in deadlock(later(board))


def test_callbacks_of_a_call_that_cannot_end_help_nobody() -> None:
    board, (one, other) = world(2)
    future, then, _ = _hooks(one)
    then(future, lambda future: None)
    other.returns()
    one.waits(one.posts("irecv", 1))
    assert "rank 0 waits in recv from rank 1" in deadlock(later(board))


def test_callbacks_that_torch_refuses_do_not_count() -> None:
    board, (one, other) = world(2)
    future, then, number = _hooks(one)
    with pytest.raises(TypeError):
        then(future, print, "a second one")
    other.does(ALL_REDUCE)
    one.done(number)
    for rank in (one, other):
        rank.returns()
    assert board.settled()


def test_a_callback_of_one_run_counts_in_no_other() -> None:
    board, (one, other) = world(2)
    future, then, number = _hooks(one)
    then(future, lambda future: None)
    other.does(ALL_REDUCE)
    one.done(number)
    for rank in (one, other):
        rank.returns()
    assert not board.settled()
    assert board.unfinished(0)
    assert not board.unfinished(1)
    board.reset(run=2)
    one.recorder.begin(2)
    other.recorder.begin(2)
    one.world = one.group("WORLD", range(2))
    one.joins(ALL_REDUCE)
    future.set_result(1)
    other.returns()
    assert "rank 0 waits in all_reduce" in deadlock(later(board))


def test_a_call_that_the_backend_has_let_go_is_told() -> None:
    """MPI ends the root's part of a broadcast early."""
    board, (one, other) = world(2)
    one.does(BROADCAST)
    one.returns()
    other.waits(other.posts("irecv", 0))
    assert (
        "hint: rank 0 has got past broadcast(root=0, dtype=float32, shape=[4]) [group WORLD, call 1], "
        "which rank 1 has not joined\n" in deadlock(at_once(board))
    )


def test_receives_from_anybody() -> None:
    board, ranks = world(3)
    ranks[0].waits(ranks[0].posts("irecv", ANY))
    ranks[1].returns()
    assert later(board) is None
    ranks[2].posts("isend", 0)
    ranks[2].returns()
    assert later(board) is None  # it meets that send
    ranks[0].done(1)
    ranks[0].waits(ranks[0].posts("irecv", ANY))
    assert "recv from any rank" in deadlock(at_once(board))


def test_a_receive_behind_one_from_anybody() -> None:
    """The second receive waits for the rank that the first has taken from, and that sends no more."""
    board, ranks = world(3)
    for sender in (1, 2):
        ranks[sender].posts("isend", 0)
    number = ranks[0].posts("irecv", ANY)
    ranks[0].waits(number)
    ranks[0].recorder.took(number, 1)
    ranks[0].done(number)
    ranks[0].waits(ranks[0].posts("irecv", 1))
    for sender in (1, 2):
        ranks[sender].returns()
    message = deadlock(at_once(board))
    assert (
        "rank 0 waits in recv from rank 1 (float32, shape [4], tag 0) [group WORLD] for rank 1"
        in message
    )
    assert (
        "wait-for: rank 0 waits for rank 1, which has returned without a matching call" in message
    )


def test_a_send_that_a_receive_from_anybody_has_not_taken() -> None:
    board, ranks = world(3, synchronous_sends=True)
    number = ranks[0].posts("irecv", ANY)
    ranks[1].posts("isend", 0)
    ranks[2].waits(ranks[2].posts("isend", 0))
    ranks[0].waits(number)
    assert later(board) is None  # who is taken is not known
    ranks[0].recorder.took(number, 1)
    ranks[0].done(number)
    for rank in ranks[:2]:
        rank.returns()
    assert "rank 2 waits in send to rank 0" in deadlock(later(board))


def test_a_named_receive_after_receives_from_anybody() -> None:
    board, ranks = world(3)
    for sender in (1, 2, 1):
        ranks[sender].posts("isend", 0)
    numbers = [ranks[0].posts("irecv", peer) for peer in (ANY, ANY, 1)]
    for number in numbers:
        ranks[0].waits(number)
        assert later(board) is None
        ranks[0].done(number)
    for number, rank in ((1, 1), (1, 2), (2, 1)):
        ranks[rank].done(number)
        ranks[rank].returns() if number == 2 or rank == 2 else None
    ranks[0].returns()
    assert board.leaks(strict=False) == ([], [])


@pytest.mark.parametrize("ordered", [True, False])
def test_a_message_that_an_earlier_receive_from_anybody_takes(ordered: bool) -> None:
    """Gloo gives it to the receive that names the sender."""
    board, ranks = world(3, synchronous_sends=True, ordered_receives=ordered)
    for sender in (1, 2):
        ranks[sender].posts("isend", 0)
    *_, last = (ranks[0].posts("irecv", peer) for peer in (ANY, ANY, 1))
    ranks[0].waits(last)
    for sender in (1, 2):
        ranks[sender].done(1)
        ranks[sender].returns()
    if ordered:
        assert "rank 0 waits in recv from rank 1" in deadlock(at_once(board))
    else:
        assert later(board) is None
        assert "may have met another call: there is a receive from any rank" in board.where(0)


def _may_take(receives: Sequence[Source], sent: Sequence[int]) -> set[int]:
    """The positions of the receives that take a message in some order of arrival, by trying all."""
    takers = set()
    for arrival in set(itertools.permutations(sent)):
        posted = dict(enumerate(receives))
        for sender in arrival:
            fits = [at for at, peer in posted.items() if peer in (ANY, sender)]
            if fits:
                del posted[fits[0]]
        takers |= {*range(len(receives))} - {*posted}
    return takers


def test_receives_that_take_messages_in_order() -> None:
    for length in (1, 2, 3):
        for receives in itertools.product((ANY, 1, 2), repeat=length):
            for counts in itertools.product(range(3), repeat=2):
                sent = [sender for sender in (1, 2) for _ in range(counts[sender - 1])]
                board, ranks = world(3, ordered_receives=True)
                for sender in sent:
                    ranks[sender].posts("isend", 0)
                numbers = [ranks[0].posts("irecv", peer) for peer in receives]
                for at, number in enumerate(numbers):
                    ranks[0].waits(number)
                    assert board.blocked(0) == (at not in _may_take(receives, sent))


# ---- Objects -------------------------------------------------------------------------------------


def test_objects_that_are_sent_and_taken() -> None:
    board, ranks = world(3)
    ranks[1].enters("smp.recv_from(world rank 0)", source=0)
    ranks[0].enters("smp.broadcast(group WORLD)", to=[1, 2])
    assert later(board) is None  # rank 2 computes
    ranks[1].leaves()
    ranks[2].enters("smp.recv_from(world rank 0)", source=0)
    assert later(board) is None
    for rank in (0, 2):
        ranks[rank].leaves()
    for rank in ranks:
        rank.enters("smp.barrier")
    assert later(board) is None
    for rank in ranks:
        rank.leaves()
        rank.returns()
    assert board.settled()


def test_objects_that_nobody_takes() -> None:
    board, ranks = world(2)
    for rank in ranks:
        rank.enters("smp.send", to=[1 - rank.rank])
    message = deadlock(at_once(board))
    assert "rank 0 waits in smp.send(world rank 1) for rank 1" in message
    assert "hint: smp.send returns after the matching smp.recv_from" in message


def test_a_broadcast_that_all_call() -> None:
    board, ranks = world(2)
    for rank in ranks:
        rank.enters("smp.broadcast", to=[1 - rank.rank])
    assert "hint: smp.broadcast is called by the root alone" in deadlock(at_once(board))


def test_different_calls_of_the_object_transport() -> None:
    board, ranks = world(2)
    ranks[0].enters("smp.barrier")
    ranks[1].enters("smp.allgather")
    assert "differs in operation" in mismatch(at_once(board))


def test_what_a_transport_does_for_a_call_is_its_own() -> None:
    _, ranks = world(2)
    recorder = ranks[0].recorder
    assert recorder.active
    with recorder.call("smp.barrier", ranks[0].api_group()):
        assert not recorder.active
    with recorder.quiet():
        assert not recorder.active
    assert recorder.active
    ranks[0].returns()
    assert not recorder.active


# ---- Time-outs, leaks, runs ----------------------------------------------------------------------


def test_where_a_rank_is_and_who_is_missing() -> None:
    board, ranks = world(3)
    assert board.where(0) == ""
    assert not board.waits(0)
    ranks[0].joins(ALL_REDUCE)
    ranks[1].joins(ALL_REDUCE)
    assert board.where(1).startswith(
        "in all_reduce(reduce op=SUM, dtype=float32, shape=[4]) [group WORLD, call 1], waiting for "
        "rank 2\n      "
    )
    assert board.waits(1)
    assert board.blocked(1)
    assert not board.blocked(2)
    (line,) = board.missing()
    assert line.startswith("rank 2 never arrived at all_reduce(")
    ranks[2].joins(ALL_REDUCE)
    assert ", which all have joined\n" in board.where(0)
    assert not board.blocked(0)
    assert board.missing() == []


@pytest.mark.parametrize("receiver", [1, ANY])
def test_where_a_rank_is_whose_message_has_met_its_recv(receiver: int) -> None:
    """A backend whose ring is full may keep it there, and nobody but two ranks has joined anything."""
    board, ranks = world(3)
    number = ranks[1].posts("isend", 0)
    ranks[0].posts("irecv", receiver)
    ranks[1].waits(number)
    met = (
        "whose recv rank 0 has issued"
        if receiver == 1
        else "which may have met another call: there is a receive from any rank"
    )
    text = board.where(1)
    assert text.startswith("in send to rank 0 (")
    assert f", {met}\n" in text
    assert "all have joined" not in text


def test_a_rank_that_left_its_body_out_of_a_call() -> None:
    board, (one, other) = world(2)
    number = one.joins(ALL_REDUCE)
    one.recorder.failed([number])
    one.returns()
    other.does(ALL_REDUCE)
    other.returns()
    assert board.waits(0)
    assert not board.waits(1)


def test_leaks() -> None:
    board, (one, other) = world(2)
    one.posts("isend", 1)
    other.posts("irecv", 0, tag=3)
    one.starts(ALL_REDUCE)
    other.starts(ALL_REDUCE)
    one.starts(BARRIER)
    one.returns()
    other.returns()
    assert board.look((), LONG) is None
    fatal, minor = board.leaks(strict=False)
    assert [line.split("\n")[0] for line in fatal] == [
        "rank 0: send to rank 1 (float32, shape [4], tag 0) was never matched",
        "rank 0: barrier() [group WORLD, call 2] was never joined by rank 1",
        "rank 1: recv from rank 0 (float32, shape [4], tag 3) was never matched",
        "ranks 0-1: all_reduce was never waited for",
    ]
    assert minor == []
    assert not board.settled()


def test_late_records_of_the_last_run_do_no_harm() -> None:
    board, (one, other) = world(2)
    one.joins(ALL_REDUCE)
    board.reset(run=2)
    one.returns()
    other.joins(ALL_REDUCE_MAX)  # still of the last run
    again = [Rank(board, rank, range(2), run=2) for rank in range(2)]
    for rank in again:
        rank.does(ALL_REDUCE)
        rank.returns()
    assert board.look((), LONG) is None
    assert board.settled()


def test_memory_stays_flat() -> None:
    board, ranks = world(2)
    for _ in range(1000):
        for rank in ranks:
            rank.does(ALL_REDUCE)
            number = rank.posts("isend" if rank.rank else "irecv", 1 - rank.rank)
            rank.waits(number)
            rank.done(number)
    assert len(board._meetings) <= 2
    assert not any(box.posts for box in board._boxes.values())
    assert not any(state.calls for state in board._ranks)


@pytest.mark.parametrize(
    "line",
    [
        b'["c",1,0,0,0,0]',  # a group that it never named
        b'["s",1,99,0,0,0,0,0]',
        b'["g",0,"torch","a","a",0,["x"]]',
        b'["d",0,"x",[["a"]],[],[],[],1]',
        b'["d",0,"x",7,[],[],[],1]',
    ],
)
def test_records_that_make_no_sense(line: bytes) -> None:
    board = Board(2)
    with pytest.raises(BackendError, match="rank 1: its line to the board"):
        board.feed(1, b'["b",0]\n' + line + b"\n")
    assert later(board) is None
    assert not board.settled()


def test_what_is_lost_could_have_prevented_a_verdict() -> None:
    board, (one, other) = world(2)
    one.waits(one.posts("irecv", 1))
    with pytest.raises(BackendError):
        board.feed(1, b"x\n")
    other.returns()
    assert later(board) is None
    assert board.leaks(strict=True) == ([], [])
