"""The rules of precedence, as functions of what is ready."""

from __future__ import annotations

import itertools

import pytest

from smp_core.schedule import POLICIES, Kind, Phase, Progress, Ready, choose

F, B = Phase.FORWARD, Phase.BACKWARD
SIMPLE, INTERLEAVED = POLICIES["simple"], POLICIES["interleaved"]
FREE = Progress(forward=0, active=0, cap=4)


def go_on(phase, microbatch, order=0):
    return Ready(phase, microbatch, Kind.GO_ON, order)


def start(microbatch):
    return Ready(F, microbatch, Kind.START, microbatch)


def turn(microbatch):
    return Ready(B, microbatch, Kind.TURN, microbatch)


def chosen(policy, ready, progress=FREE):
    index = choose(policy, ready, progress)
    return None if index is None else ready[index]


def test_nothing_is_chosen_of_nothing():
    assert chosen(SIMPLE, []) is None
    assert chosen(INTERLEAVED, []) is None


@pytest.mark.parametrize(
    "ready", list(itertools.permutations([go_on(F, 0), go_on(B, 2), go_on(B, 3)]))
)
def test_interleaved_prefers_a_ready_backward_and_simple_a_forward(ready):
    assert chosen(INTERLEAVED, ready) == go_on(B, 2)
    assert chosen(SIMPLE, ready) == go_on(F, 0)


@pytest.mark.parametrize("policy", [SIMPLE, INTERLEAVED])
@pytest.mark.parametrize(
    "ready", list(itertools.permutations([go_on(F, 2, 1), go_on(F, 1, 3), go_on(F, 1, 2)]))
)
def test_the_lowest_microbatch_goes_first_and_what_was_ready_first(policy, ready):
    assert chosen(policy, ready) == go_on(F, 1, 2)


@pytest.mark.parametrize("active", range(6))
def test_a_microbatch_begins_below_the_cap(active):
    progress = Progress(forward=8, active=active, cap=4)
    assert chosen(INTERLEAVED, [start(5)], progress) == (start(5) if active < 4 else None)
    assert chosen(INTERLEAVED, [start(5), go_on(F, 7)], progress) == (
        start(5) if active < 4 else go_on(F, 7)
    )
    assert chosen(SIMPLE, [start(5)], progress) == start(5), "the cap is not for simple"


@pytest.mark.parametrize("forward", range(3))
def test_simple_begins_no_backward_before_the_last_forward(forward):
    progress = Progress(forward=forward, active=4, cap=4)
    assert chosen(SIMPLE, [turn(0), turn(1)], progress) == (None if forward else turn(0))
    assert chosen(INTERLEAVED, [turn(1), turn(0)], progress) == turn(0)
    assert chosen(SIMPLE, [turn(0), go_on(F, 3)], progress) == go_on(F, 3)
