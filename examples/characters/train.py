"""A small GPT that learns to write a text character by character, over however many ranks there are.

    python train.py                                   # alone
    mpiexec -n 4 python train.py --pipeline 4         # four stages of one pipeline
    torchrun --nproc-per-node 4 train.py --pipeline 2 # two pipelines of two stages
    torchrun --nproc-per-node 4 train.py --sharding 4 # each rank keeps a quarter of parameters and state
    python train.py --plain                           # plain PyTorch

A plain script of the SMP API. Embedding and output share one weight, so they share a rank: the first
one calls the blocks on the others in turn, and then its own head. The curve is plain PyTorch's, to the
bit, where plain PyTorch sums the gradients of the same microbatches in the same order (README.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import smp_core.torch as smp

TEXT = Path(__file__).with_name("text.txt")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a training. ``batch`` is for all replicas together, ``microbatches`` for each replica."""

    pipeline: int = 1  # stages
    microbatches: int = 4
    schedule: str = "interleaved"
    auto: bool = False  # partition automatically, not by hand
    recompute: bool = False  # activations, in the backward pass, rather than keep them
    dropout: float = 0.0  # plain PyTorch draws other masks
    sharding: int = 1  # ranks that parameters, gradients and optimizer state are split over
    whole: int = 1000  # with sharding, parameters of fewer elements stay whole on every rank
    clip: float = 1e30  # with sharding, the largest norm of gradients; this one is never met
    accumulate: int = 1  # steps for each update
    dtype: str = "float32"  # or float16; or, with sharding, bfloat16
    width: int = 48
    heads: int = 4
    blocks: int = 4
    context: int = 48  # characters
    steps: int = 100
    batch: int = 16
    seed: int = 0
    write: int = 0  # how many characters to write in the end
    save: str = ""  # a folder for checkpoints; resumed from if it has one
    curve: str = ""  # a file for the losses of all steps, as JSON
    plain: bool = False
    replicas: int = 1  # of --plain, whose gradients are summed as those of so many


