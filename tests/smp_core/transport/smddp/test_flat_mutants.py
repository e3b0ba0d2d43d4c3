"""Bugs planted in flat.py: each must be caught by the test that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_core.transport.smddp import flat
from tests.smp_core.transport.smddp import test_flat, test_point_to_point
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught, values

BUGS = Bugs()


@BUGS.caught_by(*values(test_flat.check_nothing_is_written_to_tensors_without_elements))
def a_tensor_without_elements_has_one(patch: Patch) -> None:
    def as_bytes(tensors: Any) -> Any:
        view = tensors[0].view(-1)
        if view.stride(0) != 1:
            view = view.as_strided((1,), (1,))
        return view.view(torch.uint8).numpy()

    patch.setattr(flat, "_joined", as_bytes)


@BUGS.caught_by(*values(test_point_to_point.check_any_source))
def a_transposed_output_is_not_written(patch: Patch) -> None:
    patch.setattr(flat.Target, "finish", lambda self: None)


@BUGS.caught_by(*values(test_flat.check_views))
def a_negative_view_is_read_as_it_lies(patch: Patch) -> None:
    patch.setattr(flat, "_plain", lambda tensor: tensor.is_contiguous())


@BUGS.caught_by(lambda _: test_flat.test_tensors_that_lie_elsewhere_are_read_one_by_one())
def neighbours_are_one_storage(patch: Patch) -> None:
    def adjacent(tensors: Any) -> bool:
        ends = [each.data_ptr() + each.numel() * each.itemsize for each in tensors]
        begins = [each.data_ptr() for each in tensors]
        return all(map(flat._plain, tensors)) and begins[1:] == ends[:-1]

    patch.setattr(flat, "_adjacent", adjacent)


@BUGS.caught_by(*values(test_flat.check_storages_can_be_resized))
def the_storage_of_a_tensor_is_numpy_s(patch: Patch) -> None:
    patch.setattr(flat, "_joined", lambda tensors: tensors[0].view(-1).view(torch.uint8).numpy())


@BUGS.caught_by(test_flat.test_an_operation_keeps_the_memory_that_its_tensor_gives_up)
def an_operation_keeps_its_tensor_alone(patch: Patch) -> None:
    class Kept(flat._Memory):
        def __init__(self, tensor: torch.Tensor, count: int) -> None:
            super().__init__(tensor, count)
            self._storage: Any = tensor

    patch.setattr(flat, "_Memory", Kept)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
