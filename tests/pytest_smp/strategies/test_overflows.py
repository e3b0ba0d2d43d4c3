"""Overflow histories: every kind on every rank, valid, printed as code, shrunk to little."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis.errors import InvalidArgument

from pytest_smp.strategies import Overflows, overflows
from pytest_smp.strategies.overflows import KINDS

Drawn = Callable[..., list[Any]]


def test_every_kind_comes_on_every_rank_and_good_steps_are_many(drawn: Drawn) -> None:
    histories = drawn(overflows(3))
    assert {len(history) for history in histories} == set(range(1, 9))
    assert {history.ranks for history in histories} == {3}
    steps = [step for history in histories for step in history]
    for rank in range(3):
        assert {step[rank] for step in steps} == set(KINDS)
    good = sum(set(step) == {"finite"} for step in steps)
    assert 0.25 < good / len(steps) < 0.75
    odd = Counter(sum(kind != "finite" for kind in step) for step in steps)
    assert set(odd) == {0, 1, 2}


def test_what_is_asked_for_is_drawn(drawn: Drawn) -> None:
    for history in drawn(overflows(2, min_steps=2, max_steps=3, kinds=("nan",))):
        assert len(history) in (2, 3)
        assert {kind for step in history for kind in step} <= {"finite", "nan"}
    for history in drawn(overflows(2, kinds=("finite",)), 20):
        assert {kind for step in history for kind in step} == {"finite"}


def test_a_history_shrinks_to_the_step_that_matters(minimal: Callable[..., Any]) -> None:
    assert minimal(overflows(3)) == Overflows(("finite",) * 3)
    found = minimal(overflows(3), lambda history: any(step[1] == "inf" for step in history))
    assert found == Overflows(("finite", "inf", "finite"))


def test_a_history_prints_as_code(
    printed: Callable[..., tuple[Any, str]], paste: Callable[[str], Any]
) -> None:
    value, code = printed(overflows(2), after=3, condition=lambda history: len(history) > 2)
    assert paste(code) == value
    assert repr(Overflows(("inf", "nan"))) == "Overflows(('inf', 'nan'))"


def test_a_history_is_its_steps() -> None:
    history = Overflows(["inf", "absent"], ("finite", "large"))
    assert history == Overflows(("inf", "absent"), ("finite", "large"))
    assert history != Overflows(("inf", "absent"))
    assert history != history.steps
    assert pickle.loads(pickle.dumps(history)) == history
    assert len({history, Overflows(*history)}) == 1
    assert Overflows().ranks == 0


def test_what_is_no_history_is_refused() -> None:
    with pytest.raises(ValueError, match="no infinite; there is finite, absent, large, inf, nan"):
        Overflows(("infinite",))
    with pytest.raises(ValueError, match="each rank"):
        Overflows(("inf",), ("inf", "nan"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ranks": 0}, "ranks=0: must be an int of at least 1"),
        ({"ranks": 1, "min_steps": -1}, "min_steps=-1"),
        ({"ranks": 1, "min_steps": 3, "max_steps": 2}, "max_steps=2: must be an int of at least 3"),
        ({"ranks": 1, "kinds": ("inf", "zero")}, "no zero; there is finite"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        overflows(**arguments)
