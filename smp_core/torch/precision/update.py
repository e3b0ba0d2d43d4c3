"""The preparation of an update in a 16-bit run: the overflow flag, the loss scale, the norm.

The flag is the maximum over the world, in one exchange: a step is skipped on all ranks or on none
(API 1.8, ENGINES 1.8). The norm is taken over the whole model's gradients, each element once,
on whichever ranks the element is.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence, Set

import torch
from torch import nn

from smp_core import reduction
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.parameters.split import split_of
from smp_core.torch.precision.masters import Masters, multiply
from smp_core.torch.session import TrainingSession


class Found(enum.IntEnum):
    """The state of the gradients, from the least to the worst."""

    NOTHING = 0  #: no gradients: nothing to update with
    FINITE = 1
    OVERFLOW = 2  #: an infinity or NaN


def look(targets: Iterable[nn.Parameter]) -> Found:
    """The state of this rank's gradients."""
    found = Found.NOTHING
    for target in targets:
        if target.grad is not None:
            found = Found.FINITE
            values = target.grad.coalesce().values() if target.grad.is_sparse else target.grad
            if not bool(torch.isfinite(values).all()):
                return Found.OVERFLOW
    return found


def look_everywhere(runtime: Runtime, targets: Iterable[nn.Parameter]) -> Found:
    """The state of the world's gradients, the same on every rank. Collective over the world."""
    world = runtime.group(GroupKind.WORLD)
    mine = look(targets)
    if len(world.ranks) == 1:
        return mine
    return Found(max(runtime.fabric.objects.allgather(int(mine), world)))


class Update:
    """The gradients of one rank between backward and update, in a run with masters.

    Their state is looked up once for each reduction: by ``clip`` or by ``ready``, whichever comes first.
    """

    def __init__(self, session: TrainingSession, masters: Masters) -> None:
        self._session, self._masters = session, masters
        self._known: tuple[tuple[int, int], Found] | None = None

    def _look(self, targets: Iterable[nn.Parameter]) -> Found:
        """Without fp16 each rank looks for itself, since nothing is skipped; so with a static scaler."""
        scaler, model = self._masters.scaler, self._session.model
        assert model is not None
        assert model.gradients is not None
        # The same on every rank of the world, also where this one has no parameters.
        key = self._session.steps, model.gradients.reductions
        if self._known is None or self._known[0] != key:
            dynamic = scaler is not None and scaler.dynamic
            found = look_everywhere(self._session.runtime, targets) if dynamic else Found.FINITE
            self._known = key, found
        return self._known[1]

    def ready(self, targets: Iterable[nn.Parameter]) -> Found:
        """The state of the gradients, which the scaler is told. Gradients that were looked at are not
        looked at again. Collective over the world with a dynamic scaler.
        """
        found, scaler = self._look(targets), self._masters.scaler
        self._known = None
        if scaler is not None and found is not Found.NOTHING:
            scaler.update_scale(found is Found.OVERFLOW)
        return found

    def clip(self, targets: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> float:
        """Clip the gradients by the norm of the whole model's; that norm, or -1 after an overflow."""
        if self._look(targets) is Found.OVERFLOW:
            return -1.0
        masters, model = self._masters, self._session.model
        assert model is not None
        scale = masters.take_scale(targets, masters.loss_scale)
        if model.sharding.clips:
            model.sharding.clip(targets, scale, max_norm)
            return float(model.sharding.norm)
        places = {
            masters.made(parameter): place
            for place, parameter in enumerate(model.get_module().parameters())
        }
        counted = sorted((each for each in targets if each in places), key=places.__getitem__)
        given = [(places[each], each.grad) for each in counted if each.grad is not None]
        split = None if masters.parts is None else GroupKind.RDP
        slices = {
            place
            for place, parameter in enumerate(model.get_module().parameters())
            if split_of(parameter) is not None
        }
        total = norm(self._session.runtime, given, float(norm_type), scale, split, slices)
        multiply(counted, coefficient(total, max_norm) / scale)
        multiply(set(targets).difference(counted), 1 / scale)  # none of the model's
        return total


def norm(
    runtime: Runtime,
    gradients: Sequence[tuple[int, torch.Tensor]],
    norm_type: float,
    scale: float,
    split: GroupKind | None,
    slices: Set[int] = frozenset(),
) -> float:
    """The norm of the gradients of the whole model, divided by ``scale``; the same bits on every rank.

    ``gradients`` are this rank's, by their parameter's place in the model, in its order; over the ranks of
    ``split`` each has a part of them, over the TP group each has its slice of those in ``slices``.
    Powers are summed in float64: within a part, then over the parts
    along the tree, then over parameters in the order of the model, so that it does not matter which
    rank of the pipeline has which. Collective over ``split``, the TP group and the PP group.
    """
    powers = {place: _power(gradient, norm_type, scale) for place, gradient in gradients}
    combine: Callable[[float, float], float] = _largest if math.isinf(norm_type) else _sum
    if split is not None and len(runtime.group(split).ranks) > 1:
        gathered = runtime.fabric.objects.allgather(powers, runtime.group(split))
        places = sorted({place for each in gathered for place in each})
        powers = {
            place: reduction.fold([each[place] for each in gathered if place in each], combine)
            for place in places
        }
    tensor = runtime.group(GroupKind.TP)
    if slices and len(tensor.ranks) > 1:
        gathered = runtime.fabric.objects.allgather(powers, tensor)
        for place in slices & powers.keys():
            powers[place] = reduction.fold([each[place] for each in gathered], combine)
    group = runtime.group(GroupKind.PP)
    if len(group.ranks) > 1:
        powers = {
            place: power
            for each in runtime.fabric.objects.allgather(powers, group)
            for place, power in each.items()
        }
    total = 0.0
    for place in sorted(powers):
        total = combine(total, powers[place])
    return total if math.isinf(norm_type) else _root(total, norm_type)


def _power(gradient: torch.Tensor, norm_type: float, scale: float) -> float:
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    values = values.reshape(-1).to(torch.float64) / scale
    if not values.numel():
        return 0.0
    if math.isinf(norm_type):
        return float(values.abs().max())
    if norm_type == 2:
        return float(values.square().sum())
    return float(values.abs().pow(norm_type).sum())


def _root(total: float, norm_type: float) -> float:
    if norm_type == 2 and total >= 0:
        return math.sqrt(total)
    return float(torch.tensor(total, dtype=torch.float64).pow(1 / norm_type))


def _sum(one: float, other: float) -> float:
    return one + other


def _largest(one: float, other: float) -> float:
    return one if math.isnan(one) or one > other else other


def coefficient(total: float, max_norm: float) -> float:
    """The factor for gradients of this norm: ``max_norm / (norm + 1e-6)``, at most 1; NaN for NaN,
    as in torch's ``clip_grad_norm_``.
    """
    factor = max_norm / (total + 1e-6)
    return 1.0 if factor > 1 else factor
