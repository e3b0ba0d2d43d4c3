"""Masters: what happens around an update, against a hand-written loop on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from tests.smp_core.torch.precision.reference import Reference
from tests.smp_core.torch.sharding.checkpoint_models import own_part

STEP = 2.0**-12  # half a unit in the last place of 1 in float16: lost where it is rounded


def line(value=1.0, size=2):
    module = nn.Linear(size, 1, bias=False)
    module.weight.data.fill_(value)
    return module


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def step_of(smp):
    @smp.step
    def run(model, x):
        model.backward(model(x).sum())

    return run


@pytest.mark.smp(ranks=1, fp16=True)
def test_small_updates_add_up_in_the_master_and_not_in_the_parameter(smp):
    model = smp.DistributedModel(line())
    optimizer, run = smp.DistributedOptimizer(sgd(model.parameters())), step_of(smp)
    weight, seen = model.module.weight, []
    for _ in range(4):
        optimizer.zero_grad()
        run(model, torch.full((1, 2), -STEP))
        optimizer.step()
        seen.append((model.masters.of(weight)[0, 0].item(), weight[0, 0].item()))
    # 1 + 2**-11 is a tie, and goes to the even neighbour; float16 has 1 and 1 + 2**-10.
    assert seen == [
        (1 + STEP, 1.0),
        (1 + 2 * STEP, 1.0),
        (1 + 3 * STEP, 1 + 4 * STEP),
        (1 + 4 * STEP, 1 + 4 * STEP),
    ]


@pytest.mark.smp(ranks=2, fp16=True, ddp=True, microbatches=4)
@pytest.mark.parametrize("average", [False, True])
def test_gradients_are_summed_and_reduced_without_being_rounded(smp, average):
    """4096 + 1 + 1 + ... in float16 is 4096; over microbatches, steps and ranks it is not."""
    model = smp.DistributedModel(
        line(size=1), backward_passes_per_step=2, average_grads_across_microbatches=average
    )
    smp.DistributedOptimizer(sgd(model.parameters()))
    run = step_of(smp)
    master = model.masters.of(model.module.weight)
    x = torch.tensor([4096.0 if smp.rank() == 0 else 1.0, 1.0, 1.0, 1.0]).view(4, 1)
    run(model, x)
    assert master.grad is None
    run(model, x)
    total = (4096 + 3 + 4) * 2
    assert master.grad.item() == total / (8 if average else 2)
    assert model.module.weight.grad is None


@pytest.mark.smp(ranks=1, fp16=True)
def test_a_parameter_that_is_changed_in_place_is_what_counts(smp):
    model = smp.DistributedModel(line())
    optimizer, run = smp.DistributedOptimizer(sgd(model.parameters())), step_of(smp)
    weight = model.module.weight
    run(model, torch.full((1, 2), -STEP))
    optimizer.step()
    assert model.masters.of(weight)[0, 0] == 1 + STEP
    with torch.no_grad():
        weight.fill_(2.0)
    optimizer.step()
    assert model.masters.of(weight)[0, 0] == 2 + STEP
    model.load_state_dict({"weight": torch.full((1, 2), 1 / 3)})
    assert model.masters.of(weight)[0, 0] == torch.tensor(1 / 3).half().float()
    optimizer.zero_grad()
    run(model, torch.zeros(1, 2))
    optimizer.step()
    assert weight[0, 0] == torch.tensor(1 / 3).half()


@pytest.mark.smp(ranks=1, fp16=True)
def test_a_parameter_that_is_unfrozen_gets_a_master_and_one_that_is_frozen_stays(smp):
    module = nn.Sequential(line(), line(size=1))
    module[0].weight.requires_grad_(False)
    model = smp.DistributedModel(module)
    optimizer, run = smp.DistributedOptimizer(sgd(model.parameters())), step_of(smp)
    run(model, torch.ones(1, 2))
    optimizer.step()
    assert module[0].weight.tolist() == [[1, 1]]
    assert len(optimizer.fp16_groups[0]) == 1
    module[0].weight.requires_grad_(True)
    module[1].weight.requires_grad_(False)
    optimizer.zero_grad()
    run(model, torch.ones(1, 2))
    optimizer.step()
    assert module[1].weight.item() == -1
    assert module[0].weight.tolist() == [[2, 2]]
    assert [each.dtype for each in optimizer.fp32_from_fp16_groups[0]] == [torch.float32] * 2


@pytest.mark.smp(ranks=1, fp16=True)
def test_gradients_without_zero_grad_add_up_unscaled(smp):
    """As torch's do: the first are divided by the scale of their own step."""
    model = smp.DistributedModel(line(size=1))
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=8.0)
    run, master = step_of(smp), model.masters.of(model.module.weight)
    run(model, torch.ones(1, 1))
    assert master.grad.item() == 8
    optimizer.step()
    assert master.grad.item() == 1
    optimizer.loss_scale = 32.0
    run(model, torch.ones(1, 1))
    assert master.grad.item() == 2
    optimizer.step()
    assert master.item() == 1 - 1 - 2
    model.zero_grad()
    assert master.grad is None
    run(model, torch.ones(1, 1))
    assert master.grad.item() == 32
    optimizer.zero_grad(set_to_none=False)
    run(model, torch.ones(1, 1))
    assert master.grad.item() == 32


