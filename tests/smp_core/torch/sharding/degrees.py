"""The same script at several degrees of sharding, on the same ranks: what all of these tests compare.

A script is a plain function that is run on every rank once per configuration, between ``smp.init`` and
``smp.shutdown``, and returns tensors in any nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

import smp_core.torch as smp


def config(degree: int, **more: Any) -> dict[str, Any]:
    """Nothing is persistent but what has no element, and nothing is clipped, unless ``more`` says so."""
    sharded = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e30}
    return {
        "ddp": True,
        **(sharded if degree > 1 else {}),
        "sharded_data_parallel_degree": degree,
        **more,
    }


def run(
    smp_world: Any,
    script: Callable[..., Any],
    *args: Any,
    degrees: Sequence[int] = (1, 2),
    ranks: int = 2,
    **more: Any,
) -> list[list[Any]]:
    """By rank, what the script returned at each degree. Parameters of sharding in ``more`` are left out at 1."""
    configs = []
    for degree in degrees:
        given = {
            key: value for key, value in more.items() if degree > 1 or not key.startswith("sdp_")
        }
        configs.append(config(degree, **given))
    return smp_world.run(_each, script, args, configs, ranks=ranks, init=False)


def _each(
    script: Callable[..., Any], args: Sequence[Any], configs: Sequence[Mapping[str, Any]]
) -> list[Any]:
    results = []
    for each in configs:
        smp.init(each)
        result = script(*args)
        # The next script trains other tensors; of these the values count.
        results.append(
            tree_map(
                lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf,
                result,
            )
        )
        smp.shutdown()
    return results


def same(smp_world: Any, script: Callable[..., Any], *args: Any, **how: Any) -> list[list[Any]]:
    """Every degree gives the bits of the first, on every rank; what they are, as :func:`run` gives it."""
    by_rank = run(smp_world, script, *args, **how)
    for rank, (first, *others) in enumerate(by_rank):
        expected, structure = tree_flatten(first)
        for number, other in enumerate(others, 1):
            leaves, found = tree_flatten(other)
            assert found == structure
            for position, (one, two) in enumerate(zip(expected, leaves, strict=True)):
                same_bits = (
                    torch.equal(dense(one), dense(two))
                    if isinstance(one, torch.Tensor)
                    else one == two
                )
                assert same_bits, (
                    f"rank {rank}, configuration {number}, leaf {position} of {structure}: {one}, {two}"
                )
    return by_rank


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def gradients(model: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """By name, the gradients, whole."""
    for name, parameter in model.module.named_parameters():
        gradient = parameter.grad
        if (
            gradient is not None
            and model.sharding.degree > 1
            and model.sharding.shard(parameter) is not None
        ):
            (gradient,) = model.sharding.full_tensors([(parameter, gradient)])
        yield name, None if gradient is None else dense(gradient).clone()


def outcome(model: Any) -> dict[str, Any]:
    """The gradients and the state that a step has left, whole."""
    return {"gradients": dict(gradients(model)), "state": dict(model.state_dict())}


def wrapped(module: nn.Module, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer, SGD unless another is given."""
    made = (optimizer or sgd)(module.parameters())
    model = smp.DistributedModel(module, **options)
    return model, smp.DistributedOptimizer(made)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


class Layers(nn.Module):
    """A root with parameters of its own and, in a list, layers with a bias that is longer than its degree.

    Units without a limit: embed and head, 58 elements, then 144 of each layer.
    """

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(layers)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@smp.step
def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss


def batch(number: int = 0, rows: int = 4) -> torch.Tensor:
    """Of this rank; the ranks of a TP group share it."""
    generator = torch.Generator().manual_seed(100 * number + smp.rdp_rank())
    return torch.randn(rows, 4, generator=generator)


def train(
    make: Callable[[], nn.Module] = Layers, steps: int = 3, optimizer: Any = None, **options: Any
) -> Any:
    """A few steps: losses, and what they leave."""
    model, optimizer = wrapped(make(), optimizer, **options)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(step(model, batch(number)).stack())
        optimizer.step()
    return losses, outcome(model)
