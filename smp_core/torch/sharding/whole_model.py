"""The sharding of a model that is not sharded: the calls of ShardedModel, with nothing to do in them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace

import torch
from torch import nn

from smp_core.runtime import Runtime
from smp_core.torch.execution.source import WHOLE
from smp_core.torch.precision.masters import multiply
from smp_core.torch.reduction.shards import GradientShards, WholeGradients
from smp_core.torch.reduction.traffic import Traffic
from smp_core.torch.sharding.eager_calls import EagerCalls
from smp_core.torch.sharding.sharded_parameter import ShardedParameter

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def _warn(former: str, name: str) -> None:
    warnings.warn(
        f"model.sharding.{former} is smp_core.torch.observe.{name}(model) now",
        DeprecationWarning,
        stacklevel=3,
    )


class WholeModel:
    """No parameter is sharded: each rank holds all parameters of its partition, and holds them all the time.

    The class has no state, so ``WHOLE_MODEL`` is the only instance. ShardedModel documents the calls.
    """

    degree = 1
    place: tuple[int, int] | None = None  # there are no shards, so none is this rank's
    clips = False
    norm = 0.0
    unsharded = WHOLE
    unsharded_peak = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic()  # plain data parallelism is not counted

    def eager_calls(self, wide: bool) -> EagerCalls:
        return EagerCalls(wide)

    def gradient_shards(self, runtime: Runtime) -> GradientShards:
        return WholeGradients(runtime)

    @property
    def gathered(self) -> SimpleNamespace:
        """The counters of version 0.1, for one version."""
        _warn("gathered.peak", "unsharded_peak")
        return SimpleNamespace(peak=0, live=0)

    @property
    def collectives(self) -> SimpleNamespace:
        """The counters of version 0.1, for one version."""
        _warn("collectives.traffic", "traffic")
        return SimpleNamespace(traffic=self.traffic)

    # Steps.

    def begin_step(self, *, eager: bool = False) -> None:
        """Do nothing, since nothing is gathered in a step."""

    def end_step(self, failed: bool) -> bool:
        return True  # nobody waits for a shard, so ranks meet at the end of a failed step, too

    # Parameters.

    def shard(self, parameter: torch.Tensor) -> ShardedParameter | None:
        return None

    def describe(self) -> None:
        """Do nothing, since scripts read the attributes of sharded parameters on sharded models alone."""

    def full_tensors(
        self, given: Sequence[tuple[nn.Parameter, torch.Tensor]]
    ) -> Iterable[torch.Tensor]:
        return [own for _, own in given]

    def unshard(self) -> None:
        """Do nothing, since parameters are whole."""

    def reshard(self) -> None:
        """Do nothing, since parameters stay whole."""

    def full_tree(
        self, module: nn.Module, keep: Callable[[nn.Parameter], bool] | None = None
    ) -> AbstractContextManager[None]:
        return _NOTHING

    def loading_tree(self, module: nn.Module) -> AbstractContextManager[None]:
        return _NOTHING

    def record(self) -> dict[str, object] | None:
        return None

    # Clipping.

    def clip(
        self, targets: Sequence[nn.Parameter], scale: float = 1.0, max_norm: float | None = None
    ) -> None:
        multiply(targets, 1 / scale)

    def has_shards(self, gradients: Sequence[torch.Tensor]) -> bool:
        return False


WHOLE_MODEL = WholeModel()
