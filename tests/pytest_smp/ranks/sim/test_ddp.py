"""DistributedDataParallel runs unchanged on `sim`, and trains to the bits of one process (why that can
be asked for: lattice.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pytest_smp.ranks.protocols import OutcomeKind, VerdictKind
from smp_core.errors import DeadlockError

from .lattice import (
    RANKS,
    STEPS,
    Network,
    adam,
    batch,
    check_equal,
    fill,
    loss,
    one_process,
    update,
    whole,
)


def train(module: nn.Module) -> list[torch.Tensor]:
    """One rank's part: the same loop as the reference, on the rank's own batches."""
    optimizer = adam(module)
    history: list[torch.Tensor] = []
    for step in range(STEPS):
        loss(module, batch(dist.get_rank(), step)).backward()
        history += update(module, optimizer)
    return history + whole(module.parameters())


def test_the_reference_moves() -> None:
    """Four steps change every parameter: equality at the end says something."""
    before = whole(Network().parameters())
    after = one_process()[-len(before) :]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# DDP's own ways of doing it, none of which may change a bit.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many small buckets": {"bucket_cap_mb": 1e-5},
    "one parameter per bucket, unused looked for": {
        "bucket_cap_mb": 1e-6,
        "find_unused_parameters": True,
    },
    "gradients are views of buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
    "static graph": {"static_graph": True},
    "no first broadcast": {"init_sync": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_training_with_adam_equals_one_process(smp_world: Any, way: str) -> None:
    def body() -> list[torch.Tensor]:
        module = DistributedDataParallel(Network(), **WAYS[way])
        return train(module)

    check_equal(smp_world.run(body, ranks=RANKS), one_process())


def test_no_sync_accumulates(smp_world: Any) -> None:
    def body() -> list[torch.Tensor]:
        module = DistributedDataParallel(Network(), bucket_cap_mb=1e-4)
        optimizer, rank = adam(module), dist.get_rank()
        history: list[torch.Tensor] = []
        for step in range(2):
            with module.no_sync():
                loss(module, batch(rank, 2 * step)).backward()
            loss(module, batch(rank, 2 * step + 1)).backward()
            history += update(module, optimizer)
        return history + whole(module.parameters())

    check_equal(smp_world.run(body, ranks=RANKS), one_process(steps=2, micro=2))


def test_a_communication_hook(smp_world: Any) -> None:
    """The hook chains on a future of ours."""

    def hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
        assert work is not None
        future: Any = work.get_future()
        result: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
        return result

    hook.__annotations__.clear()  # DDP compares them, and does not know them as text

    def body() -> list[torch.Tensor]:
        module = DistributedDataParallel(Network(), bucket_cap_mb=1e-4)
        module.register_comm_hook(None, hook)
        return train(module)

    check_equal(smp_world.run(body, ranks=RANKS), one_process())


def test_the_first_broadcast_takes_rank_0s_weights(smp_world: Any) -> None:
    def body() -> list[torch.Tensor]:
        module = Network()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(dist.get_rank())
        return whole(DistributedDataParallel(module).parameters())

    check_equal(smp_world.run(body, ranks=3), whole(Network().parameters()))


def test_training_in_a_sub_group(smp_world: Any) -> None:
    """Four of the eight, in another order and without rank 0; the divisor is 4."""
    members = [6, 1, 3, 2]

    def body() -> list[torch.Tensor] | None:
        group = dist.new_group(members, sort_ranks=False)
        if dist.get_rank() not in members:
            return None
        module = DistributedDataParallel(Network(), process_group=group)
        loss(module, batch(dist.get_rank(), 0)).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        dist.destroy_process_group(group)
        return [each.clone() for each in gradients if each is not None]

    reference = Network()
    (torch.stack([loss(reference, batch(rank, 0)) for rank in members]).sum() / 4).backward()
    expected = [each.grad for each in reference.parameters() if each.grad is not None]
    got = [each for each in smp_world.run(body, ranks=RANKS) if each is not None]
    assert len(got) == 4
    check_equal(got, expected)


class Branches(nn.Module):
    """Each rank uses one of two branches; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, inputs: torch.Tensor, which: int) -> Any:
        return self.branches[which](inputs)


def test_unused_parameters(smp_world: Any) -> None:
    """Even ranks use branch 0, odd ones branch 1. A gradient that no rank has stays absent."""

    def gradients(module: nn.Module) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in module.parameters()]

    def one(module: nn.Module, rank: int) -> torch.Tensor:
        inputs, targets = batch(rank, 0)
        result: torch.Tensor = ((module(inputs, rank % 2) - targets) ** 2).sum()
        return result

    def body() -> list[torch.Tensor | None]:
        module = DistributedDataParallel(
            fill(Branches()), find_unused_parameters=True, bucket_cap_mb=1e-5
        )
        one(module, dist.get_rank()).backward()
        return gradients(module)

    reference = fill(Branches())
    (torch.stack([one(reference, rank) for rank in range(RANKS)]).sum() / RANKS).backward()
    expected = gradients(reference)
    assert [each is None for each in expected] == [False] * 4 + [True] * 2
    for got in smp_world.run(body, ranks=RANKS):
        for ours, theirs in zip(got, expected, strict=True):
            if theirs is None:
                assert ours is None
            else:
                assert ours is not None
                assert torch.equal(ours, theirs)


