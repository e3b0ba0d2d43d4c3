"""Parameters that are not where they were: replaced, added, borrowed or tied while a module runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

WIDTH = 4
SPLIT = pytest.mark.smp(
    ranks=4, microbatches=2, pipeline_parallel_degree=2, auto_partition=False, default_partition=0
)


class Borrows(nn.Module):
    """Runs its child with a parameter of its own, and a tensor that is no parameter of the model."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.child = nn.Linear(WIDTH, WIDTH)
        self.outside = [torch.randn(WIDTH, requires_grad=True)]

    def forward(self, x):
        lent = {"weight": self.weight, "bias": self.outside[0]}
        return torch.func.functional_call(self.child, lent, (x,)) + self.child(x)


class Ties(nn.Module):
    """Gives its child its own weight, in each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.child.weight = self.weight
        return self.child(x) + x @ self.weight


def step_of(smp, module):
    model = smp.DistributedModel(module)

    @smp.step
    def step(model, x):
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    return model, lambda x: step(model, x)


@pytest.mark.smp(
    ranks=2,
    microbatches=2,
    pipeline_parallel_degree=2,
    auto_partition=False,
    default_partition=1,
    skip_tracing=True,
)
@pytest.mark.parametrize("kind", [Borrows, Ties])
def test_borrowed_and_tied(smp, kind):
    torch.manual_seed(0)
    plain = kind().double()
    torch.manual_seed(0)
    module = kind().double()
    theirs, ours = (torch.ones(WIDTH).double().requires_grad_() for _ in range(2))
    plain.outside, module.outside = [theirs], [ours]
    _, step = step_of(smp, module)
    for seed in range(2):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
        step(x)
        for part in x.chunk(2):
            (plain(part).pow(2).mean() / 2).backward()
    if smp.rank() == 1:
        expected = dict(plain.named_parameters())
        found = dict(module.named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)
        if kind is Borrows:  # not the model's: torch's own sum over microbatches
            torch.testing.assert_close(ours.grad / 2, theirs.grad)


@SPLIT
@pytest.mark.parametrize("change", ["replaced", "added"])
def test_new_parameters_between_steps(smp, change):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model, step = step_of(smp, module)
    smp.set_partition(module[2], 1)
    torch.manual_seed(smp.dp_rank())
    x = torch.randn(4, WIDTH)
    step(x)
    layer = module[2]
    if smp.pp_rank() == 1:
        if change == "replaced":
            layer.weight = nn.Parameter(layer.weight.detach() * 2)
        else:
            layer.extra = nn.Parameter(torch.ones(WIDTH))
            layer.register_forward_hook(lambda module, args, output: output * module.extra)
        model.zero_grad()
    step(x)
    gradients = [parameter.grad for parameter in model.local_parameters()]
    assert all(gradient is not None for gradient in gradients)
    for mine, other in zip(*smp.allgather(gradients, smp.DP_GROUP), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.smp(ranks=2, microbatches=2)
def test_a_replaced_parameter_outside_of_steps(smp):
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    model = smp.DistributedModel(module)
    module.weight = nn.Parameter(module.weight.detach() * 2)
    torch.manual_seed(smp.dp_rank())
    model.backward(model(torch.randn(4, WIDTH)).pow(2).mean())
    one, other = smp.allgather(module.weight.grad, smp.DP_GROUP)
    assert torch.equal(one, other)
