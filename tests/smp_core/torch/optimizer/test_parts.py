"""shard_optimizer_state: the bits of the whole optimizer, from parts of it on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.torch.exceptions import UnsupportedTrainingError
from tests.smp_core.torch.precision.reference import Reference

PIPE = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}
LAYOUTS = [
    pytest.param(dtype, marks=pytest.mark.smp(
        ranks=ranks, ddp=True, microbatches=2, shard_optimizer_state=True,
        fp16=dtype is torch.float16, **more,
    ), id=f"{name}-{str(dtype)[6:]}")
    for dtype in (torch.float32, torch.float16)
    for name, ranks, more in (("two", 2, {}), ("four", 4, {}), ("pipelines", 8, PIPE))
]  # fmt: skip


class Scale(nn.Module):
    """A parameter of one element, an unused and a frozen one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return x * self.scale + self.frozen


def net(smp=None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Scale(), nn.Linear(7, 3))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # not row-major
    if smp is not None:
        smp.set_partition(model[3], 1)
    model[2].frozen.data = torch.arange(7.0)
    return model


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.03, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.03, foreach=True),
}
adam = OPTIMIZERS["adam"]


def batches(replicas, steps):
    generator = torch.Generator().manual_seed(3)
    return [
        [
            (torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator))
            for _ in range(replicas)
        ]
        for _ in range(steps)
    ]


def cut(batch, microbatches):
    return list(zip(*(each.chunk(microbatches) for each in batch), strict=True))


def step_of(smp):
    @smp.step
    def run(model, x, y):
        model.backward((model(x) - y).square().sum())

    return run


def reference_of(dtype, optimizer_of, steps, microbatches=2):
    reference = Reference(net(), optimizer_of, dtype)
    for step in steps:
        reference.backward([cut(each, microbatches) for each in step])
        reference.update()
    return reference


def own(tensor, smp):
    size, rank = smp.rdp_size(), smp.rdp_rank()
    part = -(-tensor.numel() // size)
    return tensor.reshape(-1)[rank * part : (rank + 1) * part]


@pytest.mark.parametrize("dtype", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "made"), [("sgd", "before"), ("adam", "after"), ("adamw", "before")]
)
def test_parameters_are_those_of_the_whole_optimizer_and_state_is_of_the_own_part(
    smp, dtype, name, made
):
    steps = batches(smp.dp_size(), 3)
    module = net(smp)
    if made == "before":
        optimizer = smp.DistributedOptimizer(OPTIMIZERS[name](module.parameters()))
    model = smp.DistributedModel(module)
    if made == "after":
        optimizer = smp.DistributedOptimizer(OPTIMIZERS[name](module.parameters()))
    run = step_of(smp)
    for step in steps:
        optimizer.zero_grad()
        run(model, *step[smp.dp_rank()])
        optimizer.step()
    reference = reference_of(dtype, OPTIMIZERS[name], steps)
    states = dict(
        zip(reference.names, map(reference.optimizer.state.get, reference.masters), strict=True)
    )
    for path, parameter in model.local_named_parameters():
        expected = reference.model.get_parameter(path)
        assert torch.equal(parameter, expected)
        if not parameter.requires_grad:
            continue
        master = model.masters.of(parameter)
        state = optimizer.state[master]
        wanted = states[path] or {}
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(state[key], own(value, smp) if key != "step" else value)
        assert master.shape == own(expected, smp).shape
        assert parameter.isfinite().all()
    virtual = dict(model.virtual_named_parameters())
    assert {id(each) for each in virtual.values()} >= {id(each) for each in optimizer.state}


@pytest.mark.smp(ranks=2, ddp=True, shard_optimizer_state=True)
def test_gradients_are_whole_for_the_script_to_clip_and_parts_see_that(smp):
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    plain = net()
    inner = torch.optim.SGD(plain.parameters(), lr=1.0)
    x = torch.arange(20.0).view(4, 5) / 8
    smp.step(lambda model, x: model.backward(model(x).square().sum()))(model, x)
    plain(x).square().sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)]
    assert norms[0] == norms[1]
    optimizer.step()
    inner.step()
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
    optimizer.zero_grad(set_to_none=False)
    assert all(not each.grad.any() for each in model.parameters() if each.grad is not None)
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    assert optimizer._parameters.targets() == []


