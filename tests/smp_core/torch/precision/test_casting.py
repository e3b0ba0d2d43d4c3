"""The tensors that are converted to 16 bits: parameters in place, buffers, inputs and outputs in trees."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from smp_core.errors import ArgumentTypeError

Pair = collections.namedtuple("Pair", "left right")
PIPE = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 1 + 2**-11, 1 + 3 * 2**-12]))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.full((2,), 1 / 3))
        self.register_buffer("wide", torch.full((2,), 1 / 3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex64))

    def forward(self, x):
        return x * self.weight


@pytest.mark.smp(ranks=1, fp16=True)
def test_parameters_stay_objects_and_buffers_are_converted(smp):
    module = Buffers()
    kept, optimizer = module.weight, torch.optim.SGD(module.parameters(), lr=1.0)
    smp.DistributedModel(module)
    assert module.weight is kept
    assert optimizer.param_groups[0]["params"][0] is kept
    # To nearest, ties to even: 1 + 2**-11 is halfway between 1 and 1 + 2**-10.
    assert module.weight.tolist() == [1.0, 1.0, 1 + 2**-10]
    assert {name: each.dtype for name, each in module.state_dict().items()} == {
        "weight": torch.float16,
        "frozen": torch.float16,
        "mean": torch.float16,
        "wide": torch.float16,
        "count": torch.int64,
        "phase": torch.complex64,
    }


@pytest.mark.smp(ranks=1, fp16=True)
def test_memory_that_is_shared_stays_shared(smp):
    module = nn.Module()
    flat = torch.arange(12.0)
    module.left = nn.Parameter(flat[:8].view(2, 4))
    module.right = nn.Parameter(flat[4:].view(2, 4).t())
    module.tied = module.left
    smp.DistributedModel(module)
    with torch.no_grad():
        module.left[1, 0] = 100
    assert module.right[0, 0] == 100
    assert module.tied is module.left
    assert module.right.tolist() == [[100, 8], [5, 9], [6, 10], [7, 11]]


@pytest.mark.smp(ranks=1, fp16=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16])
def test_parameters_of_other_dtypes_are_refused_before_anything_changes(smp, dtype):
    module = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2, dtype=dtype)})
    with pytest.raises(
        ArgumentTypeError, match=r"'two.weight' is torch.*Create the model in torch.float32"
    ):
        smp.DistributedModel(module)
    assert module["one"].weight.dtype is torch.float32


class Looks(nn.Module):
    """Takes and gives trees; remembers what it saw."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, pair, *, more):
        Looks.seen = (pair, more)
        return {"out": pair.left * self.weight, "rest": [more[0], more[1], "text", None]}


@pytest.mark.smp(ranks=1, fp16=True)
def test_inputs_and_outputs_are_converted_in_containers(smp):
    model = smp.DistributedModel(Looks())
    x, double, whole = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2).long()
    given = torch.ones(2, requires_grad=True)
    out = model(Pair(x, (x, given)), more=[whole, double])
    pair, more = Looks.seen
    assert type(pair) is Pair
    assert pair.left is pair.right[0]
    assert pair.left.dtype is torch.float16
    assert more[0] is whole
    assert more[1] is double
    assert out["out"].dtype is torch.float32
    assert out["rest"][0] is whole
    assert out["rest"][1] is double
    assert out["rest"][2:] == ["text", None]
    out["out"].sum().backward()
    assert given.grad is None  # it influenced nothing
    assert model.masters.of(model.module.weight).dtype is torch.float32


@pytest.mark.smp(ranks=2, fp16=True, **PIPE)
def test_delayed_parameters_are_made_in_16_bits(smp):
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert module[0].weight.is_meta
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    assert module[0].weight.dtype is torch.float16

    @smp.step
    def run(model, x):
        model.backward(model(x).sum())

    run(model, torch.ones(1, 4))
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
        assert torch.equal(model.masters.of(parameter), plain.get_parameter(name).float())
    optimizer.step()
    names = [name for name, _ in model.local_named_parameters()]
    assert [name for name, _ in model.virtual_named_parameters()] == names
    assert len(optimizer.fp16_groups[0]) == len(optimizer.fp32_from_fp16_groups[0]) == 2
