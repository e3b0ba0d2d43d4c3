"""Which of the things that a rank could do now it does: the one place that decides.

A schedule of this API is a rule of precedence, not a list: modules may be called in any order, so
what becomes ready when is only known when it does (API 5). The rules are data, and deciding is
a function of what is ready and how far the microbatches are.

What is ready when depends on which message comes first. With ``deterministic_server`` it must not, so
that all replicas do the same things in the same order (API 3.3). Then nobody looks for messages
while there is something to do: two ranks, with one queue in each direction, are determined by that.
Among more, messages of several ranks could still come in any order: so the driver does nothing for
another microbatch while one is with another rank. That costs the overlap between the ranks.

The public record has ``simple`` run all forwards before any backward, and ``active_microbatches`` cap
the microbatches in progress. Taken literally they conflict; here the cap does not apply to ``simple``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple


class Phase(enum.StrEnum):
    """What is computed for a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


class Kind(enum.Enum):
    """How an activity comes to be ready."""

    START = "start"  # a microbatch whose body has not begun
    TURN = "turn"  # a body has come to model.backward
    GO_ON = "go on"  # what it waited for is there, or another rank asks for it


class Ready(NamedTuple):
    """One thing that a rank could do now. ``order``: since when, to tell apart what is else equal."""

    phase: Phase
    microbatch: int
    kind: Kind
    order: int


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The rule of one schedule."""

    name: str
    prefers: Phase  # what is done first where both phases are ready
    turns_together: bool  # no backward begins while a microbatch has forwards to do
    capped: bool  # active_microbatches applies


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("simple", prefers=Phase.FORWARD, turns_together=True, capped=False),
        Policy("interleaved", prefers=Phase.BACKWARD, turns_together=False, capped=True),
    )
}


class Progress(NamedTuple):
    """How far the microbatches are, as the driver knows."""

    forward: int  # have forwards to do: not begun, or begun and not waiting for their turn
    active: int  # begun and not finished
    cap: int  # active_microbatches
    alone: int | None = None  # a microbatch that no other may overtake (``deterministic_server``)


def choose(policy: Policy, ready: Sequence[Ready], progress: Progress) -> int | None:
    """The index of what is to be done next, or None if nothing of it may be done yet.

    Within a phase the lowest microbatch goes first, and what was ready first.
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
