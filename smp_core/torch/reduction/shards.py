"""The questions of the reducer to the model's sharding, and the answers where nothing is sharded."""

from __future__ import annotations

from typing import Protocol

import torch

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.reduction import policy
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.layout import Layout
from smp_core.torch.reduction.policy import Options, ReductionPolicy


class ReducedShard(Protocol):
    """The shard that a rank keeps of a parameter (sharding/sharded_parameter.py)."""

    @property
    def layout(self) -> Layout:
        """The split of the elements over the ranks."""

    @property
    def padded(self) -> torch.Tensor:
        """This rank's shard, with its padding."""

    @property
    def owned_numel(self) -> int:
        """The elements of the shard that are no padding."""


class GradientShards(Protocol):
    """The gradients that are sharded, and the ranks that they are sharded over."""

    @property
    def collectives(self) -> Collectives:
        """The collectives over the shard group and the replicate group."""

    def all_reducer(self, split: bool) -> Collectives:
        """The collectives whose replicate group has the ranks that an all-reduce sums over: of the parameters that each
        tp rank has a slice of, or of the others.
        """

    def summands(self, split: bool) -> int:
        """The number of ranks whose mean loss a summed gradient is of: the divisor of the average over data."""

    @property
    def gather_digest(self) -> int:
        """A checksum of the units that were gathered in this step, in order; the same on all ranks of a shard group."""

    def shard(self, parameter: torch.Tensor) -> ReducedShard | None:
        """The shard of a parameter on this rank; None if the parameter is whole on every rank."""

    def policy(self, options: Options, wide: bool) -> ReductionPolicy:
        """The reduction of gradients; ``wide``: there are float32 masters of 16-bit parameters."""


class WholeGradients:
    """The gradients of a model that is not sharded: a shard group of one rank, and the DP group as replicate group; the
    RDP group for parameters that each tp rank has a slice of (API 1.10).

    Made by all ranks at the same point, as ``Collectives`` are.
    """

    gather_digest = 0  # nothing is gathered

    def __init__(self, runtime: Runtime) -> None:
        self.collectives = Collectives(runtime, GroupKind.SHARDING, GroupKind.DP)
        self._of_slices = self.collectives
        if runtime.topology.tensor > 1:
            self._of_slices = Collectives(runtime, GroupKind.SHARDING, GroupKind.RDP)
        self._prescaled = runtime.config.prescaled_batch

    def all_reducer(self, split: bool) -> Collectives:
        return self._of_slices if split else self.collectives

    def summands(self, split: bool) -> int:
        # The gradient of a slice is of the samples of the whole TP group: of all tp ranks' losses, or, where the batch
        # is prescaled, of the one loss that they share.
        return self.all_reducer(split and self._prescaled).replicas

    def shard(self, parameter: torch.Tensor) -> None:
        """No parameter is sharded."""

    def policy(self, options: Options, wide: bool) -> ReductionPolicy:
        """The reduction of plain data parallelism; ``wide``: there are float32 masters of 16-bit parameters."""
        return policy.plain(options, wide)
