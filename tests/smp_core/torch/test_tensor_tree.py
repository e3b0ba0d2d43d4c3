"""Tensor trees: flattened and put together again, detached, listed."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import torch

from smp_core.torch.tensor_tree import Slot, detached, flatten, map_tensors, tensors, unflatten


def test_flatten_and_unflatten():
    a, b = torch.zeros(2), torch.ones(3)
    tree = [a, {"b": (b, a, "s")}, OrderedDict(k=None)]
    found, rest = flatten(tree)
    assert [each is given for each, given in zip(found, [a, b], strict=True)] == [True, True]
    assert rest == [Slot(0), {"b": (Slot(1), Slot(0), "s")}, OrderedDict(k=None)]
    again = unflatten(found, pickle.loads(pickle.dumps(rest)))
    assert again[0] is again[1]["b"][1] is a
    assert again[1]["b"][0] is b
    assert type(again[2]) is OrderedDict


def test_a_tree_without_tensors_is_its_own_rest():
    tree = {"a": [1, None]}
    found, rest = flatten(tree)
    assert found == []
    assert rest is tree
    assert unflatten([], rest) is tree


def test_tensors_are_listed_in_order():
    a, b = torch.zeros(1), torch.nn.Parameter(torch.ones(1))
    assert [id(each) for each in tensors([b, {"x": a}, b, torch.Size([1])])] == [
        id(b),
        id(a),
        id(b),
    ]


def test_detached():
    leaf = torch.ones(2, requires_grad=True)
    out = detached((leaf * 2, ["s", leaf]))
    assert not any(each.requires_grad for each in tensors(out))
    assert out[1][0] == "s"
    assert out[1][1].data_ptr() == leaf.data_ptr()


def test_map_tensors_leaves_the_rest_alone():
    assert map_tensors(torch.Tensor.item, [torch.tensor(2), 3, "x"]) == [2, 3, "x"]