class Block(nn.Module):
    """Attention and a perceptron, (N, T, width) to the same."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width = options.width
        self.heads = options.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(n, t, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).reshape(n, t, width)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    """A model from characters (N, T) to logits (N, T, characters), without any knowledge of ranks."""

    def __init__(self, characters: int, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.blocks))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, characters, bias=False)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(characters) + self.positions(torch.arange(characters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Corpus:
    """The text as numbers, and the batches of a run: the same on every rank."""

    def __init__(self, options: Options) -> None:
        text = TEXT.read_text(encoding="utf-8")
        self.alphabet = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        self._text = torch.tensor([numbers[character] for character in text])
        self._options = options

    def batches(self) -> Iterator[torch.Tensor]:
        """(batch, context + 1): what is read, and, one further, what is to be said."""
        options = self._options
        generator = torch.Generator().manual_seed(options.seed + 1)
        for _ in range(options.steps):
            starts = torch.randint(
                len(self._text) - options.context, (options.batch,), generator=generator
            )
            yield torch.stack([self._text[at : at + options.context + 1] for at in starts])


def build(corpus: Corpus, options: Options) -> GPT:
    """The same model on every rank."""
    torch.manual_seed(options.seed)
    return GPT(len(corpus.alphabet), options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, lines: torch.Tensor) -> torch.Tensor:
    logits = model(lines[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), lines[:, 1:].flatten())


@smp.step  # the body runs once for each microbatch, on pp_rank 0; model(...) runs where its modules are
def train_step(model: smp.DistributedModel, lines: torch.Tensor):
    loss = loss_of(model, lines)
    model.backward(loss)  # in place of loss.backward()
    return loss


@smp.step
def predict(model: smp.DistributedModel, lines: torch.Tensor) -> torch.Tensor:
    return model(lines)


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
            "sharded_data_parallel_degree": options.sharding,
            "sdp_param_persistence_threshold": options.whole,
            "sdp_gradient_clipping": options.clip,
            "fp16": options.dtype == "float16",
            "bf16": options.dtype == "bfloat16",
        }
    )
    corpus = Corpus(options)
    module = build(corpus, options)
    if not options.auto:  # embedding, norm and head stay on partition 0
        for index, block in enumerate(module.blocks):
            smp.set_partition(block, index * smp.pp_size() // len(module.blocks))
    if options.recompute:
        for block in module.blocks:
            smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(module, backward_passes_per_step=options.accumulate)
    # The scale is for float16: it begins where these losses do not overflow.
    optimizer = smp.DistributedOptimizer(
        optimizer_of(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10}
    )
    curve: list[float] = []
    # Rank 0 looks; the others are told.
    if options.save and smp.allgather((Path(options.save) / "newest").exists(), smp.WORLD)[0]:
        curve = smp.resume_from_checkpoint(options.save)["curve"]

    share = options.batch // smp.dp_size()
    for step, lines in enumerate(corpus.batches()):
        if step < len(curve):
            continue
        if step % options.accumulate == 0:
            optimizer.zero_grad()
        # Each replica has its own part of the batch.
        losses = train_step(model, lines[smp.dp_rank() * share :][:share])
        if (step + 1) % options.accumulate == 0:
            optimizer.step()
        # Results are on every rank of the pipeline; those of the other replicas are asked for.
        curve.append(mean(smp.allgather(losses.reduce_mean().item(), smp.DP_GROUP)))
        if options.save and (step + 1) % (10 * options.accumulate) == 0:
            smp.save_checkpoint(
                options.save,
                tag=f"step{step + 1}",
                model=model,
                optimizer=optimizer,
                user_content={"curve": curve},
            )
    report(curve, smp.rank() == 0)
    if options.write:
        model.eval()
        written = write(corpus, options, lambda lines: predict(model, lines).concat())
        if smp.rank() == 0:
            print(written)
    return curve


@torch.no_grad()
def write(corpus: Corpus, options: Options, logits_of) -> str:
    """The most likely continuation, found alike on every rank. A step's batch has a line for each
    microbatch; all lines are the same.
    """
    line = [corpus.alphabet.index("\n")]
    for _ in range(options.write):
        lines = torch.tensor([line[-options.context :]] * options.microbatches)
        line.append(int(logits_of(lines)[0, -1].argmax()))
    return "".join(corpus.alphabet[number] for number in line)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def report(curve: list[float], first: bool) -> None:
    if first:
        for step in range(0, len(curve) - 1, 20):
            print(f"step {step:3}  loss {curve[step]:.6f}")
        print(f"step {len(curve) - 1:3}  loss {curve[-1]:.6f}")


def plain(options: Options) -> list[float]:
    """Train in plain PyTorch on one rank, and return the expected curve.

    Where ``microbatches`` and ``replicas`` are 1 the loop is the usual one. Otherwise gradients are summed
    in SMP's order: microbatches in order, then replicas pairwise.
    """
    corpus = Corpus(options)
    model = build(corpus, options)
    optimizer = optimizer_of(model)
    parameters = list(model.parameters())
    pieces = options.replicas * options.microbatches
    curve = []
    for lines in corpus.batches():
        losses, replicas = [], []
        for share in lines.chunk(options.replicas):
            total: list[torch.Tensor] | None = None
            replica = []
            for part in share.chunk(options.microbatches):
                loss = loss_of(model, part)
                found = torch.autograd.grad(loss, parameters)
                total = list(map(torch.add, total, found)) if total else list(found)
                replica.append(loss.detach())
            replicas.append(total)
            losses.append(torch.stack(replica).mean().item())
        for parameter, grads in zip(parameters, zip(*replicas, strict=True), strict=True):
            parameter.grad = pairwise(grads) / pieces
        optimizer.step()
        curve.append(mean(losses))
    report(curve, True)
    if options.write:
        print(write(corpus, options, model.eval()))
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
    if options.plain and (options.accumulate > 1 or options.dtype != "float32"):
        parser.error("--plain makes an update at each step, in float32")
    curve = (plain if options.plain else train)(options)
    if options.curve and (options.plain or smp.rank() == 0):
        Path(options.curve).write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
