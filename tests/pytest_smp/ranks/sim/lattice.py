"""Training whose every gradient is exact, and its reference: plain PyTorch in one process.

Weights, inputs and targets are small integers, the network is linear layers and ReLU with a squared
loss as a sum, and the divisor is the number of ranks, a power of two. So gradients are integers, or
integers over 8, and sums of them are exact in any order as long as they stay below 2**24 (ENGINES
2.2). ``certify`` makes sure of that at each step of the reference. Adam does not stay on integers, but
works on each element alone: equal gradients and equal states give equal bits. After each step the
weights are rounded to integers on both sides, so that the next gradients are exact again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

RANKS, ROWS, STEPS = 8, 2, 4
Batch = tuple[torch.Tensor, torch.Tensor]


def integers(shape: tuple[int, ...], low: int, high: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).float()


def fill(module: nn.Module) -> nn.Module:
    """Integer weights from -2 to 2, the same wherever this is called."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(integers(tuple(parameter.shape), -2, 2, seed))
    return module


class Network(nn.Module):
    """Odd sizes: no dimension divides among 8 ranks, most are smaller than 8."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        sizes = [(3, 5), (5, 9), (9, 2)]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in sizes)
        self.checkpointed = checkpointed  # use_reentrant, or None for no checkpointing
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            x = x.clone().requires_grad_()  # the reentrant kind needs an input with a gradient
        for layer in self.layers[:-1]:
            if self.checkpointed is None:
                x = layer(x).relu()
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed)
                x = x.relu()
        result: torch.Tensor = self.layers[-1](x)
        return result


def batch(rank: int, step: int) -> Batch:
    """Inputs and targets, unlike for every rank and step."""
    seed = 1000 + 50 * step + rank
    return integers((ROWS, 3), -2, 2, seed), integers((ROWS, 2), -3, 3, 10_000 + seed)


def loss(module: nn.Module, data: Batch) -> torch.Tensor:
    inputs, targets = data
    result: torch.Tensor = ((module(inputs) - targets) ** 2).sum()
    return result


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1.0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies; a sharded tensor is gathered."""
    with torch.no_grad():
        return [(t.full_tensor() if isinstance(t, DTensor) else t).clone() for t in tensors]


def update(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """One step of the optimizer, and back to integers. Returns the gradients: the update alone would
    not show a wrong divisor, since Adam's first step does not depend on it.
    """
    gradients = whole(p.grad for p in module.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter in module.parameters():
            local(parameter).round_()
    return gradients


def certify(module: Network, batches: list[Batch]) -> None:
    """Raise unless every sum of every gradient over all batches is exact in float32.

    The shadow, in float64, has absolute weights and inputs, and targets of the sign that makes
    differences largest: each of its numbers bounds the real one and every partial sum of it.
    """
    shadow = Network().double()
    with torch.no_grad():
        for bound, parameter in zip(shadow.parameters(), module.parameters(), strict=True):
            assert torch.equal(parameter, parameter.round())
            bound.copy_(parameter.abs())
    between: list[torch.Tensor] = []
    for inputs, targets in batches:
        x = inputs.double().abs()
        for layer in shadow.layers:
            x = layer(x)
            x.retain_grad()
            between.append(x)
        ((x + targets.double().abs()) ** 2).sum().backward()
    bounds = [each.detach() for each in between]
    bounds += [each.grad for each in (*between, *shadow.parameters()) if each.grad is not None]
    assert max(bound.max().item() for bound in bounds) < 2**24


def one_process(steps: int = STEPS, micro: int = 1) -> list[torch.Tensor]:
    """Each step's gradients and the parameters at the end, where a step takes the losses of all
    ranks, averaged over ranks and added up over ``micro`` batches.
    """
    module = Network()
    optimizer = adam(module)
    history: list[torch.Tensor] = []
    for step in range(steps):
        batches = [batch(rank, step * micro + m) for m in range(micro) for rank in range(RANKS)]
        certify(module, batches)
        (torch.stack([loss(module, data) for data in batches]).sum() / RANKS).backward()
        history += update(module, optimizer)
    return history + whole(module.parameters())


def check_equal(got: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> None:
    """Every rank's tensors equal the expected ones to the bit."""
    for rank, tensors in enumerate(got):
        for index, (ours, theirs) in enumerate(zip(tensors, expected, strict=True)):
            assert torch.equal(ours, theirs), f"rank {rank}, tensor {index}"
