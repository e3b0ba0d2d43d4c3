"""The automatic partition: valid, shared together, balanced within the bound that it states."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from smp_core.torch.parameters import sharing
from smp_core.torch.pipeline import partitioner, placement, tracing

WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def cuts(count, segments):
    for starts in itertools.combinations(range(1, count), segments - 1):
        yield [0, *starts]


def heaviest(weights, starts):
    return max(sum(weights[a:b]) for a, b in itertools.pairwise([*starts, len(weights)]))


@given(weights=WEIGHTS, degree=st.integers(1, 5), data=st.data())
def test_a_cut_is_the_shallowest_within_the_slack_of_the_best(weights, degree, data):
    depths = data.draw(st.lists(st.integers(0, 3), min_size=len(weights), max_size=len(weights)))
    starts = partitioner.cut([float(each) for each in weights], depths, degree)
    segments = min(degree, len(weights))
    assert starts[0] == 0
    assert len(starts) == segments
    assert starts == sorted(set(starts))
    every = [(heaviest(weights, each), each) for each in cuts(len(weights), segments)]
    least = min(every)[0]
    assert partitioner.least_maximum([float(each) for each in weights], segments) == least
    limit = least + partitioner.SLACK * sum(weights) / segments + 1e-6
    assert heaviest(weights, starts) <= limit
    # The bound of the docstring, derived there.
    assert heaviest(weights, starts) <= 1.1 * sum(weights) / segments + max(weights) + 1e-6
    shallow = min(
        sum(depths[each] for each in starts[1:])
        for most, starts in every
        if most == least or most <= limit - 2e-6
    )
    assert sum(depths[each] for each in starts[1:]) <= shallow


class Block(nn.Module):
    """Children of any kind, in any order, called in reverse."""

    def __init__(self, children, own):
        super().__init__()
        self.parts = nn.ModuleList(children)
        if own:
            self.own = nn.Parameter(torch.ones(own))

    def forward(self, x):
        for part in reversed(self.parts):
            x = part(x)
        return x


LEAVES = st.one_of(
    st.integers(1, 30).map(lambda size: lambda: nn.Linear(size, 2)),
    st.just(nn.ReLU),
    st.just(lambda: nn.BatchNorm1d(3)),
)
TREES = st.recursive(
    LEAVES,
    lambda trees: st.tuples(st.lists(trees, max_size=4), st.integers(0, 5)).map(
        lambda drawn: lambda: Block([make() for make in drawn[0]], drawn[1])
    ),
    max_leaves=12,
)


@given(
    tree=TREES,
    degree=st.integers(1, 4),
    ties=st.lists(st.tuples(st.integers(0), st.integers(0)), max_size=3),
)
def test_a_partition_of_any_tree_is_valid_and_keeps_ties_together(tree, degree, ties):
    module = Block([tree()], 0)
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    for one, other in ties if linears else ():
        linears[one % len(linears)].weight = linears[other % len(linears)].weight
    owner = partitioner.assign(module, degree, 0.8)
    assert owner == partitioner.assign(module, degree, 0.8)  # deterministic
    assert set(owner) == set(module.modules())
    placed = placement.place(module, owner, degree)
    atoms = partitioner.weigh(module, partitioner.atoms_of(module, None), 0.8, None)
    used = min(degree, len(atoms))
    assert set(owner.values()) == set(range(used))
    assert owner[module] == 0
    assert sorted(id(each) for atom in atoms for each in atom.modules) == sorted(
        map(id, module.modules())
    )
    for group in sharing.shared(module):
        assert len({placed.modules[entry.module] for entry in group}) == 1
    total = sum(entry.tensor.nbytes for entry in placement.unique(module))
    assert sum(atom.bytes for atom in atoms) == total
    loads = [0] * used
    for entry in placement.unique(module):
        loads[placed.modules[entry.module]] += entry.tensor.nbytes
    assert max(loads) <= 1.1 * total / used + max(atom.bytes for atom in atoms) + 1e-6


def trace_of(module, x):
    with tracing.Tracer(module) as tracer:
        module(x)
    return tracer.trace


def layers(count, width=8):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


@pytest.mark.parametrize("traced", [False, True])
def test_equal_layers_are_cut_evenly_between_them(traced):
    module = layers(8)
    trace = trace_of(module, torch.ones(2, 8)) if traced else None
    owner = partitioner.assign(module, 4, 0.8, trace)
    assert [owner[each] for each in module] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_order_of_calls_counts_rather_than_that_of_definition():
    module = Block([nn.Linear(4, 4) for _ in range(4)], 0)
    assert [partitioner.assign(module, 2, 0.8)[each] for each in module.parts] == [0, 0, 1, 1]
    trace = trace_of(module, torch.ones(2, 4))
    assert [partitioner.assign(module, 2, 0.8, trace)[each] for each in module.parts] == [
        1,
        1,
        0,
        0,
    ]


class Often(nn.Module):
    """Equal parameters, unequal work: the first layer runs eight times."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for _ in range(7):
            x = self.layers[0](x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_memory_weight_decides_between_bytes_and_work():
    module = Often()
    trace = trace_of(module, torch.ones(64, 16))
    trace.bytes.clear()  # of activations
    assert [partitioner.assign(module, 2, 1.0, trace)[each] for each in module.layers] == [
        0,
        0,
        1,
        1,
    ]
    assert [partitioner.assign(module, 2, 0.0, trace)[each] for each in module.layers] == [
        0,
        1,
        1,
        1,
    ]


class Reading(nn.Module):
    """Ties by reference: the last layer reads the first one's weight without calling it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.bias = nn.Parameter(torch.zeros(6))
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(
            self.layers(self.embedding(x)), self.embedding.weight, self.bias
        )


def test_a_module_that_reads_anothers_parameter_is_on_its_rank():
    module = Reading()
    trace = trace_of(module, torch.tensor([1, 2]))
    assert trace.reads == [("", "embedding")]
    owner = partitioner.assign(module, 3, 0.8, trace)
    assert owner[module.embedding] == owner[module] == owner[module.unused] == 0
    assert set(owner.values()) == {0, 1, 2}


class Mirror(nn.Module):
    """A decoder of which nothing but a view of the encoder's weight is left."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.encoder:
            x = layer(x)
        return x @ self.encoder[2].weight.mT @ self.encoder[1].weight.T


def test_a_module_that_reads_a_view_of_anothers_parameter_is_on_its_rank():
    module = Mirror()
    trace = trace_of(module, torch.ones(2, 4))
    assert trace.reads == [("", "encoder.2"), ("", "encoder.1")]
    owner = partitioner.assign(module, 2, 0.8, trace)
    assert owner[module.encoder[1]] == owner[module.encoder[2]] == owner[module] == 0


def test_what_torch_computes_in_one_piece_is_not_divided():
    module = nn.Sequential(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 3, enable_nested_tensor=False
        ),
        nn.LSTM(4, 4),
    )
    for trace in (None, trace_of(module, torch.ones(2, 3, 4))):
        owner = partitioner.assign(module, 4, 0.8, trace)
        assert set(owner.values()) == {0, 1, 2, 3}
        for layer in [*module[0].layers, module[1]]:
            assert len({owner[each] for each in layer.modules()}) == 1
