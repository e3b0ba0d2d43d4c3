"""FSDP2's ``fully_shard`` runs unchanged on `sim`, on meshes of one and two dimensions, and trains to
the bits of one process (why that can be asked for: lattice.py). Sharding cuts tensors and reorders
sums; neither may change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pytest_smp.ranks.protocols import OutcomeKind, VerdictKind
from smp_core.errors import DeadlockError

from .lattice import (
    RANKS,
    STEPS,
    Network,
    adam,
    batch,
    check_equal,
    local,
    loss,
    one_process,
    update,
    whole,
)

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "sharded over 8": ((8,), ("shard",)),
    "replicated 2, sharded 4": ((2, 4), ("replicate", "shard")),
    "replicated 4, sharded 2": ((4, 2), ("replicate", "shard")),
    "replicated 8, sharded 1": ((8, 1), ("replicate", "shard")),
}


def sharded(mesh: str, *, by_layer: bool = True, **options: Any) -> Network:
    shape, names = MESHES[mesh]
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    module = Network(checkpointed=options.pop("checkpointed", None))
    if by_layer:
        for layer in module.layers:
            fully_shard(layer, mesh=device_mesh, **options)
    fully_shard(module, mesh=device_mesh, **options)
    return module


def train(module: nn.Module, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = adam(module)
    history: list[torch.Tensor] = []
    for step in range(steps):
        loss(module, batch(dist.get_rank(), step)).backward()
        history += update(module, optimizer)
    result = history + whole(module.parameters())
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("mesh", MESHES)
def test_training_with_adam_equals_one_process(smp_world: Any, mesh: str) -> None:
    def body() -> list[torch.Tensor]:
        return train(sharded(mesh))

    check_equal(smp_world.run(body, ranks=RANKS), one_process())


WAYS: dict[str, dict[str, Any]] = {
    "one unit": {"by_layer": False},
    "kept gathered until the backward": {"reshard_after_forward": False},
    "gathered again in the backward": {"reshard_after_forward": True},
    "named precision": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    },
    "reduced in float64": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "checkpointed, not reentrant": {"checkpointed": False},
    "checkpointed, reentrant": {"checkpointed": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_doing_it_change_no_bit(smp_world: Any, way: str) -> None:
    def body() -> list[torch.Tensor]:
        return train(sharded("replicated 2, sharded 4", **WAYS[way]), steps=2)

    check_equal(smp_world.run(body, ranks=RANKS), one_process(steps=2))


def test_shards_are_shards(smp_world: Any) -> None:
    """Rank r holds rows r, and the rest holds nothing: the last of a 5-row weight are empty."""

    def body() -> tuple[list[float], torch.Size]:
        module = sharded("sharded over 8")
        first = local(next(module.parameters()))
        dist.destroy_process_group()
        return first.flatten().tolist(), first.shape

    weight = next(Network().parameters()).detach()
    for rank, (numbers, shape) in enumerate(smp_world.run(body, ranks=RANKS)):
        assert numbers == (weight[rank].tolist() if rank < 5 else [])
        assert shape[0] == (1 if rank < 5 else 0)


@pytest.mark.parametrize("mesh", ["sharded over 8", "replicated 2, sharded 4"])
def test_accumulation_without_synchronisation(smp_world: Any, mesh: str) -> None:
    def body() -> list[torch.Tensor]:
        module: Any = sharded(mesh)
        optimizer, rank = adam(module), dist.get_rank()
        history: list[torch.Tensor] = []
        for step in range(2):
            module.set_requires_gradient_sync(False)
            loss(module, batch(rank, 2 * step)).backward()
            module.set_requires_gradient_sync(True)
            loss(module, batch(rank, 2 * step + 1)).backward()
            history += update(module, optimizer)
        result = history + whole(module.parameters())
        dist.destroy_process_group()
        return result

    check_equal(smp_world.run(body, ranks=RANKS), one_process(steps=2, micro=2))


def test_the_gradient_norm_over_all_shards(smp_world: Any) -> None:
    """The square of the norm is an integer over 64; its root is the correctly rounded one."""

    def body() -> float:
        module = sharded("replicated 2, sharded 4")
        loss(module, batch(dist.get_rank(), 0)).backward()
        square = torch.zeros((), dtype=torch.float64)
        for parameter in module.parameters():
            assert isinstance(parameter.grad, DTensor)
            square += (parameter.grad.full_tensor().double() ** 2).sum()
        dist.destroy_process_group()
        return square.item()

    reference = Network()
    batches = [batch(rank, 0) for rank in range(RANKS)]
    (torch.stack([loss(reference, data) for data in batches]).sum() / RANKS).backward()
    gradients = [each.grad for each in reference.parameters() if each.grad is not None]
    expected = sum((gradient.double() ** 2).sum().item() for gradient in gradients)
    assert smp_world.run(body, ranks=RANKS) == [expected] * RANKS


# Trouble.


def skips_a_backward() -> None:
    module = sharded("sharded over 8")
    for step in range(2):
        value = loss(module, batch(dist.get_rank(), step))
        if (dist.get_rank(), step) != (3, 1):
            value.backward()


def skips_a_backward_on_two_dimensions() -> None:
    module = sharded("replicated 2, sharded 4")
    value = loss(module, batch(dist.get_rank(), 0))
    if dist.get_rank() != 3:
        value.backward()


def raises_in_the_forward() -> None:
    module = sharded("sharded over 8")
    if dist.get_rank() == 5:
        module.layers[1].register_forward_hook(lambda *_: 1 / 0)
    loss(module, batch(dist.get_rank(), 0)).backward()


def calls_something_else() -> None:
    module = sharded("sharded over 8")
    value = loss(module, batch(dist.get_rank(), 0))
    if dist.get_rank() == 3:
        dist.barrier(dist.group.WORLD)
    value.backward()


def test_a_rank_that_skips_a_backward_is_a_deadlock(smp_world: Any) -> None:
    report = smp_world.report(skips_a_backward, ranks=RANKS)
    assert report.verdict is VerdictKind.DEADLOCK
    assert isinstance(report.error, DeadlockError)
    text = str(report.error)
    assert "deadlock: 7 of 8 ranks wait, and none can go on" in text
    assert "] for rank 3" in text
    assert "value.backward()" in text  # the user's line
    assert "which has returned without a matching call\n" in text
    kinds = [outcome.kind for outcome in report.outcomes]
    assert kinds == [OutcomeKind.STUCK] * 3 + [OutcomeKind.RETURNED] + [OutcomeKind.STUCK] * 4


def test_on_two_dimensions_all_are_stuck_through_several_groups(smp_world: Any) -> None:
    """Rank 3's shard group waits for it, the other ranks for their replicas: no rank is left."""
    report = smp_world.report(skips_a_backward_on_two_dimensions, ranks=RANKS)
    assert report.verdict is VerdictKind.DEADLOCK
    assert "deadlock: 7 of 8 ranks wait, and none can go on" in str(report.error)
    assert "rank 3 has returned" in str(report.error)


@pytest.mark.parametrize(
    ("trouble", "verdict"),
    [
        (skips_a_backward, VerdictKind.DEADLOCK),
        (skips_a_backward_on_two_dimensions, VerdictKind.DEADLOCK),
        (raises_in_the_forward, VerdictKind.FAILED),
        (calls_something_else, VerdictKind.MISMATCH),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_same_threads_train_right_after_trouble(
    smp_world: Any, trouble: Callable[[], None], verdict: VerdictKind
) -> None:
    def body() -> list[torch.Tensor]:
        return train(sharded("replicated 2, sharded 4"), steps=1)

    expected = one_process(steps=1)
    for _ in range(2):
        assert smp_world.report(trouble, ranks=RANKS).verdict is verdict
        check_equal(smp_world.run(body, ranks=RANKS), expected)
