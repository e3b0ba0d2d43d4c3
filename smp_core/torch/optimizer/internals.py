"""Members of SMP's optimizer that helpers of scripts read, beyond the documented ones (API 1.8, source EX).

These are attributes seen in public scripts; of most only the name and a use are known. Where the meaning is
unambiguous, the attribute is implemented. Otherwise access raises UnsupportedMemberError, which names the
alternative, so that the wrapped optimizer does not raise an AttributeError without advice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_core.topology import GroupKind
from smp_core.torch.exceptions import UnsupportedMemberError, UnsupportedTrainingError
from smp_core.torch.optimizer.parameters import OptimizerParameters
from smp_core.torch.parameters.split import split_of
from smp_core.torch.reduction.layout import Layout
from smp_core.torch.session import TrainingSession
from smp_core.torch.tensor_tree import StateDict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Internals:
    """A base of DistributedOptimizer, which makes the attributes."""

    _session: TrainingSession
    _parameters: OptimizerParameters

    # 16 bits.

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """This rank's 16-bit parameters that have masters, by group. With sharded data parallelism all parameters, of
        any dtype, in the order in which ``fp32_partitioned_groups_flat`` has their parts.
        """
        return [[parameter for parameter, _ in pairs] for pairs in _pairs(self._parameters)]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """The masters of ``fp16_groups``, by group, in the same order; a parameter without one is its own."""
        return [[master for _, master in pairs] for pairs in _pairs(self._parameters)]

    @property
    def master_is_distributed(self) -> dict[nn.Parameter, bool]:
        """For each master of ``fp32_from_fp16_groups``, whether its parameter is split over tp ranks."""
        return {
            master: self._session.model is not None
            and self._session.model.is_distributed_parameter(parameter)
            for pairs in _pairs(self._parameters)
            for parameter, master in pairs
        }

    @property
    def master_distribution_axis(self) -> dict[nn.Parameter, int | None]:
        """For each master the axis along which tp ranks have slices of it; None for one that each holds whole."""
        axes: dict[nn.Parameter, int | None] = dict.fromkeys(self.master_is_distributed)
        model = self._session.model
        for parameter in () if model is None else model.get_module().parameters():
            found = split_of(parameter)
            face = self._parameters.face(parameter)
            if found is not None and isinstance(face, nn.Parameter) and face in axes:
                axes[face] = found.axis
        return axes

    # Sharded data parallelism.

    @property
    def _global_grad_norm(self) -> float:
        """The norm of the last step's gradients before sharded data parallelism clipped them, which scripts
        log; 0 without it.
        """
        return self._parameters.sharding.norm

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's part of the values that the optimizer updates, by group, as to log their norm: float32,
        1-D, for each parameter ``ceil(numel / degree)`` elements with zeros at the end, in the group's
        order (API 1.11). Parameters that are whole on every rank have a part here as well, so that over the
        shard group each element counts once. Copies, without gradients.

        Raises UnsupportedMemberError without sharded data parallelism, and before the model is wrapped.
        """
        parameters = self._parameters
        sharding, masters = parameters.sharding, parameters.masters
        if sharding.place is None:
            raise _not_sharded(
                "fp32_partitioned_groups_flat",
                "there are no parts: read optimizer.param_groups, after the model is wrapped",
            )
        parameters.take_masters()
        of: dict[nn.Parameter, nn.Parameter] = {}
        if masters is not None:
            masters.sync()
            of = {master: parameter for parameter, master in masters.pairs()}
        rank, size = sharding.place
        groups = []
        for group in parameters.optimizer.param_groups:
            flat = [torch.zeros(0)]
            for each in group["params"]:
                values, shard = each.detach().reshape(-1), sharding.shard(of.get(each, each))
                layout = Layout(values.numel(), size) if shard is None else shard.layout
                own = values[slice(*layout.owned_range(rank))] if shard is None else values
                flat += [own.float(), torch.zeros(layout.shard_numel - own.numel())]
            groups.append(torch.cat(flat))
        return groups

    @property
    def ds_param_shard_group(self) -> ProcessGroup:
        """The ``torch.distributed`` process group of the shard group, all ranks of which ask for it. Raises
        UnsupportedMemberError without sharded data parallelism.
        """
        runtime = self._session.runtime
        if runtime.topology.sharding == 1:
            raise _not_sharded(
                "ds_param_shard_group", "parameters are whole on each rank, and need no group"
            )
        return runtime.fabric.process_group(runtime.group(GroupKind.SHARDING))

    # Indices and states.

    @property
    def redefined_params(self) -> object:
        """Raises UnsupportedMemberError, since the content of this member is not known."""
        raise UnsupportedMemberError(
            "optimizer.redefined_params: an undocumented member of SMP's. What the optimizer works on is in "
            "optimizer.param_groups, and by name in model.virtual_named_parameters(); use one of those"
        )

    def orig_state_dict(self) -> StateDict:
        """The wrapped optimizer's own ``state_dict()``: of this rank's parameters, or masters, numbered among
        themselves.
        """
        self._parameters.take_masters()
        return self._parameters.optimizer.state_dict()

    def _param_id_to_index(self) -> dict[int, int]:
        """The index in states (state.py) of each parameter, and of its master, by ``id``."""
        self._parameters.take_masters()
        numbers: dict[int, int] = {}
        for order in self._parameters.order:
            for each in order:
                number = numbers.setdefault(
                    id(self._parameters.face(each)), len(set(numbers.values()))
                )
                numbers[id(each)] = number
        return numbers

    def param_name_to_index(self) -> dict[str, int]:
        """The index in states of each of the model's parameters that the optimizer was given, by each of its
        names in ``model.state_dict()``; those of all partitions.

        Raises UnsupportedTrainingError before ``smp.DistributedModel``.
        """
        model = self._session.model
        if model is None:
            raise UnsupportedTrainingError(
                "optimizer.param_name_to_index: there is no model whose names could be told. Call it after "
                "smp.DistributedModel(module)"
            )
        numbers = self._param_id_to_index()
        return {
            name: numbers[id(each)]
            for name, each in model.get_module().named_parameters(remove_duplicate=False)
            if id(each) in numbers
        }


def _pairs(parameters: OptimizerParameters) -> list[list[tuple[nn.Parameter, nn.Parameter]]]:
    """The pairs of a parameter and its master, by group."""
    masters, groups = parameters.masters, parameters.optimizer.param_groups
    parameters.take_masters()
    of: dict[nn.Parameter, nn.Parameter] = {}
    if masters is not None and masters.dtype is not None:
        of = {master: parameter for parameter, master in masters.pairs()}
    if parameters.sharding.place is not None:
        # Files of shards hold parts of all parameters, and their readers count by these lists.
        return [[(of.get(each, each), each) for each in group["params"]] for group in groups]
    return [[(of[each], each) for each in group["params"] if each in of] for group in groups]


def _not_sharded(member: str, instead: str) -> UnsupportedMemberError:
    return UnsupportedMemberError(
        f"optimizer.{member}: belongs to sharded data parallelism (sharded_data_parallel_degree above 1), and "
        f"{instead}"
    )
