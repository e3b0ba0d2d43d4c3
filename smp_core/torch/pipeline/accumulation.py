"""The ledger of a step: gradients summed within each microbatch, and folded over microbatches.

The published order. Within a microbatch contributions are added as backward reaches them: a module
call counts once per parameter (uses.py), the last call first; a microbatch is one thread of control
whichever ranks it passes, so that is the order on every partition. Microbatches are folded from the
left in index order, whatever order they end in: a sum waits until those before it have been folded,
and is freed by it. All of it in the parameter's dtype, as plain PyTorch accumulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from smp_core.errors import SmpError


class Listener(Protocol):
    """Who wants to know early which totals seem to be complete (gradients.py)."""

    def ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """All that was expected has come; the tensor does not change."""

    def late(self, parameter: nn.Parameter) -> None:
        """Something else is coming for a parameter that was ready."""


class Ledger:
    """Gradients of one step on one rank, of the parameters that this rank holds.

    ``add`` and ``close`` may come for several microbatches in turn. A parameter that no microbatch has
    a gradient for is not in the totals. Sparse gradients stay sparse, and are coalesced.

    The listener hears of parameters during the last microbatch, once those before it are folded, in
    the thread that calls ``add``; not of those with hooks of the user's, which see the sum at the end.
    """

    def __init__(self, microbatches: int, listener: Listener | None = None) -> None:
        if microbatches < 1:
            raise ValueError(f"a step has at least one microbatch, not {microbatches}")
        self._microbatches = microbatches
        self._sums: dict[int, dict[nn.Parameter, torch.Tensor]] = {}
        self._closed: set[int] = set()  # waiting for an earlier microbatch
        self._next = 0
        self._totals: dict[nn.Parameter, torch.Tensor] = {}
        self._listener = listener
        self._expected: Counter[nn.Parameter] = Counter()  # in the last microbatch
        self._told: set[nn.Parameter] = set()

    def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
        """A contribution to the microbatch may come, and is not to be overtaken by ``ready``."""
        if self._listener is not None and microbatch == self._microbatches - 1:
            self._expected[parameter] += 1
            if parameter in self._told:
                self._told.remove(parameter)
                self._listener.late(parameter)

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add one contribution to the sum of the microbatch; the tensor belongs to the ledger.

        Raises SmpError after ``close(microbatch)``: a late contribution is never lost.
        """
        if microbatch < self._next or microbatch in self._closed:
            raise SmpError(
                f"a gradient of shape {tuple(parameter.shape)} arrived for microbatch {microbatch}, whose backward "
                "has ended; call backward inside the step function only"
            )
        sums = self._sums.setdefault(microbatch, {})
        known = sums.get(parameter)
        sums[parameter] = gradient if known is None else _add(known, gradient)
        if self._listener is not None and microbatch == self._microbatches - 1:
            self._expected[parameter] -= 1
            if self._next == microbatch and self._expected[parameter] == 0:
                self._tell(self._listener, parameter, sums[parameter])

    def _tell(self, listener: Listener, parameter: nn.Parameter, last: torch.Tensor) -> None:
        if not parameter._backward_hooks:
            known = self._totals.get(parameter)
            self._told.add(parameter)
            # Of its own memory: the sums may go on.
            listener.ready(parameter, last.clone() if known is None else known + last)

    def close(self, microbatch: int) -> None:
        """The microbatch contributes no more: its parameters' hooks (``p.register_hook``) see its sums,
        and what can be folded is folded.
        """
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
            self._next += 1
        if self._listener is not None and self._next == self._microbatches - 1:
            for parameter, gradient in self._sums.get(self._next, {}).items():
                if self._expected[parameter] == 0 and parameter not in self._told:
                    self._tell(self._listener, parameter, gradient)

    @property
    def waiting(self) -> int:
        """How many microbatches have sums that are not folded yet."""
        return len(self._sums)

    @property
    def complete(self) -> bool:
        """Whether all microbatches are closed."""
        return self._next == self._microbatches

    def totals(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """The sums over all microbatches. Raises SmpError if one is not closed."""
        if not self.complete:
            raise SmpError(
                f"the step has {self._microbatches} microbatches, of which {self._next} are folded"
            )
        return self._totals


def _add(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """``total + gradient``, in the memory of ``total`` where possible: both are the ledger's."""
    if total.is_sparse and gradient.is_sparse:
        # Coalesced first: each element is then the sum of two, in this order.
        return (total.coalesce() + gradient.coalesce()).coalesce()
    if total.is_sparse:
        return gradient + total
    return total.add_(gradient)


def _hooked(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient after the hooks that the user has registered on the parameter, in their order."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        if changed is not None:
            gradient = changed.clone()  # the hook's owner may keep it, and the ledger adds in place
    return gradient