@pytest.mark.smp(ranks=2, ddp=True, shard_optimizer_state=True)
@pytest.mark.parametrize("kind", ["list", "own", "whole"])
def test_state_is_loaded_from_the_list_of_parts_a_part_or_a_whole(smp, kind):
    steps = batches(2, 4)
    run = step_of(smp)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    for step in steps[:2]:
        optimizer.zero_grad()
        run(model, *step[smp.dp_rank()])
        optimizer.step()
    parts = optimizer.local_state_dict()
    part = optimizer.local_state_dict(gather_if_shard=False)
    assert isinstance(parts, list) is (smp.rdp_rank() == 0)
    assert part["_smp_is_partial"] is True
    parts = copy.deepcopy(smp.allgather(parts, smp.WORLD)[0])
    assert len(parts) == 2
    assert torch.equal(parts[smp.rdp_rank()]["state"][0]["exp_avg"], part["state"][0]["exp_avg"])
    with pytest.raises(UnsupportedTrainingError, match="local_state_dict"):
        optimizer.state_dict()
    reference = reference_of(torch.float32, adam, steps[:2], microbatches=1)
    names = [name for name, _ in net().named_parameters()]
    whole = {
        "param_groups": part["param_groups"],
        "state": {
            names.index(name): reference.optimizer.state[master]
            for name, master in zip(reference.names, reference.masters, strict=True)
            if master in reference.optimizer.state
        },
    }
    weights = copy.deepcopy(model.state_dict())
    smp.shutdown()
    smp.init({"ddp": True, "shard_optimizer_state": True})
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adam(model.parameters()))
    model.load_state_dict(weights)
    optimizer.load_state_dict({"list": parts, "own": part, "whole": whole}[kind])
    with pytest.raises(ArgumentTypeError, match="a list of 1 parts, and there are 2"):
        optimizer.load_state_dict(parts[:1])
    run = step_of(smp)
    for step in steps[2:]:
        optimizer.zero_grad()
        run(model, *step[smp.dp_rank()])
        optimizer.step()
    reference = reference_of(torch.float32, adam, steps, microbatches=1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.model.state_dict()[name])


@pytest.mark.smp(ranks=2, ddp=True, shard_optimizer_state=True)
@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (lambda parameters: torch.optim.Adafactor(parameters), "Adafactor does not update"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), "fused"),
    ],
)
def test_optimizers_that_parts_would_change_are_refused(smp, inner, says):
    with pytest.raises(UnsupportedTrainingError, match=says):
        smp.DistributedOptimizer(inner(net().parameters()))


@pytest.mark.smp(ranks=2, ddp=True, shard_optimizer_state=True)
def test_the_scaler_unscales_whole_gradients_and_an_overflow_of_one_part_is_all_ranks(smp):
    model = smp.DistributedModel(nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = smp.amp.GradScaler(init_scale=8.0)
    run = smp.step(lambda model, scaler, x: model.backward(scaler.scale(model(x).sum())))
    run(model, scaler, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    scaler.unscale_(optimizer)
    assert model.module.weight.grad.tolist() == [[1, 2, 3, 4]]
    model.module.weight.grad.div_(4)
    scaler.step(optimizer)
    scaler.update()
    assert model.module.weight.tolist() == [[0.75, 0.5, 0.25, 0]]
    optimizer.zero_grad()
    run(model, scaler, torch.tensor([[1.0, 2.0, 3.0, float("inf")]]))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4
    assert model.module.weight.tolist() == [[0.75, 0.5, 0.25, 0]]


@pytest.mark.smp(ranks=1, fp16=True)
def test_the_scaler_is_refused_with_fp16_when_it_is_used(smp):
    scaler = smp.amp.GradScaler()
    with pytest.raises(UnsupportedTrainingError, match="scale twice"):
        scaler.scale(torch.ones(()))
    assert smp.amp.GradScaler(enabled=False).scale(1) == 1
