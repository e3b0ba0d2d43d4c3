"""fp16 over pipelines and replicas, against a hand-written loop with float32 masters on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from tests.smp_core.torch.precision.reference import Reference

LAYOUTS = [
    pytest.param({}, marks=pytest.mark.smp(ranks=1, fp16=True), id="alone"),
    pytest.param(
        {"microbatches": 2}, marks=pytest.mark.smp(ranks=2, fp16=True, ddp=True, microbatches=2),
        id="replicas",
    ),
    pytest.param(
        {"microbatches": 2},
        marks=pytest.mark.smp(
            ranks=4, fp16=True, ddp=True, microbatches=2, pipeline_parallel_degree=2,
            auto_partition=False, default_partition=0,
        ),
        id="pipelines",
    ),
]  # fmt: skip


def net(smp=None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))
    if smp is not None:
        smp.set_partition(model[2], 1)
    return model


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.03)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def batches(replicas, steps, seed=3):
    """By step and replica: four samples and what they should give."""
    generator = torch.Generator().manual_seed(seed)
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
        loss = (model(x) - y).square().sum()
        model.backward(loss)
        return loss

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("optimizer_of", "made"), [(adam, "before"), (sgd, "after")])
def test_training_is_the_plain_loops_bit_for_bit(smp, layout, optimizer_of, made):
    count = layout.get("microbatches", 1)
    module = net(smp)
    arguments = {"static_loss_scale": 48.0}
    if made == "before":
        optimizer = smp.DistributedOptimizer(optimizer_of(module.parameters()), **arguments)
        model = smp.DistributedModel(module)
    else:
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()), **arguments)
    reference = Reference(net(), optimizer_of)
    run = step_of(smp)
    masters = dict(
        zip((name for name, _ in net().named_parameters()), reference.masters, strict=True)
    )
    for step in batches(smp.dp_size(), 3):
        optimizer.zero_grad()
        loss = run(model, *step[smp.dp_rank()])
        assert loss.reduce_mean().dtype is torch.float32
        assert all(parameter.grad is None for parameter in model.local_parameters())
        optimizer.step()
        reference.backward([cut(each, count) for each in step], scale=48.0)
        reference.update(1 / 48)
        for name, parameter in model.local_named_parameters():
            assert parameter.dtype is torch.float16
            assert torch.equal(parameter, reference.model.get_parameter(name))
            assert torch.equal(model.masters.of(parameter), masters[name])
            assert torch.equal(model.masters.of(parameter).grad, masters[name].grad)
            assert parameter.isfinite().all()
    assert not optimizer.overflow


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_skips_the_step_on_every_rank_and_touches_nothing(smp, layout):
    count = layout.get("microbatches", 1)
    model = smp.DistributedModel(net(smp))
    # 2**12 overflows in float16; 2**6 does not.
    dynamic = {"init_scale": 2.0**12, "scale_window": 2, "scale_factor": 64.0}
    optimizer = smp.DistributedOptimizer(
        adam(model.module.parameters()), dynamic_loss_scale=True, dynamic_loss_args=dynamic
    )
    reference, run, scale = Reference(net(), adam), step_of(smp), 2.0**12
    seen, last, good = [], -1, 0
    for number, step in enumerate(batches(smp.dp_size(), 6)):
        reference.backward([cut(each, count) for each in step], scale)
        overflow = reference.overflowed()
        before = {name: each.clone() for name, each in model.state_dict().items()}
        optimizer.zero_grad()
        run(model, *step[smp.dp_rank()])
        optimizer.step()
        assert optimizer.overflow is overflow
        if overflow:
            scale, last = scale / 64, number
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name])
            assert all(master.grad is None for _, _, master in model.masters.known())
        else:
            reference.update(1 / scale)
            good += 1
            if (number - last) % 2 == 0:
                scale *= 64
        assert optimizer.loss_scale == scale
        seen.append(overflow)
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert steps <= {good}
        for name, parameter in model.local_named_parameters():
            assert torch.equal(parameter, reference.model.get_parameter(name))
    assert True in seen
    assert False in seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm_type", [2, float("inf"), 3.0])
def test_clip_master_grads_is_one_multiplication_by_the_norm_of_the_whole_model(
    smp, layout, norm_type
):
    count = layout.get("microbatches", 1)
    model = smp.DistributedModel(net(smp))
    dynamic = {"init_scale": 2.0**6}
    optimizer = smp.DistributedOptimizer(
        sgd(model.module.parameters()), dynamic_loss_scale=True, dynamic_loss_args=dynamic
    )
    reference, run = Reference(net(), sgd), step_of(smp)
    for step, most in zip(batches(smp.dp_size(), 3), [0.5, 1e6, 0.25], strict=True):
        optimizer.zero_grad()
        run(model, *step[smp.dp_rank()])
        norm = optimizer.clip_master_grads(most, norm_type)
        optimizer.step()
        reference.backward([cut(each, count) for each in step], 2.0**6)
        grads = [master.grad.double() / 2**6 for master in reference.masters]
        if norm_type == 2:
            total = sum(float(grad.square().sum()) for grad in grads) ** 0.5
        elif norm_type == 3:
            total = float(
                torch.tensor(
                    sum(float(grad.abs().pow(3).sum()) for grad in grads), dtype=torch.float64
                )
                ** (1 / 3)
            )
        else:
            total = max(float(grad.abs().max()) for grad in grads)
        assert norm == total
        reference.update(min(1.0, most / (total + 1e-6)) / 2**6)
        for name, parameter in model.local_named_parameters():
            assert torch.equal(parameter, reference.model.get_parameter(name))
    run(model, torch.full((4, 5), float("nan")), torch.zeros(4, 3))
    assert optimizer.clip_master_grads(1.0) == -1
    optimizer.step()
    assert optimizer.overflow


@pytest.mark.smp(ranks=1, fp16=True)
def test_the_norm_that_clipping_returns_is_a_tensor_as_torch_s_is(smp):
    """Scripts call ``.item()`` on it, format it, and compare it with -1."""
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(sgd(model.module.parameters()))
    step_of(smp)(model, *batches(1, 1)[0][0])
    norm = optimizer.clip_master_grads(1e6)
    assert (norm.shape, norm.dtype) == (torch.Size([]), torch.float64)
    assert norm.item() == float(f"{norm:.17g}")
    assert norm != -1


@pytest.mark.smp(ranks=1)
def test_without_16_bits_there_is_no_loss_scale_and_nothing_to_clip(smp):
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=8.0)
    assert optimizer.loss_scale == 1
    assert optimizer.loss_scaler is None
    assert model.masters is None
    with pytest.raises(UnsupportedTrainingError, match="fp16 only"):
        optimizer.loss_scale = 2.0
    with pytest.raises(UnsupportedTrainingError, match="without 16 bits clip"):
        optimizer.clip_master_grads(1.0)
