"""What the ranks of a pipeline say to each other. Every message but the last belongs to a microbatch,
and a microbatch is in one place at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from smp_core.torch.execution.modes import Modes
from smp_core.torch.execution.schedule import Phase
from smp_core.torch.execution.uses import CallKey


class Forward(NamedTuple):
    """Run a module; comes with its ``(args, kwargs)``.

    ``call`` is a number of the caller's. ``hooked``: the module was called, rather than its
    ``forward``. ``over`` are microbatches whose bodies are over: no backward pass of theirs will come.
    ``training``: see calls.Site.training.
    """

    microbatch: int
    caller: int  # pp rank
    call: int
    key: CallKey
    hooked: bool
    modes: Modes
    seed: int
    over: tuple[int, ...]
    training: bytes


class Backward(NamedTuple):
    """Run the backward pass of that call; comes with one gradient, or None, per differentiable
    output. ``over`` as above.
    """

    microbatch: int
    caller: int
    call: int
    of: int  # the call of the forward pass
    over: tuple[int, ...]


class Returned(NamedTuple):
    """The answer to either; comes with the outputs, or the inputs' gradients."""

    microbatch: int
    call: int


class Failure(NamedTuple):
    """An exception in an activity, as other ranks learn of it."""

    pp_rank: int
    rank: int
    microbatch: int | None
    path: str | None  # of the module; None: the body of the step
    phase: Phase | None
    type: str
    text: str
    traceback: str
    api: bytes | None  # an error of this project, pickled: every rank raises its like


class Failed(NamedTuple):
    """The other answer."""

    microbatch: int
    call: int
    failure: Failure


class End(NamedTuple):
    """The step is over; comes with the results of all microbatches, if nothing failed."""

    failure: Failure | None
