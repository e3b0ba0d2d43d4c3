"""A small language model over the GPUs of a cluster: sharded data parallelism together with tensor parallelism.

    pytest -s train.py --smp-ranks=1536                           # 32 and 1,536 GPUs, on simulated ranks
    torchrun --nproc-per-node 8 train.py --tensor 2 --sharding 2  # eight processes
    python train.py --plain --replicas 4                          # plain PyTorch, the samples of four replicas

The two clusters are the worked examples of AWS's page on sharded data parallelism, "Sharded data parallelism with
tensor parallelism" (README.md). All values are small multiples of 1/16 and the loss is a margin, so that sums are
exact: the curve and the parameters are those of plain PyTorch to the bit, in any layout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch import observe
from smp_core.torch.reduction.traffic import Sum, TrafficKind


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a training. ``batch`` is for one TP group: its ranks train on the same samples."""

    tensor: int = 1  # tensor_parallel_degree
    sharding: int = 1  # sharded_data_parallel_degree
    batch: int = 4
    steps: int = 5
    vocabulary: int = 36
    width: int = 32
    length: int = 8  # tokens of a sample
    whole: int = 64  # parameters with fewer elements stay whole
    seed: int = 0
    plain: bool = False
    replicas: int = 1  # of --plain

    def parameters(self) -> dict[str, Any]:
        """The configuration of SMP."""
        return {
            "ddp": True,
            "prescaled_batch": True,
            "tensor_parallel_degree": self.tensor,
            "sharded_data_parallel_degree": self.sharding,
            "sdp_param_persistence_threshold": self.whole,
            "sdp_gradient_clipping": 1e30,  # a clipped gradient is no multiple of anything
        }


#: "32 GPUs with a tensor parallel degree of 4, a sharded data parallel degree of 4".
GPUS_32 = Options(tensor=4, sharding=4)
#: "1536 GPUs", "tensor parallel degree to 8 and the batch size per GPU to 4", sharded data parallel degree 32.
GPUS_1536 = Options(tensor=8, sharding=32, batch=4, steps=1)


class Model(nn.Module):
    """Tokens, (B, S), to a score for each next one, (B, S, vocabulary)."""

    def __init__(self, options: Options, tensor_parallel: bool) -> None:
        super().__init__()
        vocabulary, width = options.vocabulary, options.width
        with smp.tensor_parallelism() if tensor_parallel else contextlib.nullcontext():
            self.embedding = nn.Embedding(vocabulary, width)
            self.first = nn.Linear(width, width)
            self.head = nn.Linear(width, vocabulary)
        self.own = nn.Linear(width, width)  # each rank of a TP group has the same

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(tokens)).relu()
        return self.head(self.own(x).relu())


@dataclasses.dataclass
class Result:
    """The result of a training on one rank.

    ``updated`` is the state of the model after each update, before values are rounded: on the ranks of the first shard
    group of each tp rank, which hold one copy of the model together. ``kept`` has the values that this rank keeps.
    ``samples`` are the samples of one step of all replicas. ``traffic`` is that of the last step and its update, by
    sharded data parallelism and by tensor parallelism.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    updated: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    kept: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    samples: int = 0
    traffic: dict[TrafficKind, Sum] = dataclasses.field(default_factory=dict)


def weights(options: Options) -> dict[str, torch.Tensor]:
    """The first values of all parameters: multiples of 1/16 from -1/4 to 1/4."""
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary, width = options.vocabulary, options.width
    shapes = {
        "embedding.weight": (vocabulary, width),
        "first.weight": (width, width),
        "first.bias": (width,),
        "head.weight": (vocabulary, width),
        "head.bias": (vocabulary,),
        "own.weight": (width, width),
        "own.bias": (width,),
    }
    return {
        name: torch.randint(-4, 5, shape, generator=generator).double() / 16
        for name, shape in shapes.items()
    }


@torch.no_grad()
def round_values(parameters: Any) -> None:
    """Round parameters, or the parts of them that a rank keeps, to multiples of 1/16 from -1 to 1."""
    for parameter in parameters:
        parameter.copy_((parameter * 16).round().clamp(-16, 16) / 16)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.5)


def data(options: Options, step: int, replicas: int) -> torch.Tensor:
    """The samples of all replicas in a step, (replicas, batch, length + 1)."""
    generator = torch.Generator().manual_seed(options.seed + step + 1)
    shape = (replicas, options.batch, options.length + 1)
    return torch.randint(options.vocabulary, shape, generator=generator)


def loss_of(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """By how much the score of the right token is below 1, eightfold, and those of the others above -1: the sum."""
    wanted = nn.functional.one_hot(following, scores.shape[-1])
    return (torch.relu(1 + scores * (1 - 2 * wanted)) * (1 + 7 * wanted)).sum()


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor, following: torch.Tensor):
    loss = loss_of(model(tokens), following) / following.numel()
    model.backward(loss)
    return loss


def samples_of_group(options: Options, step: int) -> torch.Tensor:
    """The batch of this rank's TP group. The first rank of the group reads it, and the others get it from that one."""
    if smp.tp_rank() > 0:
        return smp.recv_from(smp.get_tp_group()[0], smp.RankType.WORLD_RANK)
    batch = data(options, step, smp.rdp_size())[smp.rdp_rank()]
    smp.broadcast(batch, smp.TP_GROUP)
    return batch


