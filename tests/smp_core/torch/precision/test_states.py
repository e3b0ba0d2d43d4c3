"""Checkpoints of 16-bit runs and of split optimizer states: training goes on bit for bit."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.exceptions import CheckpointError
from tests.smp_core.torch.sharding.checkpoint_models import own_part

PIPE = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}
SPLIT = {"ddp": True, "shard_optimizer_state": True}
SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 8}

#: (ranks, configuration, optimizer files, fp16 files)
RUNS = {
    "alone": (1, {"fp16": True}, ["0"], ["0"]),
    "pipelines": (4, {**PIPE, "ddp": True, "fp16": True}, ["0", "1"], ["0", "1"]),
    "split": (2, {**SPLIT, "fp16": True}, ["0_0_0", "0_0_1"], ["0_0_0", "0_0_1"]),
    "split-float32": (2, SPLIT, ["0_0_0", "0_0_1"], []),
    "split-pipelines": (
        4,
        {**PIPE, **SPLIT, "fp16": True},
        ["0_0_0", "0_0_1", "1_0_0", "1_0_1"],
        ["0_0_0", "0_0_1", "1_0_0", "1_0_1"],
    ),
    "sharded": (4, {**SHARDED, "fp16": True}, ["0", "1"], ["0", "1"]),
    "sharded-bf16": (2, {**SHARDED, "bf16": True}, ["0", "1"], ["0", "1"]),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints"


class Run:
    def __init__(self, seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
        smp.set_partition(module[2], 1)
        self.model = smp.DistributedModel(module)
        dynamic = {"init_scale": 2.0**18, "scale_window": 2, "scale_factor": 16.0}
        self.optimizer = smp.DistributedOptimizer(
            torch.optim.Adam(module.parameters(), lr=0.03),
            dynamic_loss_scale=True,
            dynamic_loss_args=dynamic,
        )
        self.overflows = []

    def steps(self, first, last):
        @smp.step
        def run(model, x, y):
            model.backward((model(x) - y).square().sum())

        for number in range(first, last):
            generator = torch.Generator().manual_seed(100 * number + smp.dp_rank())
            x, y = (torch.randn(4, size, generator=generator) for size in (5, 3))
            self.optimizer.zero_grad()
            run(self.model, x, y)
            self.optimizer.step()
            self.overflows.append((self.optimizer.overflow, self.optimizer.loss_scale))

    def all(self):
        """Everything there is on this rank."""
        masters = {}
        if self.model.masters is not None:
            masters = {name: each.detach().clone() for name, _, each in self.model.masters.known()}
        return self.model.state_dict(), masters, own_part(self.optimizer)["state"]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype is other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def _through(path, partial):
    run = Run(1)
    run.steps(0, 4)
    smp.save_checkpoint(path, "t", partial=partial, model=run.model, optimizer=run.optimizer)
    run.steps(4, 8)
    return run.all(), run.overflows


def _resumed(path, partial, after=0):
    run = Run(2)
    run.steps(20, 20 + after)
    smp.resume_from_checkpoint(path, partial=partial)
    run.overflows.clear()
    run.steps(4, 8)
    return run.all(), run.overflows


@pytest.mark.parametrize("name", list(RUNS))
def test_a_partial_checkpoint_goes_on_bit_for_bit(smp_world, path, name):
    ranks, config, optimizers, fp16 = RUNS[name]
    through = smp_world.run(_through, path, True, ranks=ranks, config=config)
    found = sorted(os.listdir(path / "t_partial"))
    assert [each for each in found if each.startswith("optimizer")] == [
        f"optimizer_{each}.pt" for each in optimizers
    ]
    assert [each for each in found if each.startswith("fp16")] == [
        f"fp16_states_{each}.pt" for each in fp16
    ]
    for after in (0, 1):
        resumed = smp_world.run(_resumed, path, True, after, ranks=ranks, config=config)
        for (was, scales), (now, later) in zip(through, resumed, strict=True):
            assert equal(was, now)
            assert scales[4:] == later
    if config.get("fp16"):
        assert len({scale for _, scale in through[0][1]}) > 1  # the scaler has moved


@pytest.mark.parametrize("name", ["alone", "pipelines", "sharded", "sharded-bf16"])
def test_a_full_checkpoint_has_masters_and_loss_scale_and_goes_on_at_other_degrees(
    smp_world, path, name
):
    ranks, config, *_ = RUNS[name]
    through = smp_world.run(_through, path, False, ranks=ranks, config=config)
    precise = torch.load(path / "t")["optimizer"]["fp16_states"]
    assert {key: each.shape for key, each in precise["masters"].items()} == {
        "0.weight": (7, 5),
        "0.bias": (7,),
        "2.weight": (3, 7),
    }
    assert all(each.dtype is torch.float32 for each in precise["masters"].values())
    resumed = smp_world.run(_resumed, path, False, ranks=ranks, config=config)
    for (was, scales), (now, later) in zip(through, resumed, strict=True):
        assert equal(was, now)
        assert scales[4:] == later


def test_masters_are_cut_for_another_number_of_ranks(smp_world, path):
    """A full checkpoint of one rank, on two that split the optimizer's state, and that shard parameters."""
    smp_world.run(_through, path, False, ranks=1, config={"fp16": True})
    content = torch.load(path / "t")

    def masters():
        run = Run(2)
        smp.resume_from_checkpoint(path, partial=False)
        run.steps(0, 0)
        got = {name: each.detach().clone() for name, _, each in run.model.masters.known()}
        return got, run.optimizer.loss_scale

    for config in ({**SPLIT, "fp16": True}, {**SHARDED, "fp16": True}):
        told = smp_world.run(masters, ranks=2, config=config)
        for name, value in content["optimizer"]["fp16_states"]["masters"].items():
            parts = [got[name].reshape(-1) for got, _ in told]
            whole = parts[0] if parts[0].numel() == value.numel() else torch.cat(parts)
            assert torch.equal(whole, value.reshape(-1))
        scale = content["optimizer"]["fp16_states"]["loss_scaler"]["cur_scale"]
        assert [scale for _, scale in told] == [scale, scale]


def test_parts_of_other_ranks_are_refused(smp_world, path):
    smp_world.run(_through, path, True, ranks=2, config=SPLIT)
    with pytest.raises(CheckpointError, match=r"part 0 of 4 of the .* found part 0 of 2"):
        smp_world.run(_resumed, path, True, ranks=4, config=SPLIT)
    with pytest.raises(CheckpointError, match=r"no optimizer_0\.pt"):
        smp_world.run(_resumed, path, True, ranks=2, config={"ddp": True})
    folder = path / "t_partial"
    os.rename(folder / "optimizer_0_0_0.pt", folder / "aside")
    os.rename(folder / "optimizer_0_0_1.pt", folder / "optimizer_0_0_0.pt")
    os.rename(folder / "aside", folder / "optimizer_0_0_1.pt")
    with pytest.raises(CheckpointError, match=r"expected part 0 of 2 .*found part 1 of 2"):
        smp_world.run(_resumed, path, True, ranks=2, config=SPLIT)


def test_a_float32_run_takes_a_16_bit_checkpoint_without_its_masters(smp_world, path):
    smp_world.run(_through, path, False, ranks=1, config={"fp16": True})

    def resumed():
        run = Run(2)
        smp.resume_from_checkpoint(path, partial=False)
        return run.model.state_dict()

    (state,) = smp_world.run(resumed, ranks=1)
    assert equal(
        state, {name: each.float() for name, each in torch.load(path / "t")["model"].items()}
    )
