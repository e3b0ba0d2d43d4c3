"""The state of training on one rank: its model, its optimizer, and the step in progress.

A session belongs to the rank's runtime, so it is the rank's own where ranks are threads, and it goes
with ``smp.shutdown``.

Every other module imports this one, so it imports none of them: ``SessionModel`` and ``Optimizer`` name the members
that modules read of the session's model and optimizer, and ``Reducer`` those that a step reads of the reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from smp_core import runtime
from smp_core.microbatch import CallArguments
from smp_core.runtime import Runtime


class Owners(Protocol):
    """The owner, a pp rank, of every module, parameter and buffer by name (pipeline/placement.py)."""

    @property
    def degree(self) -> int:
        """The number of partitions."""

    @property
    def modules(self) -> Mapping[str, int]:
        """The owner of each module by its path."""

    @property
    def parameters(self) -> Mapping[str, int]:
        """The owner of each parameter by its name."""

    @property
    def buffers(self) -> Mapping[str, int]:
        """The owner of each buffer by its name."""


class Reducer(Protocol):
    """The reduction of gradients over replicas (reduction/reducer.py)."""

    reductions: int
    replicas: Any

    @property
    def listens(self) -> bool:
        """True if the step is to tell of each complete gradient when it is ready."""

    @property
    def due(self) -> bool:
        """True if ``advance`` would launch anything."""

    @property
    def moves(self) -> bool:
        """True if the step gives away the gradients that it tells of."""

    def takes(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's total is of use before the end of the step."""

    def on_ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """Take a gradient that seems to be complete."""

    def on_late_grad(self, parameter: nn.Parameter) -> None:
        """Take back that a gradient was complete."""

    def advance(self) -> None:
        """Launch the complete buckets, in the rank's own thread."""

    def begin_step(
        self, buffers: Sequence[torch.Tensor] = (), source: int = 0, *, overlaps: bool = True
    ) -> None:
        """Prepare the reduction of a step; collective over the replicas."""

    def end_step(
        self,
        totals: Mapping[nn.Parameter, torch.Tensor],
        failure: object,
        *,
        joined: bool = False,
        microbatches: int | None = None,
    ) -> Any:
        """Agree on the failure, and reduce if there is none; collective over the replicas."""

    def pending(self) -> list[torch.Tensor]:
        """The sums that wait for the end of the window."""


class SessionModel(Protocol):
    """The members of the DistributedModel that modules below ``model.py`` use.

    ``sharding``, ``masters`` and the values of ``sites`` are of classes that are defined above this
    module, so each reader annotates them.
    """

    partitioned: bool
    _session: TrainingSession
    sites: Any
    masters: Any
    sharding: Any

    def get_module(self) -> nn.Module:
        """The module that was wrapped."""

    @property
    def translations(self) -> Mapping[str, object]:
        """The translations of the states of replaced modules, by path (tensor_parallel/translation.py)."""

    @property
    def placement(self) -> Owners | None:
        """The owners of all modules and parameters of the model; None until it is partitioned."""

    @property
    def gradients(self) -> Reducer | None:
        """The reduction of its gradients; None until it is partitioned."""

    @property
    def wide(self) -> bool:
        """True if gradients of 16-bit parameters are summed in float32."""

    def modules(self) -> Iterator[nn.Module]:
        """The model itself and the modules of the tree."""

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This partition's parameters by name, each once."""

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """This partition's parameters."""

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """This partition's buffers."""

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is split over tp ranks."""

    def owner(self, path: str) -> int:
        """The pp rank that runs a module."""

    def transport(self) -> Any:
        """The messages of the model's pipeline (execution/remote/transport.py); None at pipeline degree 1."""

    def prepare(
        self, body: Callable[..., object], split: Callable[[], list[CallArguments]]
    ) -> None:
        """Make the model ready for a step; collective over the world."""

    def settle(self) -> None:
        """Run the hooks and loads that waited for the partition."""

    def computing(self) -> AbstractContextManager[None]:
        """Entered around forward and backward passes, in the thread that runs them."""

    def finished(self) -> None:
        """Run the hooks that wait for a step that went well."""


class Optimizer(Protocol):
    """The members of the DistributedOptimizer that modules below ``optimizer/`` use."""

    optimizer: torch.optim.Optimizer
    loss_scaler: Any

    def load_state_dict(self, state_dict: object) -> None:
        """Load a state; see DistributedOptimizer."""

    def load_deferred(self) -> None:
        """Carry out the loads that waited for the partition."""

    def param_name_to_index(self) -> dict[str, int]:
        """The index in states of each parameter by its names."""

    def _smp_take_state(self, source: int) -> None:
        """Have the state of dp rank ``source``; collective over the DP group."""

    def _smp_check_fits(self, given: Mapping[str, object]) -> None:
        """Raise the errors that a load of the state would raise about groups and shards."""

    def _smp_load_precise(self, precise: Mapping[str, object] | None) -> None:
        """Load masters and loss scaler only."""

    def _smp_partitioned(self, model: SessionModel) -> None:
        """Forget the parameters that other ranks own."""

    def _smp_mastered(self, model: SessionModel) -> None:
        """Work on the model's masters, if there are any."""


@dataclasses.dataclass(eq=False, slots=True)
class TrainingSession:
    """One rank's training.

    ``step`` is the step in progress, as the engine keeps it; None outside of steps. ``steps`` counts
    the steps that have begun, the same on every rank. ``restored`` is the Placement that a partial
    checkpoint brought; it holds instead of a new decision. ``tensor_group`` has the exchanges of distributed modules
    (tensor_parallel/exchange.py); None until there is a model.
    """

    runtime: Runtime
    model: SessionModel | None = None
    optimizer: Optimizer | None = None
    step: Any = None
    steps: int = 0
    timeline: Any = ()  # the last step's events on this rank (execution/timeline.py)
    tracing: bool = False
    tape: Any = None  # of delayed initialisation (creation.Tape)
    restored: Any = None
    tensor_group: Any = None


def current(call: str) -> TrainingSession:
    """This rank's session, made on the first call. Raises NotInitializedError, naming ``call``."""
    owner = runtime.current(call)
    if owner.training is None:
        owner.training = TrainingSession(owner)
    session: TrainingSession = owner.training
    return session
