"""``smp.nn.DistributedModule``: the base class of modules whose parameters are split over the TP group (API 1.10)."""

from __future__ import annotations

import torch
from torch import nn

from smp_core.topology import GroupKind
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import IndivisibleError, TensorParallelError
from smp_core.torch.parameters.slice_reads import HoldsSlices
from smp_core.torch.parameters.split import Split, mark, split, split_of
from smp_core.torch.tensor_parallel.exchange import TensorGroup


class DistributedModule(HoldsSlices, nn.Module):
    """A module of which each tp rank holds its slice of some parameters.

    The module computes with the samples of all ranks of the TP group, so all of them call it, in the same order, with
    batches of one size. At ``tensor_parallel_degree`` 1 it is a plain module.

    Raises NotInitializedError before ``smp.init``.
    """

    def __init__(self) -> None:
        super().__init__()
        runtime = sessions.current(f"smp.nn.{type(self).__name__}").runtime
        self.tp_size = len(runtime.group(GroupKind.TP).ranks)
        self.tp_rank = runtime.position(GroupKind.TP)
        self._splits: dict[str, Split] = {}
        #: The place of the module in the model, the same on all ranks.
        self.number = 0

    def slice_size(self, what: str, size: int) -> int:
        """The size of one rank's slice. Raises IndivisibleError, which names ``what`` is not divisible."""
        if size % self.tp_size:
            raise IndivisibleError(
                f"{type(self).__name__}: {what} = {size} is no multiple of tensor_parallel_degree = {self.tp_size}"
            )
        return size // self.tp_size

    def register_split(self, name: str, full: torch.Tensor, axis: int) -> None:
        """Register a parameter that is this rank's slice of ``full``, whose size along ``axis`` is divisible.

        ``full`` is drawn whole on each rank, so that the same random stream gives the same weights at every degree.
        """
        parameter = split(full, axis, self.tp_rank, self.tp_size)
        self.register_parameter(name, parameter)
        found = split_of(parameter)
        if found is not None:
            self._splits[name] = found

    def mark_splits(self) -> None:
        """Mark the split parameters of this module again: a copy of a parameter has lost the mark.

        Raises TensorParallelError if a parameter has another shape than its slice.
        """
        for name, found in self._splits.items():
            parameter = self._parameters[name]
            if parameter is None or tuple(parameter.shape) != found.local_shape:
                raise TensorParallelError(
                    f"{type(self).__name__}: parameter {name!r} is not the slice {list(found.local_shape)} of "
                    f"{list(found.shape)} that tp rank {found.rank} holds. Load whole weights by model.load_state_dict"
                )
            mark(parameter, found)

    def group(self) -> TensorGroup:
        """The TP group, for one call of the module. Raises TensorParallelError for one that is part of no model."""
        session = sessions.current(f"smp.nn.{type(self).__name__}")
        group: TensorGroup | None = session.tensor_group
        if group is None:
            raise TensorParallelError(
                f"smp.nn.{type(self).__name__} was called before there is a model: the ranks of a TP group meet when "
                "it is wrapped. Call smp.DistributedModel(module) first"
            )
        group.note(self.number)
        return group

    def group_or_none(self) -> TensorGroup | None:
        """``group()``; None at ``tensor_parallel_degree`` 1, where no rank meets another."""
        return self.group() if self.tp_size > 1 else None


def configured(optimize: str | None) -> str:
    """The value of ``optimize`` for a module that was given ``optimize``: of None, the configuration's."""
    if optimize is not None:
        return optimize
    return sessions.current("smp.nn").runtime.config.optimize
