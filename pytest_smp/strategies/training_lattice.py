"""The certificate of cases that step after each window: several optimizer steps in a row round nowhere.

After a step weights are no whole numbers but dyadic ones, multiples of ``2**-e``. Learning rates,
momenta, decays and divisors are powers of two, so each step adds a known number of bits. A value that
is a polynomial of degree ``d`` in trained weights is a multiple of ``2**(-e d)``; so it is exact in float32,
in any order of sums, if its magnitude times ``2**(e d)`` is at most ``2**24``.

Where gradients do not depend on trained weights at all, weights may be any numbers: sums of gradients are
whole, and an elementwise optimizer does the same to each element wherever it lies. The losses and outputs
that such weights give, those after the first step, may round (``exact_outputs``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_models import build

_BITS = 24  # of a float32's significand
_FAR = 40  # a power of two so large that it stands out against every factor of a small model


class _Update(NamedTuple):
    """The bits after the point that one step of an optimizer adds, by the factor that adds them."""

    rate: int  #: of the learning rate
    momentum: int | None = None
    decay: int | None = None


#: Optimizers that stay dyadic, by the oracle's names.
_DYADIC = {
    "sgd": _Update(rate=3),
    "momentum": _Update(rate=3, momentum=1),
    "decayed": _Update(rate=3, momentum=1, decay=2),
}


class _Magnitudes(NamedTuple):
    """Bounds over one microbatch: of the values inside of the module and the loss, and of any gradient."""

    values: float
    gradients: float


def exact_outputs(case: Training) -> int:
    """The number of steps whose losses and outputs a certificate covers, too: all, or the first window's."""
    return case.passes if case.every and case.optimizer not in _DYADIC else case.steps


def certified(case: Training) -> bool:
    """Return whether no sum in this run can round, in whatever order.

    If there is a step after each window, losses and outputs past ``exact_outputs`` are excepted.
    """
    if not case.every:
        return oracle.certified(case)
    if case.divisor & (case.divisor - 1) or case.dtype != "float32":
        return False
    degree = _degree(case) * (2 if case.loss == "square" else 1)  # of the loss
    update = _DYADIC.get(case.optimizer)
    if update is None:
        # Gradients are whole numbers at degree 1, whatever the weights are.
        inside = _magnitudes(case, case.span)
        return degree == 1 and inside.gradients * _runs(case) <= float(2**_BITS)
    after_point = kept = 0  # bits of the weights, and of the momentum
    weights = _Weights(case)
    for window in range(case.windows):
        bounds = _magnitudes(case, max(weights.largest(), case.span))
        summed = bounds.gradients * _runs(case)
        gradient_bits = after_point * (degree - 1) + int(math.log2(case.divisor))
        moved = gradient_bits
        if update.decay is not None:
            moved = max(moved, after_point + update.decay)
        if update.momentum is not None:
            kept = moved = max(kept + update.momentum, moved)
        before = weights.largest()
        change = weights.step(window)
        stepped = max(after_point, moved + update.rate)
        for magnitude, bits in (
            (bounds.values, after_point * degree),
            (summed, gradient_bits),
            (2 * change, moved),  # the gradient, the decay and what is kept, added up
            (before + change, stepped),
        ):
            if magnitude > 0 and math.log2(magnitude) + bits > _BITS:
                return False
        after_point = stepped
    return True


def _runs(case: Training) -> int:
    """The microbatches whose gradients are summed in one window, in any divided form."""
    return case.microbatches * case.passes * case.dp * case.copies


def _degree(case: Training) -> int:
    """The degree of the model's output in trained weights: how it grows when they all do."""
    module = build(case.model, magnitudes=True).double()
    with torch.no_grad():
        for tensor in module.state_dict(keep_vars=True).values():
            tensor.fill_(2.0**_FAR if tensor.requires_grad else 1.0)
    x, out = _filled(case, module, 1.0)
    del x
    grown = float(out.detach().max())
    return int(math.log2(max(grown, 1.0)) / _FAR) if math.isfinite(grown) else _BITS + 1


def _filled(case: Training, module: nn.Module, value: float) -> tuple[Tensor, Tensor]:
    """A microbatch of this value, and what the module makes of it."""
    if case.model.inputs:
        shape = (case.rows, case.length, case.model.inputs)
        x = torch.full(shape, value, dtype=torch.float64)
    else:
        x = torch.zeros((case.rows, case.length), dtype=torch.int64)
    return x, module(x)


def _magnitudes(case: Training, largest: float) -> _Magnitudes:
    """Bounds for weights of at most this magnitude; see ``training_oracle.certified``."""
    module = build(case.model, magnitudes=True).double()
    with torch.no_grad():
        for tensor in module.state_dict(keep_vars=True).values():
            tensor.fill_(largest)
    with oracle._Largest() as seen:  # type: ignore[no-untyped-call]
        _, out = _filled(case, module, float(case.span))
    y = torch.full_like(out, case.span).detach()
    loss = ((out + y) ** 2 if case.loss == "square" else out * y).sum()
    (upstream,) = torch.autograd.grad(loss, out)
    with seen:
        out.backward(upstream)  # type: ignore[no-untyped-call]
    grads = [p.grad for p in module.parameters() if p.grad is not None and p.grad.numel()]
    values = max(seen.found, float(upstream.max()), float(loss.detach()), largest)
    return _Magnitudes(values, max(float(grad.max()) for grad in grads))


class _Weights:
    """The weights of the run, window by window, in float64."""

    def __init__(self, case: Training) -> None:
        self._case = dataclasses.replace(case)
        self._module = oracle.make(case).double()
        self._held = oracle.parameters(self._module)
        self._optimizer = oracle.optimizer_of(case, self._held.values())

    def largest(self) -> float:
        """The largest magnitude of any weight."""
        return max(float(each.detach().abs().max()) for each in self._held.values() if each.numel())

    def step(self, window: int) -> float:
        """Make the step of this window; a bound of what it adds up for any weight."""
        case = self._case
        self._optimizer.zero_grad(set_to_none=True)
        for replica in range(case.dp):
            for step in range(window * case.passes, (window + 1) * case.passes):
                for x, y in oracle.microbatches(case, replica, step):
                    wide = x.double() if x.is_floating_point() else x
                    loss = oracle.loss_of(case, self._module(wide), y.double())
                    loss.backward()  # type: ignore[no-untyped-call]
        given = [each for each in self._held.values() if each.grad is not None]
        for each in given:
            assert each.grad is not None
            each.grad /= case.divisor
        self._optimizer.step()
        added = [each.grad.abs().max() for each in given if each.grad is not None and each.numel()]
        kept = [
            value.abs().max()
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.numel()
        ]
        return max([0.0, *map(float, added), *map(float, kept)])
