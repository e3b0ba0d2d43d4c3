"""Ranks that hold the same parameters, and were treated differently, are found at the next step, and named."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import get_total_norm  # before the engine is imported, as scripts do

import smp_core.torch as smp
from smp_core.errors import ArgumentError
from smp_core.torch.exceptions import ReplicaDriftError
from smp_core.torch.reduction import drift


@smp.step
def train(model, x):
    model.backward(model(x).square().sum())


def caught(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ReplicaDriftError as error:
        return str(error)
    return "nothing"


def make(mistake=None, wrong=0, **options):
    """A model of two layers, its optimizer, and a function that takes one step and makes ``mistake`` on a rank."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    smp.set_partition(module[1], smp.pp_size() - 1)
    model = smp.DistributedModel(module, **options)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    def step(last=False):
        optimizer.zero_grad()
        train(model, torch.randn(2, 4, generator=torch.Generator().manual_seed(smp.dp_rank())))
        if last and smp.rank() == wrong:
            mistake(module, optimizer)
        else:
            optimizer.step()

    return step


def another_rate(module, optimizer):
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()


def no_update(module, optimizer):
    pass


def own_clipping(module, optimizer):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    optimizer.step()


def one_bit(module, optimizer):
    optimizer.step()
    parameter = next(p for p in reversed(list(module.parameters())) if p.numel())
    if parameter.numel():
        parameter.data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def rows_swapped(module, optimizer):
    optimizer.step()
    weight = module[0].weight.data
    weight.copy_(weight.flip(0).clone())


def drifts(mistake, wrong):
    step = make(mistake, wrong)
    step()
    step(last=True)
    return caught(step)


@pytest.mark.parametrize("mistake", [another_rate, no_update, own_clipping, one_bit, rows_swapped])
def test_a_replica_that_was_updated_otherwise_is_named(smp_world, mistake):
    told = smp_world.run(drifts, mistake, 2, ranks=3, config={"ddp": True})
    assert len(set(told)) == 1
    assert told[0].startswith("step 3: replicas have drifted apart: parameter '")
    assert "of rank 2 is not that of ranks 0, 1" in told[0]
    if mistake is one_bit:
        assert "parameter '1.bias' of" in told[0]
        assert "more differ" not in told[0]


PIPELINE = {
    "pipeline_parallel_degree": 2,
    "auto_partition": False,
    "default_partition": 0,
    "ddp": True,
}


def drifts_in_a_pipeline():
    step = make(one_bit, 2)
    step()
    step(last=True)
    if smp.pp_rank() == 0:
        return caught(step)
    return step()


def test_in_a_pipeline_the_ranks_of_the_partition_know(smp_world):
    told = smp_world.run(drifts_in_a_pipeline, ranks=4, config=PIPELINE)
    assert ["rank 2 is not that of rank 0" in str(each) for each in told] == [
        rank in (0, 2) for rank in range(4)
    ]


SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_gradient_clipping": 1e300,
}


@pytest.mark.parametrize("threshold", [0, 10**6], ids=["parts", "persistent"])
@pytest.mark.parametrize("mistake", [another_rate, one_bit])
def test_parts_and_persistent_parameters(smp_world, mistake, threshold):
    config = {**SHARDED, "sdp_param_persistence_threshold": threshold}
    told = smp_world.run(drifts, mistake, 3, ranks=4, config=config)
    assert len(set(told)) == 1
    others = "ranks 0, 1, 2" if threshold else "rank 1"
    assert f"of rank 3 is not that of {others}" in told[0]
    assert ("the part of parameter" in told[0]) == (not threshold)


def freezes(late, sizes, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, sizes))
    if not late:
        module[smp.dp_rank()].weight.requires_grad_(False)
    model = smp.DistributedModel(module, **options)
    if late:
        train(model, torch.ones(2, 4))
        model.zero_grad()
        module[smp.dp_rank()].weight.requires_grad_(False)
    told = caught(train, model, torch.ones(2, 4))
    return told, [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sizes", [4, 7])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("config", [{"ddp": True}, SHARDED], ids=["plain", "sharded"])
def test_replicas_that_train_other_parameters_are_named(smp_world, late, overlaps, config, sizes):
    body = functools.partial(freezes, late, sizes, overlapping_allreduce=overlaps)
    for told, gradients in smp_world.run(body, ranks=2, config=config):
        assert f"step {1 + late}: replicas have drifted apart: parameter '0.weight'" in told
        assert "is trained on rank 1 and frozen on rank 0" in told
        assert gradients == [None] * 4


def drifts_at_the_update():
    step = make(own_clipping, 1)
    step()
    return caught(step, last=True), caught(step)


def test_a_gradient_that_all_ranks_hold_is_compared_before_the_update(smp_world):
    for update, after in smp_world.run(drifts_at_the_update, ranks=2, config=SHARDED):
        assert "step 2: replicas have drifted apart: the gradient of parameter '0.weight'" in update
        assert "of rank 1 is not that of rank 0" in update
        assert after == "nothing"


def first_then_clip(parameters, most, norm_type):
    """Clip as ``clip_grad_norm_`` does, by the public functions that torch has for its halves."""
    parameters = list(parameters)
    total = get_total_norm([each.grad for each in parameters], norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, total)
    return total


CLIPPINGS = [torch.nn.utils.clip_grad_norm_, first_then_clip]


def clips(clip, order):
    step_losses = []
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        train(model, torch.arange(8.0).view(2, 4))
        total = clip(model.parameters(), 0.5, norm_type=order)
        step_losses.append(total)
        optimizer.step()
    return step_losses, model.state_dict()


def clips_plain(order):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    totals = []
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.arange(8.0).view(2, 4)).square().sum().backward()
        totals.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5, norm_type=order))
        optimizer.step()
    return totals, module.state_dict()


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf"), 3.0])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("threshold", [0, 4, 10**6], ids=["parts", "some", "persistent"])
@pytest.mark.parametrize("clip", CLIPPINGS)
def test_norms_are_of_the_whole_gradient(smp_world, clip, order, degree, threshold):
    config = {
        **SHARDED,
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": threshold,
    }
    expected, weights = clips_plain(order)
    for totals, state in smp_world.run(clips, clip, order, ranks=4, config=config):
        torch.testing.assert_close(totals, expected)
        torch.testing.assert_close(state, dict(weights))


