"""The values that `same` tells apart, and those that it does not."""

from __future__ import annotations

import copy
import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from pytest_smp.strategies import Pair, Record, same

NAN, OTHER_NAN = (struct.unpack("d", struct.pack("Q", 0x7FF8 << 48 | bits))[0] for bits in (0, 1))


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        -0.0,
        NAN,
        1 + 2j,
        "ü",
        b"",
        (1, [2, {3: {4, (5, 1.0)}}]),
        frozenset({frozenset({1, 2.5}), 0}),  # prints alike in every process: it is an id
        Pair(torch.tensor([1.0]), [np.array([1, 2])]),
        Record("a", torch.zeros(0, 3)),
        np.float32(1),
        np.array(["a", "b"]),
        torch.tensor(math.nan),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, 1, 1, dtype=torch.complex128)[::2],  # contiguous to torch, with a stride of 2
        torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.ones((), dtype=torch.bool),
    ],
    ids=repr,
)
def test_a_value_is_the_same_as_its_copy(value: Any) -> None:
    assert same(value, copy.deepcopy(value))
    assert same([value], [copy.deepcopy(value)])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (NAN, OTHER_NAN),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ((1,), [1]),
        ((1, 2), (1, 2, 3)),
        ({1: 2, 3: 4}, {3: 4, 1: 2}),
        ({1: 2}, OrderedDict({1: 2})),
        ({1}, {True}),
        ({1}, frozenset({1})),
        ({(1, 2)}, {(1, 2.0)}),
        ({1: "a"}, {True: "a"}),
        (Pair(1, 2), (1, 2)),
        (Record("a", 1), Record("a", True)),
        (np.array([1]), np.array([1], dtype=np.int32)),
        (np.array([0.0]), np.array([-0.0])),
        (np.zeros((2, 0)), np.zeros((0, 2))),
        (np.float64(1), 1.0),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(()), torch.zeros(1)),
        (torch.zeros(2, 0), torch.zeros(0, 2)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.ones(1), torch.ones(1, requires_grad=True)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    ],
)
def test_what_differs_is_not_the_same(a: Any, b: Any) -> None:
    assert not same(a, b)
    assert not same([0, a], [0, b])
    assert not same({"k": a}, {"k": b})


def test_strides_do_not_count() -> None:
    dense = torch.arange(6.0).view(2, 3)
    assert same(dense, dense.t().contiguous().t())
    assert same(torch.ones(3, 2), torch.ones(2).expand(3, 2))


def test_bytes_count_where_torch_cannot_compare() -> None:
    a = torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)
    with pytest.raises(NotImplementedError):
        torch.equal(a, a)
    assert same(a, a.clone())
    assert not same(a, torch.tensor([1.0, 3.0]).to(torch.float8_e5m2))


def test_a_bool_that_is_neither_0_nor_1_is_told_apart() -> None:
    # The value of a recipe's `blank`; torch turns it into 1 whenever it copies it.
    odd = torch.tensor([0x80, 1], dtype=torch.uint8).view(torch.bool)
    assert not same(odd, torch.tensor([True, True]))
    assert same(odd, odd)
