"""Messages between the ranks of a pipeline. Every message except ``End`` belongs to a microbatch, and a microbatch is
in one place at a time.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from smp_core.schedule import Phase
from smp_core.torch.execution.modes import Modes
from smp_core.torch.execution.uses import CallKey


class Forward(NamedTuple):
    """A request to run a module. Its payload is ``(args, kwargs)``.

    Attributes:
        microbatch: its index.
        caller: the pp rank that asks.
        call: the caller's number of the request.
        key: of the module call.
        hooked: the module was called, rather than its ``forward``.
        modes: torch's modes of the calling thread.
        seed: that of the step's random streams.
        over: microbatches whose bodies have ended, so that no backward pass of theirs will come.
        training: the training modes of the module and its children, as ``calls.Site.training`` packs them.
    """

    microbatch: int
    caller: int
    call: int
    key: CallKey
    hooked: bool
    modes: Modes
    seed: int
    over: tuple[int, ...]
    training: bytes


class Backward(NamedTuple):
    """A request to run the backward pass of an earlier call. Its payload is one gradient, or None, for each
    differentiable output.

    Attributes:
        microbatch: its index.
        caller: the pp rank that asks.
        call: the caller's number of this request.
        of: the caller's number of the forward pass.
        over: microbatches whose bodies have ended.
    """

    microbatch: int
    caller: int
    call: int
    of: int
    over: tuple[int, ...]


class Returned(NamedTuple):
    """The answer of success to a request. Its payload is the outputs, or the gradients of the inputs."""

    microbatch: int
    call: int


class RemoteFailure(NamedTuple):
    """An exception in an activity, in the form in which other ranks learn of it.

    Attributes:
        pp_rank: of the rank that raised.
        rank: its world rank.
        microbatch: its index; None before the first one.
        path: of the module; None in the body of the step.
        phase: forward or backward; None outside of activities.
        type: the name of the exception's class.
        text: ``str`` of the exception.
        traceback: as text.
        api: the exception itself, pickled, if it is an error of this project: every rank raises a copy.
        of_group: all ranks of the TP group have ended the step, so none waits for an activation of another.
    """

    pp_rank: int
    rank: int
    microbatch: int | None
    path: str | None
    phase: Phase | None
    type: str
    text: str
    traceback: str
    api: bytes | None
    of_group: bool = False


class Failed(NamedTuple):
    """The answer of failure to a request."""

    microbatch: int
    call: int
    failure: RemoteFailure


class End(NamedTuple):
    """The end of the step. Its payload is the results of all microbatches, if nothing has failed."""

    failure: RemoteFailure | None


#: Requests belong to a microbatch, and so do answers.
Request: TypeAlias = Forward | Backward
Message: TypeAlias = Request | Returned | Failed | End
