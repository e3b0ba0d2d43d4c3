"""smp.partition, set_partition and model_creation, without a step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.torch.exceptions import PartitionError, UnsupportedTrainingError
from smp_core.torch.parameters import creation
from smp_core.torch.pipeline import placement
from smp_core.torch.session import current

MANUAL = {"pipeline_parallel_degree": 3, "auto_partition": False, "default_partition": 0}


def owners(module):
    return dict(placement.decide(current("test"), module).modules)


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.smp(ranks=3, **MANUAL)
def test_the_innermost_partition_of_creation_counts_wherever_the_module_is_assigned(smp):
    with smp.partition(1):
        outer = nn.Linear(2, 2)
        with smp.partition(2):
            inner = nn.Linear(2, 2)
        after = nn.Linear(2, 2)
    plain = nn.Linear(2, 2)
    assert owners(nn.Sequential(plain, outer, inner, after)) == {
        "": 0,
        "0": 0,
        "1": 1,
        "2": 2,
        "3": 1,
    }


@pytest.mark.smp(ranks=3, **MANUAL)
def test_modules_that_are_copied_or_unpickled_inside_are_created_inside(smp):
    layer = nn.Linear(2, 2)
    with smp.partition(2):
        copied, loaded = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    kept = copy.deepcopy(copied)  # outside: as its original
    assert owners(nn.Sequential(layer, copied, loaded, kept)) == {
        "": 0,
        "0": 0,
        "1": 2,
        "2": 2,
        "3": 2,
    }


@pytest.mark.smp(ranks=3, **MANUAL)
def test_module_init_is_as_before_after_use_and_after_an_error(smp):
    before = nn.Module.__init__, nn.Module.__setstate__
    with smp.partition(1), smp.partition(2):
        assert nn.Module.__init__ is not before[0]
    assert (nn.Module.__init__, nn.Module.__setstate__) == before
    with pytest.raises(ZeroDivisionError), smp.partition(1), smp.partition(2):
        _ = 1 / 0
    assert (nn.Module.__init__, nn.Module.__setstate__) == before
    assert owners(nn.Sequential(nn.Linear(1, 1))) == {"": 0, "0": 0}


@pytest.mark.smp(ranks=3, **MANUAL)
def test_ranks_that_are_threads_do_not_see_each_others_partition(smp):
    with smp.partition(smp.rank()):
        smp.barrier()
        layer = nn.Linear(1, 1)
        smp.barrier()
    smp.barrier()
    assert owners(nn.Sequential(layer, nn.Linear(1, 1))) == {"": 0, "0": smp.rank(), "1": 0}


@pytest.mark.smp(ranks=3, **MANUAL)
@pytest.mark.parametrize("index", [-1, 3, 7])
def test_an_index_out_of_range_is_refused_at_once_with_the_range(smp, index):
    with (
        pytest.raises(PartitionError, match=rf"partition {index} .*from 0 to 2"),
        smp.partition(index),
    ):
        pytest.fail("entered")
    with pytest.raises(PartitionError, match=rf"partition {index} .*from 0 to 2"):
        smp.set_partition(nn.Linear(1, 1), index)
    for wrong in (True, "1", 1.0, None):
        with pytest.raises(ArgumentTypeError), smp.partition(wrong):
            pytest.fail("entered")


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2)
def test_partition_says_nothing_under_auto_partition(smp):
    with smp.partition(9):
        layer = nn.Linear(1, 1)
    smp.set_partition(layer, 9)
    assert not hasattr(layer, placement.PARTITION.attribute)


@pytest.mark.smp(ranks=3, **MANUAL)
def test_set_partition_takes_the_subtree_and_the_last_word_counts(smp):
    with smp.partition(1):
        model = Two(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    smp.set_partition(model.first, 2)
    smp.set_partition(model.first[1], 0)
    assert owners(model) == {"": 1, "first": 2, "first.0": 2, "first.1": 0, "second": 1}
    with pytest.raises(ArgumentTypeError, match="not a torch"):
        smp.set_partition("first", 1)


@pytest.mark.smp(ranks=3, pipeline_parallel_degree=3, auto_partition=False, default_partition=2)
def test_modules_without_parameters_and_lists_follow_the_module_above(smp):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with smp.partition(1):
                self.block = Two(nn.Sequential(nn.Dropout(), nn.ReLU()), nn.Linear(1, 1))
                self.act = nn.ReLU()
            with smp.partition(0):
                self.weights = nn.ParameterList([nn.Parameter(torch.ones(1))])
                self.layers = nn.ModuleList([nn.Linear(1, 1), nn.Tanh()])
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x

    placed = placement.decide(current("test"), Net())
    assert dict(placed.modules) == {
        "": 2, "block": 1, "block.first": 1, "block.first.0": 1, "block.first.1": 1, "block.second": 1,
        "act": 2, "weights": 2, "layers": 2, "layers.0": 0, "layers.1": 2,
    }  # fmt: skip
    assert placed.parameters == {
        "scale": 2, "block.second.weight": 1, "block.second.bias": 1, "weights.0": 2,
        "layers.0.weight": 0, "layers.0.bias": 0,
    }  # fmt: skip


def build():
    model = nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Embedding(9, 4, padding_idx=0), nn.LSTM(3, 2)
    )
    for parameter in model[0].parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    nn.init.trunc_normal_(model[2].weight)
    nn.init.orthogonal_(model[3].weight_hh_l0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model.append(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    with torch.no_grad():
        model[2].weight[1:3].fill_(7.0)
        model[0].weight[2].copy_(torch.arange(5.0))
    model.rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
    generator = torch.Generator().manual_seed(3)
    model.drawn = nn.Parameter(torch.randn(4, 3, generator=generator).t())
    model.register_buffer("steps", torch.linspace(0, 1, 5), persistent=False)
    return model


@pytest.mark.smp(ranks=1)
def test_delayed_values_are_those_of_the_code_without_delay_bit_for_bit(smp):
    torch.manual_seed(3)
    plain, after = build(), torch.rand(2)
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        late = build()
    assert torch.equal(torch.rand(2), after)
    assert all(parameter.is_meta for parameter in late.parameters())
    assert late.rates == plain.rates
    session = current("test")
    pairs = zip(
        [*plain.named_parameters(), *plain.named_buffers()],
        [*late.named_parameters(), *late.named_buffers()],
        strict=True,
    )
    for (name, wanted), (_, got) in pairs:
        value = creation.value(session, got, name)
        assert torch.equal(value, wanted), name
        assert value.stride() == wanted.stride()


@pytest.mark.smp(ranks=1)
def test_delay_that_is_not_enabled_and_tensors_on_meta_of_the_users_own(smp):
    with smp.delay_param_initialization(False):
        assert not nn.Linear(1, 1).weight.is_meta
    with smp.delay_param_initialization(), smp.delay_param_initialization(enabled=False):
        assert nn.Linear(1, 1).weight.untyped_storage().data_ptr() == 0
    with pytest.raises(UnsupportedTrainingError, match="'w' is on the meta device"):
        creation.value(current("test"), torch.empty(2, device="meta"), "w")


@pytest.mark.smp(ranks=1)
def test_model_creation_sets_the_dtype_and_puts_it_back(smp):
    with smp.model_creation(dtype=torch.float64, zero_init=True, flash_attention=False):
        layer = nn.Linear(1, 1)
    assert layer.weight.dtype == torch.float64
    assert nn.Linear(1, 1).weight.dtype == torch.float32
    with (
        pytest.raises(ArgumentTypeError, match="floating-point"),
        smp.model_creation(dtype=torch.int8),
    ):
        pytest.fail("entered")
    with pytest.raises(ZeroDivisionError), smp.model_creation(dtype=torch.float64):
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.smp(ranks=1, delayed_parameter_initialization=True)
def test_the_configuration_key_delays_in_model_creation(smp):
    with smp.model_creation():
        layer = nn.Linear(1, 1)
    assert layer.weight.is_meta


@pytest.mark.smp(ranks=1, microbatches=3)
def test_number_of_microbatches_and_tracing(smp):
    assert smp.num_microbatches() == 3
    assert smp.is_tracing() is False


class Chain(nn.Module):
    """Six layers and a head whose weight is the first layer's, read without calling it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return nn.functional.linear(self.layers(x), self.layers[0].weight, self.bias)


