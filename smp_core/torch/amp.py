"""``smp.amp.GradScaler``: torch's loss scaler, with an overflow that all ranks know of
(API 1.9).

The pattern is torch's: ``scaler.scale(loss)`` inside the step, ``scaler.step(optimizer)`` and
``scaler.update()`` outside, on every rank. An infinity or NaN in the gradients of one rank makes every
rank of the world skip the update and lower the scale: a rank that went on alone would leave its
partition, or its replica, a step ahead.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.optim import Optimizer

from smp_core.topology import GroupKind
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.optimizer import DistributedOptimizer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` on the CPU, for all ranks together. Arguments, state and methods are torch's, in
    the order of the versions that SMP was written for: ``init_scale`` first.

    ``unscale_`` and ``step`` are collective over the world: every rank calls them, also one that owns
    no parameters, with or without gradients. A scaler that is not enabled does nothing, as torch's.
    Passing the scaler to a step function is harmless: it is not split.

    Gradients are unscaled where a script finds them: in ``p.grad``, whole also with ``shard_optimizer_state``.
    With ``fp16`` the optimizer scales losses itself, and a scaler that is enabled raises
    UnsupportedTrainingError when it is used.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            "cpu",  # whatever `device` says: "cuda" means the device that the model is on
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    def scale(self, outputs: Any) -> Any:
        """Scale outputs as torch's scaler does; a rank whose body does not run never calls this."""
        self._check()
        return super().scale(outputs)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """torch's, for this rank's gradients, and then the maximum of all ranks' findings."""
        shown: Any = optimizer
        if isinstance(optimizer, DistributedOptimizer):
            # With shard_optimizer_state the optimizer has parts, and a script clips the whole.
            shown = types.SimpleNamespace(param_groups=[{"params": optimizer.with_gradients()}])
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            shown, inv_scale, found_inf, allow_fp16
        )
        here = any(bool(each.item()) for each in found.values())
        runtime = sessions.current("smp.amp.GradScaler").runtime
        anywhere = runtime.fabric.objects.allgather(here, runtime.group(GroupKind.WORLD))
        device = torch.device("cpu")
        return {device: torch.full((), float(any(anywhere)), device=device)}

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale gradients as torch's scaler does, and agree over the world on infinities and NaN."""
        self._ready()
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
        """Update as torch's scaler does; no rank updates if any rank found an infinity or NaN."""
        self._ready()
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale as torch's scaler does; the new scale is the same on every rank."""
        self._ready()
        super().update(new_scale)

    def _ready(self) -> None:
        """torch makes the scale at the first ``scale``, which only ranks with a body call."""
        self._check()
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def _check(self) -> None:
        if self.is_enabled() and sessions.current("smp.amp.GradScaler").runtime.config.fp16:
            raise UnsupportedTrainingError(
                "smp.amp.GradScaler: with the configuration parameter fp16 model.backward scales losses, and "
                "optimizer.step unscales gradients; both together would scale twice. Leave the scaler out (or pass "
                "enabled=False), and give the loss scale to smp.DistributedOptimizer"
            )
