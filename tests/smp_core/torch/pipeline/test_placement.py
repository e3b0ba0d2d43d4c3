"""Parameters and buffers reach their owners, and nobody keeps more than its own."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from smp_core.errors import Cancelled, DeadlockError
from smp_core.topology import Topology
from smp_core.torch.exceptions import PartitionError, UnsupportedTrainingError
from smp_core.torch.parameters import foreign, sharing
from smp_core.torch.pipeline import placement
from smp_core.torch.session import current
from smp_core.torch.sharding.whole_model import WHOLE_MODEL
from smp_core.transport.protocols import Group

MANUAL = {"auto_partition": False, "default_partition": 0}


def distributed(module):
    """Place the module as the first step does, without a DistributedModel."""
    session = current("test")
    model = types.SimpleNamespace(get_module=lambda: module)
    placed = placement.settle(session, lambda: placement.decide(session, module))
    placement.prepare(session, model)
    placement.distribute(session, model, placed, WHOLE_MODEL)
    return placed


class Odd(nn.Module):
    """Zero-size, non-contiguous, expanded, scalar and integer tensors; ties within a partition."""

    def __init__(self, smp):
        super().__init__()
        self.own = nn.Parameter(torch.randn(3, 2))
        with smp.partition(1):
            self.one = nn.Linear(4, 4, bias=False)
            self.tied = nn.Linear(4, 4, bias=False)
            self.tied.weight = self.one.weight
            self.norm = nn.BatchNorm1d(3)
            with torch.no_grad():
                self.norm.running_mean.normal_()
        self.one.empty = nn.Parameter(torch.empty(0, 5))
        self.one.turned = nn.Parameter(torch.randn(3, 4).t(), requires_grad=False)
        self.one.register_buffer("wide", torch.randn(1, 3).expand(5, 3), persistent=False)
        self.one.register_buffer("count", torch.randint(100, ()))
        self.one.register_buffer("absent", None)

    def forward(self, x):
        return self.tied(self.one(x))


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2, **MANUAL)
def test_owners_and_replicas_get_the_values_of_the_first_rank_and_others_nothing(smp):
    torch.manual_seed(10)
    wanted = Odd(smp)  # what rank 0 draws
    torch.manual_seed(10 + smp.rank())
    model = Odd(smp)
    before = dict(model.named_parameters(remove_duplicate=False))
    placed = distributed(model)
    assert placed.parameters["own"] == 0
    assert {placed.parameters[name] for name in ("one.weight", "tied.weight")} == {1}
    here = smp.pp_rank()
    for kind, owners in (("parameter", placed.parameters), ("buffer", placed.buffers)):
        tensors = dict(getattr(model, f"named_{kind}s")(remove_duplicate=False))
        expected = dict(getattr(wanted, f"named_{kind}s")(remove_duplicate=False))
        assert set(tensors) == set(expected) == set(owners)
        for name, tensor in tensors.items():
            if owners[name] == here:
                assert torch.equal(tensor, expected[name]), name
                assert not foreign.is_foreign(tensor)
            else:
                assert tensor.untyped_storage().nbytes() == 0, name
                assert foreign.is_foreign(tensor)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert model.one.weight is model.tied.weight


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=1)
def test_at_degree_one_replicas_take_over_the_first_ranks_values(smp):
    torch.manual_seed(smp.rank())
    model = nn.Linear(3, 3)
    distributed(model)
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(3, 3).weight)


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2, **MANUAL)
def test_delayed_parameters_become_real_on_their_owners_alone(smp):
    torch.manual_seed(10)
    wanted = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    torch.manual_seed(10 + smp.rank())
    with smp.delay_param_initialization():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    smp.set_partition(model[2], 1)
    weight = model[2].weight
    placed = distributed(model)
    assert model[2].weight is weight
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta
        if placed.parameters[name] == smp.pp_rank():
            assert torch.equal(parameter, wanted.get_parameter(name))
        else:
            assert parameter.numel() == 0


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, **MANUAL)
def test_a_rank_gives_up_a_storage_that_its_own_tensors_lay_in_with_others(smp):
    flat = torch.arange(1000.0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for index, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[500 * index :][:500].view(500, 1))
    smp.set_partition(model[1], 1)
    assert sharing.shared(model) == []
    distributed(model)
    own = model[smp.pp_rank()].weight
    assert torch.equal(own.flatten(), torch.arange(1000.0)[500 * smp.pp_rank() :][:500])
    assert own.untyped_storage().nbytes() == 2000


def tie_module(model):
    model[1].weight = model[0].weight


def tie_memory(model):
    model[1].weight = nn.Parameter(model[0].weight.data[:1])


def tie_buffer(model):
    model[0].register_buffer("mask", torch.ones(2))
    model[1].register_buffer("veil", model[0].mask)


@pytest.mark.parametrize(
    ("tie", "names"),
    [
        (tie_module, "parameter '0.weight' .*'0'.* partition 0.*'1'.*'1.weight'.* partition 1"),
        (tie_memory, "parameter '0.weight' .* partition 0.*'1.weight'.* partition 1"),
        (tie_buffer, "buffer '0.mask' .* partition 0.*'1.veil'.* partition 1"),
    ],
)
@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, **MANUAL)
def test_memory_shared_across_partitions_is_refused_on_every_rank(smp, tie, names):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tie(model)
    smp.set_partition(model[1], 1)
    with pytest.raises(PartitionError, match=names):
        distributed(model)
    smp.set_partition(model[1], 0)
    distributed(model)


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, **MANUAL)
def test_different_models_and_lazy_ones_are_refused_on_every_rank(smp):
    with pytest.raises(PartitionError, match=r"'0.weight' of shape \[2, 2\].*rank 1.*\[2, 3\]"):
        distributed(nn.Sequential(nn.Linear(2 + smp.rank(), 2)))
    with pytest.raises(PartitionError, match=r"nothing where|has nothing"):
        distributed(nn.Sequential(*[nn.Linear(2, 2)] * 1, *([nn.Linear(1, 1)] * smp.rank())))
    with pytest.raises(UnsupportedTrainingError, match=r"'0\.weight'.*has no shape"):
        distributed(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, **MANUAL)
def test_an_error_of_the_deciding_rank_reaches_all(smp):
    def decide():
        raise KeyError("what")

    expected = KeyError if smp.rank() == 0 else PartitionError
    with pytest.raises(expected, match="what"):
        placement.settle(current("test"), decide)


@pytest.mark.parametrize("end", [Cancelled, DeadlockError])
def test_an_end_of_the_run_is_sent_to_no_rank(end):
    """A session whose object transport has no method: each use raises AttributeError."""
    runtime = types.SimpleNamespace(
        rank=0,
        topology=Topology(2, pipeline=2),
        group=lambda kind: Group("WORLD", (0, 1)),
        fabric=types.SimpleNamespace(objects=None),
    )

    def decide():
        raise end("the run has ended")

    with pytest.raises(end):
        placement.settle(types.SimpleNamespace(runtime=runtime), decide)


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, **MANUAL)
def test_reading_what_another_rank_owns_names_parameter_owner_and_reader(smp):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    smp.set_partition(model[1], 1)
    distributed(model)
    theirs = model[1] if smp.pp_rank() == 0 else model[0]
    path, owner = ("1", 1) if smp.pp_rank() == 0 else ("0", 0)
    with pytest.raises(
        PartitionError,
        match=rf"'{path}.weight' of module '{path}' belongs to pp_rank {owner}.*outside of any",
    ):
        torch.ones(1) * theirs.weight
    with pytest.raises(PartitionError, match=f"'{path}.bias'"):
        torch.cat([torch.ones(1), theirs.bias])
    for view in ("T", "mT", "H", "mH", "real"):
        with pytest.raises(PartitionError, match=rf"'{path}.weight'.*\({view}\)"):
            getattr(theirs.weight, view)
    if path == "1":
        with pytest.raises(PartitionError, match=r"buffer '1.running_mean'"):
            theirs.running_mean + 1
    assert "Foreign" in repr(theirs.weight)
    assert theirs.weight.requires_grad
    assert theirs.weight.is_leaf
    theirs.weight.requires_grad_(False)
    model.zero_grad()
    model.double()
    assert theirs.weight.dtype == torch.float64
    model.to("cpu")
    with pytest.raises(PartitionError, match=f"'{path}.bias'"):
        torch.ones(1) + theirs.bias.to(torch.float32)
    if path == "1":
        with pytest.raises(PartitionError, match=r"buffer '1.running_mean'"):
            theirs.running_mean + 1
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 0


class Reader(nn.Module):
    """A head that reads the embedding's weight without calling the embedding."""

    def __init__(self, smp):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        with smp.partition(1):
            self.head = Head(self.embedding)

    def forward(self, x):
        return self.head(self.embedding(x))


class Head(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.__dict__["embedding"] = embedding  # no child

    def forward(self, x):
        return nn.functional.linear(x, self.embedding.weight, self.bias)


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, skip_tracing=True, **MANUAL)
def test_a_module_that_reads_what_another_rank_owns_is_named_in_the_step(smp):
    model = smp.DistributedModel(Reader(smp))
    run = smp.step(lambda model, x: model.backward(model(x).sum()))
    with pytest.raises(
        Exception, match=r"'embedding.weight' .*pp_rank 0, and module 'head' \(Head\) on pp_rank 1"
    ):
        run(model, torch.tensor([0, 1]))
