"""Buckets are launched while the last microbatch's backward pass still runs, on every rank of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch import session as sessions
from smp_core.torch.partitioning import partition

MICROBATCHES = 3
CONFIG = {
    "auto_partition": False,
    "default_partition": 0,
    "skip_tracing": True,
    "microbatches": MICROBATCHES,
    "ddp": True,
}


class Stage(nn.Module):
    """Two layers, and a diary of the gradients that have reached their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.diary: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda _: self.diary.append("backward"))
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near = Stage()
        with partition(smp.pp_size() - 1):
            self.far = Stage()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.far(torch.tanh(self.near(x)))
        return y


def train(
    checkpointed: bool = False, **options: Any
) -> tuple[Mapping[str, list[str]], dict[str, torch.Tensor | None]]:
    """A step. The diaries of this rank's stages, with when an exchange began, and the gradients."""
    torch.manual_seed(3)
    module = Stages()
    model = smp.DistributedModel(module, bucket_cap_mb=1e-9, **options)
    if checkpointed:
        smp.set_activation_checkpointing(module.near)
        smp.set_activation_checkpointing(module.far)

    def watch(model: smp.DistributedModel, _: Any) -> None:
        assert model.gradients is not None
        ours = model.gradients._collectives
        begin = ours.all_reduce

        def exchange(*args: Any) -> Any:
            module.near.diary.append("exchange")
            module.far.diary.append("exchange")
            return begin(*args)

        ours.all_reduce = exchange  # type: ignore[method-assign]

    model.register_post_partition_hook(watch)

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x.requires_grad_()).square().sum()
        model.backward(loss)
        return loss

    torch.manual_seed(10 + smp.dp_rank())
    x = torch.randn(2 * MICROBATCHES, 4, dtype=torch.float64)
    step(x if smp.pp_rank() == 0 else torch.empty(2 * MICROBATCHES, 0))
    diaries = {"near": module.near.diary, "far": module.far.diary}
    return diaries, {name: p.grad for name, p in model.local_named_parameters()}


def before_the_last(diary: list[str]) -> int:
    """How many exchanges began before the last backward pass through the stage was over."""
    assert diary.count("backward") == MICROBATCHES
    last = len(diary) - 1 - diary[::-1].index("backward")
    return diary[:last].count("exchange")


@pytest.mark.smp(ranks=2)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_at_degree_1_buckets_set_out_within_the_last_backward_pass(
    smp: Any, pipeline: str, checkpointed: bool
) -> None:
    smp.init({**CONFIG, "pipeline": pipeline})
    diaries, _ = train(checkpointed)
    assert before_the_last(diaries["far"]) >= 2  # of the second layer
    assert before_the_last(diaries["near"]) >= 6
    assert diaries["near"].count("exchange") == 8


@pytest.mark.smp(ranks=4)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_on_every_rank_of_a_pipeline_too(smp: Any, pipeline: str, checkpointed: bool) -> None:
    smp.init({**CONFIG, "pipeline": pipeline, "pipeline_parallel_degree": 2})
    diaries, _ = train(checkpointed)
    mine = diaries["near" if smp.pp_rank() == 0 else "far"]
    assert before_the_last(mine) >= 2
    assert mine.count("exchange") == 4


def gradients(**options: Any) -> tuple[list[str], dict[str, torch.Tensor | None]]:
    diaries, found = train(**options)
    return diaries["near" if smp.pp_rank() == 0 else "far"], found


@pytest.mark.parametrize("degree", [1, 2])
def test_the_bits_are_those_of_a_reduction_at_the_end(smp_world: Any, degree: int) -> None:
    config = {**CONFIG, "pipeline_parallel_degree": degree}
    ranks = 2 * degree
    early = smp_world.run(gradients, ranks=ranks, config=config)
    late = smp_world.run(_late, ranks=ranks, config=config)
    for (_, ours), (diary, theirs) in zip(early, late, strict=True):
        assert before_the_last(diary) == 0
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _late() -> tuple[list[str], dict[str, torch.Tensor | None]]:
    return gradients(overlapping_allreduce=False)


@pytest.mark.smp(ranks=2)
def test_a_rank_that_serves_folds_microbatches_as_they_end(smp: Any) -> None:
    """The driver's requests say which are over: sums are not kept to the end of the step."""
    active = {"pipeline": "interleaved", "active_microbatches": 1, "microbatches": 5}
    smp.init({**CONFIG, **active, "pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Stages())
    waiting: list[int] = []

    def look(*_: Any) -> None:
        waiting.append(sessions.current("a test").step.ledger.waiting)

    model.module.far.register_forward_pre_hook(look)

    @smp.step
    def step(x: torch.Tensor) -> None:
        model.backward(model(x.requires_grad_()).square().sum())

    step(torch.ones(10, 4, dtype=torch.float64))
    assert waiting == ([0] * 5 if smp.pp_rank() == 1 else [])
