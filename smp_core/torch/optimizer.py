"""``smp.DistributedOptimizer``: a torch optimizer over this rank's part of the parameters, whose
state can be had, and given, whole (SMP_API.md 1.8; FP32).

States name parameters by their index among all of them in the original order, as plain torch's do, on
every rank: a rank's part has gaps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.topology import GroupKind
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import SecondModelError, UnsupportedTrainingError
from smp_core.torch.pipeline import foreign

PARTIAL = "_smp_is_partial"
_LOSS_SCALE = {
    "init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift",
    "consecutive_hysteresis",
}  # fmt: skip


class DistributedOptimizer(Optimizer):
    """Wraps the optimizer of a script; there is one.

    ``optimizer`` was made over the model's parameters before or after the model was wrapped, before
    or after it was partitioned. When the model is partitioned, parameters of other ranks, and what
    state there is of them, are dropped; groups stay, even empty. ``param_groups``, ``state`` and
    ``defaults`` are the wrapped optimizer's own, so learning-rate schedulers take either of the two.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: scripts pass them in FP32 runs too, the
            last as one dict under that name or as keywords of its keys. Ignored without ``fp16``.

    Raises ArgumentTypeError if ``optimizer`` is none, or a DistributedOptimizer; ArgumentError for an
    unknown loss-scale argument; SecondModelError for a second one; UnsupportedTrainingError with
    ``fp16``, whose masters are not available.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        session = sessions.current("smp.DistributedOptimizer")
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise ArgumentTypeError(
                f"smp.DistributedOptimizer: optimizer is a {type(optimizer).__name__}, not a plain "
                "torch.optim.Optimizer"
            )
        if session.optimizer is not None:
            raise SecondModelError(
                "smp.DistributedOptimizer: there is an optimizer already, and a script may have one. Give "
                "one optimizer several param_groups, or call smp.shutdown() and smp.init() to start anew"
            )
        _check_loss_scale(dynamic_loss_args)
        if session.runtime.config.fp16:
            raise UnsupportedTrainingError(
                "smp.DistributedOptimizer: fp16 with FP32 masters is not available; leave fp16 out"
            )
        # Not Optimizer.__init__, which would make groups of its own: one set of groups, two faces.
        self.optimizer = optimizer
        self._session = session
        self._order = [list(group["params"]) for group in optimizer.param_groups]
        self._names = [group.get("param_names") for group in optimizer.param_groups]
        self._elsewhere: set[int] = set()
        self._loads: list[Mapping[str, Any]] = []
        self._partitioned = False
        session.optimizer = self
        if session.model is not None and session.model.partitioned:
            self._smp_partitioned(session.model)

    def __getattr__(self, name: str) -> Any:
        """What we do not define is the wrapped optimizer's: its groups, its hooks, its own methods."""
        if name == "optimizer":  # not there yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, with this rank's parameters once the model is partitioned."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "smp.DistributedOptimizer belongs to its rank and cannot be copied; take its state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Other ranks' parameters get their index in states, and are left out."""
        self.optimizer.add_param_group(param_group)
        group = self.optimizer.param_groups[-1]
        self._order.append(list(group["params"]))
        self._names.append(group.get("param_names"))
        if self._partitioned:
            self._keep_own(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of this rank's parameters; a rank without any does nothing but call
        ``closure``. Returns what the closure returned.
        """
        if any(group["params"] for group in self.optimizer.param_groups):
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    # State.

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This rank's part of the state, with ``_smp_is_partial``: False until the model is
        partitioned. ``gather_if_shard`` is about sharded state; there is none here. No communication.
        """
        indices = self._indices()
        state = {
            indices[id(key)] if isinstance(key, torch.Tensor) else key: value
            for key, value in self.optimizer.state.items()
            if not isinstance(key, torch.Tensor) or id(key) in indices
        }
        groups = []
        for group, order, names in zip(
            self.optimizer.param_groups, self._order, self._names, strict=True
        ):
            whole = {key: value for key, value in group.items() if key != "params"}
            if names is not None:
                whole["param_names"] = list(names)
            groups.append({**whole, "params": [indices[id(each)] for each in order]})
        return {"state": state, "param_groups": groups, PARTIAL: self._partitioned}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as plain torch's optimizer over the whole model would have it.

        Collective over the MP group once the model is partitioned: every rank of it calls.
        """
        part = self.local_state_dict()
        del part[PARTIAL]
        runtime = self._session.runtime
        group = runtime.group(GroupKind.MP)
        if self._partitioned and len(group.ranks) > 1:
            for other in reversed(
                runtime.fabric.objects.allgather(_unshared(part["state"]), group)
            ):
                part["state"] = {**other, **part["state"]}
            # Ranks that have no parameter in common agree on the order of the keys.
            part["state"] = {
                index: part["state"][index]
                for index in sorted(
                    part["state"], key=lambda index: (isinstance(index, str), index)
                )
            }
        return part

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, or this rank's part of one, which are merged over the MP group (all of
        it must call). Before the model is partitioned the load waits until it is.

        Raises ValueError as torch's does, at the time of the load, if groups differ.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise ArgumentTypeError(
                "optimizer.load_state_dict: the state is no dict with 'state' and 'param_groups'"
            )
        if self._partitioned:
            self._load(state_dict)
        else:
            self._loads.append(state_dict)

    def load_deferred(self) -> None:
        """Carry out the loads that waited; after partitioning and its hooks."""
        loads, self._loads = self._loads, []
        for state in loads:
            self._load(state)

    def _load(self, given: Mapping[str, Any]) -> None:
        state, groups = given["state"], given["param_groups"]
        runtime = self._session.runtime
        group = runtime.group(GroupKind.MP)
        if given.get(PARTIAL, False) and len(group.ranks) > 1:
            parts = runtime.fabric.objects.allgather(_unshared(state), group)
            merged = {index: value for part in parts for index, value in part.items()}
            state = {**merged, **state}
        if [len(each["params"]) for each in groups] != [len(each) for each in self._order]:
            raise ValueError(
                "loaded state dict has a different number of parameter groups, or a group of different "
                f"size: {[len(each['params']) for each in groups]} parameters, "
                f"{[len(each) for each in self._order]} here"
            )
        # torch's own load matches positions, so it is given the part that is here, renumbered.
        saved = [index for each in groups for index in each["params"]]
        index_of = {
            id(parameter): index for parameter, index in zip(self._all(), saved, strict=True)
        }
        narrowed = [
            {
                **saved_group,
                "params": [index_of[id(each)] for each in own["params"]],
                **({"param_names": own["param_names"]} if "param_names" in own else {}),
            }
            for saved_group, own in zip(groups, self.optimizer.param_groups, strict=True)
        ]
        here = {index for each in narrowed for index in each["params"]}
        self.optimizer.load_state_dict(
            {
                "state": {
                    index: copy.deepcopy(state[index]) for index in sorted(here) if index in state
                },
                "param_groups": narrowed,
            }
        )

    def _all(self) -> list[torch.Tensor]:
        return [parameter for order in self._order for parameter in order]

    def _indices(self) -> dict[int, int]:
        """Index of each parameter in the original order, first occurrence, as torch numbers them."""
        indices: dict[int, int] = {}
        for parameter in self._all():
            indices.setdefault(id(parameter), len(indices))
        return indices

    def _own(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter stays: it is ours, or none of the model's (then every rank has it)."""
        return id(parameter) not in self._elsewhere and not foreign.is_foreign(parameter)

    def _keep_own(self, group: dict[str, Any]) -> None:
        kept = [position for position, each in enumerate(group["params"]) if self._own(each)]
        for key in {"params", "param_names"} & set(group):
            group[key] = [group[key][position] for position in kept]

    def _smp_partitioned(self, model: Any) -> None:
        """The model has been partitioned: forget what other ranks own."""
        placement, here = model.placement, self._session.runtime.position(GroupKind.PP)
        self._elsewhere = {
            id(parameter)
            for name, parameter in model.module.named_parameters()
            if placement.parameters[name] != here
        }
        for group in self.optimizer.param_groups:
            self._keep_own(group)
        for parameter in [each for each in self.optimizer.state if not self._own(each)]:
            del self.optimizer.state[parameter]
        self._partitioned = True


def _check_loss_scale(arguments: Mapping[str, Any]) -> None:
    given = dict(arguments)
    nested = given.pop("dynamic_loss_args", None)
    if nested is not None and not isinstance(nested, Mapping):
        raise ArgumentTypeError(
            f"smp.DistributedOptimizer: dynamic_loss_args must be a dict, not {nested!r}"
        )
    unknown = sorted({*given, *(nested or {})} - _LOSS_SCALE)
    if unknown:
        raise ArgumentError(
            f"smp.DistributedOptimizer: unknown argument {', '.join(map(repr, unknown))}; the arguments "
            f"of dynamic loss scaling are {', '.join(sorted(_LOSS_SCALE))}"
        )


def _unshared(state: Any) -> Any:
    """The state with tensors that own their memory: a pickled view drags its storage along."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _unshared(value) for key, value in state.items()}
    if isinstance(state, Iterable) and isinstance(state, list | tuple):
        return type(state)(_unshared(value) for value in state)
    return state
