"""States of models with distributed modules are those of the plain module, hooks of modules included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.exceptions import TensorParallelError
from tests.smp_core.torch.checkpoint.tensor_runs import Run, world
from tests.smp_core.torch.nn.test_linear import values
from tests.smp_core.torch.sharding.checkpoint_models import equal, snapshot

NAMES = ("tp2", "pp2tp2", "tp2sdp2")


class Renames(nn.Module):
    """Saves the weight in float64 under another name, and reads that."""

    def with_hooks(self) -> None:
        self._register_state_dict_hook(self._rename)
        self._register_load_state_dict_pre_hook(self._take)

    def _rename(self, module, state, prefix, metadata):
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").double()

    def _take(self, state, prefix, *others):
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").float()


class Renaming(nn.Linear, Renames):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.with_hooks()


class DistributedRenaming(smp.nn.DistributedLinear, Renames):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.with_hooks()


class Adds(nn.Module):
    """Looks at the whole weight that there is when it loads: what is given is added."""

    def _load_from_state_dict(self, state, prefix, *others):
        with torch.no_grad():
            self.weight.data.add_(state[f"{prefix}weight"])
            self.bias.copy_(self.weight.sum(dim=1))


class Adding(Adds, nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)


class DistributedAdding(Adds, smp.nn.DistributedLinear):
    pass


def plain(kind) -> nn.Module:
    net = nn.Sequential(kind(4, 6), nn.Linear(6, 4))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(values(*parameter.shape, start=number))
    return net


def wrapped(kind, distributed) -> smp.DistributedModel:
    smp.tp_register_with_module(kind, distributed, init_hook=lambda *sizes: (sizes, {}))
    net = nn.Sequential(kind(4, 6), nn.Linear(6, 4))
    smp.set_tensor_parallelism(net)
    if smp.pp_size() > 1:
        smp.set_partition(net[0], 1)
    model = smp.DistributedModel(net)
    if not model.partitioned:
        forward(model, torch.ones(2, 4))
    assert len(list(model.distributed_modules())) == (1 if smp.pp_size() > 1 else 2)
    return model


@smp.step
def forward(model, x):
    model(x)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_that_rename_and_cast_see_whole_parameters(smp_world, name):
    expected = snapshot(dict(plain(Renaming).state_dict()))
    assert expected["0.kernel"].shape == (6, 4)

    def body():
        model = wrapped(Renaming, DistributedRenaming)
        model.load_state_dict(expected)
        equal(snapshot(model.state_dict()), expected)
        part = snapshot(model.local_state_dict())
        model.load_state_dict({key: torch.zeros_like(value) for key, value in expected.items()})
        model.load_state_dict(part)
        equal(snapshot(model.state_dict()), expected)
        on_first = model.state_dict(gather_to_rank0=True)
        equal(snapshot(on_first), expected if smp.rank() == 0 else {})

    how = world(name)
    how["config"]["sdp_param_persistence_threshold"] = 1
    smp_world.run(body, **how)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_that_loads_in_its_own_way_sees_whole_parameters(smp_world, name):
    reference = plain(Adding)
    given = snapshot(dict(reference.state_dict()))
    doubled = snapshot(given)
    doubled["0.weight"] *= 2
    doubled["0.bias"] = doubled["0.weight"].sum(dim=1)

    def body():
        model = wrapped(Adding, DistributedAdding)
        before = model.state_dict()["0.weight"]
        model.load_state_dict({**given, "0.weight": given["0.weight"] - before})
        model.load_state_dict(given)
        equal(snapshot(model.state_dict()), doubled)

    how = world(name)
    how["config"]["sdp_param_persistence_threshold"] = 1
    smp_world.run(body, **how)


def test_a_hook_that_changes_parameters_while_the_state_is_taken_changes_slices(smp_world):
    def body():
        layer = nn.Linear(4, 6)
        smp.set_tensor_parallelism(layer)
        model = smp.DistributedModel(layer)

        def clamp(module, state, prefix, metadata):
            with torch.no_grad():
                module.weight.fill_(2.0)

        model.module.register_state_dict_post_hook(clamp)
        state = model.state_dict()
        assert torch.equal(state["weight"], torch.full((6, 4), 2.0))
        assert torch.equal(model.module.weight, torch.full((6, 2), 2.0))

    smp_world.run(body, **world("tp2"))


def test_a_module_that_takes_another_shape_while_it_loads_is_refused(smp_world):
    def body():
        layer = nn.Linear(4, 6)
        smp.set_tensor_parallelism(layer)
        model = smp.DistributedModel(layer)

        def grows(module, *others):
            module.weight = nn.Parameter(torch.ones(6, 8))

        model.module.register_load_state_dict_post_hook(lambda module, keys: grows(module))
        with pytest.raises(
            TensorParallelError, match=r"'weight' was given the shape \[6, 8\].* \[6, 4\]"
        ):
            model.load_state_dict(plain_linear)
        assert model.module.weight.shape == (6, 2)
        smp.barrier()

    plain_linear = nn.Linear(4, 6).state_dict()
    smp_world.run(body, **world("tp2"))


@pytest.mark.parametrize("name", [*NAMES, "pp2tp2rdp2"])
def test_the_first_replica_alone_gathers_the_state(smp_world, name):
    def body():
        run = Run()
        run.step(0)
        everywhere = snapshot(run.model.state_dict())
        if "sdp" not in name and smp.rdp_rank() != 0:  # shards are gathered by all of a shard group
            smp.barrier()
            return None
        again = snapshot(run.model.state_dict())
        equal(again, everywhere)
        smp.barrier()
        return again

    found = smp_world.run(body, **world(name))
    for each in found[1:]:
        if each is not None and "sdp" not in name:
            for key in found[0]:
                if "running" not in key:
                    equal(each[key], found[0][key], key)


@pytest.mark.parametrize("name", ["pp2tp2rdp2", "tp2sdp2rdp4"])
def test_only_the_ranks_that_rank_0_gathers_from_hold_full_parameters(smp_world, name):
    """Counted in bytes of memory, while all are gathered."""

    def body():
        run = Run()
        run.step(0)
        held = []

        def hook(module, state, prefix, metadata):
            seen = [state[f"{name}.weight"] for name in ("embed", "first", "last", "own")]
            held.extend(each.untyped_storage().nbytes() for each in seen)

        run.model.module.register_state_dict_post_hook(hook)
        run.model.state_dict(gather_to_rank0=True)
        return held, (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank())

    found = {place: held for held, place in smp_world.run(body, **world(name))}
    embed, first, last, own = 4 * 7 * 8, 4 * 12 * 8, 4 * 5 * 8, 4 * 12 * 8
    nothing = 4  # one number, expanded
    for (pp, tp, rdp), held in found.items():
        gathers = tp == rdp == 0
        if "pp" in name:  # each stage has parameters of its own, and of the others none
            expected = [[embed, first, 0, 0], [0, 0, last, own]][pp]
            if not gathers:
                expected = [[nothing, nothing, 0, 0], [0, 0, nothing, own]][pp]
        else:  # all four are sharded
            expected = [embed, first, last, own] if gathers else [nothing] * 4
        assert held == expected, (pp, tp, rdp)


@pytest.mark.parametrize("name", ["tp2", "pp2tp2", "tp2sdp2", "tp2fp16", "tp2rdp2parts"])
def test_cpu_makes_the_module_whole_and_training_goes_on_with_slices(smp_world, name):
    def body(reads):
        run = Run()
        run.steps(0, 1)
        part, states = run.state(), []
        if reads:
            whole = snapshot(run.model.state_dict())
            assert run.model.cpu() is run.model
            equal(snapshot(dict(run.model.module.state_dict())), whole)
            run.model.cpu()  # again
            equal(snapshot(dict(run.model.module.state_dict())), whole)
            run.optimizer.zero_grad()
            losses = run.steps(2)
            run.model.cpu()
            equal(snapshot(run.model.state_dict())["first.weight"].shape, (12, 8))
            run.model.cpu()
            states.append(run.state())
            assert run.model.module.embed.weight.shape != (7, 8)
            run.model.cpu()
            run.model.load_state_dict(whole)
            equal(snapshot(run.model.state_dict()), whole)
            run.model.load_state_dict(states[0][0])
            run.optimizer.load_state_dict(states[0][1])
            run.model.cpu()
        else:
            losses = run.steps(2)
            states.append(run.state())
        return part, losses, states, run.steps(3), run.state()

    plain = smp_world.run(body, False, **world(name))
    for one, other in zip(smp_world.run(body, True, **world(name)), plain, strict=True):
        equal(list(one), list(other))


def test_a_call_after_cpu_computes_with_slices(smp_world):
    def body():
        run = Run()
        run.model.eval()
        ids = torch.arange(12).view(4, 3) % 7
        with torch.no_grad():
            expected = run.model(ids)
            run.model.cpu()
            assert run.model.module.first.weight.shape == (12, 8)
            equal(run.model.module.first(torch.ones(2, 8)).shape, (2, 12))
            run.model.cpu()
            equal(run.model(ids), expected)

    for name in ("tp2", "tp2sdp2"):
        smp_world.run(body, **world(name))


def test_of_values_that_were_changed_after_cpu_each_rank_keeps_its_slice(smp_world):
    def body():
        run = Run()
        run.model.cpu()
        weight = values(12, 8)
        with torch.no_grad():
            run.model.module.first.weight.copy_(weight)
        equal(run.model.local_state_dict()["first.weight"], weight.chunk(2, dim=1)[smp.tp_rank()])

    smp_world.run(body, **world("tp2"))
