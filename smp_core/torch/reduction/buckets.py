"""Buckets: the parameters whose gradients are reduced together, and the rows of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from smp_core.torch.parameters.split import split_of
from smp_core.torch.reduction.layout import Layout, bins
from smp_core.torch.reduction.policy import BucketUnit, ReductionPolicy

Totals = Mapping[nn.Parameter, torch.Tensor]
#: The dtypes that sums are taken in, where they differ from the parameter's own.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of this one are summed."""
    return _WIDE.get(dtype, dtype)


def dtype_of(parameter: nn.Parameter, wide: bool) -> torch.dtype:
    """The dtype of a parameter's gradients: its own; if ``wide``, float32 for a 16-bit one."""
    return wide_dtype(parameter.dtype) if wide else parameter.dtype


class Bucket:
    """Parameters of one dtype whose gradients are reduced together.

    A bucket has a row for each rank of the shard group: that rank's shard of each parameter, one after
    the other. So one reduce-scatter delivers contiguous shards. In a shard group of one rank the only row has the
    whole gradients. The rows lie in one tensor, or the columns of each parameter where its gradient is.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layouts: Sequence[Layout], dtype: torch.dtype
    ) -> None:
        self.parameters, self.layouts, self.dtype = parameters, layouts, dtype
        self.ranks = layouts[0].ranks
        #: True if each tp rank has a slice of its parameters, so that gradients are reduced over RDP groups.
        self.split = split_of(parameters[0]) is not None

    @property
    def _device(self) -> torch.device:
        """The parameters' device, and not torch's default one, which a script may have set."""
        return self.parameters[0].device

    def columns(self, totals: Totals) -> list[torch.Tensor]:
        """Each parameter's gradient, ``(ranks, shard_numel)``, contiguous; zeros for one without a gradient.

        The memory is that of the gradient, where its layout allows it.
        """
        return [
            self._columns_of(totals.get(parameter), layout)
            for parameter, layout in zip(self.parameters, self.layouts, strict=True)
        ]

    def _columns_of(self, total: torch.Tensor | None, layout: Layout) -> torch.Tensor:
        shape = self.ranks, layout.shard_numel
        if total is None:
            return torch.zeros(shape, dtype=self.dtype, device=self._device)
        total = (total.to_dense() if total.is_sparse else total).to(self.dtype)
        if layout.padded_numel != layout.numel:
            return layout.shards(total)
        return total.reshape(shape).contiguous()

    def rows(self, totals: Totals) -> torch.Tensor:
        """The gradients, ``(ranks, width)``, in memory of their own; zeros for a parameter without a gradient."""
        width = sum(layout.shard_numel for layout in self.layouts)
        rows = torch.empty((self.ranks, width), dtype=self.dtype, device=self._device)
        start = 0
        for parameter, layout in zip(self.parameters, self.layouts, strict=True):
            end = start + layout.shard_numel
            # One by one, so that no more than one is copied on the way while the rows are there.
            rows[:, start:end] = self._columns_of(totals.get(parameter), layout)
            start = end
        return rows

    def shards(self, row: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter's shard of a row, with its padding."""
        widths = [layout.shard_numel for layout in self.layouts]
        yield from zip(self.parameters, torch.split(row, widths), strict=True)

    def full_gradients(
        self, rows: torch.Tensor, views: bool = False
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter's whole gradient, from the rows of all ranks: in the parameter's own strides, or, if they
        may be ``views``, as they lie in a single row.
        """
        rows = rows.view(self.ranks, -1)
        start = 0
        for parameter, layout in zip(self.parameters, self.layouts, strict=True):
            flat = layout.full(rows[:, start : start + layout.shard_numel])
            shaped = flat.view(parameter.shape)
            if not views:
                own = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
                shaped = own.copy_(shaped)
            yield parameter, shaped
            start += layout.shard_numel


def fill(
    parameters: Sequence[nn.Parameter],
    policy: ReductionPolicy,
    layout_of: Callable[[nn.Parameter], Layout],
) -> list[Bucket]:
    """Buckets of these parameters, which are in the order of registration, in reverse, as backward reaches them."""
    layouts = {each: layout_of(each) for each in parameters}
    filled: list[list[nn.Parameter]] = []
    for split in (False, True):  # no bucket has both
        some = [each for each in parameters if (split_of(each) is not None) is split]
        if policy.bucket_unit is BucketUnit.BYTES:
            filled += fill_bytes(some, policy.bucket_cap, policy.wide)
        else:
            filled += _fill_elements({each: layouts[each] for each in some}, policy.bucket_cap)
    if any(split_of(each) is not None for each in parameters):
        # As backward completes them: a bucket's last parameter is the one that was registered first.
        place = {each: n for n, each in enumerate(parameters)}
        filled.sort(key=lambda members: -place[members[-1]])
    return [
        Bucket(members, [layouts[each] for each in members], dtype_of(members[0], policy.wide))
        for members in filled
    ]


def fill_bytes(
    parameters: Sequence[nn.Parameter], cap: float, wide: bool = False
) -> list[list[nn.Parameter]]:
    """The parameters in reverse order, in buckets of one dtype and at most ``cap`` bytes of gradients; a
    parameter larger than that is alone. ``wide`` as in ``dtype_of``.
    """
    buckets: list[list[nn.Parameter]] = []
    open_: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        dtype = dtype_of(parameter, wide)
        size = parameter.numel() * dtype.itemsize
        bucket, filled = open_.get(dtype, ([], 0))
        if not bucket or filled + size > cap:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_[dtype] = bucket, filled + size
    return buckets


def _fill_elements(layouts: Mapping[nn.Parameter, Layout], cap: float) -> list[list[nn.Parameter]]:
    reverse = list(layouts)[::-1]
    buckets: list[list[nn.Parameter]] = []
    for dtype in dict.fromkeys(each.dtype for each in reverse):
        of_one = [each for each in reverse if each.dtype is dtype]
        # The layout's elements: `numel()` of a sharded parameter counts its shard alone.
        for bin_ in bins([layouts[each].numel for each in of_one], cap):
            buckets.append([of_one[index] for index in bin_])
    return buckets