def train(options: Options) -> Result:
    """Every rank calls this."""
    smp.init(options.parameters())
    torch.set_default_dtype(torch.float64)
    model = smp.DistributedModel(Model(options, tensor_parallel=True))
    model.load_state_dict(weights(options))
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    result = Result(samples=options.batch * smp.rdp_size())
    counters = observe.traffic(model), observe.tensor_traffic(model)
    for step in range(options.steps):
        before = [traffic.mark() for traffic in counters]
        batch = samples_of_group(options, step)
        optimizer.zero_grad()
        loss = train_step(model, batch[:, :-1], batch[:, 1:]).reduce_mean().item()
        optimizer.step()
        for traffic, mark in zip(counters, before, strict=True):
            result.traffic.update(traffic.since(mark))
        result.losses.append(mean(smp.allgather(loss, smp.RDP_GROUP)))
        result.kept.append([each.detach().clone() for each in model.local_parameters()])
        if (
            smp.rdp_rank() < options.sharding
        ):  # others have the same: one copy is enough, as in a checkpoint
            result.updated.append(copied(model))
        round_values(model.local_parameters())
    return result


def plain(options: Options) -> Result:
    """The same in plain PyTorch, on one rank: one loss of the samples of all replicas, divided by their number at last,
    as SMP divides gradients. For a number that is no power of two the place of the division is in the last bits.
    """
    torch.set_default_dtype(torch.float64)
    model = Model(options, tensor_parallel=False)
    model.load_state_dict(weights(options))
    optimizer = optimizer_of(model)
    result = Result(samples=options.batch * options.replicas)
    for step in range(options.steps):
        batch = data(options, step, options.replicas).flatten(0, 1)
        optimizer.zero_grad()
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:]) / (options.batch * options.length)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad /= options.replicas
        optimizer.step()
        result.losses.append(loss.item() / options.replicas)
        result.updated.append(copied(model))
        round_values(model.parameters())
    return result


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report(result: Result) -> None:
    print(f"{result.samples} samples in a step")
    for step, loss in enumerate(result.losses):
        print(f"step {step}  loss {loss:.6f}")
    for kind, sent in result.traffic.items():
        print(f"{kind.operation:24} {kind.group:12} {sent.calls:3} calls {sent.bytes:9,} bytes")


def check(smp_world, options: Options, ranks: int) -> None:
    """Train on simulated ranks, and compare with one process bit for bit."""
    # The configuration is checked before there is any rank.
    config = options.parameters()
    results = smp_world.run(train, options, ranks=ranks, config=config, timeout=600)
    wanted = plain(dataclasses.replace(options, replicas=ranks // options.tensor))
    for result in results:
        assert (result.samples, result.losses) == (wanted.samples, wanted.losses)
        assert len(result.updated) in (0, options.steps)
        for state, expected in zip(result.updated, wanted.updated, strict=False):
            assert all(torch.equal(state[name], expected[name]) for name in expected)
    print(f"on rank 0 of {ranks}:")
    report(results[0])


def test_32_gpus(smp_world):
    check(smp_world, GPUS_32, ranks=32)


def test_1536_gpus(smp_world):
    check(smp_world, GPUS_1536, ranks=1536)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Options):
        kind = {"action": "store_true"} if field.type == "bool" else {"type": type(field.default)}
        parser.add_argument(f"--{field.name}", default=field.default, **kind)
    options = Options(**vars(parser.parse_args()))
    result = (plain if options.plain else train)(options)
    if options.plain or smp.rank() == 0:
        report(result)


if __name__ == "__main__":
    main()
