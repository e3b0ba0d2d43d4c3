"""One step, and the path of a microbatch through the ranks.

1. The driver (pp rank 0 of each pipeline) splits the arguments and runs the body once per microbatch,
   each in a worker (``run_step``, ``Server.drive``). The other pp ranks serve (``Server.serve``).
2. The body calls the model. A module that this rank owns runs here. A call of any other module becomes a
   request to its owner (calls.py, ``boundary.call_remote``), the worker pauses, and another microbatch may run
   (``schedule.choose``).
3. The owner runs the module in a worker of its own, which may call modules of any rank in the same way,
   and answers with the outputs (``boundary.run_forward``). The caller's worker continues when it is its turn.
4. ``model.backward(loss)`` waits for its turn, then runs autograd in the body's worker. At a remote call autograd
   asks the owner for the backward pass of the call (``boundary.run_backward``), which may ask further ranks in the
   same way, and continues with the gradients of the inputs.
5. When all bodies have ended, no message is in flight. The driver ends the step, and every rank gets the
   results (``End``). The replicas agree that the step has succeeded, and gradients are reduced.

If the step fails, the microbatches that have begun are unwound first, so no message outlives its step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from smp_core.errors import PayloadError, VerdictError
from smp_core.microbatch import CallArguments
from smp_core.torch.exceptions import (
    OutsideStepError,
    UnsupportedTrainingError,
)
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import agreement, batches, streams
from smp_core.torch.execution.remote.messages import End, RemoteFailure
from smp_core.torch.execution.remote.packets import (
    NOTHING,
    OutgoingPayload,
    ReceivedPayload,
    freeze,
)
from smp_core.torch.execution.running import Callee, RunningStep
from smp_core.torch.execution.server import Server
from smp_core.torch.session import Reducer, TrainingSession
from smp_core.torch.tensor_tree import detached


class _Overlap:
    """Tells the reducer of complete gradients; launches buckets in the midst of a backward pass."""

    def __init__(self, step: RunningStep, gradients: Reducer) -> None:
        self._step, self._gradients = step, gradients
        self.takes, self.on_late_grad = gradients.takes, gradients.on_late_grad

    def on_ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        self._gradients.on_ready(parameter, total)
        activity = activities.current()
        failed = self._step.failure is not None or self._step.unwinding
        if activity is not None and self._gradients.due and not failed:
            activity.step_aside(self._gradients.advance)


def run_step(
    session: TrainingSession,
    body: Callable[..., object],
    split: Callable[[], list[CallArguments]],
    detach_outputs: bool,
) -> list[object]:
    """Run one step; every rank of the world calls it. Returns the body's result for each microbatch, in
    order, on every pp rank.

    ``split`` returns the arguments of each microbatch, and is called on the driver alone. If it or a body raises, every
    rank raises: see ``RunningStep.refuse``.
    """
    if session.step is not None:
        raise OutsideStepError("smp.step: a step was entered inside a step")
    model = session.model
    if model is None and session.runtime.config.pipeline_parallel_degree > 1:
        raise UnsupportedTrainingError(
            "smp.step: there is no model to run over the ranks of the pipeline. Make one before the "
            "first step: model = smp.DistributedModel(module)"
        )
    session.steps += 1
    if model is not None:
        with torch.inference_mode(False):
            model.prepare(body, split)
    step = session.step = RunningStep(session, _Overlap)
    try:
        results = _run(step, body, split, detach_outputs)
    finally:
        session.step, session.timeline = None, step.timeline.events
        step.workers.close()
        # The ledger's listener refers to the step: in that cycle gradients would wait for the garbage collector.
        del step.ledger
    if model is not None:
        model.finished()
    return results


def _run(
    step: RunningStep,
    body: Callable[..., object],
    split: Callable[[], list[CallArguments]],
    detach_outputs: bool,
) -> list[object]:
    # Every rank draws, although only the driver's seed is used: generators that began alike stay alike, so a script
    # may restore the state of any of them on all ranks.
    step.seed = streams.draw_seed()
    server = Server(step)
    results: list[object] = []
    try:
        if step.rank == 0:
            results = _drive(step, server, body, split, detach_outputs)
        else:
            end, answer = server.serve()
            if end.failure is None:
                try:
                    results = answer.thaw()
                except Exception as error:  # a value's own __setstate__ may raise anything
                    step.fail(None, error)
                for microbatch in range(step.microbatches):
                    step.end_microbatch(microbatch)
            else:
                step.failure = end.failure  # if several ranks failed, the driver's choice holds
    finally:
        server.close()
    if step.transport is not None:
        step.transport.settle()
    failure = _agreed(step)
    if failure is not None:
        step.refuse(failure)
    return results


def _drive(
    step: RunningStep,
    server: Server,
    body: Callable[..., object],
    split: Callable[[], list[CallArguments]],
    detach_outputs: bool,
) -> list[object]:
    results: list[object] = []
    sent = NOTHING
    of_group = True  # all ranks of the TP group raise, if one does
    try:
        calls, step.seed = batches.compared(step.session.runtime, split, step.seed)
        of_group = False
        bodies = [functools.partial(body, *call.args, **call.kwargs) for call in calls]
        del calls
        root = step.sites.get("")
        modes_left: dict[int, bytes] = {}
        if root is not None:
            begin = root.training()
            bodies = [
                functools.partial(_in_mode, root, begin, modes_left, number, each)
                for number, each in enumerate(bodies)
            ]
        by_microbatch = server.drive(bodies)
        if root is not None and len(bodies) - 1 in modes_left:
            root.train(modes_left[len(bodies) - 1])
        if step.failure is None:
            results = [by_microbatch[microbatch] for microbatch in range(len(bodies))]
            if detach_outputs:
                results = [detached(result) for result in results]
            if step.transport is not None:
                sent = _sendable(results)
    except VerdictError:
        raise  # the whole world has ended with it
    except Exception as error:
        step.fail(None, error, of_group=of_group)
    server.end(End(step.failure), sent)
    return results


def _in_mode(
    root: Callee,
    training: bytes,
    left: dict[int, bytes],
    microbatch: int,
    body: Callable[[], object],
) -> object:
    """Run a body with the training modes at the start of the step, and keep the modes at its end.

    Other bodies, which are paused, may have set other modes in between.
    """
    root.train(training)
    result = body()
    left[microbatch] = root.training()
    return result


def _sendable(results: list[object]) -> OutgoingPayload:
    """Pickle the results, and unpickle them on trial: here an error still reaches every rank."""
    what = "smp.step: what the function returned"
    sent = freeze(results, what, False)
    try:
        ReceivedPayload(sent.pickled, sent.tensors, sent.requires).thaw()
    except Exception as error:
        raise PayloadError(
            f"{what} cannot be put together on another rank: {type(error).__name__}: {error}. Return "
            "tensors and values that can be unpickled"
        ) from error
    return sent


def _agreed(step: RunningStep) -> RemoteFailure | None:
    """Replicas tell each other how their pipelines ended, and reduce gradients if all went well; the
    first failure is every rank's. The ranks of a TP group that failed together keep their own.
    """
    model = step.session.model
    if model is not None and not model.sharding.end_step(step.failure is not None):
        return step.failure
    together = step.session.tensor_group is not None and step.failure is not None
    if together and step.failure is not None and not step.failure.of_group:
        # A rank of a TP group may wait for an activation of this one, and not to hear how the step ended here.
        return step.failure
    failure: RemoteFailure | None
    if model is None or model.gradients is None:
        report = agreement.ReplicaReport(failure=step.failure)
        failure = agreement.agree(step.session.runtime, report).failure
    else:
        totals = step.ledger.totals() if step.failure is None else {}
        failure = model.gradients.end_step(totals, step.failure)
    return step.failure if together else failure
