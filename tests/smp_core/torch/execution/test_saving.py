"""A gathered parameter that autograd saves comes back, in its geometry, from memory that is gathered again."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from smp_core.torch.execution import saving
from smp_core.torch.sharding.sharded_parameter import make_unit
from smp_core.torch.sharding.unsharding import Unsharded


class OneRank:
    """Gathers are copies, as of one rank."""

    def __init__(self):
        self.calls = 0

    def all_gather_parts(self, shard, lengths):
        self.calls += 1
        self._parts = torch.split(shard, lengths)
        return self

    def result(self):
        return [part.clone().view(1, -1) for part in self._parts]


class Call:
    def __init__(self):
        self.module, self.parent, self.units = None, None, None


class Model:
    """Two parameters in a unit, and another unit."""

    def __init__(self, *values):
        self.parameters = [nn.Parameter(value) for value in values]
        units = []
        for number, parameter in enumerate(self.parameters):
            unit = make_unit(number, nn.Module(), [(f"p{number}", parameter)], 1, 0)
            parameter.data = unit.shards[0].copy_from_full(parameter)
            units.append(unit)
        self.collectives = OneRank()
        self.unsharded = Unsharded(self.collectives, units, 10**9)
        self.unsharded.begin_step()

    def read(self, number=0):
        """A whole parameter, and the call that reads it."""
        call = Call()
        return self.unsharded.read(self.parameters[number], call), call


VALUE = torch.arange(24.0).view(4, 6)

VIEWS = {
    "whole": lambda whole: whole,
    "row": lambda whole: whole[2],
    "columns": lambda whole: whole[:, 1::2],
    "transposed": lambda whole: whole.t(),
    "diagonal": lambda whole: whole.diagonal(),
    "expanded": lambda whole: whole[:, :1].expand(4, 9),
    "windows": lambda whole: whole.unfold(0, 2, 1),
    "empty": lambda whole: whole[:0],
    "one element": lambda whole: whole[3, 5],
    "bits": lambda whole: whole.view(torch.int32),
}
COMPLEX_VIEWS = {
    "real": torch.view_as_real,
    "conjugated": torch.conj,
    "imaginary": lambda whole: whole.imag,
    "imaginary, conjugated": lambda whole: whole.conj().imag,
    "conjugated, transposed": lambda whole: whole.mH,
}


def check_view(value, view):
    model = Model(value)
    whole, call = model.read()
    expected = view(value.clone())
    with saving.entered(model.unsharded, 0):
        kept = saving.keep(view(whole))
    memory = StorageWeakRef(whole.untyped_storage())
    del whole
    model.unsharded.leave(call, False)
    assert memory.expired()
    assert model.unsharded.live == 0
    again = saving.opened(kept)
    assert torch.equal(again, expected)
    assert again.dtype == expected.dtype
    assert again.stride() == expected.stride()
    assert (again.is_conj(), again.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert model.collectives.calls == 2


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_parameter(view):
    check_view(VALUE, VIEWS[view])


@pytest.mark.parametrize("view", COMPLEX_VIEWS)
def test_views_of_a_complex_parameter(view):
    check_view(torch.complex(VALUE, VALUE + 1), COMPLEX_VIEWS[view])


def test_what_is_still_whole_is_not_gathered_again():
    model = Model(VALUE)
    whole, _ = model.read()
    with saving.entered(model.unsharded, 0):
        kept = saving.keep(whole.t())
    assert saving.opened(kept).data_ptr() == whole.data_ptr()
    assert model.collectives.calls == 1


def test_a_tensor_of_other_memory_is_kept_itself():
    model = Model(VALUE)
    model.read()
    other = torch.ones(3)
    with saving.entered(model.unsharded, 0):
        kept = saving.keep(other)
    assert saving.opened(kept).data_ptr() == other.data_ptr()


def test_what_somebody_kept_of_a_parameter_that_was_given_back():
    """No longer a gathered one's memory: kept as any tensor."""
    model = Model(VALUE, VALUE + 1)
    whole, call = model.read()
    model.unsharded.leave(call, False)
    model.read(1)
    with saving.entered(model.unsharded, 0):
        kept = saving.keep(whole[1])
    assert torch.equal(saving.opened(kept), VALUE[1])
    assert model.collectives.calls == 2


def test_sparse_tensors_are_kept():
    model = Model(VALUE)
    model.read()
    sparse = torch.eye(3).to_sparse()
    with saving.entered(model.unsharded, 0):
        kept = saving.keep(sparse)
    assert torch.equal(saving.opened(kept).to_dense(), torch.eye(3))


def test_in_place_modification_in_between_is_noticed():
    model = Model(VALUE)
    x = torch.ones(3, requires_grad=True)
    with saving.entered(model.unsharded, 0):
        y = x.exp()
        z = y * 1
    y.mul_(2)
    said = "modified by an inplace operation: .* is at version 1; expected version 0"
    with pytest.raises(RuntimeError, match=said):
        z.sum().backward()


def test_modes_nest_and_end():
    model, other = Model(VALUE), Model(VALUE)
    whole, _ = model.read()
    with saving.entered(model.unsharded, 0):
        with saving.entered(other.unsharded, 1):
            assert saving.opened(saving.keep(whole)).data_ptr() == whole.data_ptr()
        assert saving.keep(whole).source is model.unsharded
    assert saving.keep(whole) is whole


def test_backward_gathers_again_and_leaves_no_memory():
    """Through torch's own saving: the graph has no reference to whole parameters."""
    model = Model(VALUE, 2 * VALUE)
    x = torch.ones(3, 4, requires_grad=True)
    gc.disable()
    try:
        with saving.entered(model.unsharded, 0):
            memory, y = [], x
            for number in range(2):
                whole, call = model.read(number)
                memory.append(StorageWeakRef(whole.untyped_storage()))
                y = y @ whole if number == 0 else y @ whole.t()
                del whole
                model.unsharded.leave(call, False)
        assert all(each.expired() for each in memory)
        y.sum().backward()
        assert model.collectives.calls == 4
        model.unsharded.end_backward(0)
        assert (model.unsharded.live, model.unsharded._storages) == (0, {})
    finally:
        gc.enable()
    plain = torch.ones(3, 4, requires_grad=True)
    (plain @ VALUE @ (2 * VALUE).t()).sum().backward()
    assert torch.equal(x.grad, plain.grad)
