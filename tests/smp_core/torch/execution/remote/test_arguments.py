"""Arguments and outputs of unusual kinds, between modules of two ranks, in a traced step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.smp(
    ranks=2, microbatches=2, pipeline_parallel_degree=2, auto_partition=False, default_partition=0
)


class Runs(nn.Module):
    """Runs whatever module it is given, and gives it back."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x, module):
        return module(self.own(x)), module, torch.eye(4).to_sparse()


class Lends(nn.Module):
    """Lends a module of its own rank to one of another."""

    def __init__(self):
        super().__init__()
        self.lent = nn.Linear(4, 4)
        self.runs = Runs()

    def forward(self, x):
        y, same, sparse = self.runs(x, self.lent)
        assert same is self.lent
        z, relu, _ = self.runs(y, nn.ReLU())  # no module of the model: a value
        assert isinstance(relu, nn.ReLU)
        return torch.sparse.mm(sparse, z.t()).t()


@pytest.mark.parametrize("measured", [True, False])
def test_a_module_as_an_argument_and_a_sparse_output(smp, measured):
    torch.manual_seed(0)
    module, plain = Lends(), Lends()
    plain.load_state_dict(module.state_dict())
    model = smp.DistributedModel(module, trace_memory_usage=measured)
    smp.set_partition(module.runs, 1)

    @smp.step
    def step(model, x):
        model.backward(model(x).pow(2).mean())

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    step(model, x)
    for part in x.chunk(2):
        (plain(part).pow(2).mean() / 2).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)
