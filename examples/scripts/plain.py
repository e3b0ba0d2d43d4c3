"""The twins of digits.py and gpt2.py in plain PyTorch, on one process: the losses that they must have.

    python plain.py digits --replicas 2 --microbatches 4
    python plain.py gpt2 --replicas 4 --dtype bfloat16 --clip 1.0

Gradients are added up as SMP's are: microbatches in order, then replicas pairwise, then one division. A model in 16
bits has copies of its parameters in float32, the masters, which the optimizer updates.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Digits:
    """The model, the data and the optimizer of digits.py, with its defaults."""

    batch_size, seed, lr = 32, 1, 0.5

    def __init__(self, dtype):
        from digits_data import GroupedNet, load_digits

        torch.manual_seed(self.seed)
        self.model = GroupedNet().to(dtype)
        self.dataset, _ = load_digits()
        self.epoch = 1

    def loss(self, model, data, target):
        return F.nll_loss(model(data), target, reduction="mean")

    def optimizer(self, model):
        return torch.optim.Adadelta(model.parameters(), lr=self.lr), None


class GPT2:
    """The model, the data and the optimizer of gpt2.py, with its defaults."""

    batch_size, seed, lr, weight_decay = 4, 12345, 1e-2, 0.01
    vocab_size, max_context_width, hidden_width, num_layers, num_heads = 128, 16, 32, 4, 4

    def __init__(self, dtype):
        from gpt2_data import Tokens, gpt2_config
        from transformers import AutoModelForCausalLM, set_seed

        set_seed(self.seed)
        torch.set_default_dtype(dtype)
        self.model = AutoModelForCausalLM.from_config(gpt2_config(self))
        torch.set_default_dtype(torch.float32)
        self.dataset = Tokens(self.vocab_size, self.max_context_width, self.seed)
        self.epoch = 0

    def loss(self, model, input_ids, attention_mask):
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
        return loss if loss.dtype is torch.float64 else loss.float()

    def optimizer(self, model):
        from gpt2_data import weight_decay_groups

        groups = weight_decay_groups(model, self.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def batches(task, replicas):
    """The batches of all replicas, step by step: those that each replica's own sampler and loader give."""
    loaders = []
    for replica in range(replicas):
        sampler = DistributedSampler(
            task.dataset, replicas, replica, seed=task.seed, drop_last=True
        )
        sampler.set_epoch(task.epoch)
        loaders.append(DataLoader(task.dataset, task.batch_size, sampler=sampler, drop_last=True))
    return zip(*loaders, strict=True)


def losses_of(task, replicas, microbatches=1, steps=6, clip=None, scale=1.0, wide=None):
    """Train, and return the loss of each step. With ``wide``, compute all of it in this dtype."""
    model = task.model.to(wide) if wide else task.model
    parameters = list(model.parameters())
    masters = model
    if parameters[0].dtype in (torch.float16, torch.bfloat16):
        masters = copy.deepcopy(model).float()
    optimizer, scheduler = task.optimizer(masters)
    losses = []
    for batch, _ in zip(batches(task, replicas), range(steps), strict=False):
        means, sums = [], []
        for replica in batch:
            model.zero_grad()
            found = []
            if wide:
                replica = [x.to(wide) if x.is_floating_point() else x for x in replica]
            for part in zip(*(tensor.chunk(microbatches) for tensor in replica), strict=True):
                loss = task.loss(model, *part)
                (loss * scale).backward()
                found.append(loss.detach())
            means.append(torch.stack(found).mean())
            sums.append([parameter.grad.clone() for parameter in parameters])
        for master, *gradients in zip(masters.parameters(), *sums, strict=True):
            total = pairwise([gradient.to(master.dtype) for gradient in gradients])
            master.grad = total / (replicas * microbatches) / scale
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(pairwise(means).item() / replicas)
    return losses


def pairwise(values):
    """The sum of neighbours, then of neighbouring sums, and so on."""
    while len(values) > 1:
        values = [sum(values[i + 1 : i + 2], start=values[i]) for i in range(0, len(values), 2)]
    return values[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["digits", "gpt2"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    task = {"digits": Digits, "gpt2": GPT2}[args.task](getattr(torch, args.dtype))
    for step, loss in enumerate(
        losses_of(task, args.replicas, args.microbatches, args.steps, args.clip, args.scale)
    ):
        print(f"Batch {step} Loss: {loss:.6f}")


if __name__ == "__main__":
    main()
