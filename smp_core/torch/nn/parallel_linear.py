"""The linear layers inside of transformer blocks: output channels or input channels split over the TP group.

They hold parameters. The block computes with them, in the layout of its hidden states (hidden_layout.py).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from smp_core.torch.nn.hidden_layout import HiddenLayout
from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.tensor_parallel.exchange import TensorGroup


class ColumnParallelLinear(DistributedModule):
    """A linear layer of which each tp rank holds some output channels: rows of ``weight``, and of ``bias``.

    Args:
        in_features, out_features: global sizes; the degree divides ``out_features``.
        bias: whether there is a bias.
        std: the standard deviation of a normal initial weight, with a bias of zeros; None for torch's initial values.

    Raises IndivisibleError.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, std: float | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        plain = initial(in_features, out_features, bias, std)
        self.register_split("weight", plain.weight, axis=0)
        if bias:
            self.register_split("bias", plain.bias, axis=0)
        else:
            self.register_parameter("bias", None)

    def extra_repr(self) -> str:
        return shown(self)


class RowParallelLinear(DistributedModule):
    """A linear layer of which each tp rank holds some input channels: columns of ``weight``.

    Args:
        in_features, out_features: global sizes; the degree divides ``in_features``.
        bias: whether there is a bias. Each rank holds it whole, or its channels, as ``layout`` says.
        layout: the layout of the output.
        std: as that of ColumnParallelLinear.

    Raises IndivisibleError.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        layout: HiddenLayout,
        std: float | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.layout = in_features, out_features, layout
        plain = initial(in_features, out_features, bias, std)
        self.register_split("weight", plain.weight, axis=1)
        if bias and layout.splits_channels:
            self.register_split("bias", plain.bias, axis=0)
        else:
            self.register_parameter("bias", plain.bias)

    def summed(self, x: torch.Tensor, group: TensorGroup | None) -> torch.Tensor:
        """The output for the whole batch's slice of the input, in the layout of hidden states."""
        if group is None:
            return functional.linear(x, self.weight, self.bias)
        output = self.layout.sum(functional.linear(x, self.weight), group)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        return shown(self)


def initial(inputs: int, outputs: int, bias: bool, std: float | None) -> nn.Linear:
    """A whole layer with its initial values."""
    plain = nn.Linear(inputs, outputs, bias)
    if std is not None:
        nn.init.normal_(plain.weight, std=std)
        if bias:
            nn.init.zeros_(plain.bias)
    return plain


def shown(linear: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"in_features={linear.in_features}, out_features={linear.out_features}, "
        f"bias={linear.bias is not None}, tp_size={linear.tp_size}"
    )
