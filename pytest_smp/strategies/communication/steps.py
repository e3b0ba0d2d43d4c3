"""The parts of a communication program: steps in one order for all ranks, and the actions of each rank.

A *step* is one communication of some ranks. A rank's part in a program is a list of *actions*: the
calls of the steps that it takes part in, in the steps' order, and the waits for those of its calls
that are asynchronous, each anywhere behind its call.

No program deadlocks. Take the first step that some participant has not called. The participant can only
wait for a call of an earlier step, which all of that step's participants have called, so the wait ends.
All ranks make their calls on one group, and their messages of one sender, receiver and tag, in the
steps' order, so each call meets its own.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

Shape = tuple[int, ...]
Slot = tuple[int, int, int, int]


class Lie(NamedTuple):
    """The position of a tensor in its storage: a layout of ``TensorSpec``, behind ``offset`` guards."""

    layout: str = "contiguous"
    offset: int = 0


PLAIN = Lie()


@dataclasses.dataclass(frozen=True)
class Step:
    """One communication.

    Attributes:
        number: the step's place in the program, from 0.
        operation: a key of OPERATIONS.
        group: for tensors ``""``, the default group, or the variable of a group that the program makes;
            for objects a group kind of the API, ``"WORLD"``, ``"DP"``, ...
        members: the world ranks of the group, in its order.
        root: the root, or the sender; a world rank.
        peer: the receiver; a world rank.
        tag: the tag of a point-to-point message.
        shift: in a batch of messages, the i-th member sends to the (i + shift)-th.
        reduce_op: a name of ``torch.distributed.ReduceOp``.
        dtype: torch's name of the dtype.
        shape: the shape of the smaller of input and output, or of each tensor if that is a list.
        rows: in an all-to-all, the number of rows of ``shape`` that the i-th member sends to the j-th.
        input, output: the layouts of input and output; a tensor that is both has the output's.
        payload: the kind of object that is sent.
        lags: for each participant None if its call is synchronous, else the number of further steps
            after which the rank waits for the call.
        priority: among the waits after one step, those of the smallest priority come first.
    """

    number: int
    operation: str
    group: str = ""
    members: tuple[int, ...] = ()
    root: int = -1
    peer: int = -1
    tag: int = 0
    shift: int = 0
    reduce_op: str = ""
    dtype: str = "float32"
    shape: Shape = ()
    rows: tuple[tuple[int, ...], ...] = ()
    input: Lie = PLAIN
    output: Lie = PLAIN
    payload: int = 0
    lags: tuple[int | None, ...] = ()
    priority: int = 0

    @property
    def participants(self) -> tuple[int, ...]:
        """The ranks that make a call."""
        return (self.root, self.peer) if self.peer >= 0 else self.members

    def position(self, rank: int) -> int:
        """The place of a world rank in the group."""
        return self.members.index(rank)


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing that one rank does: ``slot`` orders the actions of a program.

    ``what`` is ``"call"``, ``"wait"``, or one of two that only faults bring: ``"return"`` and
    ``"write"``, which changes the tensor called ``target`` of a call in flight.
    """

    slot: Slot
    what: str
    step: Step
    waits: bool = True  # of a call: whether it is synchronous
    target: str = ""


#: The actions of each rank, in order.
Plans = tuple[tuple[Action, ...], ...]


def planned(steps: tuple[Step, ...], ranks: int) -> Plans:
    """The actions of each of ``ranks`` ranks in a valid program."""
    plans: list[list[Action]] = [[] for _ in range(ranks)]
    for step in steps:
        at = step.number
        for rank, lag in zip(step.participants, step.lags, strict=True):
            plans[rank].append(Action((at, 0, 0, at), "call", step, lag is None))
            if lag is not None:
                after = min(at + lag, len(steps) - 1)
                plans[rank].append(Action((after, 1, step.priority, at), "wait", step))
    return tuple(tuple(sorted(plan, key=lambda action: action.slot)) for plan in plans)
