"""What is whole, and when: gathered on demand, given back, never more than allowed; counted independently."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import smp_core.torch as smp
from smp_core.torch.exceptions import ShardingError
from smp_core.torch.sharding.gathered import Gathered
from smp_core.torch.sharding.shards import Unit, make_unit
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

    def all_gather(self, part):
        self.begun.append(part)
        return self

    def result(self):
        return self.begun[-1].clone()


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
        Gathered(collectives, units, most),
        [unit.shards[0].parameter for unit in units],
        modules,
        collectives,
    )


def forward(gathered, parameters, modules):
    """One call after the other; how much is live within each."""
    live = []
    for parameter, module in zip(parameters, modules, strict=True):
        call = Call(module)
        gathered.read(parameter, call)
        live.append(gathered.live)
        gathered.leave(call, False)
    return live


def test_the_next_one_is_fetched_once_the_order_is_known():
    gathered, parameters, modules, collectives = of_sizes(10, 10, 10, most=100)
    gathered.begin_step()
    assert forward(gathered, parameters, modules) == [10, 10, 10]
    gathered.end_step()
    gathered.begin_step()
    assert forward(gathered, parameters, modules) == [20, 20, 10]
    assert (gathered.peak, gathered.live, len(collectives.begun)) == (20, 0, 6)


@pytest.mark.parametrize(("most", "live"), [(19, [10, 10, 10]), (20, [20, 20, 10])])
def test_nothing_is_fetched_ahead_above_the_limit(most, live):
    gathered, parameters, modules, _ = of_sizes(10, 10, 10, most=most)
    for expected in ([10, 10, 10], live):
        gathered.begin_step()
        assert forward(gathered, parameters, modules) == expected
        gathered.end_step()
    assert gathered.peak <= most


def test_what_is_demanded_is_gathered_above_the_limit():
    gathered, parameters, modules, _ = of_sizes(10, 10, most=5)
    outer = Call(modules[0])
    gathered.read(parameters[0], outer)
    inner = Call(modules[1], outer)
    gathered.read(parameters[1], inner)
    assert gathered.live == 20
    gathered.leave(inner, False)
    assert gathered.live == 10
    gathered.leave(outer, False)
    assert gathered.live == 0


def test_another_order_than_expected_ends_the_guessing():
    gathered, parameters, modules, collectives = of_sizes(10, 10, 10, most=100)
    for order in ([0, 1, 2], [0, 2, 1]):
        gathered.begin_step()
        forward(gathered, [parameters[each] for each in order], [modules[each] for each in order])
        gathered.end_step()
    # 1 had set out, and was found; nothing was fetched twice.
    assert len(collectives.begun) == 6
    assert gathered.live == 0


def test_a_unit_stays_for_the_call_of_its_module():
    """Though it is read in a call below; one whose module is not called stays for the call that reads."""
    gathered, parameters, modules, _ = of_sizes(10, 10, most=100)
    outer = Call(modules[0])
    inner = Call(nn.Module(), outer)
    gathered.read(parameters[0], inner)
    gathered.read(parameters[1], inner)
    gathered.leave(inner, False)
    assert gathered.live == 10
    gathered.leave(outer, False)
    assert gathered.live == 0


def test_in_backward_the_last_gradient_gives_a_unit_back():
    gathered, parameters, _, _ = of_sizes(10, 10, most=100)
    for number in (0, 0, 1):
        gathered.expect("microbatch", parameters[number])
    gathered.again(gathered.units[0], 0, "microbatch")
    gathered.came("microbatch", parameters[0])
    assert gathered.live == 10
    gathered.again(gathered.units[1], 0, "microbatch")
    assert gathered.live == 20  # a gradient of the first is due
    gathered.came("microbatch", parameters[0])
    assert gathered.live == 10
    gathered.over("microbatch")  # the gradient of the second does not come
    assert gathered.live == 0


def test_in_backward_what_is_frozen_makes_room():
    gathered, _, _, _ = of_sizes(10, 10, most=100)
    for unit in gathered.units:
        gathered.again(unit, 0, "microbatch")
        assert gathered.live == 10


def test_a_parameter_that_was_modified_holds_nobody_else_up():
    gathered, _, _, _ = of_sizes(10, 10, most=100)
    for unit in gathered.units:
        gathered.expect(None, unit.shards[0].parameter)
    whole = [gathered.again(unit, 0, None) for unit in reversed(gathered.units)]
    whole[0].add_(1)
    assert gathered.live == 20
    with pytest.raises(ShardingError, match="'p1' was modified in place"):
        gathered.rest()
    assert (gathered.live, gathered._states, gathered._storages) == (0, {}, {})


# On ranks. Memory is looked at from outside: by weak references to the storages of all that was ever gathered.


class Living:
    """The elements of gathered parameters that this rank's memory has, and the most that it ever had."""

    def __init__(self, model):
        self._storages, self.most, living = [], 0, self

        class Watched(Unit):
            __slots__ = ()

            def wholes(self, gathered):
                for whole in Unit.wholes(self, gathered):
                    living._storages.append(
                        (StorageWeakRef(whole.untyped_storage()), whole.numel())
                    )
                    living.most = max(living.most, living.elements)
                    yield whole

        for unit in model.sharding.gathered.units:
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


def limited():
    """The most that is whole at once, counted here and by the engine; gathers a step."""
    model, optimizer = wrapped(Layers())
    gathered, traffic = model.sharding.gathered, model.sharding.collectives.traffic
    counts, living = [], Living(model)
    for number in range(3):
        mark = traffic.mark()
        gathered.mark()
        step(model, batch(number))
        counts.append(traffic.calls(mark, "all_gather"))
        optimizer.step()
    return living.most, gathered.peak, counts, [unit.numel for unit in gathered.units]


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
    gathered, traffic = model.sharding.gathered, model.sharding.collectives.traffic
    results = []
    for prefetch in (True, False):
        gathered.prefetch = prefetch
        for number in range(2):
            mark = traffic.mark()
            gathered.mark()
            optimizer.zero_grad()
            loss = step(model, batch(number)).stack()
            calls = traffic.calls(mark, "all_gather")
        results.append((loss, outcome(model)["gradients"], calls, gathered.peak))
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
