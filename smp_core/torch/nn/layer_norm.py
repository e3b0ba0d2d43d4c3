"""Layer normalisation: the plain one under its name in SMP, and that of channels that are split over the TP group."""

from __future__ import annotations

from abc import ABCMeta

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from smp_core.torch.fused import warn_plain
from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.tensor_parallel.exchange import TensorGroup


class FusedLayerNorm(nn.LayerNorm, metaclass=ABCMeta):
    """``torch.nn.LayerNorm`` under the name that scripts import. Nothing is fused on the CPU (API 1.9), which the first
    one in a process says by a PlainEquivalentWarning. Each layer normalisation of a distributed module is an instance.

    Args:
        normalized_shape, eps, elementwise_affine: as torch's.
    """

    _asked_for = True  # by a script

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
    ) -> None:
        if self._asked_for:
            warn_plain("smp.nn.FusedLayerNorm", "torch.nn.LayerNorm")
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input; of a float32 input and a 16-bit weight, in the weight's dtype."""
        if self.weight is None or input.dtype == self.weight.dtype or not _is_half(self.weight):
            return super().forward(input)
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        found = functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return found.to(self.weight.dtype)


class WholeLayerNorm(FusedLayerNorm):
    """A FusedLayerNorm inside of a distributed module, whole on each tp rank. None of them warns."""

    _asked_for = False


@FusedLayerNorm.register  # scripts find layer normalisations by this class, for groups without weight decay
class SlicedLayerNorm(DistributedModule):
    """A layer normalisation of ``hidden_size`` channels, of which each tp rank holds a slice.

    The input and the output are ``(G, ..., hidden_size / tp_size)``, ``weight`` and ``bias`` this rank's slices. Ranks
    exchange means and sums of squares; 16-bit values are normalised in float32.

    Raises IndivisibleError; TensorParallelError for a call before there is a model.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.slice_size("hidden_size", hidden_size)
        self.weight: nn.Parameter
        self.bias: nn.Parameter
        self.register_split("weight", torch.ones(hidden_size), axis=0)
        self.register_split("bias", torch.zeros(hidden_size), axis=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised slice; all ranks of the TP group call it."""
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.hidden_size, self.eps, self.group()
        )
        return normalised

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, tp_size={self.tp_size}"


class _Context(FunctionCtx):
    """The context of one normalisation."""

    saved_tensors: tuple[torch.Tensor, ...]
    hidden_size: int
    group: TensorGroup


class _Normalise(torch.autograd.Function):
    """Keeps the input's slice and two numbers of each row for backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(
        ctx: _Context,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        hidden_size: int,
        eps: float,
        group: TensorGroup,
    ) -> torch.Tensor:
        values = _wide(x)
        # Each rank's mean and sum of squares around it; then those of all channels, without cancellation.
        own = values.mean(-1)
        squares = (values - own.unsqueeze(-1)).square().sum(-1)
        means, sums = group.all_gather(torch.stack((own, squares))).unbind(1)
        mean = means.mean(0)
        sums = sums + values.shape[-1] * (means - mean).square()
        scale = torch.rsqrt(sums.sum(0) / hidden_size + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.hidden_size, ctx.group = hidden_size, group
        normalised = (values - mean.unsqueeze(-1)) * scale.unsqueeze(-1)
        found = normalised * _wide(weight) + _wide(bias)
        return found.to(weight.dtype if _is_half(weight) else x.dtype)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        gradient = _wide(gradient)
        normalised = (_wide(x) - mean.unsqueeze(-1)) * scale.unsqueeze(-1)
        inner = gradient * _wide(weight)
        both = torch.stack((inner.sum(-1), (inner * normalised).sum(-1)))
        level, slope = (ctx.group.all_reduce(both) / ctx.hidden_size).unsqueeze(-1).unbind(0)
        of_x = (inner - level - normalised * slope) * scale.unsqueeze(-1)
        rows = tuple(range(gradient.dim() - 1))
        return (
            of_x.to(x.dtype),
            (gradient * normalised).sum(rows).to(weight.dtype),
            gradient.sum(rows).to(weight.dtype),
            None,
            None,
            None,
        )


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if _is_half(x) else x
