"""The training of tests of sharded checkpoints: a model with every kind of parameter, here and in plain PyTorch.

The plain loop, over replicas in one process, knows nothing of shards, ranks or files.
"""

from __future__ import annotations

import torch
from torch import nn

import smp_core.torch as smp

OPTIMIZERS = {
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.03, amsgrad=True),
    "asgd": lambda given: torch.optim.ASGD(given, lr=0.03),
}


class Net(nn.Module):
    """Tied, frozen, unused, without dimensions, without elements, smaller than the degree; and a buffer."""

    def __init__(self, seed, features=6):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, features)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(features, 5), nn.ReLU(), nn.Linear(5, features))
            for _ in range(2)
        )
        self.gain = nn.Parameter(torch.rand(()))
        self.pair = nn.Parameter(torch.rand(2))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(features, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(features))
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, x):
        y = self.embed(x)
        for block in self.blocks:
            y = y + block(y) * self.gain * self.scale
        return self.head(y).sum(-1) * self.pair[0] + self.pair[1] + self.empty.sum()


def batch(replica, number):
    """The data of a replica in one step: a stream by rank."""
    generator = torch.Generator().manual_seed(100 * number + replica)
    return torch.randint(0, 7, (2, 3), generator=generator)


def loss_of(out):
    return (out * out).mean()


class Plain:
    """Training in one process."""

    def __init__(self, optimizer):
        self.model = Net(1)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, replicas, number):
        """One step; gradients are added along the tree over the replicas, and divided once."""
        sums, losses = [], []
        for replica in range(replicas):
            self.model.zero_grad()
            loss = loss_of(self.model(batch(replica, number)))
            loss.backward()
            losses.append(loss.detach())
            sums.append([each.grad for each in self.model.parameters()])
        while len(sums) > 1:
            sums = [
                [a if b is None else a + b for a, b in zip(one, other, strict=True)]
                for one, other in zip(sums[::2], sums[1::2], strict=True)
            ]
        for each, total in zip(self.model.parameters(), sums[0], strict=True):
            each.grad = None if total is None else total / replicas
        self.optimizer.step()
        return losses


def expected(optimizer, *replicas):
    """Plain training over so many replicas in each step: losses, and the states after each."""
    plain, losses, states = Plain(optimizer), [], []
    for number, count in enumerate(replicas):
        losses.append(plain.step(count, number))
        states.append((snapshot(plain.model.state_dict()), snapshot(plain.optimizer.state_dict())))
    return losses, states


class Run:
    """The same on this rank, from a seed or from where ``plain`` is."""

    def __init__(self, optimizer, seed=1, features=6, plain=None, **arguments):
        module = Net(seed, features) if plain is None else plain.model
        self.model = smp.DistributedModel(module)
        inner = OPTIMIZERS[optimizer](module.parameters()) if plain is None else plain.optimizer
        self.optimizer = smp.DistributedOptimizer(inner, **arguments)

        @smp.step
        def run(model, x):
            loss = loss_of(model(x))
            model.backward(loss)
            return loss

        self._step = run

    def step(self, number):
        self.optimizer.zero_grad()
        loss = self._step(self.model, batch(smp.dp_rank(), number)).reduce_mean()
        self.optimizer.step()
        return loss.detach()

    def overflowed(self, number):
        """Run a step and return whether it was skipped."""
        self.step(number)
        return self.optimizer.overflow

    def steps(self, *numbers):
        return [self.step(number) for number in numbers]

    def state(self):
        return snapshot(self.model.state_dict()), snapshot(self.optimizer.state_dict())


def config(degree, threshold=0, **more):
    return {
        "ddp": True,
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": threshold,
        "sdp_gradient_clipping": 1e30,
        **more,
    }


def own_part(optimizer):
    """This rank's part of an optimizer's state, also on rdp_rank 0, which gets the list of all parts."""
    state = optimizer.local_state_dict(gather_if_shard=False)
    return state[0] if isinstance(state, list) else state


def snapshot(value):
    """A nest with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(each) for each in value]
    return value


def equal(one, other, place="it"):
    """Assert that two containers are the same, to the bit; tensors in shape and dtype, too."""
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor), place
        assert (one.shape, one.dtype) == (other.shape, other.dtype), place
        assert torch.equal(one, other), f"{place}: {one}, not {other}"
    elif isinstance(other, dict):
        assert list(one) == list(other), place
        for key in other:
            equal(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(other, list | tuple):
        assert len(one) == len(other), place
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            equal(a, b, f"{place}[{index}]")
    else:
        assert one == other, place
