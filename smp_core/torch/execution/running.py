"""The state of the step in progress: what its activities, their server and the calls that cross ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from smp_core.topology import GroupKind
from smp_core.torch.execution import modes, schedule
from smp_core.torch.execution.accumulation import Ledger, Listener
from smp_core.torch.execution.failures import elsewhere, failure_of
from smp_core.torch.execution.remote.messages import Failure
from smp_core.torch.execution.remote.transport import Transport
from smp_core.torch.execution.source import ParameterSource
from smp_core.torch.execution.timeline import Timed, Timeline
from smp_core.torch.execution.uses import CallKey
from smp_core.torch.execution.workers import Crew
from smp_core.torch.session import Reducer, Session


class Callee(Protocol):
    """One module of the model, as its rank runs it for itself and for others (calls.py)."""

    @property
    def closed(self) -> bool:
        """Whether its forward pass is sure to call no module of another rank."""

    def training(self) -> bytes:
        """Which modules from this one on are in training mode."""

    def train(self, training: bytes) -> None:
        """Set the modules from this one on to what ``training`` gave."""

    def follow(self, caller: int, training: bytes) -> None:
        """Take over what a calling rank has changed of the training modes."""

    def run(
        self,
        activity: Any,
        key: CallKey,
        hooked: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the module on this rank, for an activity."""


class RunningStep:
    """The step in progress, on one rank.

    ``departures`` makes what tells the reducer of complete gradients during the backward pass.
    """

    def __init__(
        self, session: Session, departures: Callable[[RunningStep, Reducer], Listener]
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
        self.crew = Crew()
        self.modes = modes.current()  # of the caller of the step: those of the bodies
        self.gradients = None if model is None else model.gradients
        listens = self.gradients is not None and self.gradients.listens
        listener = departures(self, self.gradients) if listens and self.gradients else None
        sharding = None if model is None else model.sharding
        self.gathered: ParameterSource | None = None if sharding is None else sharding.gathered
        self.ledger = Ledger(self.microbatches, listener, moves=sharding is not None)
        self.ledger.wide = model is not None and model.wide
        self.computing = contextlib.nullcontext if model is None else model.computing
        self.seed = 0  # of the random streams: the driver's, which comes with each request
        self.timeline = Timeline(runtime.rank)
        self.failure: Failure | None = None
        self.unwinding = False  # every activity is to end, though nobody is told
        self._own: tuple[Failure, BaseException] | None = None
        self._calls = 0
        self._over: list[int] = []  # microbatches whose bodies are over, as far as this rank knows
        self._told: dict[int, int] = {}  # how many of them by pp rank

    def next_call(self) -> int:
        """A number for a request of this rank."""
        self._calls += 1
        return self._calls

    def news_for(self, rank: int) -> tuple[int, ...]:
        """The microbatches that are over, as far as a rank has not been told."""
        told, self._told[rank] = self._told.get(rank, 0), len(self._over)
        return tuple(self._over[told:])

    def is_over(self, microbatch: int) -> bool:
        """The body of a microbatch is over: no gradient of it will come. Whether that is news."""
        if microbatch in self._over:
            return False
        self._over.append(microbatch)
        self.ledger.close(microbatch)
        return True

    def fail(self, activity: Timed | None, error: BaseException) -> None:
        """This rank raised: the step has failed, if it has not yet."""
        if self.failure is None:
            self.failure = failure_of(self.session.runtime, activity, error)
            self._own = self.failure, error

    def failed(self, failure: Failure) -> None:
        """Another rank says that the step has failed."""
        if self.failure is None:
            self.failure = failure

    def refuse(self, failure: Failure) -> NoReturn:
        """Raise what failed: as itself where it was raised, and everywhere if it is an error of ours."""
        if self._own is not None and self._own[0] == failure:
            raise self._own[1]
        raise elsewhere(failure)


def _here(path: str) -> None:
    return None
