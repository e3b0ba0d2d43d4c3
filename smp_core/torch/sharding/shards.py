"""Sharded parameters: what a rank keeps of each, in units that are gathered together.

A sharded ``nn.Parameter`` stays the object that it was. Its ``data`` is what this rank owns of it, 1-D,
without padding, maybe empty: a view of the part that the rank contributes when its unit is gathered.
So an optimizer made before or after works on shards, and its state has their size. It says with
attributes what it is a part of (``describe``), as persistent parameters do, which are whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.sharding.layout import Layout


@dataclasses.dataclass(eq=False, slots=True)
class Shard:
    """One sharded parameter on one rank.

    Attributes:
        name: its first name in the wrapped module.
        shape, stride: of the whole; the stride is that of a dense tensor, whatever it was before.
        layout: how the elements, in row-major order, are split.
        own: where this rank's elements begin and end.
        part: what this rank contributes, padded with zeros; ``parameter.data`` is the beginning of it.
    """

    parameter: nn.Parameter
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: Layout
    own: tuple[int, int]
    part: torch.Tensor

    @property
    def numel(self) -> int:
        """The elements of the whole."""
        return self.layout.numel

    @property
    def owned(self) -> int:
        """The elements of this rank."""
        return self.own[1] - self.own[0]

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """Keep this rank's elements of a whole tensor; what ``parameter.data`` is to be."""
        own = self.part[: self.owned]
        own.copy_(value.detach().reshape(-1)[slice(*self.own)])
        return own

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a flat whole; a view."""
        return flat[slice(*self.own)]

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat whole in the parameter's shape and stride; a view where the stride is row-major."""
        shaped = flat.view(self.shape)
        if shaped.stride() == self.stride:
            return shaped
        return torch.empty_strided(self.shape, self.stride, dtype=flat.dtype).copy_(shaped)


@dataclasses.dataclass(eq=False, slots=True)
class Unit:
    """Parameters that are gathered together.

    ``module`` is the lowest module whose calls use all of them, as far as the tree tells: a unit stays
    gathered until that call is over. ``flat`` holds the parts of this rank, one after the other.
    """

    number: int
    module: nn.Module
    shards: Sequence[Shard]
    flat: torch.Tensor

    @property
    def numel(self) -> int:
        """The elements that are live when it is gathered."""
        return sum(shard.numel for shard in self.shards)

    def check(self) -> None:
        """Take over what was put into a parameter's ``data``, as an optimizer that works out of place
        does. Raises ShardingError for what is not this rank's shard.
        """
        for shard in self.shards:
            data, gradient = shard.parameter.data, shard.parameter.grad
            if gradient is not None and gradient.shape == shard.shape != (shard.owned,):
                # Whole, from before the model was wrapped, or from a script.
                shard.parameter.grad = shard.slice_of(gradient.to_dense().reshape(-1)).clone()
            fits = data.shape == (shard.owned,) and data.dtype == shard.part.dtype
            if fits and data.data_ptr() == shard.part.data_ptr():
                continue
            if fits:
                view = shard.part[: shard.owned]
                if shard.owned:
                    view.copy_(data)
                shard.parameter.data = view
                continue
            raise ShardingError(
                f"parameter {shard.name!r} was changed behind the back of sharded data parallelism: its data "
                f"has shape {list(data.shape)} and {data.dtype}, and this rank keeps {shard.owned} of its "
                f"{shard.numel} elements, flat, {shard.part.dtype}. Change values in place, or load them with "
                "model.load_state_dict"
            )

    def wholes(self, gathered: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parameters, whole and each in memory of its own, from the parts of all ranks in order."""
        rows, together = gathered.view(-1, self.flat.numel()), gathered.untyped_storage()._cdata
        start = 0
        for shard in self.shards:
            stop = start + shard.layout.part
            flat = shard.layout.whole(rows[:, start:stop])
            if len(self.shards) > 1 and flat.untyped_storage()._cdata == together:
                flat = flat.clone()  # parts of one element: a view was enough to line them up
            yield shard.shaped(flat)
            start = stop


def make_unit(
    number: int,
    module: nn.Module,
    named: Iterable[tuple[str, nn.Parameter]],
    ranks: int,
    rank: int,
) -> Unit:
    """What ``rank`` is to keep of these parameters, all of one dtype: zeros, until each is given its
    values (``Shard.take``). The parameters themselves are not touched.
    """
    named = list(named)
    layouts = [Layout(parameter.numel(), ranks) for _, parameter in named]
    flat = torch.zeros(sum(layout.part for layout in layouts), dtype=named[0][1].dtype)
    parts = flat.split([layout.part for layout in layouts])  # type: ignore[no-untyped-call]
    shards = []
    for (name, parameter), layout, part in zip(named, layouts, parts, strict=True):
        shape = tuple(parameter.shape)
        describe(parameter, layout, rank, part)
        stride, own = dense_stride(parameter), layout.own(rank)
        shards.append(Shard(parameter, name, shape, stride, layout, own, part))
    return Unit(number, module, shards, flat)


def describe(
    parameter: nn.Parameter, layout: Layout, rank: int, part: torch.Tensor | None = None
) -> None:
    """Say on a parameter what scripts ask: ``ds_shape`` and ``ds_numel`` of the whole, and ``ds_tensor``,
    this rank's ``part`` of it with its padding, whose own ``ds_numel`` is the size of a part
    (API 1.11). Without ``part``, of a persistent parameter: a view of what the part would be,
    not padded.
    """
    if part is None:
        part = parameter.detach().reshape(-1)[slice(*layout.own(rank))]
    vars(parameter).update(ds_shape=parameter.shape, ds_numel=layout.numel, ds_tensor=part)
    vars(part).update(ds_numel=layout.part)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride of the tensor if its elements fill memory, or else that of a row-major one."""
    kept = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return tuple(kept.stride())
