"""The core's own tests for an environment without pytest and Hypothesis: a plain script, on one rank or two.

    python tests/smp_core/alone.py
    torchrun --nproc-per-node=2 tests/smp_core/alone.py
    mpiexec -n 2 python tests/smp_core/alone.py

The script refuses imports of the harness and of what it needs, also where they are installed. Weights, inputs and
targets are small integers, so sums are exact in any order, and every result must equal plain PyTorch's to the bit.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

REFUSED = ("_pytest", "conformance", "hypothesis", "pytest", "pytest_smp")


class Refusal(MetaPathFinder, Loader):
    """Finds the refused modules, since torch looks for some of them, and lets nobody import one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] in REFUSED else None

    def exec_module(self, module: Any) -> None:
        name = module.__name__
        raise ModuleNotFoundError(f"{name} is refused: smp_core must do without", name=name)


sys.meta_path.insert(0, Refusal())

import torch  # noqa: E402
from torch import nn  # noqa: E402

import smp_core.torch as smp  # noqa: E402

STEPS = 2


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 - number % 2)
    return layers


def batch(step: int, replica: int) -> torch.Tensor:
    return torch.arange(16.0).view(4, 4) % 5 - step - replica


def plain(replicas: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of replica 0 by step, and the parameters after the last one."""
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=2.0**-4)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        every = [layers(batch(step, replica)).mean() for replica in range(replicas)]
        (sum(every) / replicas).backward()
        optimizer.step()
        losses.append(every[0].item())
    return losses, dict(layers.state_dict())


@smp.step
def train_step(distributed: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = distributed(x).mean()
    distributed.backward(loss)
    return loss


def trains(config: dict[str, Any]) -> None:
    """A training in this configuration is plain PyTorch's, and its checkpoint is read again."""
    smp.init({"ddp": True, "auto_partition": False, "default_partition": 0, **config})
    layers = model()
    if smp.pp_size() == 2:
        smp.set_partition(layers[2], 1)
    distributed = smp.DistributedModel(layers)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(distributed.parameters(), lr=2.0**-4))
    losses = []
    replica = smp.rank() if config.get("sharded_data_parallel_degree") else smp.dp_rank()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = train_step(distributed, batch(step, replica)).reduce_mean()
        optimizer.step()
        losses.append(loss.item())
    everyone = smp.allgather((replica, losses), smp.WORLD)
    expected, parameters = plain(1 + max(each for each, _ in everyone))
    assert all(found == expected for each, found in everyone if each == 0), (
        config,
        everyone,
        expected,
    )
    found = distributed.state_dict()
    assert set(found) == set(parameters), config
    assert all(torch.equal(found[name], value) for name, value in parameters.items()), config
    folder = smp.allgather(tempfile.mkdtemp() if smp.rank() == 0 else "", smp.WORLD)[0]
    smp.save_checkpoint(folder, tag="last", partial=True, model=distributed, optimizer=optimizer)
    smp.barrier()
    smp.resume_from_checkpoint(folder, tag="last", partial=True)
    train_step(distributed, batch(0, replica))
    smp.barrier()
    if smp.rank() == 0:
        shutil.rmtree(folder)
    smp.shutdown()


def exchanges() -> int:
    smp.init({"ddp": True})
    n = smp.size()
    assert smp.allgather({"rank": smp.rank()}, smp.WORLD) == [{"rank": each} for each in range(n)]
    if n > 1 and smp.rank() == 0:
        smp.send("x" * 100_000, 1, smp.RankType.WORLD_RANK)
    elif n > 1:
        assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "x" * 100_000
    smp.barrier()
    smp.shutdown()
    return n


def main() -> None:
    ranks = exchanges()
    trains({})
    if ranks == 2:
        trains({"pipeline_parallel_degree": 2, "microbatches": 2})
        sharded = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
        trains({**sharded, "sdp_gradient_clipping": 2.0**20})  # clips nothing
    assert not set(REFUSED) & set(sys.modules)
    os.write(1, b"passed\n")


if __name__ == "__main__":
    main()
