"""Sharded parameters: the shard that a rank keeps of each, in units that are all-gathered together.

The words of this file. The *full* parameter has all elements, in the parameter's shape. Its *shard* on a rank has
``ceil(numel / ranks)`` of them, flat, padded with zeros. The *owned range* are the elements of the shard that are no
padding. A *unit* is the parameters that one all-gather brings.

A sharded ``nn.Parameter`` stays the object that it was. Its ``data`` is the owned range, 1-D, maybe empty: a view of
the shard. So an optimizer made before or after works on shards, and its state has their size. Attributes on the
parameter tell which parameter it is a shard of (``describe``); persistent parameters, which are whole, have them too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.reduction.layout import Layout


@dataclasses.dataclass(eq=False, slots=True)
class ShardedParameter:
    """One sharded parameter on one rank.

    Attributes:
        name: its first name in the wrapped module.
        shape, stride: of the full parameter; the stride is that of a dense tensor, whatever it was before.
        layout: how the elements, in row-major order, are split.
        owned_range: where this rank's elements begin and end in the flat full parameter.
        padded: this rank's shard with its padding; ``parameter.data`` is a view of its beginning.
    """

    parameter: nn.Parameter
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: Layout
    owned_range: tuple[int, int]
    padded: torch.Tensor

    @property
    def numel(self) -> int:
        """The elements of the full parameter."""
        return self.layout.numel

    @property
    def owned_numel(self) -> int:
        """The elements of the owned range."""
        return self.owned_range[1] - self.owned_range[0]

    def copy_from_full(self, value: torch.Tensor) -> torch.Tensor:
        """Copy the owned range of a full tensor into the shard; gives the view that ``parameter.data`` is to be."""
        own = self.padded[: self.owned_numel]
        own.copy_(value.detach().reshape(-1)[slice(*self.owned_range)])
        return own

    def owned_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """The owned range of a flat full tensor; a view."""
        return flat[slice(*self.owned_range)]

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat full tensor in the parameter's shape and stride; a view where the stride is row-major."""
        shaped = flat.view(self.shape)
        if shaped.stride() == self.stride:
            return shaped
        return torch.empty_strided(self.shape, self.stride, dtype=flat.dtype).copy_(shaped)


@dataclasses.dataclass(eq=False, slots=True)
class Unit:
    """Parameters that are all-gathered together.

    ``module`` is the lowest module whose calls use all of them, as far as the tree tells: a unit stays
    unsharded until that call ends. ``flat`` holds the shards of this rank, one after the other.
    """

    number: int
    module: nn.Module
    shards: Sequence[ShardedParameter]
    flat: torch.Tensor

    @property
    def numel(self) -> int:
        """The elements that are live while it is unsharded."""
        return sum(shard.numel for shard in self.shards)

    def check(self) -> None:
        """Take over a tensor that was put into a parameter's ``data``, as an optimizer that works out of place
        does. Raises ShardingError for a tensor that is not this rank's shard.
        """
        for shard in self.shards:
            data, gradient = shard.parameter.data, shard.parameter.grad
            if gradient is not None and gradient.shape == shard.shape != (shard.owned_numel,):
                # Whole, from before the model was wrapped, or from a script.
                shard.parameter.grad = shard.owned_slice(gradient.to_dense().reshape(-1)).clone()
            fits = data.shape == (shard.owned_numel,) and data.dtype == shard.padded.dtype
            if fits and data.data_ptr() == shard.padded.data_ptr():
                continue
            if fits:
                # The all-gather sends `padded`: values that lie elsewhere would not be sent.
                view = shard.padded[: shard.owned_numel]
                if shard.owned_numel:
                    view.copy_(data)
                shard.parameter.data = view
                continue
            raise ShardingError(
                f"parameter {shard.name!r} was changed behind the back of sharded data parallelism: its data "
                f"has shape {list(data.shape)} and {data.dtype}, and this rank keeps {shard.owned_numel} of its "
                f"{shard.numel} elements, flat, {shard.padded.dtype}. Change values in place, or load them with "
                "model.load_state_dict"
            )

    @property
    def lengths(self) -> list[int]:
        """The elements of each shard in ``flat``, with its padding."""
        return [shard.layout.shard_numel for shard in self.shards]

    def full_tensors(self, gathered: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The full parameters, each in memory of its own.

        ``gathered``: for each parameter the padded shards of all ranks, in order, as rows. Those that are views of one
        buffer are copied.
        """
        storages = Counter(part.untyped_storage()._cdata for part in gathered)
        for shard, rows in zip(self.shards, gathered, strict=True):
            flat = shard.layout.full(rows)
            storage = flat.untyped_storage()._cdata
            if storages[storage] > 1:
                flat = flat.clone()  # shards of one element: a view was enough to line them up
            yield shard.shaped(flat)


def make_unit(
    number: int,
    module: nn.Module,
    named: Iterable[tuple[str, nn.Parameter]],
    ranks: int,
    rank: int,
) -> Unit:
    """The unit of ``rank``'s shards of these parameters, all of one dtype: zeros, until each is given its
    values (``ShardedParameter.copy_from_full``). The parameters themselves are not touched.
    """
    named = list(named)
    layouts = [Layout(parameter.numel(), ranks) for _, parameter in named]
    flat = torch.zeros(sum(layout.shard_numel for layout in layouts), dtype=named[0][1].dtype)
    sizes = [layout.shard_numel for layout in layouts]
    shards = []
    for (name, parameter), layout, padded in zip(
        named, layouts, torch.split(flat, sizes), strict=True
    ):
        describe(parameter, layout, rank, padded)
        shards.append(
            ShardedParameter(
                parameter=parameter,
                name=name,
                shape=tuple(parameter.shape),
                stride=dense_stride(parameter),
                layout=layout,
                owned_range=layout.owned_range(rank),
                padded=padded,
            )
        )
    return Unit(number, module, shards, flat)


def describe(
    parameter: nn.Parameter, layout: Layout, rank: int, padded: torch.Tensor | None = None
) -> None:
    """Set the attributes that scripts read on a parameter: ``ds_shape`` and ``ds_numel`` of the full parameter, and
    ``ds_tensor``, this rank's shard of it with its padding, whose own ``ds_numel`` is the size of a shard
    (API 1.11). Without ``padded``, for a persistent parameter, ``ds_tensor`` is a view of the elements that the
    shard would have, not padded.
    """
    if padded is None:
        padded = parameter.detach().reshape(-1)[slice(*layout.owned_range(rank))]
    vars(parameter).update(ds_shape=parameter.shape, ds_numel=layout.numel, ds_tensor=padded)
    vars(padded).update(ds_numel=layout.shard_numel)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride of the tensor if its elements fill memory, or else that of a row-major one."""
    kept = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return tuple(kept.stride())
