"""A digits classifier, trained over however many ranks there are: a plain script of the SMP API.

    python train.py                                   # alone
    mpiexec -n 4 python train.py --pipeline 4         # four stages of one pipeline
    torchrun --nproc-per-node 4 train.py --pipeline 2 # two pipelines of two stages
    python train.py --plain                           # plain PyTorch

Written as for one device; what is SMP's is said where it stands. The curve that comes out is the same
in all of these: to the bit between launchers, partitions, schedules and pipeline degrees, and with
``--exact`` between numbers of replicas, too (README.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import smp_core.torch as smp


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a training. ``batch`` is for all replicas together, ``microbatches`` for each replica."""

    pipeline: int = 1  # stages
    microbatches: int = 4
    schedule: str = "interleaved"
    auto: bool = False  # partition automatically, not by hand
    recompute: bool = False  # activations, in the backward pass, rather than keep them
    exact: bool = False  # small integers, on which every order of summation gives the same bits
    steps: int = 60
    batch: int = 64
    seed: int = 0
    save: str = ""  # a folder for checkpoints; resumed from if it has one
    curve: str = ""  # a file for the losses of all steps, as JSON
    plain: bool = False
    replicas: int = 1  # of --plain, whose gradients are summed as those of so many


class Classifier(nn.Module):
    """A perceptron, (N, 64) to (N, 10), without any knowledge of ranks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        widths = [64, hidden, hidden, hidden, 10]
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


def build(options: Options) -> Classifier:
    """The same model on every rank."""
    torch.manual_seed(options.seed)
    model = Classifier(hidden=16 if options.exact else 48)
    if options.exact:
        model = model.double()
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
        snap(model.parameters())
    return model


@torch.no_grad()
def snap(parameters: Iterator[nn.Parameter]) -> None:
    """Round parameters to multiples of 2**-6 from -1 to 1.

    With inputs of 0 and 1, relu, and margins as the loss, all values of a step are then multiples of
    2**-24 below 2**29, whose sums are not rounded in float64.
    """
    for parameter in parameters:
        parameter.copy_((parameter * 64).round().clamp(-64, 64) / 64)


def optimizer_of(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    if options.exact:
        return torch.optim.SGD(model.parameters(), lr=2**-5)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.95, nesterov=True)


def data(options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8, as (N, 64), and the digits that they show, (N,)."""
    images, digits = load_digits(return_X_y=True)
    x = torch.from_numpy(images)
    x = (x > 7).double() if options.exact else (x / 16).float()
    return x, torch.from_numpy(digits)


