"""Shards that a script saves, loads and copies by itself: each rank gets its own back, or is told."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.exceptions import CheckpointError, UnsupportedTrainingError
from tests.smp_core.torch.sharding.checkpoint_models import (
    Run,
    batch,
    config,
    equal,
    own_part,
    snapshot,
)


@pytest.mark.parametrize("v3", [False, True])
def test_each_rank_loads_the_shard_that_it_saved(smp_world, tmp_path, v3):
    """Shards of an even model have the same sizes on both ranks."""

    def body():
        run = Run("momentum")
        run.steps(0)
        before = snapshot(run.model.state_dict())
        smp.save(run.model.local_state_dict(), tmp_path / "model", partial=True, v3=v3)
        smp.save(
            run.optimizer.local_state_dict(gather_if_shard=False), tmp_path / "optimizer", v3=v3
        )
        run.steps(1)
        smp.barrier()
        run.model.load_state_dict(smp.load(tmp_path / "model", partial=True))
        run.optimizer.load_state_dict(smp.load(tmp_path / "optimizer", partial=True))
        equal(snapshot(run.model.state_dict()), before)

    smp_world.run(body, ranks=4, config=config(2))
    names = {"0_0_0", "0_0_1", "0_0_2", "0_0_3"} if v3 else {"0", "1"}
    assert {each.name for each in tmp_path.iterdir()} == {
        f"{what}_{name}" for what in ("model", "optimizer") for name in names
    }


@pytest.mark.parametrize("gather", [True, False])
def test_what_the_first_rank_saved_for_all_is_found(smp_world, tmp_path, gather):
    """The list of all parts is one file, ``{f}_{mp_rank}``. Hugging Face's Trainer, too, saves what the first rank has,
    and asks with False.
    """

    def body():
        run = Run("momentum")
        run.steps(0)
        before = snapshot(run.optimizer.state_dict())
        parts = run.optimizer.local_state_dict(gather_if_shard=gather)
        if smp.rdp_rank() == 0:
            smp.save(parts, tmp_path / "optimizer", partial=True)
        run.steps(1)
        smp.barrier()
        run.optimizer.load_state_dict(smp.load(tmp_path / "optimizer", partial=True))
        equal(snapshot(run.optimizer.state_dict()), before)

    smp_world.run(body, ranks=2, config=config(2))


def test_the_shards_of_another_rank_or_degree_are_refused(smp_world):
    def body():
        run = Run("momentum")
        parts = smp.allgather(snapshot(run.model.local_state_dict()), smp.WORLD)
        before = snapshot(run.model.state_dict())
        mine, other = smp.rank(), 1 - smp.rank()
        with pytest.raises(
            CheckpointError, match=f"state: expected shard {mine} of 2, found shard {other}: it is"
        ):
            run.model.load_state_dict(parts[other])
        equal(snapshot(run.model.state_dict()), before)
        return parts[0]

    part = smp_world.run(body, ranks=2, config=config(2))[0]

    def elsewhere(said):
        model = Run("momentum").model
        before = snapshot(model.state_dict())
        with pytest.raises(CheckpointError, match=said):
            model.load_state_dict(part)
        equal(snapshot(model.state_dict()), before)

    said = "holds a shard of sharded_data_parallel_degree=2, and this run has 4"
    smp_world.run(elsewhere, said, ranks=4, config=config(4))
    smp_world.run(elsewhere, "expected parameters that are whole, as in this run, found", ranks=1)


class Counting:
    """Objects that come from other ranks, as they come."""

    def __init__(self, objects, came):
        self._objects, self._came = objects, came

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def recv_from(self, *args):
        self._came.append(self._objects.recv_from(*args))
        return self._came[-1]

    def allgather(self, *args):
        self._came.append(self._objects.allgather(*args))
        return self._came[-1]


def test_only_the_first_rank_is_sent_the_parts_of_others(smp_world):
    def body():
        run = Run("adamw")
        run.steps(0)
        fabric = run.optimizer._session.runtime.fabric
        objects, came = fabric.objects, []
        fabric.objects = Counting(objects, came)
        parts = run.optimizer.local_state_dict()
        fabric.objects = objects
        own = own_part(run.optimizer)
        told = smp.allgather(snapshot(own), smp.WORLD)
        if smp.rank():
            equal(snapshot(parts), snapshot(own))
            assert not came
        else:
            equal(snapshot(parts), told)
            assert len(came) == 3

    smp_world.run(body, ranks=4, config=config(2))


# ---- Modules that load in ways of their own ------------------------------------------------------


class Special(nn.Embedding):
    """Past the version counter, in part, in another parameter's place, through a hook."""

    def __init__(self, how):
        super().__init__(5, 3)
        nn.init.constant_(self.weight, 5.0)
        self.how, self.seen = how, []
        if how == "post hook":
            self.register_load_state_dict_post_hook(
                lambda module, keys: self.seen.append(self.weight.sum().item())
            )
        if how == "pre hook":
            self.register_load_state_dict_pre_hook(
                lambda module, *rest: self.seen.append(self.weight.sum().item())
            )

    def _load_from_state_dict(self, state, prefix, *rest):
        value = state[prefix + "weight"]
        if self.how == "data":
            self.weight.data.copy_(value)
        elif self.how == "rows":
            with torch.no_grad():
                self.weight[:2].copy_(value[:2])
        elif self.how == "assigned":
            self.weight = nn.Parameter(value.clone())
        elif self.how == "new data":
            self.weight.data = value.clone()
        else:
            super()._load_from_state_dict(state, prefix, *rest)


