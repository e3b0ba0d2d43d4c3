"""When units are unsharded: on demand, never above the limit, resharded after use; counted independently."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import smp_core.torch as smp
from smp_core.torch.exceptions import ShardingError
from smp_core.torch.sharding.sharded_parameter import Unit, make_unit
from smp_core.torch.sharding.unsharding import UnitState, Unsharded
from tests.smp_core.torch.sharding.degrees import (
    Layers,
    batch,
    config,
    outcome,
    same,
    step,
    train,
    wrapped,
)

# Without ranks: a model of the rules.


class OneRank:
    """All there is, when it is asked for."""

    def __init__(self):
        self.begun = []

    def all_gather_parts(self, shard, lengths):
        self.begun.append((shard, lengths))
        return self

    def result(self):
        shard, lengths = self.begun[-1]
        return [part.clone().view(1, -1) for part in torch.split(shard, lengths)]


class Call:
    """A call in progress."""

    def __init__(self, module, parent=None):
        self.module, self.parent, self.units = module, parent, None


def of_sizes(*sizes, most):
    modules = [nn.Module() for _ in sizes]
    units = []
    for number, (size, module) in enumerate(zip(sizes, modules, strict=True)):
        parameter = nn.Parameter(torch.zeros(size))
        units.append(make_unit(number, module, [(f"p{number}", parameter)], 1, 0))
    collectives = OneRank()
    return (
        Unsharded(collectives, units, most),
        [unit.shards[0].parameter for unit in units],
        modules,
        collectives,
    )


def forward(unsharded, parameters, modules):
    """One call after the other; how much is live within each."""
    live = []
    for parameter, module in zip(parameters, modules, strict=True):
        call = Call(module)
        unsharded.read(parameter, call)
        live.append(unsharded.live)
        unsharded.leave(call, False)
    return live


def test_the_next_one_is_fetched_once_the_order_is_known():
    unsharded, parameters, modules, collectives = of_sizes(10, 10, 10, most=100)
    unsharded.begin_step()
    assert forward(unsharded, parameters, modules) == [10, 10, 10]
    unsharded.end_step()
    unsharded.begin_step()
    assert forward(unsharded, parameters, modules) == [20, 20, 10]
    assert (unsharded.peak, unsharded.live, len(collectives.begun)) == (20, 0, 6)


def test_a_unit_goes_through_its_states():
    unsharded, parameters, modules, _ = of_sizes(10, 10, most=100)

    def states():
        return [unsharded.state(unit).name for unit in unsharded.units]

    for expected in (["UNSHARDED", "SHARDED"], ["UNSHARDED", "UNSHARDING"]):
        unsharded.begin_step()
        assert states() == ["SHARDED", "SHARDED"]
        first, second = Call(modules[0]), Call(modules[1])
        unsharded.read(parameters[0], first)
        assert states() == expected  # in the second step the next unit is prefetched
        unsharded.leave(first, False)
        unsharded.read(parameters[1], second)
        assert states() == ["SHARDED", "UNSHARDED"]
        unsharded.leave(second, False)
        assert states() == ["SHARDED", "SHARDED"]
        unsharded.end_step()
    assert {state.name for state in UnitState} == {"SHARDED", "UNSHARDING", "UNSHARDED"}


@pytest.mark.parametrize(("most", "live"), [(19, [10, 10, 10]), (20, [20, 20, 10])])
def test_nothing_is_fetched_ahead_above_the_limit(most, live):
    unsharded, parameters, modules, _ = of_sizes(10, 10, 10, most=most)
    for expected in ([10, 10, 10], live):
        unsharded.begin_step()
        assert forward(unsharded, parameters, modules) == expected
        unsharded.end_step()
    assert unsharded.peak <= most


def test_what_is_demanded_is_gathered_above_the_limit():
    unsharded, parameters, modules, _ = of_sizes(10, 10, most=5)
    outer = Call(modules[0])
    unsharded.read(parameters[0], outer)
    inner = Call(modules[1], outer)
    unsharded.read(parameters[1], inner)
    assert unsharded.live == 20
    unsharded.leave(inner, False)
    assert unsharded.live == 10
    unsharded.leave(outer, False)
    assert unsharded.live == 0


def test_another_order_than_expected_ends_the_guessing():
    unsharded, parameters, modules, collectives = of_sizes(10, 10, 10, most=100)
    for order in ([0, 1, 2], [0, 2, 1]):
        unsharded.begin_step()
        forward(unsharded, [parameters[each] for each in order], [modules[each] for each in order])
        unsharded.end_step()
    # 1 had been launched, and was found; nothing was fetched twice.
    assert len(collectives.begun) == 6
    assert unsharded.live == 0


def test_a_unit_stays_for_the_call_of_its_module():
    """Though it is read in a call below; one whose module is not called stays for the call that reads."""
    unsharded, parameters, modules, _ = of_sizes(10, 10, most=100)
    outer = Call(modules[0])
    inner = Call(nn.Module(), outer)
    unsharded.read(parameters[0], inner)
    unsharded.read(parameters[1], inner)
    unsharded.leave(inner, False)
    assert unsharded.live == 10
    unsharded.leave(outer, False)
    assert unsharded.live == 0


def test_in_backward_the_last_gradient_gives_a_unit_back():
    unsharded, parameters, _, _ = of_sizes(10, 10, most=100)
    for number in (0, 0, 1):
        unsharded.expect("microbatch", parameters[number])
    unsharded.unshard_for_backward(unsharded.units[0], 0, "microbatch")
    unsharded.on_grad("microbatch", parameters[0])
    assert unsharded.live == 10
    unsharded.unshard_for_backward(unsharded.units[1], 0, "microbatch")
    assert unsharded.live == 20  # a gradient of the first is due
    unsharded.on_grad("microbatch", parameters[0])
    assert unsharded.live == 10
    unsharded.end_backward("microbatch")  # the gradient of the second does not come
    assert unsharded.live == 0


def test_in_backward_what_is_frozen_makes_room():
    unsharded, _, _, _ = of_sizes(10, 10, most=100)
    for unit in unsharded.units:
        unsharded.unshard_for_backward(unit, 0, "microbatch")
        assert unsharded.live == 10


def test_a_parameter_that_was_modified_holds_nobody_else_up():
    unsharded, _, _, _ = of_sizes(10, 10, most=100)
    for unit in unsharded.units:
        unsharded.expect(None, unit.shards[0].parameter)
    whole = [unsharded.unshard_for_backward(unit, 0, None) for unit in reversed(unsharded.units)]
    whole[0].add_(1)
    assert unsharded.live == 20
    with pytest.raises(ShardingError, match="'p1' was modified in place"):
        unsharded.reshard_all()
    assert (unsharded.live, unsharded._live_units, unsharded._storages) == (0, {}, {})


# On ranks. Memory is looked at from outside: by weak references to the storages of all that was ever unsharded.


class Living:
    """The elements of gathered parameters that this rank's memory has, and the most that it ever had."""

    def __init__(self, model):
        self._storages, self.most, living = [], 0, self

        class Watched(Unit):
            __slots__ = ()

            def full_tensors(self, gathered):
                for whole in Unit.full_tensors(self, gathered):
                    living._storages.append(
                        (StorageWeakRef(whole.untyped_storage()), whole.numel())
                    )
                    living.most = max(living.most, living.elements)
                    yield whole

        for unit in model.sharding.unsharded.units:
            unit.__class__ = Watched

    @property
    def elements(self):
        self._storages = [each for each in self._storages if not each[0].expired()]
        return sum(size for _, size in self._storages)