class Counting(nn.Module):
    """A linear layer with a buffer that adds up what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> Any:
        self.seen += inputs.sum()
        return self.linear(inputs)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers(smp_world: Any, option: str, broadcast: bool) -> None:
    """With the option, every forward starts from rank 0's; without, each rank keeps its own."""

    def seen(rank: int, step: int) -> float:
        return batch(rank, step)[0].sum().item()

    def body() -> float:
        module = DistributedDataParallel(fill(Counting()), **{option: broadcast})
        for step in range(3):
            loss(module, batch(dist.get_rank(), step)).backward()
        counting: Any = module.module
        result: float = counting.seen.item()
        return result

    for rank, got in enumerate(smp_world.run(body, ranks=RANKS)):
        before = sum(seen(0 if broadcast else rank, step) for step in range(2))
        assert got == before + seen(rank, 2)


# Trouble.


def trains() -> list[torch.Tensor]:
    return train(DistributedDataParallel(Network(), bucket_cap_mb=1e-5))


def skips_a_backward() -> None:
    module = DistributedDataParallel(Network(), bucket_cap_mb=1e-5)
    for step in range(3):
        value = loss(module, batch(dist.get_rank(), step))
        if (dist.get_rank(), step) != (3, 2):
            value.backward()


def raises_beside_the_reducer() -> None:
    module = DistributedDataParallel(Network(), bucket_cap_mb=1e-5)
    value = loss(module, batch(dist.get_rank(), 0))
    if dist.get_rank() == 3:
        raise LookupError("beside the reducer")
    value.backward()


def mismatches_in_backward() -> None:
    """Rank 3 calls a collective of its own before its backward."""
    module = DistributedDataParallel(Network(), bucket_cap_mb=1e-5)
    value = loss(module, batch(dist.get_rank(), 0))
    if dist.get_rank() == 3:
        dist.all_reduce(torch.ones(1))
    value.backward()


def test_a_rank_that_skips_a_backward_is_a_deadlock(smp_world: Any) -> None:
    report = smp_world.report(skips_a_backward, ranks=RANKS)
    assert report.verdict is VerdictKind.DEADLOCK
    assert isinstance(report.error, DeadlockError)
    text = str(report.error)
    assert "deadlock: 7 of 8 ranks wait, and none can go on" in text
    assert "  ranks 0-2, 4-7 wait in all_reduce(reduce op=SUM, dtype=float32" in text
    assert "] for rank 3" in text
    assert "value.backward()" in text  # the user's line
    assert "which has returned without a matching call\n" in text
    kinds = [outcome.kind for outcome in report.outcomes]
    assert kinds == [OutcomeKind.STUCK] * 3 + [OutcomeKind.RETURNED] + [OutcomeKind.STUCK] * 4


@pytest.mark.parametrize(
    ("trouble", "verdict"),
    [
        (skips_a_backward, VerdictKind.DEADLOCK),
        (raises_beside_the_reducer, VerdictKind.FAILED),
        (mismatches_in_backward, VerdictKind.MISMATCH),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_same_threads_train_right_after_trouble(
    smp_world: Any, trouble: Callable[[], None], verdict: VerdictKind
) -> None:
    expected = one_process()
    for _ in range(2):
        assert smp_world.report(trouble, ranks=RANKS).verdict is verdict
        check_equal(smp_world.run(trains, ranks=RANKS), expected)


# Activation checkpointing around a collective.


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_around_a_collective(smp_world: Any, use_reentrant: bool) -> None:
    """y = sum over ranks of w x, and rank r's loss is (r + 1) y. The forward runs twice: so does its
    collective, in the middle of the backward. dL/dx = w * 10 and dL/dw = x * 10, for 4 ranks."""
    import torch.distributed.nn.functional as differentiable

    calls: list[int] = []

    def body() -> tuple[float, float, float]:
        rank = dist.get_rank()
        weight = torch.tensor(3.0, requires_grad=True)
        inputs = torch.tensor(2.0 + rank, requires_grad=True)

        def layer(x: torch.Tensor) -> Any:
            calls.append(rank)
            return differentiable.all_reduce(weight * x)

        output: Any = checkpoint(layer, inputs, use_reentrant=use_reentrant)
        ((rank + 1) * output).backward()
        assert inputs.grad is not None
        assert weight.grad is not None
        return output.item(), inputs.grad.item(), weight.grad.item()

    total = 3.0 * sum(2.0 + rank for rank in range(4))
    got = smp_world.run(body, ranks=4)
    assert got == [(total, 3.0 * 10, (2.0 + rank) * 10) for rank in range(4)]
    assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_inside_ddp(smp_world: Any, use_reentrant: bool) -> None:
    def body() -> list[torch.Tensor]:
        module = DistributedDataParallel(Network(use_reentrant), bucket_cap_mb=1e-4)
        return train(module)

    check_equal(smp_world.run(body, ranks=RANKS), one_process())