@pytest.mark.smp(ranks=1, fp16=True)
def test_a_parameter_of_the_scripts_own_is_unscaled_each_time(smp):
    own = nn.Parameter(torch.ones(1))
    model = smp.DistributedModel(line(size=1))
    optimizer = smp.DistributedOptimizer(sgd([*model.parameters(), own]), static_loss_scale=8.0)
    run = smp.step(lambda model, x: model.backward((model(x) * own).sum()))
    for expected in (0.0, -1.0):
        model.load_state_dict({"weight": torch.ones(1, 1)})
        optimizer.zero_grad()
        run(model, torch.ones(1, 1))
        optimizer.step()
        assert own.item() == expected


@pytest.mark.smp(ranks=1, fp16=True)
def test_a_parameter_of_the_scripts_own_does_not_count_and_is_not_clipped(smp):
    own = nn.Parameter(torch.ones(1))
    model = smp.DistributedModel(line())
    optimizer = smp.DistributedOptimizer(sgd([*model.parameters(), own]), static_loss_scale=8.0)
    step_of(smp)(model, torch.tensor([[3.0, 4.0]]))
    own.grad = torch.full((1,), 2 * 8.0)
    assert optimizer.clip_master_grads(1.0) == 5
    assert own.grad.item() == 2


SPLIT = {"ranks": 2, "ddp": True}
SHARDED = {**SPLIT, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}
MASTERED = [
    pytest.param(marks=pytest.mark.smp(**more), id=name)
    for name, more in (
        ("fp16", {"ranks": 1, "fp16": True}),
        ("split", {**SPLIT, "shard_optimizer_state": True}),
        ("sharded", {**SHARDED, "bf16": True, "sdp_gradient_clipping": 1e30}),
    )
]


@pytest.mark.parametrize((), MASTERED)
def test_a_parameter_that_was_replaced_keeps_its_index_and_state(smp):
    """As in plain torch, where the optimizer does not know: it goes on with the gradients that there are, and
    the parameter can be put back.
    """

    def optimizer_of(parameters):
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    def states():
        part = own_part(optimizer)
        assert part["param_groups"][0]["params"] == [0]
        assert list(part["state"]) == [0]
        told = smp.allgather(part["state"][0]["momentum_buffer"].reshape(-1), smp.WORLD)
        return part, torch.cat(told).tolist()

    module, plain = line(size=4), line(size=4)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
    inner = optimizer_of(plain.parameters())
    weights = [module.weight, plain.weight]
    x, run = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), step_of(smp)

    def train():
        run(model, x)
        plain(x).sum().backward()
        optimizer.step()
        inner.step()

    train()
    for owner, weight in ((module, weights[0]), (plain, weights[1])):
        owner.weight = nn.Parameter(torch.zeros(1, 4, dtype=weight.dtype))
    for _ in range(2):
        train()
        values = smp.allgather(weights[0].flatten().tolist(), smp.WORLD)
        assert (values[0] if model.sharding.degree == 1 else [*values[0], *values[1]]) == weights[
            1
        ].flatten().tolist()
    part, momentum = states()
    assert momentum == inner.state[weights[1]]["momentum_buffer"].flatten().tolist()
    assert module.weight.tolist() == plain.weight.tolist()  # not trained
    optimizer.load_state_dict(part)
    assert states()[1] == momentum
    module.weight, plain.weight = weights
    optimizer.zero_grad()
    inner.zero_grad()
    train()
    assert states()[1] == inner.state[weights[1]]["momentum_buffer"].flatten().tolist()
    assert model.state_dict()["weight"].tolist() == plain.weight.tolist()


