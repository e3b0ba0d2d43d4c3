"""Split parameters: of a distributed module's parameter each tp rank holds one slice (API 1.10).

The mark of a split parameter is an attribute of the tensor object, so it stays where the parameter is emptied,
sharded, or given other memory. Slices are equal and contiguous along one axis, in the order of tp ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from smp_core.torch.exceptions import TensorParallelError

#: The attribute of a split parameter that holds its Split.
MARK = "_smp_split"

#: The attribute of a parameter whose module a distributed module has replaced: the module's path.
_REPLACED = "_smp_replaced"


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The way in which a parameter is split over the TP group.

    Attributes:
        axis: the axis of the parameter that is split.
        shape: the shape of the whole parameter.
        rank: the tp rank of this slice.
        degree: the number of slices.
    """

    axis: int
    shape: tuple[int, ...]
    rank: int
    degree: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of each slice."""
        sizes = list(self.shape)
        sizes[self.axis] //= self.degree
        return tuple(sizes)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole parameter, or of anything of its shape: a view."""
        size = self.shape[self.axis] // self.degree
        return full.narrow(self.axis, self.rank * size, size)

    def full(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole parameter from the slices of all tp ranks, in their order."""
        return torch.cat(list(slices), dim=self.axis)


def split(full: torch.Tensor, axis: int, rank: int, degree: int) -> nn.Parameter:
    """A parameter that is this rank's slice of ``full`` along ``axis``, in memory of its own.

    The size of the axis is a multiple of ``degree``.
    """
    found = Split(axis % full.dim(), tuple(full.shape), rank, degree)
    parameter = nn.Parameter(found.slice_of(full.detach()).clone())
    if degree > 1:
        mark(parameter, found)
    return parameter


def mark(parameter: nn.Parameter, found: Split) -> None:
    """Mark a parameter as a slice."""
    setattr(parameter, MARK, found)


def split_of(tensor: torch.Tensor) -> Split | None:
    """The split of a parameter; None of a tensor that each tp rank holds whole."""
    found: Split | None = vars(tensor).get(MARK)
    return found


def mark_replaced(parameter: nn.Parameter, path: str) -> None:
    """Note that a distributed module has taken the place of the parameter's module, so that nobody trains it."""
    setattr(parameter, _REPLACED, path)


def check_current(call: str, parameters: Iterable[torch.Tensor]) -> None:
    """Raise TensorParallelError if one of an optimizer's parameters is none of the model's any more, because a
    distributed module has taken the place of its module.
    """
    for parameter in parameters:
        path = vars(parameter).get(_REPLACED)
        if path is not None:
            raise TensorParallelError(
                f"{call}: the optimizer holds parameters of module {path!r}, which smp.DistributedModel has replaced "
                "by a distributed module with parameters of its own. Make the optimizer after the model is wrapped, of "
                "model.parameters()"
            )
