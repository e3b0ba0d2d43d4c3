"""Exceptions of one rank, as the other ranks learn of them and raise them."""

from __future__ import annotations

import contextlib
import pickle
import traceback

from torch import nn

from smp_core.collective_try import text_of
from smp_core.errors import SmpError, VerdictError
from smp_core.runtime import Runtime
from smp_core.schedule import Phase
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import StepAbortedError
from smp_core.torch.execution.remote.messages import RemoteFailure
from smp_core.torch.execution.timeline import Timed
from smp_core.torch.session import TrainingSession
from smp_core.transport.stack_frames import is_ours


def module_text(path: str) -> str:
    """A module in an error's words."""
    return f"module {path}" if path else "the model itself"


def aborted(session: TrainingSession, error: BaseException) -> StepAbortedError:
    """The exception for the other ranks when this rank raised ``error`` before the first microbatch."""
    return _aborted(failure_of(session.runtime, None, error))


def remote_failure(failure: RemoteFailure, when: str | None = None) -> Exception:
    """The exception that a rank raises for another rank's failure.

    ``when`` says in words at which time the failure was, if it was in no microbatch.
    """
    error: SmpError = _aborted(failure, when) if failure.api is None else pickle.loads(failure.api)
    error.raised_by = failure.rank
    return error


def failure_of(runtime: Runtime, activity: Timed | None, error: BaseException) -> RemoteFailure:
    """An exception of this rank, in a form that can be sent."""
    api = None
    if isinstance(error, SmpError) and not isinstance(error, VerdictError):
        with contextlib.suppress(Exception):  # a class of the user's may do anything
            pickled = pickle.dumps(error)
            if type(pickle.loads(pickled)) is type(error):
                api = pickled
    return RemoteFailure(
        runtime.position(GroupKind.PP),
        runtime.rank,
        None if activity is None else activity.microbatch,
        None if activity is None else activity.path,
        None if activity is None else activity.phase,
        type(error).__name__,
        text_of(error),
        _traceback(error),
        api,
    )


def _traceback(error: BaseException) -> str:
    """The traceback of the user's frames, if there are any; frames of this project and of module calls are left out."""
    told = traceback.TracebackException.from_exception(error)  # survives what text_of does
    users = [
        frame
        for frame in told.stack
        if not is_ours(frame.filename) and frame.filename != nn.modules.module.__file__
    ]
    if users:
        told.stack = traceback.StackSummary.from_list(users)
    return "".join(told.format())


def _aborted(failure: RemoteFailure, when: str | None = None) -> StepAbortedError:
    """The exception that the other ranks raise for a user's exception."""
    where = f"pp rank {failure.pp_rank} (world rank {failure.rank})"
    what = when or "before the first microbatch"
    if failure.microbatch is not None:
        phase = "backward" if failure.phase is Phase.BACKWARD else "forward"
        module = "the function" if failure.path is None else module_text(failure.path)
        what = f"in the {phase} pass of microbatch {failure.microbatch}, in {module}"
    rest = "The parameters are as they were before the step; the next step may be tried"
    error = StepAbortedError(
        f"smp.step was aborted, because {where} raised {failure.type}: {failure.text}, {what}"
        + (f". {rest}" if when is None else "")
    )
    error.add_note(f"on {where}:\n{failure.traceback}")
    return error
