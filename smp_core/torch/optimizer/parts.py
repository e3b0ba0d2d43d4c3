"""``shard_optimizer_state``: each replica's rank updates its own part of every parameter, and keeps the
optimizer's state of that part alone (API 1.8).

Parameters and gradients stay whole. A parameter is laid out flat, padded, in equal parts over the RDP
group (reduction/layout.py); the masters (masters.py) are this rank's parts, and after an update the parts
of all are gathered. An elementwise optimizer gives the bits that it gives on whole parameters; others are refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.optimizers import FusedLAMB, FusedNovoGrad
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.layout import Layout, bins

#: The most elements that are gathered at a time; a larger parameter is alone.
_MOST = 2**24

#: Optimizers whose update of an element depends on others than that element.
_NOT_ELEMENTWISE = (
    FusedLAMB,
    FusedNovoGrad,
    *(
        getattr(torch.optim, name)
        for name in ("LBFGS", "Adafactor", "Muon", "SparseAdam")
        if hasattr(torch.optim, name)
    ),
)


class OwnParts:
    """The split of one rank's masters over its RDP group. Made by all ranks at the same point."""

    def __init__(self, runtime: Runtime) -> None:
        self.collectives = Collectives(runtime, GroupKind.RDP, None)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor, 1-D, in row-major order; a view where it is contiguous."""
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        layout = Layout(tensor.numel(), self.collectives.size)
        return dense.reshape(-1)[slice(*layout.owned_range(self.collectives.rank))]

    def gather(self, parameters: Iterable[nn.Parameter], own: Iterable[torch.Tensor]) -> None:
        """Give parameters the values of the ranks' own parts of them, in place. Every rank of the RDP
        group calls this with the same parameters; ``own`` are the changed results of :meth:`own` for each of them.
        """
        by_dtype: dict[torch.dtype, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        for parameter, part in zip(parameters, own, strict=True):
            by_dtype.setdefault(parameter.dtype, []).append((parameter, part))
        for pairs in by_dtype.values():
            for bin_ in bins([parameter.numel() for parameter, _ in pairs], _MOST):
                self._gather([pairs[number] for number in bin_])

    def _gather(self, pairs: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Make parameters of one dtype whole again from the parts of all ranks."""
        size = self.collectives.size
        layouts = [Layout(parameter.numel(), size) for parameter, _ in pairs]
        sent = pairs[0][1].new_zeros(sum(layout.shard_numel for layout in layouts))
        start = 0
        for layout, (_, part) in zip(layouts, pairs, strict=True):
            sent[start : start + part.numel()] = part
            start += layout.shard_numel
        rows = self.collectives.all_gather(sent).result().view(size, -1)
        start = 0
        with torch.no_grad():
            for layout, (parameter, _) in zip(layouts, pairs, strict=True):
                whole = layout.full(rows[:, start : start + layout.shard_numel])
                parameter.copy_(whole.view(parameter.shape))
                start += layout.shard_numel


def check_elementwise(optimizer: Optimizer, what: str) -> None:
    """Raise UnsupportedTrainingError for an optimizer whose result on parts differs from that on whole
    parameters, or in rounding, as far as that is known; ``what`` is the configuration that splits.
    """
    check_parts(optimizer, what)
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedTrainingError(
            f"smp.DistributedOptimizer: {type(optimizer).__name__}(fused=True) rounds an element by where it lies "
            f"in memory, and with {what} it lies elsewhere (docs/spec/engines.md#2.1). Leave fused out"
        )


def check_parts(optimizer: Optimizer, what: str) -> None:
    """Raise UnsupportedTrainingError for an optimizer that is known to depend on more than an element and its gradient;
    ``what`` splits parameters.
    """
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise UnsupportedTrainingError(
            f"smp.DistributedOptimizer: {type(optimizer).__name__} does not update each element by itself, and "
            f"with {what} it would see parts of parameters. Use an elementwise optimizer, as Adam, or leave {what} out"
        )
