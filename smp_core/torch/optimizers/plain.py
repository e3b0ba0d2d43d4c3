"""The common part of optimizers that stand in for apex's: closures, and ``set_grad_none``."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.fused import warn_plain


class PlainOptimizer(Optimizer):
    """An optimizer of apex in plain operations of torch. A subclass defines ``update``, and its algorithm's name."""

    algorithm: ClassVar[str]
    set_grad_none = True

    def __init__(
        self, params: ParamsT, defaults: dict[str, object], amsgrad: bool, set_grad_none: bool
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise UnsupportedTrainingError(f"{name}: {self.algorithm} has no amsgrad. Leave it out")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)
        warn_plain(f"smp.optimizers.{name}", f"{self.algorithm} in operations of torch", above=1)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop or zero gradients; ``set_to_none`` is ``set_grad_none`` by default."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of each parameter that has a gradient. Returns the value of the closure."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.update()
        return result

    def update(self) -> None:
        """Change the parameters by their gradients."""
        raise NotImplementedError
