"""LAMB, an optimizer whose updates are scaled to the norm of each parameter.

Formulas: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020, algorithm 2.
Arguments: those that apex documents for its ``FusedLAMB``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, cast

import torch
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import ParamsT

from smp_core.torch.optimizers.plain import PlainOptimizer, computing_dtype


class _Group(TypedDict):
    params: list[torch.Tensor]
    lr: float
    bias_correction: bool
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_averaging: bool
    max_grad_norm: float | None
    adam_w_mode: bool
    use_nvlamb: bool


def _alone(norm: float) -> Sequence[float]:
    return [norm]


class FusedLAMB(PlainOptimizer):
    """LAMB in plain operations of torch; ``FusedLamb`` is the same class.

    For a gradient g of a parameter w the moments m and v are those of Adam, u is ``m / (sqrt(v) + eps)`` plus
    ``weight_decay * w``, and w changes by ``-lr * |w| / |u| * u``, by ``-lr * u`` where a norm is 0.

    Args:
        bias_correction: divide m and v by 1 minus the power of their beta, as Adam does.
        amsgrad: not supported; True raises UnsupportedTrainingError.
        adam_w_mode: False adds the weight decay to the gradient instead.
        grad_averaging: False adds g to m with the factor 1, instead of ``1 - betas[0]``.
        set_grad_none: the default of ``zero_grad``.
        max_grad_norm: the most that the norm of all gradients together may be: beyond it they are scaled down for the
            update. 0 or None: no limit.
        use_nvlamb: scale to the norm of w also in groups without weight decay.
    """

    #: The norms of all partitions' gradients, given that of this one's; ``smp.DistributedOptimizer`` sets another.
    gather_norms: Callable[[float], Sequence[float]] = staticmethod(_alone)
    algorithm = "LAMB"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        defaults: dict[str, object] = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "adam_w_mode": adam_w_mode,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)

    def update(self) -> None:
        """Change the parameters; with ``smp.DistributedOptimizer`` all ranks of the PP group call."""
        norms = [
            torch.linalg.vector_norm(each.grad, dtype=computing_dtype(each))
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        own = get_total_norm(norms)
        total = torch.tensor(self.gather_norms(float(own)), dtype=torch.float64).norm().item()
        for group in cast("list[_Group]", self.param_groups):
            most = group["max_grad_norm"]
            scale = most / total if most and total > most else 1.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad.to(computing_dtype(parameter)) * scale
                    self._update(parameter, gradient, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: _Group) -> None:
        state, decay = self.state[parameter], group["weight_decay"]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in self.moments:
                state[name] = torch.zeros_like(parameter, dtype=gradient.dtype)
        state["step"] += 1
        first, second = group["betas"]
        weight = parameter.to(gradient.dtype)
        if not group["adam_w_mode"]:
            gradient = gradient + decay * weight
        m, v, step = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
        m.mul_(first).add_(gradient, alpha=1 - first if group["grad_averaging"] else 1)
        v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if group["bias_correction"]:
            m, v = m / (1 - first**step), v / (1 - second**step)
        update = m / (v.sqrt() + group["eps"])
        if group["adam_w_mode"]:
            update += decay * weight
        ratio = 1.0
        if decay or group["use_nvlamb"]:
            sizes = float(weight.norm()), float(update.norm())
            ratio = sizes[0] / sizes[1] if all(sizes) else 1.0
        parameter.sub_(update, alpha=group["lr"] * ratio)