def lives(checkpointed):
    """After each part of each step; without the garbage collector."""
    module = Layers()
    if checkpointed:
        smp.set_activation_checkpointing(module.layers[0])
        smp.set_activation_checkpointing(module.layers[1])
    model, optimizer = wrapped(module)
    found, living = [], Living(model)

    @smp.step
    def observed(model, x):
        y = model(x)
        found.append(living.elements)
        model.backward(y.pow(2).mean())
        found.append(living.elements)

    gc.disable()
    try:
        for number in range(3):
            observed(model, batch(number))
            optimizer.step()
            found.append(living.elements)
        y = model(batch())
        found.append(living.elements)
        model.backward(y.mean())
        found.append(living.elements)
        with torch.no_grad():
            model(batch())
        found.append(living.elements)
    finally:
        gc.enable()
    return found, living.most


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_memory_is_free_between_forward_and_backward_and_after_a_step(
    smp_world, microbatches, checkpointed
):
    for found, most in smp_world.run(
        lives, checkpointed, ranks=2, config=config(2, microbatches=microbatches)
    ):
        assert set(found) == {0}
        assert most > 0


@pytest.mark.smp(ranks=2, ddp=True, sharded_data_parallel_degree=2)
def test_the_former_name_warns(smp):
    model = smp.DistributedModel(nn.Linear(2, 2))
    with pytest.warns(DeprecationWarning, match=r"is called model\.sharding\.unsharded"):
        assert model.sharding.gathered is model.sharding.unsharded


def limited():
    """The most that is whole at once, counted here and by the engine; gathers a step."""
    model, optimizer = wrapped(Layers())
    unsharded, traffic = model.sharding.unsharded, model.sharding.collectives.traffic
    counts, living = [], Living(model)
    for number in range(3):
        mark = traffic.mark()
        unsharded.mark()
        step(model, batch(number))
        counts.append(traffic.calls(mark, "all_gather"))
        optimizer.step()
    return living.most, unsharded.peak, counts, [unit.numel for unit in unsharded.units]


