"""The model of matching, against endings worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_smp.strategies.communication import Program
from pytest_smp.strategies.communication.matching import Ending, ending
from pytest_smp.strategies.communication.steps import Plans

Make = Callable[..., Program]
REDUCE = {"operation": "all_reduce", "reduce_op": "SUM"}


def without(plans: Plans, rank: int, *places: int) -> Plans:
    """Plans in which a rank leaves out the actions at these places."""
    kept = tuple(action for at, action in enumerate(plans[rank]) if at not in places)
    return (*plans[:rank], kept, *plans[rank + 1 :])


def changed(plans: Plans, rank: int, place: int, **fields: Any) -> Plans:
    """Plans in which a rank's call differs."""
    plan = [*plans[rank]]
    plan[place] = replace(plan[place], step=replace(plan[place].step, **fields))
    return (*plans[:rank], tuple(plan), *plans[rank + 1 :])


def blocked(end: Ending) -> dict[int, int]:
    """The ranks that wait for ever, each with the number of the step."""
    return {rank: action.step.number for rank, action in end.blocked.items()}


def test_a_valid_program_ends(program: Make) -> None:
    end = ending(program(3, REDUCE, {"operation": "barrier"}).plans)
    assert end == Ending()


def test_a_call_left_out_at_the_end_blocks_the_others(program: Make) -> None:
    end = ending(without(program(3, REDUCE).plans, 1, 0))
    assert blocked(end) == {0: 0, 2: 0}
    assert not end.mismatches


def test_a_call_left_out_before_an_equal_one_blocks_at_the_last(program: Make) -> None:
    end = ending(without(program(3, REDUCE, REDUCE).plans, 1, 0))
    assert blocked(end) == {0: 1, 2: 1}
    assert not end.mismatches


def test_a_call_left_out_before_another_one_is_a_mismatch(program: Make) -> None:
    end = ending(without(program(3, REDUCE, {"operation": "barrier"}).plans, 1, 0))
    (meeting,) = end.mismatches
    assert {rank: action.step.number for rank, (action, _) in meeting.calls.items()} == {
        0: 0,
        1: 1,
        2: 0,
    }


def test_calls_on_two_groups_do_not_meet(program: Make) -> None:
    plans = program(2, {**REDUCE, "group": "g1"}, {**REDUCE, "group": "g2"}, g1=(0, 1), g2=(0, 1))
    first, second = plans.plans[1]
    assert blocked(ending((plans.plans[0], (second, first)))) == {0: 0, 1: 1}


def test_two_blocked_sends_meet_nothing_and_asynchronous_ones_do(program: Make) -> None:
    def crossing(lags: tuple[Any, ...]) -> Program:
        one = {"operation": "send", "root": 0, "peer": 1, "lags": (*lags, None)}
        return program(2, one, {**one, "root": 1, "peer": 0})

    for lags, ends in (((None,), {0: 0, 1: 1}), ((1,), {})):
        plans = crossing(lags).plans
        sends_first = sorted(plans[1], key=lambda action: action.step.number != 1)
        moved = tuple(action for action in sends_first if action.what == "call")
        waits = tuple(action for action in sends_first if action.what == "wait")
        assert blocked(ending((plans[0], (*moved, *waits)))) == ends


def test_a_tag_and_a_peer_must_fit(program: Make) -> None:
    plans = program(3, {"operation": "send", "root": 0, "peer": 1}).plans
    assert blocked(ending(changed(plans, 1, 0, tag=1))) == {0: 0, 1: 0}
    assert blocked(ending(changed(plans, 1, 0, root=2))) == {0: 0, 1: 0}


def test_a_send_and_its_receive_must_agree_on_count_and_dtype_not_on_shape(program: Make) -> None:
    plans = program(2, {"operation": "send", "root": 0, "peer": 1, "shape": (2, 3)}).plans
    assert not ending(changed(plans, 1, 0, shape=(6,))).mismatches
    assert len(ending(changed(plans, 1, 0, shape=(5,))).mismatches) == 1
    assert len(ending(changed(plans, 1, 0, dtype="int8")).mismatches) == 1


def test_counts_of_all_to_all_are_compared_when_everybody_has_come(program: Make) -> None:
    call = {"operation": "all_to_all", "rows": ((1, 2), (3, 4))}
    plans = program(2, call).plans
    assert ending(plans) == Ending()
    assert len(ending(changed(plans, 0, 0, rows=((1, 1), (3, 4)))).mismatches) == 1
    assert not ending(changed(plans, 0, 0, rows=((1, 2), (3, 5)))).mismatches  # not its affair


def test_objects_are_taken_in_the_order_of_sending(program: Make) -> None:
    send = {"operation": "smp.send", "group": "WORLD", "root": 0, "peer": 1}
    broadcast = {"operation": "smp.broadcast", "group": "WORLD", "root": 0}
    plans = program(3, send, broadcast).plans
    assert ending(plans) == Ending()
    assert blocked(ending(without(plans, 1, 0))) == {0: 1}
    assert blocked(ending(without(plans, 2, 0))) == {0: 1}


def test_what_nobody_waits_for_is_left(program: Make) -> None:
    plans = program(2, {**REDUCE, "lags": (0, 0)}).plans
    end = ending(without(plans, 0, 1))
    assert [(rank, action.what, action.step.number) for rank, action in end.left] == [
        (0, "call", 0)
    ]
    assert not end.blocked


def test_torchs_own_view_of_complex_numbers_leaves_a_doubt(program: Make) -> None:
    plans = program(2, {**REDUCE, "dtype": "complex64", "shape": (3,)}).plans
    assert ending(changed(plans, 1, 0, dtype="float32", shape=(3, 2))).doubtful
    assert not ending(changed(plans, 1, 0, dtype="float32")).doubtful
