"""NovoGrad, an optimizer whose second moment is one number for each parameter.

Formulas: Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks,
2019, algorithm 1. Arguments: those that apex documents for its ``FusedNovoGrad``.
"""

from __future__ import annotations

import math
from typing import TypedDict, cast

import torch
from torch.optim.optimizer import ParamsT

from smp_core.errors import ArgumentError
from smp_core.torch.optimizers.plain import PlainOptimizer, computing_dtype


class _Group(TypedDict):
    params: list[torch.Tensor]
    lr: float
    bias_correction: bool
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_averaging: bool
    norm_type: int
    init_zero: bool
    reg_inside_moment: bool


class FusedNovoGrad(PlainOptimizer):
    """NovoGrad in plain operations of torch.

    For a gradient g of a parameter w the second moment v is the running mean of ``|g|**2``, m that of g, and w changes
    by ``-lr * (m / (sqrt(v) + eps) + weight_decay * w)``. The paper's algorithm is the one with ``bias_correction`` and
    ``grad_averaging`` False and ``reg_inside_moment`` True.

    Args:
        bias_correction: divide m and v by 1 minus the power of their beta, as Adam does.
        amsgrad: not supported; True raises UnsupportedTrainingError.
        reg_inside_moment: m is the running mean of ``g / (sqrt(v) + eps) + weight_decay * w`` instead.
        grad_averaging: False adds to m with the factor 1, instead of ``1 - betas[0]``.
        norm_type: 2, or 0 for the largest absolute value, of which v is the running mean. Others raise ArgumentError.
        init_zero: v begins with 0, instead of the first step's norm.
        set_grad_none: the default of ``zero_grad``.
    """

    algorithm = "NovoGrad"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise ArgumentError(
                f"FusedNovoGrad: norm_type={norm_type!r}: 2, or 0 for the largest absolute value"
            )
        defaults: dict[str, object] = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
            "reg_inside_moment": reg_inside_moment,
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)

    def update(self) -> None:
        """Change the parameters, each by itself."""
        for group in cast("list[_Group]", self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad.to(computing_dtype(parameter))
                    self._update(parameter, gradient, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: _Group) -> None:
        state, decay = self.state[parameter], group["weight_decay"]
        order = group["norm_type"]
        moment = gradient.norm() ** 2 if order == 2 else _largest(gradient)
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=gradient.dtype)
            state["exp_avg_sq"] = torch.zeros_like(moment) if group["init_zero"] else moment.clone()
        state["step"] += 1
        first, second = group["betas"]
        m, v, step = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
        v.mul_(second).add_(moment, alpha=1 - second)
        corrections = 1.0, 1.0
        if group["bias_correction"]:
            corrections = 1 - first**step, 1 - second**step
        mean = v / corrections[1] if order == 0 else v.sqrt() / math.sqrt(corrections[1])
        denominator = mean + group["eps"]
        weight = parameter.to(gradient.dtype)
        added = gradient / denominator + decay * weight if group["reg_inside_moment"] else gradient
        m.mul_(first).add_(added, alpha=1 - first if group["grad_averaging"] else 1)
        update = m / corrections[0]
        if not group["reg_inside_moment"]:
            update = update / denominator + decay * weight
        parameter.sub_(update, alpha=group["lr"])


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    """The largest absolute value; 0 for an empty gradient."""
    return gradient.abs().amax() if gradient.numel() else gradient.new_zeros(())