def test_what_is_put_on_top_of_the_norm_and_taken_away_leaves_it_alone(smp_world):
    config = {**SHARDED, "sdp_param_persistence_threshold": 0}
    expected, weights = clips_plain(2.0)

    def check():
        for totals, state in smp_world.run(
            clips, torch.nn.utils.clip_grad_norm_, 2.0, ranks=2, config=config
        ):
            torch.testing.assert_close(totals, expected)
            torch.testing.assert_close(state, dict(weights))

    check()
    inner = torch.nn.utils.clip_grad._get_total_norm
    with pytest.MonkeyPatch.context() as patch:
        spy = lambda *given, **named: inner(*given, **named)  # noqa: E731
        patch.setattr(torch.nn.utils.clip_grad, "_get_total_norm", spy)
        check()
        gc.collect()  # models that are gone take nothing with them
    check()
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert torch.nn.utils.clip_grad_norm_([parameter], 1.0) == 5.0


def test_a_nonfinite_norm_of_a_sharded_gradient(smp_world):
    assert (
        smp_world.run(_nonfinite, ranks=2, config={**SHARDED, "sdp_param_persistence_threshold": 0})
        == [True] * 2
    )


def _nonfinite():
    module = nn.Linear(4, 4)
    model = smp.DistributedModel(module)
    train(model, torch.full((2, 4), float("inf")))
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    with pytest.raises(ArgumentError, match="norm_type=0"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=0)
    return True


# Nothing is an error that is none.


def joins():
    step = make()
    with smp.state.model.join():
        for _ in range(1 + smp.rank()):
            step()
    step()
    return True


def frozen():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    module[0].weight.requires_grad_(False)
    model = smp.DistributedModel(module, broadcast_buffers=False)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    for _ in range(3):
        torch.manual_seed(smp.rank())
        with torch.no_grad():
            module[0].weight.normal_()  # a rank's own
        train(model, torch.randn(2, 4))
        optimizer.step()
    return True


def nan_and_hooked():
    module = nn.Linear(4, 4)
    model = smp.DistributedModel(module)
    with torch.no_grad():
        module.weight[0, 0] = float("nan")
    train(model, torch.randn(2, 4))
    return True


@pytest.mark.parametrize("body", [joins, frozen, nan_and_hooked])
def test_what_may_differ_is_no_error(smp_world, body):
    assert smp_world.run(body, ranks=2, config={"ddp": True}) == [True] * 2


def hooked():
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    model = smp.DistributedModel(module)

    def own(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, own)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        train(model, torch.full((2, 4), float(smp.rank())))
        optimizer.step()
    return module.weight.detach().clone()


def test_replicas_whose_gradients_a_hook_reduces_may_differ(smp_world):
    first, second = smp_world.run(hooked, ranks=2, config={"ddp": True})
    assert not torch.equal(first, second)


dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8]
)


@given(dtype=dtypes, size=st.integers(1, 40), start=st.integers(0, 9), data=st.data())
def test_every_bit_counts_and_nothing_else(dtype, size, start, data):
    values = torch.arange(size + start).to(dtype)
    tensor = values[start:]
    assert drift.digest(tensor) == drift.digest(tensor.clone())
    assert drift.digest(tensor) == drift.digest(torch.stack([tensor, tensor], 1)[:, 0])
    memory = tensor.clone().view(torch.uint8)
    place = data.draw(st.integers(0, len(memory) - 1))
    memory[place] ^= 1 << data.draw(st.integers(0, 7))
    assert drift.digest(memory.view(dtype)) != drift.digest(tensor)


@given(dtype=dtypes, size=st.integers(2, 5000), data=st.data())
def test_order_counts(dtype, size, data):
    words = torch.arange(size * 8, dtype=torch.int64).view(dtype)
    rows = words.view(size, -1)
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = rows.clone()
    swapped[[one, other]] = swapped[[other, one]]
    assert drift.digest(swapped) != drift.digest(rows)
