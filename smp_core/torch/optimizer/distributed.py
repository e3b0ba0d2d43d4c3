"""``smp.DistributedOptimizer``: a torch optimizer over this rank's part of the parameters, whose
state can be had, and given, whole (API 1.8; state.py).

Where the model has masters (precision/masters.py), the wrapped optimizer's groups and state hold those in
the parameters' place (parameters.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from smp_core.errors import ArgumentTypeError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import SecondModelError, UnsupportedTrainingError
from smp_core.torch.optimizer import state as optimizer_state
from smp_core.torch.optimizer.internals import Internals
from smp_core.torch.optimizer.parameters import OptimizerParameters
from smp_core.torch.optimizer.parts import check_elementwise, check_parts
from smp_core.torch.optimizers import FusedLAMB
from smp_core.torch.parameters.split import check_current, split_of
from smp_core.torch.precision import scaler
from smp_core.torch.precision.scaler import LossScaler
from smp_core.torch.precision.update import Found, Update
from smp_core.torch.tensor_tree import StateDict


class DistributedOptimizer(Internals, Optimizer):
    """Wraps the optimizer of a script; there is one.

    ``optimizer`` was made over the model's parameters before or after the model was wrapped, before
    or after it was partitioned. When the model is partitioned, parameters of other ranks are dropped, with
    their state if they have any; groups stay, even empty. ``param_groups``, ``state`` and
    ``defaults`` are the wrapped optimizer's own, so learning-rate schedulers take either of the two.

    Args:
        optimizer: any ``torch.optim.Optimizer``. With ``fp16`` also the ``FP16_Optimizer`` that scripts brought along
            before SMP 1.10: the optimizer in its attribute ``optimizer`` is wrapped.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: scripts pass them in FP32 runs too, the
            last as one dict under that name or as keywords of its keys. Ignored without ``fp16``.

    Members of SMP's that are not documented: internals.py.

    With ``fp16``: ``optimizer`` is the wrapped optimizer, which learning-rate schedulers are given;
    ``overflow``: whether the last step was skipped; ``loss_scaler``: precision/scaler.py's, else None.

    Raises ArgumentTypeError if ``optimizer`` is none, or a DistributedOptimizer; ArgumentError for an
    unknown loss-scale argument; SecondModelError for a second one; UnsupportedTrainingError for an
    optimizer that calls its closure several times (LBFGS) in 16 bits, or is not elementwise where it would
    see parts of parameters (``shard_optimizer_state``, sharded data parallelism, tensor parallelism).
    """

    def __init__(
        self,
        optimizer: object,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: object,
    ) -> None:
        session = sessions.current("smp.DistributedOptimizer")
        optimizer = _unwrapped(optimizer, session.runtime.config.fp16)
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
        check_current(
            "smp.DistributedOptimizer",
            (each for group in optimizer.param_groups for each in group["params"]),
        )
        dynamic = scaler.dynamic_arguments(dynamic_loss_args)
        config = session.runtime.config
        if isinstance(optimizer, torch.optim.LBFGS) and (config.fp16 or config.bf16):
            raise UnsupportedTrainingError(
                "smp.DistributedOptimizer: LBFGS calls its closure several times in a step, and in 16 bits "
                "gradients are looked at once a step. Use another optimizer, or leave fp16 and bf16 out"
            )
        if config.shard_optimizer_state or session.runtime.topology.sharding > 1:
            split = config.shard_optimizer_state
            what = "shard_optimizer_state" if split else "sharded_data_parallel_degree"
            check_elementwise(optimizer, what)
        given = (each for group in optimizer.param_groups for each in group["params"])
        if any(split_of(each) is not None for each in given):
            check_parts(optimizer, "tensor parallelism")
        if isinstance(optimizer, FusedLAMB):
            optimizer.gather_norms = functools.partial(_of_partitions, session.runtime)
        # Not Optimizer.__init__, which would make groups of its own: one set of groups, two faces.
        self.optimizer = optimizer
        self._session = session
        self._loads: list[object] = []
        self.overflow = False
        of_losses = None
        if config.fp16:
            of_losses = scaler.of_arguments(static_loss_scale, dynamic_loss_scale, dynamic)
        self._parameters = OptimizerParameters(optimizer, session.runtime, of_losses)
        self._update: Update | None = None  # once the model is partitioned, with masters
        session.optimizer = self
        if session.model is not None and session.model.partitioned:
            self._smp_partitioned(session.model)
            self._smp_mastered(session.model)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute that is not defined here up on the wrapped optimizer: its groups, hooks and methods."""
        if name == "optimizer":  # not there yet, while it is unpickled
            raise AttributeError(name)
        member = getattr(type(self), name, None)
        if isinstance(member, property) and member.fget is not None:
            return member.fget(
                self
            )  # it has raised an AttributeError: raise it again, with its advice
        return getattr(self.optimizer, name)

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The scaler of losses (precision/scaler.py); None without ``fp16``. A script may set its own before step 1."""
        return self._parameters.scaler

    @loss_scaler.setter
    def loss_scaler(self, loss_scaler: LossScaler | None) -> None:
        self._parameters.scaler = loss_scaler

    @property
    def param_groups(self) -> list[StateDict]:
        """The wrapped optimizer's groups, with this rank's parameters once the model is partitioned."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[StateDict]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> StateDict:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: StateDict) -> None:
        self.optimizer.defaults = defaults

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, object]:
        raise TypeError(
            "smp.DistributedOptimizer belongs to its rank and cannot be copied; take its state_dict()"
        )

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group as torch's method does. Other ranks' parameters get their index in states, and are left out."""
        self.optimizer.add_param_group(param_group)
        self._parameters.add_last_group()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of this rank's parameters; a rank without any does nothing but call
        ``closure``. Returns the value of the closure.

        With masters, or sharded parameters, ``closure`` is called once, before anything else. With ``fp16``
        and a dynamic loss scale every rank of the world calls: if any found an infinity or NaN, the step is
        skipped on all, which drops the gradients; if none has a gradient, nothing at all happens.
        """
        parameters = self._parameters
        sharding, masters = parameters.sharding, parameters.masters
        if masters is None and not sharding.clips:
            return self._step(closure)
        sharding.reshard()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        scale = self.loss_scale
        if masters is not None:
            assert self._update is not None
            parameters.take_masters()
            masters.sync()
            found = self._update.ready(parameters.targets())
            self.overflow = found is Found.OVERFLOW
            if self.overflow:
                self.zero_grad()
            if found is not Found.FINITE:
                return result
            scale = masters.take_scale(parameters.targets(), scale)
        sharding.clip(parameters.targets(), scale)  # divides by the scale, too
        self._step(None)
        if masters is not None:
            masters.publish()
        return result

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's step; a rank without parameters only calls the closure, and takes part in the norm
        of LAMB.
        """
        works = any(group["params"] for group in self.optimizer.param_groups)
        if works or isinstance(self.optimizer, FusedLAMB):
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients as torch's method does, those of masters and of their parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self._parameters.masters is not None:
            self._parameters.masters.zero_grad(set_to_none)

    def with_gradients(self) -> list[object]:
        """The tensors in whose ``grad`` a script finds gradients: this rank's parameters, or masters of 16-bit ones."""
        shown = []
        for order in self._parameters.order:
            for each in order:
                face = self._parameters.face(each)
                shown.append(each if each.grad is not None else face)
        return shown

    # 16 bits.

    @property
    def loss_scale(self) -> float:
        """The factor of ``model.backward`` on losses: 1 without ``fp16``. With ``fp16`` a script may set the factor.

        Setting it raises UnsupportedTrainingError without ``fp16``, ArgumentError for no positive number.
        """
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self.loss_scaler is None:
            raise UnsupportedTrainingError(
                "optimizer.loss_scale: losses are scaled with fp16 only. Set fp16, or leave it out"
            )
        self.loss_scaler.loss_scale = scale

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the masters' gradients by the norm of the whole model's, the loss scale taken out, as torch's
        ``clip_grad_norm_`` does. Returns that norm, a float64 tensor of shape ``()``; -1 if any rank's
        gradients overflowed, which are then left as they are, for ``step`` to skip. Clipping and scale
        are one multiplication.

        Collective over the world. Sharded data parallelism clips by its own norm, and once more in ``step``. Raises
        UnsupportedTrainingError in a run without ``fp16`` or ``bf16``, before the model is partitioned, and under
        sharded data parallelism for another norm than the L2 norm.
        """
        masters = self._parameters.masters
        if masters is None or masters.dtype is None or self._update is None:
            raise UnsupportedTrainingError(
                "optimizer.clip_master_grads: there are no masters: the model is not partitioned yet, or "
                "neither fp16 nor bf16 is set. Call it after the step; without 16 bits clip p.grad"
            )
        if self._parameters.sharding.clips and norm_type != 2:
            raise UnsupportedTrainingError(
                f"optimizer.clip_master_grads: norm_type={norm_type}: sharded data parallelism clips by the L2 norm. "
                "Leave norm_type out"
            )
        self._parameters.take_masters()
        norm = self._update.clip(self._parameters.targets(), max_norm, norm_type)
        return torch.tensor(norm, dtype=torch.float64)

    # State (state.py).

    def local_state_dict(self, gather_if_shard: bool = True) -> Any:
        """This rank's part of the state, with ``_smp_is_partial``; on rdp_rank 0 the list of all parts, where
        the state is split over the RDP group, for which all of it calls. With ``shard_optimizer_state`` and not
        ``gather_if_shard`` every rank gets its own.
        """
        return optimizer_state.local_state_dict(self._parameters, gather_if_shard)

    def state_dict(self) -> StateDict:
        """The whole state, as plain torch's optimizer over the whole model would have it.

        Collective over the MP and the shard group. Raises UnsupportedTrainingError with
        ``shard_optimizer_state`` (API 6).
        """
        return optimizer_state.state_dict(self._parameters)

    def load_state_dict(self, state_dict: object) -> None:
        """Load a whole state, this rank's part of one, or the list of all parts by rdp_rank. Parts are merged
        over the PP group (all of it must call). Before the model is partitioned the load waits until it is.

        Raises ValueError as torch's does, at the time of the load, if groups differ.
        """
        optimizer_state.check(state_dict)
        if self._parameters.partitioned:
            optimizer_state.load(self._parameters, state_dict)
        else:
            self._loads.append(state_dict)

    def load_deferred(self) -> None:
        """Carry out the loads that waited; after partitioning and its hooks."""
        loads, self._loads = self._loads, []
        for state in loads:
            optimizer_state.load(self._parameters, state)

    def _smp_take_state(self, source: int) -> None:
        """Take over dp rank ``source``'s state for each parameter; collective over the DP group."""
        optimizer_state.take(self._parameters, source)

    def _smp_check_fits(self, given: Mapping[str, object]) -> None:
        """Raise ValueError if groups differ, CheckpointError for another rank's shard or slices."""
        optimizer_state.check_fits(self._parameters, given)

    def _smp_load_precise(self, precise: Mapping[str, object] | None) -> None:
        """Load the masters and the loss scaler of a state, as far as this run has such."""
        optimizer_state.load_precise(self._parameters, precise)

    # Calls by the model.

    def _smp_partitioned(self, model: sessions.SessionModel) -> None:
        """Forget the parameters that other ranks own, now that the model has been partitioned."""
        self._parameters.partition(model)

    def _smp_mastered(self, model: sessions.SessionModel) -> None:
        """The model has been partitioned, and has its own parameters: work on masters, if there are any."""
        if model.masters is not None:
            self._update = Update(self._session, model.masters)
        self._parameters.follow(model)


def _unwrapped(optimizer: object, fp16: bool) -> object:
    """Return the optimizer that a script's own ``FP16_Optimizer`` has around it; anything else as it is.

    Raises ArgumentTypeError without ``fp16``: nothing else keeps masters of parameters in 16 bits.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, Optimizer) or not isinstance(inner, Optimizer):
        return optimizer
    if not fp16:
        raise ArgumentTypeError(
            f"smp.DistributedOptimizer: optimizer is a {type(optimizer).__name__} around a {type(inner).__name__}: the "
            'configuration parameter fp16 has taken its place. Give "fp16": True to smp.init'
        )
    return inner


def _of_partitions(runtime: Runtime, norm: float) -> Sequence[float]:
    """The values of all ranks of the PP group, which call this together."""
    if runtime.config.pipeline_parallel_degree == 1:
        return [norm]
    return runtime.fabric.objects.allgather(norm, runtime.group(GroupKind.PP))
