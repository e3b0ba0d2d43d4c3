"""The gradient ledger of a step: gradients are summed within each microbatch and folded over microbatches.

The published order has two parts. Within a microbatch, contributions are added as backward reaches them: one per module
call and parameter (uses.py), the last call first. A microbatch is one thread of control, so that order is the same on
every partition. Over microbatches, sums are folded from the left in index order. A microbatch that ends early keeps its
sum until all before it have been folded.

Sums have the parameter's dtype, as in plain PyTorch. For 16-bit parameters with float32 masters they are float32 from
the first contribution on (``Ledger.wide``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from smp_core.errors import SmpError
from smp_core.torch.execution import counted


class GradientListener(Protocol):
    """The reducer, which hears during the backward pass which totals seem complete (reduction/reducer.py)."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Return whether the listener has a use for the parameter's total before the end of the step."""

    def on_ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """Take the total of a parameter whose expected contributions have all come. The tensor does not change."""

    def on_late_grad(self, parameter: nn.Parameter) -> None:
        """Note that another contribution will come for a parameter that was ready."""


class Ledger:
    """The gradients of one step on one rank, for the parameters that this rank holds.

    ``add`` and ``close`` may alternate between microbatches. A parameter without a gradient in any microbatch is not in
    the totals. Sparse gradients stay sparse, and are coalesced.

    The listener is told of a parameter as soon as each microbatch has a contribution for each use of the parameter,
    or is closed. The thread that calls ``add`` or ``close`` calls the listener. With ``moves`` the listener gets the
    sum itself, and the totals keep only later contributions.
    """

    def __init__(
        self, microbatches: int, listener: GradientListener | None = None, *, moves: bool = False
    ) -> None:
        if microbatches < 1:
            raise ValueError(f"a step has at least one microbatch, not {microbatches}")
        self._microbatches = microbatches
        self._sums: dict[int, dict[nn.Parameter, torch.Tensor]] = {}
        self._closed: set[int] = set()  # closed microbatches that wait for an earlier one
        self._next = 0
        self._totals: dict[nn.Parameter, torch.Tensor] = {}
        self._listener, self._moves = listener, moves
        self._expected: dict[int, Counter[nn.Parameter]] = {}  # uses without a contribution yet
        self._told: set[nn.Parameter] = set()

    def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
        """Announce a contribution to the microbatch, so that ``on_ready`` waits for it."""
        if self._listener is not None:
            self._expected.setdefault(microbatch, Counter())[parameter] += 1
            if parameter in self._told:
                self._told.remove(parameter)
                self._listener.on_late_grad(parameter)

    wide = False  #: whether 16-bit gradients are summed in float32

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add one contribution to the sum of the microbatch. The ledger takes over the tensor.

        Raises SmpError after ``close(microbatch)``, so no contribution is lost silently.
        """
        if microbatch < self._next or microbatch in self._closed:
            raise SmpError(
                f"a gradient of shape {tuple(parameter.shape)} arrived for microbatch {microbatch}, whose backward "
                "has ended; call backward inside the step function only"
            )
        if self.wide and gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = gradient.to(torch.float32)
        sums = self._sums.setdefault(microbatch, {})
        known = sums.get(parameter)
        sums[parameter] = total = gradient if known is None else _add(known, gradient)
        counted.holds(counted.GRADIENTS, total)
        counted.happened("gradient")
        if self._listener is not None:
            self._expected.setdefault(microbatch, Counter())[parameter] -= 1
            self._tell(self._listener, parameter)

    def _tell(self, listener: GradientListener, parameter: nn.Parameter) -> None:
        """Tell the listener if all contributions seem to be there."""
        # Hooks of the user's on the parameter see the sum of a microbatch, which only close() has.
        if parameter._backward_hooks or parameter in self._told or not listener.takes(parameter):
            return
        for microbatch in reversed(range(self._next, self._microbatches)):
            expected = self._expected.get(microbatch)
            awaited = expected is None or parameter not in expected or expected[parameter] > 0
            if awaited and microbatch not in self._closed:
                return
        self._told.add(parameter)
        total = self._moved(parameter) if self._moves else self._total(parameter)
        listener.on_ready(parameter, total)

    def _total(self, parameter: nn.Parameter) -> torch.Tensor:
        """Fold the present sums into new memory, because contributions may still be added to them."""
        sums = [self._sums.get(each, {}) for each in range(self._next, self._microbatches)]
        parts = [each[parameter] for each in (self._totals, *sums) if parameter in each]
        total = parts[0].clone()
        for part in parts[1:]:
            total = _add(total, part)
        counted.holds(counted.GRADIENTS, total)
        return total

    def _moved(self, parameter: nn.Parameter) -> torch.Tensor:
        """Fold the present sums, and remove them from the ledger."""
        sums = [self._sums.get(each, {}) for each in range(self._next, self._microbatches)]
        parts = [each.pop(parameter) for each in (self._totals, *sums) if parameter in each]
        total = parts[0]
        for part in parts[1:]:
            total = _add(total, part)
        return total

    def close(self, microbatch: int) -> None:
        """End a microbatch: hooks of parameters (``p.register_hook``) see its sums, and the next sums are folded."""
        if not 0 <= microbatch < self._microbatches or microbatch < self._next:
            raise ValueError(f"microbatch {microbatch} of {self._microbatches} cannot be closed")
        if microbatch in self._closed:
            raise ValueError(f"microbatch {microbatch} is closed already")
        sums = self._sums.get(microbatch, {})
        for parameter, gradient in sums.items():
            if parameter._backward_hooks:
                sums[parameter] = _hooked(parameter, gradient)
        self._closed.add(microbatch)
        while self._next in self._closed:
            self._closed.remove(self._next)
            for parameter, gradient in self._sums.pop(self._next, {}).items():
                known = self._totals.get(parameter)
                self._totals[parameter] = gradient if known is None else _add(known, gradient)
            self._expected.pop(self._next, None)
            self._next += 1
        if self._listener is not None:
            for parameter in list(self._sums.get(self._microbatches - 1, {})):
                self._tell(self._listener, parameter)

    @property
    def waiting(self) -> int:
        """The number of microbatches whose sums are not folded yet."""
        return len(self._sums)

    @property
    def complete(self) -> bool:
        """True if all microbatches are closed."""
        return self._next == self._microbatches

    def totals(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """The sums over all microbatches. Raises SmpError if one is not closed."""
        if not self.complete:
            raise SmpError(
                f"the step has {self._microbatches} microbatches, of which {self._next} are folded"
            )
        return self._totals


def _add(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Compute ``total + gradient``, in the memory of ``total`` where possible. The ledger owns both."""
    if total.is_sparse and gradient.is_sparse:
        # Coalesce first: each element is then the sum of two values, in this order.
        return (total.coalesce() + gradient.coalesce()).coalesce()
    if total.is_sparse:
        return gradient + total
    return total.add_(gradient)


def _hooked(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient after the hooks that the user has registered on the parameter, in their order."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        if changed is not None:
            gradient = changed.clone()  # the ledger adds in place, and the hook may keep its tensor
    return gradient
