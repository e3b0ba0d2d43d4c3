"""Objects: they survive plain pickle, hard cases are drawn, and they shrink to None."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.vendor import pretty

from pytest_smp.strategies import Pair, Record, objects, same
from pytest_smp.strategies.numbers import PICKLABLE

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]


def parts(value: Any) -> Iterator[Any]:
    """The value and everything in it."""
    yield value
    inside: Any = ()
    if isinstance(value, Record):
        inside = (value.name, value.value)
    elif isinstance(value, dict):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    for each in inside:
        yield from parts(each)


@given(objects())
@settings(deadline=None, database=None, max_examples=300)
def test_they_survive_plain_pickle(value: Any) -> None:
    assert same(pickle.loads(pickle.dumps(value)), value)


@pytest.mark.parametrize(
    "kind",
    [
        *(type(None), bool, int, float, str, bytes),
        *(tuple, list, dict, set, frozenset, Pair, Record),
        *(torch.Tensor, np.ndarray),
    ],
)
def test_every_type_is_drawn(kind: type, minimal: Minimal) -> None:
    found = minimal(objects(), lambda value: kind in map(type, parts(value)), False)
    assert kind in map(type, parts(found))


def test_nothing_else_is_drawn(drawn: Drawn) -> None:
    allowed = {type(None), bool, int, float, str, bytes, tuple, list, dict, set, frozenset}
    for value in drawn(objects(), 200):
        for part in parts(value):
            assert type(part) in {*allowed, Pair, Record, torch.Tensor, np.ndarray}
            assert not isinstance(part, torch.Tensor) or part.dtype in PICKLABLE


@pytest.mark.parametrize(
    "condition",
    [
        *(
            lambda v, dtype=dtype: isinstance(v, torch.Tensor) and v.dtype == dtype
            for dtype in PICKLABLE
        ),
        lambda v: isinstance(v, torch.Tensor) and v.numel() == 0,
        lambda v: isinstance(v, torch.Tensor) and v.shape == (),
        lambda v: isinstance(v, torch.Tensor) and not v.is_contiguous(),
        lambda v: isinstance(v, torch.Tensor) and v.storage_offset() > 0,
        lambda v: type(v) is int and abs(v) >= 2**63,
        lambda v: type(v) is float and v == float("inf"),
        lambda v: type(v) is tuple and v == (),
    ],
    ids=[*map(str, PICKLABLE), "empty", "0-D", "strides", "offset", "big", "inf", "()"],
)
def test_every_dtype_and_hard_case_is_drawn(
    condition: Callable[[Any], bool], minimal: Minimal
) -> None:
    assert (
        minimal(objects(), lambda value: any(map(condition, parts(value))), False) is not Ellipsis
    )


def test_they_nest(drawn: Drawn) -> None:
    def depth(value: Any) -> int:
        return 1 + max((depth(part) for part in parts(value) if part is not value), default=0)

    assert any(len(list(parts(value))) > 6 for value in drawn(objects(), 300))
    assert max(depth(value) for value in drawn(objects(), 100)) > 2


def test_without_tensors_there_are_none(drawn: Drawn) -> None:
    for value in drawn(objects(tensors=False), 300):
        assert not any(isinstance(part, torch.Tensor) for part in parts(value))


def test_they_shrink_to_little(minimal: Minimal) -> None:
    assert minimal(objects()) is None
    assert minimal(objects(), lambda value: isinstance(value, list)) == []
    assert minimal(objects(), lambda value: isinstance(value, list) and value) == [None]
    tensor = minimal(objects(), lambda value: isinstance(value, torch.Tensor))
    assert same(tensor, torch.tensor(1 + 2**-12))
    nested = minimal(
        objects(), lambda v: type(v) is tuple and any(isinstance(e, torch.Tensor) for e in v)
    )
    assert same(nested, (torch.tensor(1 + 2**-12),))


def test_the_tensors_of_others_print_as_ever() -> None:
    assert pretty.pretty(torch.tensor([1.0, 2.0])) == "tensor([1., 2.])"


@pytest.mark.parametrize("kind", [list, tuple, dict, Pair, Record])
def test_a_failing_example_shows_tensors_as_recipes(
    kind: type, printed: Callable[..., tuple[Any, str]], paste: Callable[[str], Any]
) -> None:
    def holds_a_tensor(value: Any) -> bool:
        inside = value.values() if kind is dict else value
        if kind is Record:
            inside = [value.value]
        return any(isinstance(each, torch.Tensor) for each in inside)

    for after in range(4):
        value, code = printed(
            objects(), after, lambda value: type(value) is kind and holds_a_tensor(value)
        )
        assert re.search(r"TensorSpec\(.*\)\.make\(\)", code), code
        assert not re.search(r"\btensor\(", code), code
        assert same(paste(code), value), code


def test_many_failing_examples_can_be_pasted(
    printed: Callable[..., tuple[Any, str]], paste: Callable[[str], Any]
) -> None:
    for after in range(0, 60, 3):
        value, code = printed(objects(), after, lambda value: len(list(parts(value))) > 2)
        assert same(paste(code), value), code


@pytest.mark.smp(ranks=3)
@given(values=st.lists(objects(), min_size=3, max_size=3))
@settings(deadline=None, database=None, max_examples=40)
def test_they_travel_between_ranks(smp: Any, values: list[Any]) -> None:
    assert same(smp.allgather(values[smp.rank()], smp.WORLD), values)