def batches(options: Options, count: int) -> Iterator[torch.Tensor]:
    """The indices of each step's batch, the same on every rank: endless, but for ``steps``."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    for _ in range(options.steps):
        yield torch.randint(count, (options.batch,), generator=generator)


def loss_of(logits: torch.Tensor, digits: torch.Tensor, exact: bool) -> torch.Tensor:
    """Cross entropy; or, exactly, by how much the right digit is below 1, eightfold, and the others
    above -1.
    """
    if not exact:
        return functional.cross_entropy(logits, digits)
    wanted = functional.one_hot(digits, 10)
    return (torch.relu(1 + logits * (1 - 2 * wanted)) * (1 + 7 * wanted)).sum() / len(digits)


@smp.step  # the body runs once for each microbatch, on pp_rank 0; model(...) runs where its modules are
def train_step(model: smp.DistributedModel, x: torch.Tensor, digits: torch.Tensor, exact: bool):
    loss = loss_of(model(x), digits, exact)
    model.backward(loss)  # in place of loss.backward()
    return loss


@smp.step
def predict(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def train(options: Options) -> list[float]:
    """Every rank calls this. Gives the mean loss over all replicas, step by step, on every rank."""
    smp.init(
        {
            "pipeline_parallel_degree": options.pipeline,
            "microbatches": options.microbatches,
            "pipeline": options.schedule,
            "auto_partition": options.auto,
            "default_partition": 0,
            "ddp": True,
        }
    )
    x, digits = data(options)
    module = build(options)
    if not options.auto:
        for index, layer in enumerate(module.layers):
            smp.set_partition(layer, index * smp.pp_size() // len(module.layers))
    if options.recompute:
        for layer in module.layers:
            smp.set_activation_checkpointing(layer)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model, options))
    curve: list[float] = []
    # Rank 0 looks; the others are told.
    if options.save and smp.allgather((Path(options.save) / "newest").exists(), smp.WORLD)[0]:
        curve = smp.resume_from_checkpoint(options.save)["curve"]

    share = options.batch // smp.dp_size()
    for step, indices in enumerate(batches(options, len(x))):
        if step < len(curve):
            continue
        mine = indices[smp.dp_rank() * share :][
            :share
        ]  # each replica has its own part of the batch
        optimizer.zero_grad()
        losses = train_step(model, x[mine], digits[mine], options.exact)
        optimizer.step()
        if options.exact:
            snap(model.local_parameters())
        # Results are on every rank of the pipeline; those of the other replicas are asked for.
        curve.append(mean(smp.allgather(losses.reduce_mean().item(), smp.DP_GROUP)))
        if options.save and (step + 1) % 10 == 0:
            smp.save_checkpoint(
                options.save,
                tag=f"step{step + 1}",
                model=model,
                optimizer=optimizer,
                user_content={"curve": curve},
            )

    with torch.no_grad():
        logits = predict(model, x[: len(x) // 64 * 64]).concat()
    right = (logits.argmax(1) == digits[: len(logits)]).double().mean().item()
    report(curve, right, smp.rank() == 0)
    return curve


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report(curve: list[float], right: float, first: bool) -> None:
    if first:
        for step in range(0, len(curve), 10):
            print(f"step {step:3}  loss {curve[step]:.6f}")
        print(f"step {len(curve) - 1:3}  loss {curve[-1]:.6f}  right {right:.1%}")


def plain(options: Options) -> list[float]:
    """The same in plain PyTorch, on one rank: what the curve has to be.

    Where ``microbatches`` and ``replicas`` are 1 this is the loop that everybody writes. Otherwise it
    sums gradients in the order that SMP's are summed in: microbatches in order, then replicas pairwise.
    """
    x, digits = data(options)
    model = build(options)
    optimizer = optimizer_of(model, options)
    parameters = list(model.parameters())
    pieces = options.replicas * options.microbatches
    curve = []
    for indices in batches(options, len(x)):
        losses, replicas = [], []
        for share in indices.chunk(options.replicas):
            total: list[torch.Tensor] | None = None
            replica = []
            for part in share.chunk(options.microbatches):
                loss = loss_of(model(x[part]), digits[part], options.exact)
                found = torch.autograd.grad(loss, parameters)
                total = list(map(torch.add, total, found)) if total else list(found)
                replica.append(loss.detach())
            replicas.append(total)
            losses.append(torch.stack(replica).mean().item())
        for parameter, grads in zip(parameters, zip(*replicas, strict=True), strict=True):
            parameter.grad = pairwise(grads) / pieces
        optimizer.step()
        if options.exact:
            snap(model.parameters())
        curve.append(mean(losses))
    with torch.no_grad():
        right = (model(x).argmax(1) == digits).double().mean().item()
    report(curve, right, True)
    return curve


def pairwise(values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum of neighbours, then of neighbouring sums, and so on."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1  # the largest power of two below
    return pairwise(values[:half]) + pairwise(values[half:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Options):
        kind = {"action": "store_true"} if field.type == "bool" else {"type": type(field.default)}
        parser.add_argument(f"--{field.name}", default=field.default, **kind)
    options = Options(**vars(parser.parse_args()))
    curve = (plain if options.plain else train)(options)
    if options.curve and (options.plain or smp.rank() == 0):
        Path(options.curve).write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
