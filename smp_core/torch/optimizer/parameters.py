"""The parameters of a torch optimizer: those of all ranks in their original order, and the tensors that stand
in their place on this rank.

In the place of a parameter the wrapped optimizer has its master (precision/masters.py) where there is
one, this rank's shard where it is sharded, and nothing where another rank owns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.parameters import foreign
from smp_core.torch.parameters.split import split_of
from smp_core.torch.precision.masters import Masters, is_elementwise
from smp_core.torch.precision.scaler import LossScaler
from smp_core.torch.session import SessionModel
from smp_core.torch.sharding.sharding import Sharding
from smp_core.torch.sharding.whole_model import WHOLE_MODEL


class OptimizerParameters:
    """The parameters that one rank's optimizer works on.

    Attributes:
        optimizer: the wrapped one.
        scaler: of the losses, with ``fp16``.
        order: by group, the parameters that the optimizer was given, those of other ranks among them.
        names: by group, the names that the script gave to them, if it did.
        partitioned: whether parameters of other ranks have been dropped.
        masters, sharding: of the partitioned model, as far as it has such.
    """

    def __init__(self, optimizer: Optimizer, runtime: Runtime, scaler: LossScaler | None) -> None:
        self.optimizer, self.runtime, self.scaler = optimizer, runtime, scaler
        self.order = [list(group["params"]) for group in optimizer.param_groups]
        self.names = [group.get("param_names") for group in optimizer.param_groups]
        self.partitioned = False
        self.masters: Masters | None = None
        self.sharding: Sharding = WHOLE_MODEL
        self._elsewhere: set[int] = set()

    def add_last_group(self) -> None:
        """Take in the group that was last added to the wrapped optimizer."""
        group = self.optimizer.param_groups[-1]
        self.order.append(list(group["params"]))
        self.names.append(group.get("param_names"))
        if self.partitioned:
            self._keep_own(group)
            self.take_masters()

    # The parameters of this rank.

    def held(self) -> list[nn.Parameter]:
        """The parameters in the wrapped optimizer's groups: this rank's, or their masters."""
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def targets(self) -> list[nn.Parameter]:
        """The parameters that the next update changes: those with a gradient."""
        return [each for each in self.held() if each.grad is not None]

    def face(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that the wrapped optimizer has in the parameter's place."""
        masters = self.masters
        return parameter if masters is None else masters.of(parameter)  # type: ignore[arg-type]

    def take_masters(self) -> None:
        """Put masters in the place of parameters that have one, state and all: again before each use, since
        a parameter may have been added, or unfrozen.
        """
        if self.masters is None:
            return
        for group in self.optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                face = self.face(parameter)
                if face is not parameter:
                    group["params"][position] = face
                    if parameter in self.optimizer.state:
                        state = self.optimizer.state.pop(parameter)
                        self.optimizer.state[face] = self.moved(parameter, state)

    def moved(self, parameter: Any, state: object) -> object:
        """The state of a parameter, moved to the tensor that the wrapped optimizer has in its place: tensors of the
        whole parameter's shape are cut, 16-bit ones are float32 where there is a master.
        """
        split = split_of(parameter)
        if split is not None and isinstance(state, Mapping):
            state = {
                key: split.slice_of(value.detach()).clone()
                if is_elementwise(key, value, split.shape)
                else value
                for key, value in state.items()
            }
        if self.masters is not None:
            state = self.masters.moved(parameter, state)
        shard = self.sharding.shard(parameter)
        if shard is None or not isinstance(state, Mapping):
            return state
        return {
            key: shard.owned_slice(value.detach().reshape(-1)).clone()
            if is_elementwise(key, value, shard.shape)
            else value
            for key, value in state.items()
        }

    # The model is partitioned.

    def partition(self, model: SessionModel) -> None:
        """Drop the parameters that other ranks own, and the state of them; groups stay."""
        assert model.placement is not None
        placement, here = model.placement, self.runtime.position(GroupKind.PP)
        self._elsewhere = {
            id(parameter)
            for name, parameter in model.get_module().named_parameters()
            if placement.parameters[name] != here
        }
        for group in self.optimizer.param_groups:
            self._keep_own(group)
        for parameter in [each for each in self.optimizer.state if not self._own(each)]:
            del self.optimizer.state[parameter]
        self.partitioned = True

    def follow(self, model: SessionModel) -> None:
        """Work on the model's masters and shards. State that there is of whole parameters is cut as they are."""
        self.sharding = model.sharding
        if model.masters is None:
            state = self.optimizer.state
            for parameter in [each for each in state if isinstance(each, torch.Tensor)]:
                state[parameter] = self.moved(parameter, state[parameter])
        if model.masters is not None:
            self.masters = model.masters
            model.masters.scaler, model.masters.optimized = self.scaler, self.held
            self.take_masters()

    def _own(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter stays: this rank owns it, or it is not the model's (then every rank has it)."""
        return id(parameter) not in self._elsewhere and not foreign.is_foreign(parameter)

    def _keep_own(self, group: dict[str, Any]) -> None:
        kept = [position for position, each in enumerate(group["params"]) if self._own(each)]
        for key in {"params", "param_names"} & set(group):
            group[key] = [group[key][position] for position in kept]
