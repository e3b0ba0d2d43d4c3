"""The training of tests of checkpoints with tensor parallelism: a model with slices, and with parameters and buffers
that each rank holds whole.
"""

from __future__ import annotations

import torch
from torch import nn

import smp_core.torch as smp
from tests.smp_core.torch.sharding.checkpoint_models import snapshot

#: By name: ranks, configuration.
WORLDS = {
    "tp2": (2, {}),
    "tp4": (4, {"tensor_parallel_degree": 4}),
    "tp2rdp2": (4, {}),
    "tp2rdp2prescaled": (4, {"prescaled_batch": True}),
    "pp2tp2": (4, {"pipeline_parallel_degree": 2}),
    "pp2tp2rdp2": (8, {"pipeline_parallel_degree": 2, "placement_strategy": "spread"}),
    "tp2sdp2": (4, {"sharded_data_parallel_degree": 2}),
    "tp2sdp2rdp4": (8, {"sharded_data_parallel_degree": 2}),
    "tp2rdp2parts": (4, {"shard_optimizer_state": True}),
    "pp2tp2rdp2parts": (8, {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}),
    "tp2fp16": (2, {"fp16": True}),
    "pp2tp2fp16": (4, {"fp16": True, "pipeline_parallel_degree": 2}),
    "tp2rdp2partsfp16": (4, {"fp16": True, "shard_optimizer_state": True}),
    "tp2sdp2fp16": (4, {"fp16": True, "sharded_data_parallel_degree": 2}),
    "tp2sdp2bf16": (4, {"bf16": True, "sharded_data_parallel_degree": 2}),
}

#: The first scale overflows, so that the scaler has something to remember.
SCALES = {
    "dynamic_loss_scale": True,
    "dynamic_loss_args": {"init_scale": 2.0**18, "scale_factor": 2.0**8, "scale_window": 3},
}


def world(name: str, **more) -> dict:
    """The arguments of ``smp_world.run``."""
    ranks, config = WORLDS[name]
    sharded = config.get("sharded_data_parallel_degree", 1) > 1
    pipeline = {"microbatches": 2, "auto_partition": False, "default_partition": 0}
    return {
        "ranks": ranks,
        "config": {
            "tensor_parallel_degree": 2,
            "ddp": True,
            **(
                {
                    "prescaled_batch": True,
                    "sdp_param_persistence_threshold": 20,
                    "sdp_gradient_clipping": 1e30,
                }
                if sharded
                else {}
            ),
            **(pipeline if "pipeline_parallel_degree" in config else {}),
            **config,
            **more,
        },
    }


class Net(nn.Module):
    """An embedding and two linear layers are distributed; a linear layer, a norm and a parameter are not."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, width)
        self.first = nn.Linear(width, 12)
        self.own = nn.Linear(12, 8, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(8, 5)
        self.gain = nn.Parameter(torch.rand(3, 1))

    def forward(self, ids):
        hidden = torch.tanh(self.first(self.embed(ids)))
        return self.last(self.norm(torch.tanh(self.own(hidden))) * self.gain)


def module(seed: int, width: int = 8) -> Net:
    """The module with its wishes, drawn from a seed, at any degree."""
    net = Net(seed, width)
    for child in (net.embed, net.first, net.last):
        smp.set_tensor_parallelism(child)
    if smp.pp_size() > 1:
        for child in (net.own, net.norm, net.last):
            smp.set_partition(child, 1)
    return net


OPTIMIZERS = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.03, amsgrad=True),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
}


@smp.step
def train_step(model, ids):
    output = model(ids)
    loss = (output * output).mean()
    model.backward(loss)
    return loss


def batch(number: int) -> torch.Tensor:
    """This rank's samples of one step."""
    replica = smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()
    generator = torch.Generator().manual_seed(100 * number + replica)
    return torch.randint(0, 7, (4, 3), generator=generator)


class Run:
    """Training on this rank, from a seed."""

    def __init__(self, optimizer: str = "adamw", seed: int = 1, width: int = 8) -> None:
        self.model = smp.DistributedModel(module(seed, width))
        made = OPTIMIZERS[optimizer](self.model.parameters())
        self.optimizer = smp.DistributedOptimizer(made, **SCALES)

    def step(self, number: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = train_step(self.model, batch(number)).reduce_mean()
        self.optimizer.step()
        return loss.detach().clone()

    def steps(self, *numbers: int) -> list[torch.Tensor]:
        return [self.step(number) for number in numbers]

    def state(self) -> list[object]:
        """All that training depends on, on this rank, without communication."""
        parts = self.model.local_state_dict(), self.optimizer.local_state_dict(False)
        return snapshot(list(parts))

    def save(self, path, tag: str = "a", partial: bool = True, **arguments) -> None:
        optimizer = self.optimizer if partial else None
        arguments = {"model": self.model, "optimizer": optimizer, **arguments}
        smp.save_checkpoint(path, tag, partial, **arguments)