@pytest.mark.smp(ranks=1, fp16=True)
def test_a_parameter_that_was_replaced_and_no_optimizer_holds_is_forgotten(smp):
    model = smp.DistributedModel(nn.Sequential(line(), line(size=1)))
    optimizer = smp.DistributedOptimizer(sgd(model.module[0].parameters()))
    run = step_of(smp)
    for _ in range(2):
        run(model, torch.ones(1, 2))
        optimizer.step()
        model.module[1].weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float16))
    run(model, torch.ones(1, 2))
    assert len(model.masters._entries) == 2
    assert [len(each) for each in optimizer.fp16_groups] == [1]


@pytest.mark.parametrize((), MASTERED[1:])
def test_one_rank_alone_may_look_at_what_the_optimizer_does_not_hold(smp):
    """The look makes masters there; nothing that ranks do together depends on that."""
    module = nn.Sequential(line(size=4), line(size=1))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(sgd(module[1].parameters()))
    if smp.rank() == 0:
        assert len(list(model.virtual_named_parameters())) == 2
    optimizer.step()
    step_of(smp)(model, torch.ones(1, 4))
    optimizer.step()
    told = smp.allgather(
        {name: each.tolist() for name, each in model.state_dict().items()}, smp.WORLD
    )
    assert told == [{"0.weight": [[1.0] * 4], "1.weight": [[1.0 - 4]]}] * 2
    if model.sharding.degree > 1:
        assert list(optimizer.state_dict()["fp16_states"]["masters"]) == ["1.weight"]


@pytest.mark.smp(ranks=2, fp16=True, ddp=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_static_scale_never_skips_and_one_ranks_overflow_is_everyones(smp, rank):
    model = smp.DistributedModel(line(size=1))
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()), static_loss_scale=2.0)
    run = step_of(smp)
    run(model, torch.full((1, 1), float("inf") if smp.rank() == rank else 1.0))
    optimizer.step()
    assert optimizer.overflow is False
    assert optimizer.loss_scale == 2
    assert model.module.weight.item() == -float("inf")


@pytest.mark.smp(
    ranks=2, fp16=True, pipeline_parallel_degree=2, auto_partition=False, default_partition=0
)
def test_an_overflow_of_one_partition_skips_the_other(smp):
    module = nn.Sequential(line(size=1), line(size=1))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(
        sgd(model.parameters()), dynamic_loss_scale=True, init_scale=4.0
    )
    # The gradient of the second weight is infinite, that of the first is not.
    run = smp.step(lambda model, x: model.backward(model(x).sum()))
    run(model, torch.ones(1, 1))
    optimizer.step()
    assert not optimizer.overflow
    for _, _, master in model.masters.known():
        master.grad.fill_(float("inf") if smp.pp_rank() == 1 else 1.0)
    values = [each.clone() for each in model.local_parameters()]
    optimizer.step()
    assert optimizer.overflow
    assert optimizer.loss_scale == 2
    assert all(map(torch.equal, values, model.local_parameters()))
    assert all(master.grad is None for _, _, master in model.masters.known())
    optimizer.step()  # nobody has a gradient: nothing happens
    assert optimizer.loss_scale == 2
    assert not optimizer.overflow


@pytest.mark.smp(ranks=1, fp16=True)
def test_schedulers_closures_and_hooks(smp):
    model = smp.DistributedModel(line(size=1))
    inner = sgd(model.parameters())
    optimizer = smp.DistributedOptimizer(inner, dynamic_loss_scale=True, init_scale=2.0**40)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    assert optimizer.optimizer is inner
    seen, run, calls = [], step_of(smp), []
    model.module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        run(model, torch.ones(1, 1))
        return 7

    while optimizer.overflow or not calls:
        assert optimizer.step(closure) == 7
        if not optimizer.overflow:
            scheduler.step()
    assert len(calls) == 40 - 15 + 1  # 2**16 is infinite in float16
    assert seen[-1] == 2**15
    assert inner.param_groups[0]["lr"] == 0.5
    assert model.module.weight.item() == 0


