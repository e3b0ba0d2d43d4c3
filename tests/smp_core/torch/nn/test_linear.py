"""``smp.nn.DistributedLinear``, alone and in the place of a torch.nn.Linear, against torch's own layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as api


def values(*shape: int, start: int = 0) -> torch.Tensor:
    """Small integers, different from element to element: every sum and product of the tests is exact."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 5 + start) % 7 - 3).float().view(shape)


def plain(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        layer.weight.copy_(values(outputs, inputs))
        if bias:
            layer.bias.copy_(values(outputs, start=3))
    return layer


@api.step
def train_step(model, x):
    output = model(x)
    loss = (output * output).sum()
    model.backward(loss)
    return output


@pytest.mark.parametrize("prescaled", [False, True], ids=["own batches", "prescaled"])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_as_torchs_layer_does(smp_world, degree, bias, prescaled):
    config = {"tensor_parallel_degree": degree, "ddp": True, "prescaled_batch": prescaled}
    smp_world.run(body, bias, prescaled, ranks=4, config=config)


def body(bias: bool, prescaled: bool) -> None:
    api.init()
    reference = plain(8, 3, bias)
    with api.tensor_parallelism():
        layer = nn.Linear(8, 3, bias)
    model = api.DistributedModel(layer)
    assert isinstance(model.module, api.nn.DistributedLinear)
    model.load_state_dict(reference.state_dict())
    share = api.rdp_rank() if prescaled else api.dp_rank()
    shares = api.rdp_size() if prescaled else api.dp_size()
    batches = [values(2, 5, 8, start=number) for number in range(shares)]
    outputs = [reference(each) for each in batches]
    output = train_step(model, batches[share])
    assert torch.equal(output.concat(), outputs[share])
    total = sum((each * each).sum() for each in outputs) / shares
    total.backward()
    size = 8 // api.tp_size()
    start = size * api.tp_rank()
    expected = reference.weight.grad[:, start : start + size]
    assert torch.equal(model.module.weight.grad, expected)
    if bias:
        assert torch.equal(model.module.bias.grad, reference.bias.grad)
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for key, value in reference.state_dict().items():
        assert torch.equal(state[key], value), key
