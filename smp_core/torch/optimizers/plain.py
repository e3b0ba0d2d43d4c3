"""The common part of optimizers that stand in for apex's: closures, ``set_grad_none``, and 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.fused import warn_plain


def computing_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's moments and arithmetic: float32 for a 16-bit parameter, else the parameter's own.

    The square of a float16 gradient overflows from 256 on, and is 0 below 2**-13.
    """
    return torch.promote_types(parameter.dtype, torch.float32)


class PlainOptimizer(Optimizer):
    """An optimizer of apex in plain operations of torch. A subclass defines ``update``, and its algorithm's name."""

    algorithm: ClassVar[str]
    #: The entries of a parameter's state that have its computing dtype.
    moments = ("exp_avg", "exp_avg_sq")
    set_grad_none = True

    def __init__(
        self, params: ParamsT, defaults: dict[str, object], amsgrad: bool, set_grad_none: bool
    ) -> None:
        name = type(self).__name__
        if amsgrad:
            raise UnsupportedTrainingError(f"{name}: {self.algorithm} has no amsgrad. Leave it out")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)
        warn_plain(f"smp.optimizers.{name}", f"{self.algorithm} in operations of torch")

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
        self._refuse_sparse()
        self.update()
        return result

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As torch's, but the moments of 16-bit parameters stay in float32."""
        given: StateDict = {}
        # The last hook sees the state that other hooks have made.
        with self.register_load_state_dict_pre_hook(lambda _, state: given.update(state)):
            super().load_state_dict(state_dict)
        for saved, group in zip(given["param_groups"], self.param_groups, strict=True):
            for number, parameter in zip(saved["params"], group["params"], strict=True):
                for name in given["state"].get(number, {}).keys() & set(self.moments):
                    self.state[parameter][name] = given["state"][number][name].to(
                        parameter.device, computing_dtype(parameter)
                    )

    def _refuse_sparse(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise UnsupportedTrainingError(
                        f"{type(self).__name__}.step: the parameter of shape {list(parameter.shape)} has a sparse "
                        f"gradient, and {self.algorithm} is for dense ones. Make its embedding with sparse=False"
                    )

    def update(self) -> None:
        """Change the parameters by their gradients."""
        raise NotImplementedError