def lattice(module):
    """Small integers: whatever the order of sums, no rounding."""
    for index, parameter in enumerate(module.parameters()):
        values = torch.arange(parameter.numel()).view(parameter.shape)
        parameter.data.copy_((values + index) % 3 - 1)


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2, microbatches=2)
def test_an_automatic_partition_trains_as_plain_torch_and_its_ties_by_reference_hold(smp):
    x = torch.arange(16.0).view(4, 4) % 3 - 1
    plain, module = Chain(), Chain()
    lattice(plain)
    lattice(module)
    model = smp.DistributedModel(module)
    traced = []

    @smp.step
    def run(model, x):
        traced.append(smp.is_tracing())
        model.backward(model(x).sum())

    run(model, x)
    assert traced == {0: [True, False, False], 2: [False, False]}.get(smp.rank(), [])
    assert [model.placement.modules[name] for name in ("", "layers.0", "layers.5")] == [0, 0, 1]
    for part in x.chunk(2):
        (plain(part).sum() / 2).backward()
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name
    assert next(iter(model.local_parameters()), None) is not None


@pytest.mark.smp(
    ranks=2, pipeline_parallel_degree=2, delayed_parameter_initialization=True, skip_tracing=False
)
def test_a_delayed_model_starts_with_the_values_of_one_that_is_not(smp):
    torch.manual_seed(4)
    with smp.model_creation():
        module = Chain()
    torch.manual_seed(4)
    plain = Chain()
    model = smp.DistributedModel(module)
    smp.set_partition(module, 0)  # says nothing under auto_partition
    smp.step(lambda model, x: None)(model, torch.ones(1, 4))
    own = dict(model.local_named_parameters())
    assert 0 < len(own) < 13
    for name, parameter in own.items():
        assert torch.equal(parameter, plain.get_parameter(name))


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, auto_partition=False, default_partition=0)
def test_set_partition_comes_too_late_after_the_first_step(smp):
    model = smp.DistributedModel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    smp.set_partition(model.module[1], 1)
    smp.step(lambda model, x: None)(model, torch.ones(1, 1))
    assert dict(model.placement.modules) == {"": 0, "0": 0, "1": 1}
    for index in (0, 1):
        with pytest.raises(PartitionError, match="partitioned already"):
            smp.set_partition(model.module[1], index)
    smp.set_partition(nn.Linear(1, 1), 1)  # not of the model


@pytest.mark.smp(ranks=1, auto_partition=False, default_partition=0)
def test_at_degree_one_set_partition_may_follow_the_wrapping(smp):
    model = smp.DistributedModel(nn.Sequential(nn.Linear(1, 1)))
    smp.set_partition(model.module[0], 0)
    assert model(torch.ones(1, 1)).shape == (1, 1)
