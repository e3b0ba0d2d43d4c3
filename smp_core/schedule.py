"""The pipeline schedules: this module alone decides which ready activity a rank runs next.

A schedule of this API is a rule of precedence, not a list of actions, because modules may be called in any order (API
5). The rules are data. The decision is a function of the ready activities and the progress of the microbatches.

The set of ready activities depends on which message comes first. With ``deterministic_server`` the decision must not,
so that all replicas do the same things in the same order (API 3.3). The server then takes no message while an activity
is ready, which determines two ranks, with one queue in each direction. Messages of three or more ranks could still come
in any order, so the driver runs no other microbatch while one is on another rank. The price is the overlap between
ranks.

The public record has ``simple`` run all forwards before any backward, and ``active_microbatches`` cap the microbatches
in progress. The two conflict. Here the cap does not apply to ``simple``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple


class Phase(enum.StrEnum):
    """The pass that is computed for a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


class Kind(enum.Enum):
    """The reason for which an activity is ready."""

    START = "start"  # the body of the microbatch has not begun
    TURN = "turn"  # the body has reached model.backward
    GO_ON = "go on"  # the answer has come, or another rank requests the activity


class Ready(NamedTuple):
    """An activity that a rank can run now. ``order`` counts the ready activities, and breaks ties."""

    phase: Phase
    microbatch: int
    kind: Kind
    order: int


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The rule of one schedule.

    Attributes:
        name: the value of the key ``pipeline``.
        prefers: the phase that runs first if both are ready.
        turns_together: no backward begins while a microbatch has forwards to do.
        capped: ``active_microbatches`` applies.
    """

    name: str
    prefers: Phase
    turns_together: bool
    capped: bool


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("simple", prefers=Phase.FORWARD, turns_together=True, capped=False),
        Policy("interleaved", prefers=Phase.BACKWARD, turns_together=False, capped=True),
    )
}


class Progress(NamedTuple):
    """The progress of the microbatches, as the driver knows it.

    Attributes:
        forward: the number of microbatches with forwards to do, begun or not.
        active: the number of microbatches that have begun and not finished.
        cap: ``active_microbatches``.
        alone: the only microbatch that may run, under ``deterministic_server``; None if any may.
    """

    forward: int
    active: int
    cap: int
    alone: int | None = None


def choose(policy: Policy, ready: Sequence[Ready], progress: Progress) -> int | None:
    """The index of the ready activity to run next; None if none may run yet.

    Within a phase the lowest microbatch goes first, then the activity that was ready first.
    """
    best: tuple[bool, int, int] | None = None
    chosen = None
    for index, each in enumerate(ready):
        if each.kind is Kind.START and policy.capped and progress.active >= progress.cap:
            continue
        if each.kind is Kind.TURN and policy.turns_together and progress.forward:
            continue
        if progress.alone not in (None, each.microbatch):
            continue
        rank = (each.phase is not policy.prefers, each.microbatch, each.order)
        if best is None or rank < best:
            best, chosen = rank, index
    return chosen
