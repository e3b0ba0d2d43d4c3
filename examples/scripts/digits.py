"""Digits, trained with the SageMaker model parallel library: a script written for GPUs (README.md)."""

import argparse
import json

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_data import GroupedNet, load_digits
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@smp.step
def train_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum")
    correct = output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum()
    return loss, correct


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    losses = []
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        # loss_mb is a StepOutput: the losses of all microbatches.
        _, loss_mb = train_step(model, data, target)
        loss = loss_mb.reduce_mean()
        optimizer.step()
        dist.all_reduce(loss, group=smp.get_dp_process_group())
        losses.append(loss.item() / smp.dp_size())
        if smp.rank() == 0 and batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {losses[-1]:.6f}")
        if batch_idx + 1 == args.steps:
            break
    return losses


def test(model, device, test_loader):
    model.eval()
    test_loss = correct = count = 0
    for data, target in test_loader:
        data, target = data.to(device), target.to(device)
        loss_mb, correct_mb = test_step(model, data, target)
        test_loss += loss_mb.reduce_sum().item()
        correct += correct_mb.reduce_sum().item()
        count += len(data)
    if smp.mp_rank() == 0:
        print(f"Test set: Average loss: {test_loss / count:.4f}, Accuracy: {correct}/{count}")
    return test_loss / count


def main():
    parser = argparse.ArgumentParser(description="PyTorch digits")
    parser.add_argument("--batch-size", type=int, default=32, help="of each replica")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; all of it if 0")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--pipeline", choices=["simple", "interleaved"], default="interleaved")
    parser.add_argument("--checkpoint", default="", help="a file to save the model to")
    parser.add_argument("--losses", default="", help="a JSON file to write the losses to")
    parser.add_argument("--mp_parameters", default="", help="given by SageMaker's launcher")
    args = parser.parse_args()

    if not torch.cuda.is_available():
        raise ValueError("The script requires CUDA support, but CUDA not available")
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "pipeline": args.pipeline,
            "placement_strategy": "spread",
            "optimize": "speed",
            "ddp": True,
        }
    )
    torch.manual_seed(args.seed)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")

    train_set, test_set = load_digits()
    sampler = DistributedSampler(
        train_set, num_replicas=smp.dp_size(), rank=smp.dp_rank(), seed=args.seed, drop_last=True
    )
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True, pin_memory=True
    )
    test_loader = DataLoader(test_set, args.batch_size, drop_last=True)

    model = smp.DistributedModel(GroupedNet())
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(model.parameters(), lr=args.lr))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    losses = []
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        losses += train(args, model, device, train_loader, optimizer, epoch)
        scheduler.step()
    test(model, device, test_loader)

    if args.checkpoint and smp.dp_rank() == 0:
        # Ranks of one replica hold the whole model, a part each.
        model_dict = model.local_state_dict()
        optimizer_dict = optimizer.local_state_dict()
        smp.save(
            {"model_state_dict": model_dict, "optimizer_state_dict": optimizer_dict},
            args.checkpoint,
            partial=True,
        )
    if args.losses and smp.rank() == 0:
        with open(args.losses, "w") as file:
            json.dump(losses, file)
    smp.barrier()


if __name__ == "__main__":
    main()
