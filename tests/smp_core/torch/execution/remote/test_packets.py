"""An object that is made a payload, encoded, decoded and thawed is equal to the object before."""

from __future__ import annotations

import pytest
import torch

from smp_core.errors import PayloadError
from smp_core.torch.execution.remote import packets
from smp_core.torch.execution.remote.packets import decode, encode, freeze


def crossed(value, grad=True, least=64):
    payload = freeze(value, "a value", grad)
    buffer = encode(3, "message", payload, least)
    total, sender = packets.beginning(buffer[:64])
    assert (sender, len(buffer)) == (3, max(total, least))
    message, received = decode(buffer)
    assert message == "message"
    return received


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)

TENSORS = {
    "contiguous": BASE,
    "transposed": BASE.t(),
    "strided": BASE[:, ::2],
    "reversed columns": BASE.flip(1),
    "expanded": BASE[0].expand(5, 6),
    "expanded of nothing": torch.ones(1, 0).expand(5, 0),
    "scalar": torch.tensor(2.5),
    "expanded scalar": torch.tensor(2.5).expand(3, 2),
    "empty": torch.empty(0, 3),
    "empty and strided": torch.empty(3, 0).t(),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "large": torch.rand(100, 100),
    "conjugate": torch.conj(torch.tensor([1 + 2j])),
    "negative": torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_keeps_values_and_strides(name):
    tensor = TENSORS[name]
    received = crossed([tensor])
    (came,) = received.thaw()
    assert torch.equal(came, tensor)
    if tensor.numel() > 1:  # of fewer elements no kernel looks at them
        assert came.stride() == tensor.stride()
    assert came.dtype is tensor.dtype
    assert not came._is_view() or not came.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_a_tensor_keeps_its_place_within_64_bytes(dtype):
    row = torch.arange(60).to(dtype)
    given = [row[start : start + 3] for start in (0, 1, 7, 16, 31, 50)]
    came = crossed(given).thaw()
    for one, other in zip(given, came, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() % 64 == other.data_ptr() % 64


def test_a_nest_keeps_its_identities():
    a, b = torch.ones(2), torch.zeros(3, requires_grad=True)
    nest = {"a": a, "list": [b, a, (None, 3, "text")], "again": b}
    received = crossed(nest)
    assert received.requires == [False, True]
    assert received.differentiable() == [1]
    came = received.thaw()
    assert came["a"] is came["list"][1]
    assert came["again"] is came["list"][0]
    assert came["list"][2] == (None, 3, "text")
    other = received.thaw(["first", "second"])
    assert other == {
        "a": "first",
        "list": ["second", "first", (None, 3, "text")],
        "again": "second",
    }


def test_without_gradients_nothing_is_part_of_the_graph():
    assert crossed([torch.ones(1, requires_grad=True)], grad=False).differentiable() == []


def test_tensors_share_no_version_counter():
    received = crossed([torch.ones(2), torch.ones(3)])
    first, second = received.tensors
    first.add_(1)
    assert first._version == 1
    assert second._version == 0
    assert second.tolist() == [1, 1, 1]


def test_sparse_tensors_are_values():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(crossed({"s": sparse}).thaw()["s"].to_dense(), torch.eye(3))


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(PayloadError, match=r"module a: an argument cannot be sent.*lambda"):
        freeze([lambda: 0], "module a: an argument", True)
