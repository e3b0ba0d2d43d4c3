"""A 16-bit loop with float32 masters in plain PyTorch, on one process: what the ranks must compute."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Reference:
    """``model`` is float32; ``optimizer(parameters)`` makes the optimizer of the masters."""

    def __init__(self, model: nn.Module, optimizer, dtype=torch.float16):
        self.model = copy.deepcopy(model).to(dtype)
        self.dtype = dtype
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.parameters = map(list, zip(*named, strict=True))
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.optimizer = optimizer(self.masters)

    def backward(self, replicas, scale=1.0, average=True):
        """Gradients of ``replicas``, each a list of microbatches ``(x, y)``, to the masters."""
        sums = []
        for microbatches in replicas:
            total = None
            for x, y in microbatches:
                output = self.model(x.to(self.dtype)).float()
                loss = (output - y).square().sum()
                loss.backward(torch.full_like(loss, scale))
                grads = [None if p.grad is None else p.grad.float() for p in self.parameters]
                self.model.zero_grad()
                total = grads if total is None else added(total, grads)
            sums.append(total)
        while len(sums) > 1:
            sums = [added(sums[i], sums[i + 1]) for i in range(0, len(sums), 2)]
        divisor = len(replicas) * (len(replicas[0]) if average else 1)
        for master, total in zip(self.masters, sums[0], strict=True):
            master.grad = None if total is None else total / divisor

    def overflowed(self):
        """Return whether a gradient is infinite, or no number."""
        given = [master.grad for master in self.masters if master.grad is not None]
        return not all(bool(gradient.isfinite().all()) for gradient in given)

    def update(self, factor=1.0):
        """One update with gradients times ``factor``, one multiplication."""
        with torch.no_grad():
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(factor)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def added(one, other):
    """Two lists of gradients, which lack the same ones."""
    return [None if a is None else a + b for a, b in zip(one, other, strict=True)]