class Hooked(Special):
    _load_from_state_dict = nn.Module._load_from_state_dict


def special(how):
    module = nn.Sequential((Hooked if "hook" in how else Special)(how), nn.Linear(3, 3))
    model = smp.DistributedModel(module)
    state = snapshot(model.state_dict())
    state["0.weight"] = torch.arange(15.0).view(5, 3)
    state["1.bias"] = torch.arange(3.0)
    model.load_state_dict(state)
    return module[0].seen, model.state_dict()["0.weight"], model.state_dict()["1.bias"]


@pytest.mark.parametrize("how", ["data", "rows", "assigned", "new data", "pre hook", "post hook"])
def test_modules_load_in_their_own_ways(smp_world, how):
    expected = torch.arange(15.0).view(5, 3)
    if how == "rows":
        expected[2:] = 5.0
    seen = {"pre hook": [75.0], "post hook": [105.0]}.get(how, [])
    for found, weight, bias in smp_world.run(special, how, ranks=2, config=config(2)):
        assert found == seen
        equal(weight, expected)
        equal(bias, torch.arange(3.0))


def partly(how):
    """Masters by name before and after a load, in the midst of training; of shards this rank's."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(3):
        step(model, torch.ones(2, 3))
        optimizer.step()
        optimizer.zero_grad()
    if how == "data":
        module[1]._load_from_state_dict = lambda state, prefix, *rest: module[1].bias.data.copy_(
            state[prefix + "bias"]
        )
    before = snapshot(model.masters.state_dict())
    value = torch.full((3,), 7.0) if how == "data" else model.state_dict()["1.bias"]
    model.load_state_dict({"1.bias": value}, strict=False)
    after = snapshot(model.masters.state_dict())
    whole = model.state_dict()["1.bias"]
    own = module[1].bias.detach().float()
    return before, after, own, whole.float()


@pytest.mark.parametrize("how", ["same", "data"])
@pytest.mark.parametrize(
    "given",
    [{"ddp": True, "fp16": True}, config(2, fp16=True), config(2, bf16=True)],
    ids=["fp16", "sharded fp16", "sharded bf16"],
)
def test_only_what_is_loaded_changes_its_master(smp_world, given, how):
    for before, after, own, whole in smp_world.run(partly, how, ranks=2, config=given):
        assert [name for name in before if name != "1.bias"] == ["0.weight", "0.bias", "1.weight"]
        for name in before:
            equal(after[name], own if name == "1.bias" else before[name])
        if how == "data":
            equal(whole, torch.full((3,), 7.0))


# ---- Whole for a while, and copies ---------------------------------------------------------------


def read_whole(reads):
    """Losses and states of training, in the midst of which the module is made whole or not."""
    run = Run("adamw")
    losses = run.steps(0)
    whole = snapshot(run.model.state_dict())
    run.optimizer.zero_grad()
    step = run._step(run.model, batch(smp.dp_rank(), 1)).reduce_mean()
    if reads:  # before an update, and before a step
        assert run.model.cpu() is run.model
        equal(snapshot(dict(run.model.module.state_dict())), whole)
    run.optimizer.step()
    parts = []
    for take in (run.model.local_state_dict, lambda: run.optimizer.local_state_dict(False)):
        if reads:
            run.model.cpu()
        parts.append(snapshot(take()))
    for load, part in zip((run.model, run.optimizer), parts, strict=True):
        if reads:
            run.model.cpu()
        load.load_state_dict(part)
    if reads:
        run.model.cpu()
        run.model.cpu()
    states = run.state()
    if reads:
        run.model.cpu()
        copied = copy.deepcopy(run.model.module)
        equal(snapshot(dict(copied.state_dict())), states[0])
        equal(copied(batch(0, 0)).float(), run.model(batch(0, 0)), "a copy's output")
        run.model.cpu()
    return losses, step, parts, run.steps(2), run.state()


@pytest.mark.parametrize("more", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_cpu_makes_the_module_whole_until_it_is_used(smp_world, more):
    given = config(2, **more)
    wanted = smp_world.run(read_whole, False, ranks=2, config=given)
    found = smp_world.run(read_whole, True, ranks=2, config=given)
    equal(found, wanted)


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_shards_are_not_copied_for_modules(smp_world, how):
    def body():
        model = Run("momentum").model
        with pytest.raises(UnsupportedTrainingError, match=r"cannot be copied.*model\.cpu\(\)"):
            how(model.module)
        with pytest.raises(UnsupportedTrainingError, match=r"parallelism after model\.cpu\(\)"):
            how(model)

    smp_world.run(body, ranks=2, config=config(2))


@pytest.mark.parametrize("more", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_an_optimizer_made_of_a_whole_module_works_on_shards(smp_world, more):
    def body(reads):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        model = smp.DistributedModel(module)
        if reads:
            model.cpu()
        optimizer = smp.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))

        @smp.step
        def step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        for _ in range(2):
            step(model, torch.ones(2, 3))
            optimizer.step()
        return snapshot(dict(model.state_dict())), snapshot(optimizer.state_dict())

    given = config(2, **more)
    equal(*(smp_world.run(body, reads, ranks=2, config=given) for reads in (True, False)))
