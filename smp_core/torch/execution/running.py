"""The state of the step in progress, which its activities, their server and remote calls share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol

from smp_core import schedule
from smp_core.topology import GroupKind
from smp_core.torch.execution import modes
from smp_core.torch.execution.accumulation import GradientListener, Ledger
from smp_core.torch.execution.failures import failure_of, remote_failure
from smp_core.torch.execution.remote.messages import RemoteFailure
from smp_core.torch.execution.remote.transport import Transport
from smp_core.torch.execution.source import WHOLE, ParameterSource
from smp_core.torch.execution.timeline import Timed, Timeline
from smp_core.torch.execution.uses import CallKey
from smp_core.torch.execution.workers import WorkerThreads
from smp_core.torch.session import Reducer, TrainingSession


class Callee(Protocol):
    """A module of the model, which a rank runs for itself and for other ranks (calls.py)."""

    @property
    def closed(self) -> bool:
        """True if the forward pass is sure to call no module of another rank."""

    def training(self) -> bytes:
        """The training modes of this module and its children, one byte each."""

    def train(self, training: bytes) -> None:
        """Set the training modes to those that ``training`` returned."""

    def follow(self, caller: int, training: bytes) -> None:
        """Take over the training modes that a calling rank has changed."""

    def run(
        self,
        activity: object,
        key: CallKey,
        hooked: bool,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Run the module on this rank, for an activity."""


class RunningStep:
    """The step in progress on one rank.

    ``overlap`` makes the listener that launches buckets during the backward pass.
    """

    def __init__(
        self, session: TrainingSession, overlap: Callable[[RunningStep, Reducer], GradientListener]
    ) -> None:
        runtime, model = session.runtime, session.model
        config = runtime.config
        self.session, self.number = session, session.steps
        self.microbatches = config.microbatches
        self.policy = schedule.POLICIES[config.pipeline]
        self.cap = config.active_microbatches
        self.rank = runtime.position(GroupKind.PP)
        self.transport: Transport | None = None if model is None else model.transport()
        self.sites: Mapping[str, Callee] = {} if model is None else model.sites
        self.owner: Callable[[str], int | None] = _here if model is None else model.owner
        self.workers = WorkerThreads()
        self.modes = modes.current()  # of the step's caller, for the bodies
        self.gradients = None if model is None else model.gradients
        listens = self.gradients is not None and self.gradients.listens
        listener = overlap(self, self.gradients) if listens and self.gradients else None
        self.source: ParameterSource = WHOLE if model is None else model.sharding.unsharded
        self.ledger = Ledger(
            self.microbatches, listener, moves=self.gradients is not None and self.gradients.moves
        )
        self.ledger.wide = model is not None and model.wide
        self.computing = contextlib.nullcontext if model is None else model.computing
        self.seed = 0  # of the random streams: drawn by the driver, and part of each request
        self.timeline = Timeline(runtime.rank)
        self.failure: RemoteFailure | None = None
        self.unwinding = False  # every activity is to end, and no rank is told
        self._own: tuple[RemoteFailure, BaseException] | None = None
        self._calls = 0
        self._ended: list[
            int
        ] = []  # microbatches whose bodies have ended, as far as this rank knows
        self._sent: dict[int, int] = {}  # how many of them a pp rank has been sent

    def next_call(self) -> int:
        """Draw the number of the next request of this rank."""
        self._calls += 1
        return self._calls

    def ended_since_last_request(self, rank: int) -> tuple[int, ...]:
        """The microbatches whose bodies have ended since the last request to ``rank``."""
        sent, self._sent[rank] = self._sent.get(rank, 0), len(self._ended)
        return tuple(self._ended[sent:])

    def end_microbatch(self, microbatch: int) -> bool:
        """Close a microbatch whose body has ended, so no gradient of it will come. False if it was closed."""
        if microbatch in self._ended:
            return False
        self._ended.append(microbatch)
        self.ledger.close(microbatch)
        return True

    def fail(self, activity: Timed | None, error: BaseException, *, of_group: bool = False) -> None:
        """Record an exception of this rank, unless the step has failed before. ``of_group``: all ranks of its TP group
        raise one here.
        """
        if self.failure is None:
            failure = failure_of(self.session.runtime, activity, error)
            self.failure = failure._replace(of_group=of_group)
            self._own = self.failure, error

    def failed(self, failure: RemoteFailure) -> None:
        """Record the failure of another rank, unless the step has failed before."""
        if self.failure is None:
            self.failure = failure

    def refuse(self, failure: RemoteFailure) -> NoReturn:
        """Raise the failure: the exception itself on its rank and for errors of this project, StepAbortedError else."""
        if self._own is not None and self._own[0] == failure:
            raise self._own[1]
        raise remote_failure(failure)


def _here(path: str) -> None:
    return None
