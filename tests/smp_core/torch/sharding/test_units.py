"""The parameters that are gathered together: all of them, each once, of one dtype, in units under the limit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.sharding.sharded_parameter import dense_stride, make_unit
from smp_core.torch.sharding.units import groups
from tests.smp_core.torch.sharding.degrees import Layers

MANY = 10**9


def names(module, most=MANY):
    return [
        [name for name, _ in named]
        for _, named in groups(module, list(module.named_parameters()), most)
    ]


def test_layers_of_a_list_are_units_and_leaves_go_with_the_root():
    module = Layers(2)
    assert names(module) == [
        ["embed.weight", "embed.bias", "head.weight", "head.bias"],
        *(
            [f"layers.{number}.{linear}.{kind}" for linear in (0, 2) for kind in ("weight", "bias")]
            for number in range(2)
        ),
    ]
    owners = [owner for owner, _ in groups(module, list(module.named_parameters()), MANY)]
    assert owners == [module, *module.layers]


def test_a_wrapper_is_looked_through():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layers(2)

    assert len(names(Wrapper())) == 3


def test_a_limit_takes_units_apart_down_to_single_parameters():
    module = Layers(2)
    for most in (1, 2, 16, 17, 64, 128, 144, 150, 288, 10**4):
        for named in names(module, most):
            sizes = [module.get_parameter(name).numel() for name in named]
            assert len(named) == 1 or sum(sizes) <= most // 2


def models():
    yield Layers()
    yield nn.Linear(2, 2)
    yield nn.Sequential()
    tied = Layers()
    tied.layers[1][0].weight = tied.layers[0][2].weight
    tied.again = tied.layers[0]
    yield tied
    mixed = Layers()
    mixed.layers[0][0].double()
    yield mixed
    yield nn.ModuleDict({"a": nn.ModuleList([nn.ParameterList([torch.ones(3)]), Layers(1)])})
    yield nn.Transformer(8, 2, 2, 2, 16, batch_first=True)


@pytest.mark.parametrize("most", [1, 50, 200, MANY])
def test_every_parameter_is_in_one_unit_of_its_dtype(most):
    for module in models():
        found = groups(module, list(module.named_parameters()), most)
        given = [parameter for _, named in found for _, parameter in named]
        assert sorted(map(id, given)) == sorted(map(id, module.parameters()))
        for owner, named in found:
            assert owner in set(module.modules())
            assert len({parameter.dtype for _, parameter in named}) == 1
            within = set(owner.parameters())
            assert all(parameter in within for _, parameter in named)


def test_only_what_is_given_is_in_a_unit():
    module = Layers(1)
    given = [(name, each) for name, each in module.named_parameters() if each.numel() > 8]
    found = [name for _, named in groups(module, given, MANY) for name, _ in named]
    assert sorted(found) == sorted(name for name, _ in given)


# A rank's shards of a unit.

KINDS = {
    "matrix": torch.arange(15.0).view(3, 5),
    "transposed": torch.arange(20.0).view(4, 5).t(),
    "gaps": torch.arange(24.0).view(3, 8)[:, ::2],
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 4),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "no dimensions": torch.tensor(7.0),
    "another": torch.tensor(8.0),
    "one": torch.tensor([9.0]),
    "fewer than ranks": torch.tensor([[1.0], [2.0]]),
    "as many as ranks": torch.arange(4.0),
    "complex": torch.randn(3, 3, dtype=torch.complex64),
}


@pytest.mark.parametrize("together", [False, True], ids=["apart", "in one buffer"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize(
    "kinds", [[kind] for kind in KINDS] + [[kind for kind in KINDS if kind != "complex"]]
)
def test_parts_of_all_ranks_make_the_parameters_again(kinds, ranks, together):
    """And each whole has memory of its own, and the stride of a dense tensor."""
    named = [(kind, nn.Parameter(KINDS[kind])) for kind in kinds]
    units = [make_unit(0, nn.Module(), named, ranks, rank) for rank in range(ranks)]
    for unit in units:
        for shard, (_, parameter) in zip(unit.shards, named, strict=True):
            own = shard.copy_from_full(parameter)
            assert own.numel() == shard.owned_numel
            assert own.untyped_storage().data_ptr() == unit.flat.untyped_storage().data_ptr()
    rows = torch.stack([unit.flat for unit in units])
    parts = torch.split(rows, units[0].lengths, dim=1)
    gathered = parts if together else [part.contiguous().clone() for part in parts]
    wholes = list(units[0].full_tensors(gathered))
    for whole, (_, parameter) in zip(wholes, named, strict=True):
        assert torch.equal(whole, parameter)
        assert whole.stride() == dense_stride(parameter)
    assert len({whole.untyped_storage()._cdata for whole in wholes}) == len(named)
    assert units[0].numel == sum(parameter.numel() for _, parameter in named)


def one_unit(rank=0):
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    unit = make_unit(0, nn.Module(), [("layer.weight", parameter)], 2, rank)
    parameter.data = unit.shards[0].copy_from_full(parameter)
    return unit, parameter


def test_what_a_parameter_says_of_itself():
    unit, parameter = one_unit(1)
    assert parameter.ds_shape == (2, 3)
    assert parameter.ds_numel == 6
    assert torch.equal(parameter.ds_tensor, torch.tensor([3.0, 4.0, 5.0]))
    assert unit.shards[0].shape == (2, 3)


def test_other_data_of_the_same_size_is_taken_over():
    unit, parameter = one_unit()
    parameter.data = torch.tensor([5.0, 6.0, 7.0])
    unit.check()
    assert torch.equal(unit.flat, torch.tensor([5.0, 6.0, 7.0]))
    assert parameter.data_ptr() == unit.flat.data_ptr()


@pytest.mark.parametrize(
    "data",
    [torch.zeros(2, 3), torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)],
)
def test_other_data_that_is_no_shard(data):
    unit, parameter = one_unit()
    parameter.data = data
    with pytest.raises(
        ShardingError, match=r"'layer\.weight' was changed behind the back"
    ) as raised:
        unit.check()
    assert f"shape {list(data.shape)} and {data.dtype}" in str(raised.value)
    assert "keeps 3 of its 6 elements" in str(raised.value)


def test_a_whole_gradient_becomes_this_ranks():
    unit, parameter = one_unit(1)
    parameter.grad = None
    # As torch leaves it where a parameter gets another shape.
    whole = nn.Parameter(torch.zeros(2, 3))
    whole.grad = torch.arange(6.0).view(2, 3)
    whole.data = parameter.data
    unit.shards[0].parameter = whole
    unit.check()
    assert torch.equal(whole.grad, torch.tensor([3.0, 4.0, 5.0]))