@pytest.mark.smp(ranks=1, fp16=True)
def test_sparse_gradients(smp):
    torch.manual_seed(0)
    module = nn.Embedding(5, 2, sparse=True)
    plain = nn.Embedding(5, 2, sparse=True)
    plain.load_state_dict({"weight": module.weight.half().float()})
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(
        sgd(model.parameters()), dynamic_loss_scale=True, init_scale=8.0
    )
    reference = sgd(plain.parameters())
    run, x = step_of(smp), torch.tensor([[1, 3, 1]])
    run(model, x)
    plain(x).sum().backward()
    optimizer.clip_master_grads(1.0)
    coefficient = 1 / (10**0.5 + 1e-6)  # two elements are 2, two are 1
    plain.weight.grad = plain.weight.grad.coalesce() * coefficient
    optimizer.step()
    reference.step()
    assert torch.equal(model.masters.of(module.weight), plain.weight)


@pytest.mark.smp(ranks=2, fp16=True, ddp=True)
def test_replicas_agree_after_a_join_on_masters_too(smp):
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Linear(3, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    run = step_of(smp)
    with model.join():
        for number in range(2 + smp.rank()):
            optimizer.zero_grad()
            run(model, torch.full((1, 3), number + 1.0))
            optimizer.step()
    mine = [master.detach() for _, _, master in model.masters.known()]
    told = smp.allgather(mine, smp.WORLD)
    assert all(map(torch.equal, *told))
    model.masters.sync()
    assert all(map(torch.equal, mine, told[1]))
    for _, parameter, master in model.masters.known():
        assert torch.equal(parameter, master.half())


@pytest.mark.smp(ranks=1, fp16=True)
def test_an_optimizer_that_calls_its_closure_several_times_is_refused(smp):
    with pytest.raises(UnsupportedTrainingError, match="LBFGS"):
        smp.DistributedOptimizer(torch.optim.LBFGS(line().parameters()))


@pytest.mark.smp(ranks=1, fp16=True)
def test_state_from_before_wrapping_moves_to_masters(smp):
    """An optimizer that has taken float32 steps goes on with them."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    inner = adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    inner.step()
    reference = Reference(module, adam)
    for master, parameter in zip(reference.masters, module.parameters(), strict=True):
        reference.optimizer.state[master] = {
            key: value.clone() for key, value in inner.state[parameter].items()
        }
    inner.zero_grad()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(inner)
    smp.step(lambda model, x, y: model.backward((model(x) - y).square().sum()))(
        model, torch.ones(1, 3), torch.zeros(1, 2)
    )
    optimizer.step()
    reference.backward([[(torch.ones(1, 3), torch.zeros(1, 2))]])
    reference.update()
    for (_, _, master), expected in zip(model.masters.known(), reference.masters, strict=True):
        assert torch.equal(master, expected)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(
            {"dynamic_loss_scale": True},
            "dynamic_loss_scale",
            marks=pytest.mark.smp(ranks=2, fp16=True, ddp=True),
        ),
        pytest.param(
            {},
            "shard_optimizer_state",
            marks=pytest.mark.smp(ranks=2, ddp=True, shard_optimizer_state=True),
        ),
    ],
)
def test_join_is_refused_where_all_ranks_take_part_in_updates(smp, arguments, says):
    model = smp.DistributedModel(line())
    smp.DistributedOptimizer(sgd(model.parameters()), **arguments)
    with pytest.raises(UnsupportedTrainingError, match=f"not with {says}"), model.join():
        pass


@pytest.mark.smp(
    ranks=2, ddp=True, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=2
)
def test_the_scaler_over_shards_skips_on_all_ranks(smp):
    """float32, sharded: rank 0 alone has the element whose gradient is infinite."""
    model = smp.DistributedModel(line(size=4))
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    scaler = smp.amp.GradScaler(init_scale=8.0)
    run = smp.step(lambda model, scaler, x: model.backward(scaler.scale(model(x).sum())))
    for first in (float("inf"), 0.25):
        optimizer.zero_grad()
        run(model, scaler, torch.tensor([[first, 0.25, 0.25, 0.25]]))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4
    assert model.state_dict()["weight"].tolist() == [[0.75] * 4]
