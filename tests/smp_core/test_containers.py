"""Containers: what is one, and that each is rebuilt in its class with all that it carries."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import pytest
import torch

from smp_core.containers import leaves, map_leaves, opened


class Point(NamedTuple):
    x: Any
    y: Any


class Named(list):
    def __init__(self, name: str) -> None:
        super().__init__([name])  # what a rebuilt one must not go through
        self.name = name


class Fixed(tuple):
    def __new__(cls) -> Fixed:
        raise AssertionError("no constructor is called")


@dataclasses.dataclass
class Output(OrderedDict):
    """As a model library has it: a dataclass whose attributes mirror the items of an OrderedDict."""

    loss: Any
    logits: Any = None
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def twice(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf * 2, value)


def test_plain_nests_at_any_depth():
    assert twice([1, (2, {"a": [3], "b": ()}), {4}, frozenset({5})]) == [
        2, (4, {"a": [6], "b": ()}), {8}, frozenset({10}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "leaf", ["text", b"bytes", None, 1, torch.Size([2, 3]), range(3), deque([1])]
)
def test_everything_else_is_a_leaf(leaf):
    assert opened(leaf) is None
    assert list(leaves(leaf)) == [leaf]


def test_a_dataclass_is_a_leaf():
    @dataclasses.dataclass
    class Plain:
        x: int

    assert opened(Plain(1)) is None


def test_named_tuples_keep_their_class():
    assert twice(Point(1, [2])) == Point(2, [4])
    assert type(twice(Point(1, 2))) is Point
    old = namedtuple("old", "a b")
    assert type(twice(old(1, 2))) is old


def test_subclasses_are_rebuilt_without_their_constructors():
    named = Named("n")
    named.append("m")
    doubled = twice(named)
    assert type(doubled) is Named
    assert doubled == ["nn", "mm"]
    assert doubled.name == "n"
    fixed = tuple.__new__(Fixed, [1, 2])
    assert type(twice(fixed)) is Fixed
    assert tuple(twice(fixed)) == (2, 4)


def test_torchs_named_results():
    result = torch.tensor([[1.0, 3.0]]).max(dim=1)
    doubled = twice(result)
    assert type(doubled) is type(result)
    assert doubled.values.item() == 6
    assert doubled.indices.item() == 2


def test_subclasses_of_dict():
    ordered = OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    assert list(twice(ordered).items()) == [("b", 4), ("a", 2)]
    assert type(twice(ordered)) is OrderedDict
    missing = twice(defaultdict(list, a=1))
    assert missing == {"a": 2}
    assert missing["new"] == []
    assert twice(Counter("aab")) == Counter(a=4, b=2)


def test_an_output_class_keeps_attributes_and_items_alike():
    output = Output(loss=[1], logits=2, note="n")
    doubled = twice(output)
    assert type(doubled) is Output
    assert dict(doubled) == {"loss": [2], "logits": 4}
    assert doubled.loss is doubled["loss"] is doubled[0]
    assert doubled.logits == 4
    assert doubled.note == "n"
    assert (output.loss, output["logits"]) == ([1], 2)  # the old one is untouched
    assert "logits" not in twice(Output(loss=1))


def test_a_user_dict():
    doubled = twice(UserDict(a=1))
    assert type(doubled) is UserDict
    assert doubled.data == {"a": 2}


def test_what_does_not_change_is_no_copy():
    container = [1, {"a": (2, 3)}]
    assert map_leaves(lambda leaf: leaf, container) is container
    changed = map_leaves(lambda leaf: 9 if leaf == 1 else leaf, container)
    assert changed[1] is container[1]
    assert container[0] == 1


def test_leaves_come_in_order():
    assert list(leaves([1, {"b": 2, "a": (3, [])}, Point(4, 5)])) == [1, 2, 3, 4, 5]
