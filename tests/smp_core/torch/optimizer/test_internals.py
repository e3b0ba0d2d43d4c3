"""The members of the optimizer that helpers of scripts read: each against a value that a script sees otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError
from tests.smp_core.torch.sharding.checkpoint_models import own_part

PIPES = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}
SHARDED = {
    "ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 3,
    "sdp_gradient_clipping": 1e30,
}  # fmt: skip


class Net(nn.Module):
    """Of 3, 2 and 3 elements, the first one in two places: 1 to 8."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 1)
        self.second = nn.Linear(3, 1, bias=False)
        self.first.bias = nn.Parameter(torch.zeros(2))
        self.tied = self.first.weight
        with torch.no_grad():
            start = 1
            for each in self.parameters():
                each.copy_(torch.arange(start, start + each.numel()).view(each.shape))
                start += each.numel()

    def forward(self, x):
        return (self.first.weight * x).sum() + self.first.bias.sum() + self.second(x).sum()


def made(smp, module=None):
    module = module or Net()
    groups = [
        {"params": [module.second.weight]},
        {"params": [module.first.weight, module.first.bias]},
    ]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0, momentum=0.5))
    return smp.DistributedModel(module), optimizer


def train(smp, model, optimizer):
    smp.step(lambda model, x: model.backward(model(x).sum()))(model, torch.ones(1, 3))
    optimizer.step()


@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.smp(ranks=2, **SHARDED, **more), id=name)
        for name, more in (("fp32", {}), ("bf16", {"bf16": True}))
    ],
)
def test_the_flat_parts_of_a_group_hold_each_element_once(smp):
    model, optimizer = made(smp)
    flat = optimizer.fp32_partitioned_groups_flat
    # ceil(3 / 2), and of the bias, which is whole on both, ceil(2 / 2).
    mine = [[[6, 7], [1, 2, 4]], [[8, 0], [3, 0, 5]]][smp.rank()]
    assert [each.tolist() for each in flat] == mine
    assert {each.dtype for each in flat} == {torch.float32}
    squares = sum(each.square().sum() for each in flat)
    dist.all_reduce(squares, group=optimizer.ds_param_shard_group)
    assert squares == sum(number**2 for number in range(1, 9))
    train(smp, model, optimizer)
    assert optimizer.fp32_partitioned_groups_flat[0].tolist() == [[5, 6], [7, 0]][smp.rank()]
    with torch.no_grad():
        model.module.second.weight.fill_(2)
    assert optimizer.fp32_partitioned_groups_flat[0].tolist() == [[2, 2], [2, 0]][smp.rank()]


@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.smp(ranks=2, **SHARDED, **more), id=name)
        for name, more in (("fp32", {}), ("bf16", {"bf16": True}))
    ],
)
def test_the_groups_list_the_parameters_of_the_flat_parts(smp):
    """From their order public readers of shards know which elements are whose, those of a frozen parameter too."""
    module = Net()
    module.first.bias.requires_grad_(False)
    _, optimizer = made(smp, module)
    wanted = [[module.second.weight], [module.first.weight, module.first.bias]]
    found = [[id(each) for each in group] for group in optimizer.fp16_groups]
    assert found == [[id(each) for each in group] for group in wanted]
    lengths = [[each.numel() for each in group] for group in optimizer.fp32_from_fp16_groups]
    assert lengths == [[[2], [2, 2]], [[1], [1, 2]]][smp.rank()]


@pytest.mark.smp(ranks=4, ddp=True, sharded_data_parallel_degree=2)
def test_the_shard_group_is_the_sharding_group(smp):
    _, optimizer = made(smp)
    ranks = dist.get_process_group_ranks(optimizer.ds_param_shard_group)
    assert ranks == [[0, 1], [2, 3]][smp.rank() // 2]


@pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=pytest.mark.smp(ranks=ranks, **more), id=name)
        for name, ranks, more in (
            ("plain", 1, {}),
            ("fp16", 1, {"fp16": True}),
            ("pipelines", 2, PIPES),
            ("sharded", 2, SHARDED),
        )
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_indices_are_those_of_states(smp, trained):
    model, optimizer = made(smp)
    if trained:
        train(smp, model, optimizer)
    indices = optimizer.param_name_to_index()
    assert indices == {"first.weight": 1, "first.bias": 2, "second.weight": 0, "tied": 1}
    by_id = optimizer._param_id_to_index()
    for named in (model.local_named_parameters(), model.virtual_named_parameters()):
        assert all(by_id[id(each)] == indices[name] for name, each in named)
    if trained:
        state = own_part(optimizer)["state"]
        for each, kept in optimizer.state.items():
            assert kept["momentum_buffer"] is state[by_id[id(each)]]["momentum_buffer"]


@pytest.mark.smp(ranks=2, fp16=True, **PIPES)
def test_the_wrapped_optimizers_own_state_is_numbered_by_itself(smp):
    module = Net()
    smp.set_partition(module.second, 1)
    model, optimizer = made(smp, module)
    train(smp, model, optimizer)
    state = optimizer.orig_state_dict()
    numbers = [each["params"] for each in state["param_groups"]]
    assert numbers == ([[0], []] if smp.pp_rank() == 1 else [[], [0, 1]])
    assert sorted(state["state"]) == [each for group in numbers for each in group]
    assert "fp16_states" not in state


@pytest.mark.smp(ranks=1, fp16=True)
def test_no_master_is_split_over_tp_ranks(smp):
    _, optimizer = made(smp)
    masters = [each for group in optimizer.fp32_from_fp16_groups for each in group]
    assert len(masters) == 3
    assert [optimizer.master_is_distributed[each] for each in masters] == [False] * 3
    assert [optimizer.master_distribution_axis[each] for each in masters] == [None] * 3


@pytest.mark.smp(ranks=1)
@pytest.mark.parametrize(
    ("member", "instead"),
    [
        ("redefined_params", "virtual_named_parameters"),
        ("fp32_partitioned_groups_flat", "param_groups"),
        ("ds_param_shard_group", "need no group"),
    ],
)
def test_what_there_is_not_says_what_to_use(smp, member, instead):
    _, optimizer = made(smp)
    with pytest.raises(UnsupportedTrainingError, match=rf"optimizer\.{member}: .*{instead}"):
        getattr(optimizer, member)
    assert not hasattr(optimizer, member)
    assert getattr(optimizer, member, None) is None


@pytest.mark.smp(ranks=1)
def test_names_need_a_model(smp):
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=1.0))
    with pytest.raises(UnsupportedTrainingError, match=r"after smp\.DistributedModel"):
        optimizer.param_name_to_index()
    assert list(optimizer._param_id_to_index().values()) == [0, 1, 2]
