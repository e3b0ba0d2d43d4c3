"""``smp.nn.DistributedLinear``: a linear layer whose input channels are split over the TP group (API 1.10)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.tensor_parallel import exchange
from smp_core.torch.tensor_parallel.registry import Arguments, Registration, register


class DistributedLinear(DistributedModule):
    """``torch.nn.Linear`` with the input channels of its weight split over the TP group.

    Args:
        in_features, out_features: global sizes; the degree divides ``in_features``.
        bias: whether there is a bias, which every rank holds whole.
        device, dtype: as torch's.

    ``weight`` is ``(out_features, in_features / tp_size)``. The input is ``(B, ..., in_features)``, of any dtype that
    torch's layer takes, the output ``(B, ..., out_features)``; B is this rank's batch. Ranks exchange their batches so
    that each has the channels of its slice, and get back the sums of their own samples (API 1.10).

    Raises IndivisibleError; a call raises ArgumentError for an input without a batch or of other channels.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.slice_size("in_features", in_features)
        self._hold(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    @classmethod
    def of(cls, plain: nn.Linear) -> DistributedLinear:
        """The layer with the weights of a plain one, which is the same on all ranks of the TP group."""
        with torch.random.fork_rng(devices=[]):  # no number is drawn for weights that go
            made = cls(plain.in_features, plain.out_features, plain.bias is not None)
        made._hold(plain)
        return made

    def _hold(self, plain: nn.Linear) -> None:
        """Hold a slice of a plain layer's weight, and its bias."""
        self.weight: nn.Parameter
        self.register_split("weight", plain.weight, axis=1)
        self.bias = plain.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer on this rank's samples; all ranks of the TP group call it."""
        if self.tp_size == 1:
            return functional.linear(input, self.weight, self.bias)
        name = "smp.nn.DistributedLinear"
        exchange.check_channels(name, input, self.in_features, "in_features")
        group = self.group()
        sliced = exchange.slice_channels(input, group, name)
        output = exchange.sum_batch(functional.linear(sliced, self.weight), group)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tp_size={self.tp_size}"
        )


def _arguments(module: nn.Module) -> Arguments:
    assert isinstance(module, nn.Linear)
    return (module.in_features, module.out_features), {"bias": module.bias is not None}


register(Registration(nn.Linear, DistributedLinear, arguments=_arguments))
