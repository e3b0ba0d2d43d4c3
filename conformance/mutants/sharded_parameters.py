"""Bugs of sharded parameters: layout, kept shards, unsharding, and the time until resharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp_core.torch as smp
from conformance.mutants.defences import unseen_drift
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core.errors import VerdictError
from smp_core.torch import session as sessions
from smp_core.torch.parameters import creation, registration
from smp_core.torch.pipeline import placement
from smp_core.torch.reduction import gather_plan
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.gather_plan import GatherPlan
from smp_core.torch.sharding import sharded_model, units
from smp_core.torch.sharding.sharded_parameter import ShardedParameter, Unit
from smp_core.torch.sharding.unsharding import Unsharded

BUGS = Bugs("sharded parameters")


def splits(patch: Patch, rule: Callable[[nn.Parameter, int], bool]) -> None:
    """Shard only parameters, among those of at least the threshold, for which ``rule`` is true."""

    def some(root: nn.Module, sharded: Sequence[tuple[str, nn.Parameter]], most: int) -> Any:
        least = sessions.current("the mutant").runtime.config.sdp_param_persistence_threshold
        return units.groups(root, [(name, p) for name, p in sharded if rule(p, least)], most)

    patch.setattr(sharded_model, "groups", some)


# ---- What is split -------------------------------------------------------------------------------


@BUGS.enter("SHARD-MEMORY", origin="B113")
def few_elements_are_whole(patch: Patch) -> None:
    """a parameter with fewer elements than there are ranks is not split"""
    splits(patch, lambda parameter, least: parameter.numel() >= smp.rdp_size())


@BUGS.enter("SHARD-MEMORY")
def frozen_are_whole(patch: Patch) -> None:
    """parameters that need no gradient are not split"""
    splits(patch, lambda parameter, least: parameter.requires_grad)


@BUGS.enter("SHARD-MEMORY", origin="B130")
def optimizer_state_is_whole(patch: Patch) -> None:
    """the optimizer's state is made for the whole parameter, of which a rank uses a part"""
    step = smp.DistributedOptimizer.step

    def wasting(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        for values in self.state.values():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim():
                    whole = value.new_zeros(value.numel() * smp.rdp_size())
                    values[key] = whole[: value.numel()].view(value.shape).copy_(value)
        return result

    patch.setattr(smp.DistributedOptimizer, "step", wasting)


# ---- What a rank keeps ---------------------------------------------------------------------------


@BUGS.enter("SHARD-INIT")
def every_rank_keeps_its_own_weights(patch: Patch) -> None:
    """each rank shards the weights that it made, not those of rank 0"""
    take = ShardedParameter.copy_from_full

    def own(self: ShardedParameter, value: Tensor) -> Tensor:
        here = self.parameter.data
        made = here.shape == self.shape and not here.is_meta
        return take(self, here if made else value)

    patch.setattr(ShardedParameter, "copy_from_full", own)


@BUGS.enter("SHARD-INIT")
def small_weights_are_not_sent(patch: Patch) -> None:
    """parameters that are not split keep the values that each rank made"""
    unseen_drift(patch)
    assign = placement.assign

    def some(tensor: Tensor, value: Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            assign(tensor, value)

    patch.setattr(placement, "assign", some)


@BUGS.enter("SHARD-DELAYED")
def parts_are_drawn_one_by_one(patch: Patch) -> None:
    """under delayed initialization a parameter is made as if it were flat"""
    value = creation.value

    def flat(session: Any, tensor: Tensor, name: str) -> Tensor:
        made = value(session, tensor, name)
        return made.t().reshape(made.shape) if made.dim() == 2 else made

    patch.setattr(creation, "value", flat)


@BUGS.enter("SHARD-EQUALS-PLAIN", origin="B013")
def last_part_is_lost(patch: Patch) -> None:
    """the last rank of several keeps zeros where its part is filled up with padding"""
    take = ShardedParameter.copy_from_full

    def losing(self: ShardedParameter, value: Tensor) -> Tensor:
        kept = take(self, value)
        return kept.zero_() if self.owned_numel < self.layout.shard_numel else kept

    patch.setattr(ShardedParameter, "copy_from_full", losing)


@BUGS.enter("SHARD-ANY-PARAMETER", origin="B004")
def parts_in_the_order_of_memory(patch: Patch) -> None:
    """the elements of a parameter that lies column by column are taken for rows"""
    patch.setattr(
        ShardedParameter, "shaped", lambda self, flat: flat.as_strided(self.shape, self.stride)
    )


# ---- How it becomes whole ------------------------------------------------------------------------


@BUGS.enter("SHARD-EQUALS-PLAIN", origin="B124")
def offsets_without_padding(patch: Patch) -> None:
    """the second parameter of a unit is looked for where it would begin without padding"""
    wholes = Unit.full_tensors

    def shifted(self: Unit, gathered: Sequence[Tensor]) -> Iterator[Tensor]:
        layout, (first, *others) = self.shards[0].layout, gathered
        if others:
            moved = torch.cat(others, 1).roll(layout.padded_numel - layout.numel, 1)
            others = list(torch.split(moved, self.lengths[1:], 1))
        return wholes(self, [first, *others])

    patch.setattr(Unit, "full_tensors", shifted)


@BUGS.enter("SHARD-HIERARCHICAL")
def places_for_nodes(patch: Patch) -> None:
    """after a hierarchical gather the shards are reordered by the inverse of the right order"""
    original = gather_plan.hierarchical

    def inverted(*args: Any) -> GatherPlan:
        route = original(*args)
        if route.order is None:
            return route
        order = tuple(route.order.index(row) for row in range(len(route.order)))
        return route._replace(order=order)

    patch.setitem(gather_plan.PLANNERS, "hierarchical", inverted)


@BUGS.enter("SHARD-LIVE")
def any_guess_is_right(patch: Patch) -> None:
    """a prefetch gathers the next unit's shards in place of its own, if the shapes agree"""
    prefetch = Unsharded._prefetch

    def wrong(self: Unsharded) -> None:
        before = set(self._live_units)
        prefetch(self)
        for number in set(self._live_units) - before:
            at = self._at or 0
            next_ = self.units[(self._expected[at + 1 :] or [number])[0]]
            if [each.shape for each in next_.shards] == [
                each.shape for each in self.units[number].shards
            ]:
                self._live_units[number].all_gather.result()
                gather = self._collectives.all_gather_parts(next_.flat, next_.lengths)
                self._live_units[number].all_gather = gather

    patch.setattr(Unsharded, "_prefetch", wrong)


# ---- For how long --------------------------------------------------------------------------------


@BUGS.enter("SHARD-REPLAYED", origin="B118")
def kept_over_the_update(patch: Patch) -> None:
    """unsharded parameters are never resharded, so a step uses those from before the update"""
    patch.setattr(Unsharded, "_reshard", lambda self, number: None)


@BUGS.enter("SHARD-FREED")
def freed_after_backward_only(patch: Patch) -> None:
    """parameters that a layer has used stay unsharded until the end of the step"""
    patch.setattr(Unsharded, "leave", lambda self, frame, backward: None)


@BUGS.enter("SHARD-LIVE-BOUND")
def nothing_makes_room(patch: Patch) -> None:
    """unused units are not resharded before the next one is gathered"""
    leave = Unsharded.leave
    patch.setattr(Unsharded, "leave", lambda self, frame, backward: leave(self, frame, True))
    patch.setattr(Unsharded, "_make_room", lambda self, wanted: None)


@BUGS.enter("SHARD-LIVE-BOUND")
def fetched_ahead_without_limit(patch: Patch) -> None:
    """prefetched units do not count against sdp_max_live_parameters"""
    prefetch = Unsharded._prefetch

    def unbounded(self: Unsharded) -> None:
        most, self._most = self._most, 10**9
        prefetch(self)
        self._most = most

    patch.setattr(Unsharded, "_prefetch", unbounded)


# ---- Parameters of other modules -----------------------------------------------------------------


@BUGS.enter("SHARD-OUTSIDE", origin="B095")
def registered_without_gradient(patch: Patch) -> None:
    """a registered parameter gets the gradients of its own module only"""
    whole = registration._Replacing._whole

    def detached(self: Any, value: Any) -> Any:
        found: Any = whole(self, value)
        return found if found is value else found.detach()

    patch.setattr(registration._Replacing, "_whole", detached)


@BUGS.enter("SHARD-SAME-MODEL", *ASSERTION, VerdictError, origin="B139")
def models_are_not_compared(patch: Patch) -> None:
    """a rank that has built another model than rank 0 is refused, the others are not"""
    check = placement._check_same

    def alone(session: Any, module: nn.Module) -> None:
        try:
            check(session, module)
        except Exception:
            if session.runtime.rank:
                raise

    patch.setattr(placement, "_check_same", alone)


# ---- From step to step ---------------------------------------------------------------------------


@BUGS.enter("SHARD-STEPS")
def gathers_bring_the_parameters_of_the_step_before(patch: Patch) -> None:
    """a step gathers the parameters that the step before it began with"""
    begin = Unsharded.begin_step
    gather = Collectives.all_gather_parts
    # Never cleared, because a mutant's process ends with its trial.
    kept: dict[Unit, tuple[Tensor, Tensor]] = {}

    def keeping(self: Unsharded, eager: bool = False) -> None:
        begin(self, eager)
        for unit in self.units:
            now = unit.flat.clone()
            kept[unit] = kept.get(unit, (now, now))[1], now

    def late(self: Collectives, flat: Tensor, lengths: Sequence[int]) -> Any:
        for unit, (before, _) in kept.items():
            if unit.flat is flat:
                return gather(self, before, lengths)
        return gather(self, flat, lengths)

    patch.setattr(Unsharded, "begin_step", keeping)
    patch.setattr(Collectives, "all_gather_parts", late)


@BUGS.enter("SHARD-STEPS")
def optimizer_forgets_shards(patch: Patch) -> None:
    """the optimizer's state of split parameters is made anew in every step"""
    step = smp.DistributedOptimizer.step

    def forgetting(self: Any, closure: Any = None) -> Any:
        if smp.state.cfg.sharded_data_parallel_degree > 1:
            self.state.clear()
        return step(self, closure)

    patch.setattr(smp.DistributedOptimizer, "step", forgetting)