@pytest.mark.parametrize("most", [300, 346, 347, 10**9])
def test_the_limit_holds_and_each_unit_is_gathered_twice(smp_world, most):
    # In use at once: the root's unit, 58, and a layer, 144.
    for living, peak, counts, sizes in smp_world.run(
        limited, ranks=2, config=config(2, sdp_max_live_parameters=most)
    ):
        assert sizes == [58, 144, 144, 144]
        assert peak == (346 if most >= 346 else 202)
        assert living <= peak <= max(most, 202)
        assert counts == [8, 8, 8]


def test_a_limit_below_what_is_used(smp_world):
    for living, peak, _, sizes in smp_world.run(
        limited, ranks=2, config=config(2, sdp_max_live_parameters=1)
    ):
        # Units of one parameter each; a matrix and its bias are used together.
        assert len(sizes) == 16
        assert living <= peak == 72


@pytest.mark.parametrize("most", [1, 146, 300])
def test_the_limit_changes_no_bit(smp_world, most):
    same(smp_world, train, sdp_max_live_parameters=most, microbatches=2)


def without_prefetch():
    model, optimizer = wrapped(Layers())
    unsharded, traffic = model.sharding.unsharded, model.sharding.collectives.traffic
    results = []
    for prefetch in (True, False):
        unsharded.prefetch = prefetch
        for number in range(2):
            mark = traffic.mark()
            unsharded.mark()
            optimizer.zero_grad()
            loss = step(model, batch(number)).stack()
            calls = traffic.calls(mark, "all_gather")
        results.append((loss, outcome(model)["gradients"], calls, unsharded.peak))
    return results


def test_prefetch_changes_memory_only(smp_world):
    for (loss, gradients, calls, peak), (other, others, more, less) in smp_world.run(
        without_prefetch, ranks=2, config=config(2)
    ):
        assert torch.equal(loss, other)
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)
        assert calls == more == 8
        assert (peak, less) == (346, 202)


def checkpointed_gathers():
    module = Layers()
    for layer in module.layers:
        smp.set_activation_checkpointing(layer)
    model, optimizer = wrapped(module)
    traffic, counts = model.sharding.collectives.traffic, []
    for number in range(2):
        mark = traffic.mark()
        step(model, batch(number))
        counts.append(traffic.calls(mark, "all_gather"))
        optimizer.step()
    return counts


def test_checkpointed_activations_take_no_gather_more(smp_world):
    assert smp_world.run(checkpointed_gathers, ranks=2, config=config(2)) == [[8, 8], [8, 8]]


def flat():
    """How many tensors there are after each step, without the garbage collector."""
    model, optimizer = wrapped(Layers(2))
    counts = []
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            step(model, batch(number))
            optimizer.step()
            optimizer.zero_grad()
            smp.barrier()
            if number in (4, 19) and smp.rank() == 0:
                counts.append(
                    sum(type(each) in (torch.Tensor, nn.Parameter) for each in gc.get_objects())
                )
            smp.barrier()
    finally:
        gc.enable()
    return counts


@pytest.mark.parametrize("degree", [1, 2])
def test_steps_leave_no_tensor_to_the_garbage_collector(smp_world, degree):
    before, after = smp_world.run(flat, ranks=2, config=config(degree))[0]
    assert after == before


def delayed(how):
    """The same values; and of what is made, no rank holds more than one parameter at a time whole."""
    with {"delayed": smp.delay_param_initialization, "creation": smp.model_creation}[how]():
        module = Layers()
    model, optimizer = wrapped(module)
    loss = step(model, batch()).stack()
    optimizer.step()
    return loss, outcome(model)


def eager():
    model, optimizer = wrapped(Layers())
    loss = step(model, batch()).stack()
    optimizer.step()
    return loss, outcome(model)


@pytest.mark.parametrize("how", ["delayed", "creation"])
def test_delayed_initialization_gives_the_same_values(smp_world, how):
    whole = same(smp_world, eager)
    for (one, _), (two, _) in zip(whole, same(smp_world, delayed, how), strict=True):
        assert torch.equal(one[0], two[0])
        assert all(
            torch.equal(one[1]["state"][name], value) for name, value in two[1]["state"].items()
        )


def test_a_rank_keeps_its_parts_only(smp_world):
    whole = sum(parameter.nbytes for parameter in Layers().parameters())
    assert smp_world.run(kept_bytes, ranks=2, config=config(2)) == [whole // 2] * 2


def kept_bytes():
    """Of all storages that parameters lie in, each once."""
    with smp.delay_param_initialization():
        module = Layers()
    model, _ = wrapped(module)
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in model.parameters()
    }
    return sum(storages.values())
