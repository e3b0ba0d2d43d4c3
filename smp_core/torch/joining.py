"""``model.join()``: replicas with different numbers of batches (API 1.7).

As torch's DDP has it. A replica that has left the loop stays in the context and *shadows* the steps of
the others: it takes their buffers and reduces zeros with them (and, at the first boundary of
accumulation, the sums of steps that it took itself), until nobody has input. Gradients are divided by
the number of all replicas, joined or not (torch's ``divide_by_initial_world_size=True``). Its own
``p.grad`` stays; its optimizer takes no steps. In the end all replicas get the parameters and buffers
(and masters) of one that took the most steps, and the state that its optimizer has of them: with another momentum the
next update would make replicas differ. Options of the optimizer's groups, as the learning rate, stay a replica's own.

While the context is entered, a step begins with a message to the other replicas: whether there is one.
"""

from __future__ import annotations

from types import TracebackType

from smp_core.topology import GroupKind
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.execution import agreement, failures
from smp_core.torch.execution.agreement import ReplicaReport
from smp_core.torch.session import SessionModel, TrainingSession


class Join:
    """The context manager of ``model.join()``: ``with model.join(): ...`` around the loop over batches, on every
    rank. The ranks of one pipeline have equally many batches.

    Entering raises UnsupportedTrainingError if ``ddp`` is not on, inside of another join, and with
    sharded data parallelism, ``shard_optimizer_state`` or ``dynamic_loss_scale``. Leaving raises the error that
    a step of another replica raised. If a replica has no batch at all, the model must have been
    partitioned before (by a step, or pipeline degree 1); else every replica raises
    UnsupportedTrainingError.
    """

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._steps = 0

    def __enter__(self) -> Join:
        model = self._model
        if not self._session.runtime.config.ddp:
            raise UnsupportedTrainingError(
                "model.join is for data parallelism with the configuration parameter ddp=True"
            )
        if model.sharding.degree > 1:
            raise UnsupportedTrainingError(
                "model.join: not with sharded data parallelism: a replica without a batch has a part of the parameters "
                "that the others need. Give every rank as many batches, or set sharded_data_parallel_degree to 1"
            )
        scaler = None if self._session.optimizer is None else self._session.optimizer.loss_scaler
        parts = None if model.masters is None else model.masters.parts
        if parts is not None or (scaler is not None and scaler.dynamic):
            what = "shard_optimizer_state" if parts is not None else "dynamic_loss_scale"
            raise UnsupportedTrainingError(
                f"model.join: not with {what}: all ranks exchange something in optimizer.step(), which a replica "
                f"without a batch does not call. Give every rank as many batches, or leave {what} out"
            )
        if current(self._session) is not None:
            raise UnsupportedTrainingError("model.join was entered inside of model.join")
        model.__dict__["_join"] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                while self.others():
                    self._shadow()
                self._synchronize()
        finally:
            del self._model.__dict__["_join"]

    @property
    def _model(self) -> SessionModel:
        model = self._session.model
        assert model is not None
        return model

    def step(self) -> int:
        """Tell the others that this replica begins a step; gives the dp rank whose buffers count."""
        self._steps += 1
        return self._meet(joined=False)[0]

    def others(self) -> bool:
        """Tell the others that this replica has no more steps: whether another begins one."""
        self._active = self._meet(joined=True)
        return bool(self._active)

    def _meet(self, joined: bool) -> list[int]:
        agreed = agreement.agree(self._session.runtime, ReplicaReport(joined=joined))
        if agreed.active and len(agreed.active) < len(agreed.reports):
            self._check_partitioned(len(agreed.reports) - len(agreed.active))
        return agreed.active

    def _check_partitioned(self, idle: int) -> None:
        if not self._model.partitioned:
            raise UnsupportedTrainingError(
                f"model.join: {idle} replicas have no batch for the first step, in which the model is partitioned. "
                "Give every replica at least one batch"
            )

    def _shadow(self) -> None:
        gradients = self._model.gradients
        assert gradients is not None
        self._session.steps += 1
        self._model.settle()
        gradients.begin_step(list(self._model.local_buffers()), self._active[0])
        failure = gradients.end_step({}, None, joined=True)
        if failure is not None:
            raise failures.remote_failure(failure)
        self._model.finished()

    def _synchronize(self) -> None:
        runtime, gradients = self._session.runtime, self._model.gradients
        if gradients is None:  # nobody took a step
            return
        group = runtime.group(GroupKind.DP)
        if len(group.ranks) > 1:
            steps = runtime.fabric.objects.allgather(self._steps, group)
            state = [*self._model.local_parameters(), *self._model.local_buffers()]
            masters = self._model.masters
            if masters is not None and masters.parts is None:
                # Masters travel, too: a parameter is its master rounded, and does not give it back.
                masters.sync()
                own = [masters.of(parameter) for parameter in self._model.local_parameters()]
                state += [each for each in own if each not in set(state)]
            source = steps.index(max(steps))
            gradients.replicas.broadcast(state, source)
            if masters is not None and masters.parts is None:
                masters.agreed()
            if self._session.optimizer is not None:
                self._session.optimizer._smp_take_state(source)


def current(session: TrainingSession) -> Join | None:
    """The join that the model is in, or None."""
    model = session.model
    joined: Join | None = None if model is None else vars(model).get("_join")
    return joined


def before_step(session: TrainingSession) -> int:
    """At the very beginning of each step: gives the dp rank whose buffers count, for
    ``GradientReducer.begin_step``. Sends nothing outside of joins.
    """
    join = current(session)
    return 0 if join is None else join.step()
