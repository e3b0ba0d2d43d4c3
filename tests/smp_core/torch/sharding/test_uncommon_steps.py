"""Steps that are not one forward and one backward pass of the same parameters, sharded as at degree 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.exceptions import ShardingError

THRESHOLD = {"sdp_param_persistence_threshold": 3, "sdp_gradient_clipping": 1e30}


def config(degree, **more):
    return {"ddp": True, "sharded_data_parallel_degree": degree, **THRESHOLD, **more}


def net(width=4, depth=4):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def values(size, *, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + smp.rank())
    return torch.randn(size, generator=generator)


def whole(model):
    """The gradients by name, whole, from the shards that ranks have."""
    found = {}
    for name, parameter in model.module.named_parameters():
        shard = model.sharding.shard(parameter)
        if parameter.grad is None or shard is None:
            found[name] = None if parameter.grad is None else parameter.grad.clone()
        else:
            (found[name],) = model.sharding.full_tensors([(parameter, parameter.grad)])
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        if one[name] is None or other[name] is None:
            assert one[name] is other[name], name
        else:
            assert torch.equal(one[name], other[name]), name


def at_degrees(smp_world, body, *args, degrees=(2, 4), **more):
    """Run a body at sharding degree 1 and at others: the results of the ranks are the same."""
    expected = smp_world.run(body, *args, ranks=4, config=config(1, **more))
    for degree in degrees:
        found = smp_world.run(body, *args, ranks=4, config=config(degree, **more))
        for one, other in zip(expected, found, strict=True):
            same(one, other)


def twice(overlapping, steps):
    """Two backward passes in one body: the second has more for what the first has reduced."""
    model = smp.DistributedModel(net(), overlapping_allreduce=overlapping)

    @smp.step
    def step(model, x):
        first, second = x.chunk(2)
        model.backward(model.module[3](first).square().mean())
        loss = model(second).square().mean()
        model.backward(loss)
        return loss

    for number in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        step(model, values((12, 4), seed=number))
    return whole(model)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_several_backward_passes_without_overlap(smp_world, microbatches):
    at_degrees(smp_world, twice, False, 1, microbatches=microbatches)


@pytest.mark.parametrize("bucket", [1, 10**9])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_after_a_late_gradient_nothing_sets_out_early(smp_world, microbatches, bucket):
    at_degrees(smp_world, twice, True, 2, microbatches=microbatches, sdp_reduce_bucket_size=bucket)


def unfreezing():
    model = smp.DistributedModel(net())
    weight = model.module[1][0].weight.requires_grad_(False)

    @smp.step
    def step(model, x):
        weight.requires_grad_(True)
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, values((3, 4)))
    return whole(model)


def test_a_parameter_unfrozen_in_a_step_has_its_gradient(smp_world):
    at_degrees(smp_world, unfreezing)


def unfreezing_a_copy():
    model = smp.DistributedModel(net())
    model.module[1][0].weight.requires_grad_(False)

    @smp.step
    def step(model, x):
        model.module[1][0].weight.requires_grad_(True)
        model.backward(model(x).square().mean())

    with pytest.raises(
        ShardingError, match=r"'1\.0\.weight' was set to require a gradient in a step"
    ):
        step(model, values((3, 4)))
    return True


def test_a_copy_that_is_unfrozen_in_a_step_is_refused(smp_world):
    assert all(smp_world.run(unfreezing_a_copy, ranks=2, config=config(2)))


def sixteen_bits():
    model = smp.DistributedModel(net().to(torch.bfloat16))

    @smp.step
    def step(model, x):
        loss = model(x).float().square().mean()
        model.backward(loss)
        return loss

    step(model, values((3, 4)).to(torch.bfloat16))
    return whole(model)


def test_a_model_that_is_16_bits_by_itself(smp_world):
    at_degrees(smp_world, sixteen_bits)


class Bag(nn.Module):
    """An embedding that is looked up, and multiplied by as a whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(8, 2, sparse=True)

    def forward(self, tokens, dense):
        if dense:
            return (self.embed.weight**2).sum()
        return self.embed(tokens).sum()


def sparse_then_dense(order):
    model = smp.DistributedModel(Bag())

    @smp.step
    def step(model, tokens):
        for dense in order:
            model.backward(model(tokens, dense))

    for _ in range(2):  # nothing is launched early in the second
        model.module.embed.weight.grad = None
        step(model, torch.tensor([1, 2 + smp.rank()]))
    gradient = whole(model)["embed.weight"]
    return {"embed.weight": gradient.to_dense() if gradient.is_sparse else gradient}


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_sparse_and_dense_gradients_of_one_parameter(smp_world, order):
    at_degrees(smp_world, sparse_then_dense, order)


def evaluation():
    model = smp.DistributedModel(net())

    @smp.step
    def step(model, x):
        with torch.no_grad():
            return model(x)

    step(model, values((2, 4)))
    traffic = model.sharding.collectives.traffic
    begun = model.sharding.collectives.begun
    step(model, values((2, 4)))
    return model.sharding.collectives.begun - begun, len(model.sharding.unsharded.units), traffic


def test_a_step_without_gradients_reduces_nothing(smp_world):
    for collectives, units, _ in smp_world.run(evaluation, ranks=2, config=config(2)):
        assert collectives == units


def outside():
    model = smp.DistributedModel(net())
    first, second = model(values((3, 4))), model(values((3, 4), seed=1))
    model.backward(first.square().sum())
    model.backward(second.square().sum())
    return whole(model)


def test_two_calls_outside_of_steps_before_the_first_backward_pass(smp_world):
    at_degrees(smp_world, outside)


def peaks():
    model = smp.DistributedModel(net())
    unsharded = model.sharding.unsharded

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    unsharded.prefetch = False
    found = []
    for validate in (False, True):
        if validate:
            model(values((2, 4)))  # with its graph, that no backward pass comes for
        unsharded.mark()
        step(model, values((2, 4)))
        found.append(unsharded.peak)
    return found


def test_a_call_outside_without_backward_costs_the_next_step_nothing(smp_world):
    for before, after in smp_world.run(peaks, ranks=2, config=config(2)):
        assert before == after == 4 * 4 + 4


def after_failure():
    model = smp.DistributedModel(net())
    broken = []

    @smp.step
    def step(model, x):
        hidden = model.module[0](x)
        if broken:
            raise ValueError("broken")
        loss = model.module[1](hidden).square().mean()
        model.backward(loss)
        return loss

    step(model, values((2, 4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    broken.append(True)
    with pytest.raises(ValueError, match="broken"):
        step(model, values((2, 4)))
    same(before, model.state_dict())
    return True


def test_a_state_after_a_step_that_failed_on_all_ranks(smp_world):
    """Gathers that were on their way at the failure are not taken for the first part of the state."""
    assert all(smp_world.run(after_failure, ranks=2, config=config(2)))
