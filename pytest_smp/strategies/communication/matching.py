"""The model of matching: the end of a program in any order of turns, with the calls that meet.

On each group the n-th collective of a member meets the n-th of every other. A send meets the receive of
the same group, sender, receiver and tag, in the order of the calls. An object meets the next
``recv_from`` of its sender. No receive takes messages from any source, so the reached calls do not
depend on the order of turns: ranks are advanced until none can go on. Calls that meet and differ are
never done.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pytest_smp.strategies.communication.operations import OPERATIONS, neighbour
from pytest_smp.strategies.communication.steps import Action, Plans, Step

#: A call of a rank: the action that made it, and the values that the others must agree on.
Made = tuple[Action, Any]


@dataclass(eq=False)
class _Operation:
    """An operation that a rank waits for. ``left``: the number of matches that the operation still needs."""

    left: int = 1

    @property
    def done(self) -> bool:
        return self.left == 0


@dataclass
class ProgramMeeting:
    """Calls that meet, by rank."""

    calls: dict[int, Made] = field(default_factory=dict)
    operations: list[_Operation] = field(default_factory=list)
    differs: bool = False


@dataclass
class Ending:
    """The end of a program.

    Attributes:
        mismatches: meetings of calls that differ.
        blocked: the ranks that wait for ever, each with the action that it waits in.
        left: calls that nobody waited for, or that met nobody, of ranks that went on: rank and
            action. They count if no rank is blocked.
        doubtful: whether the end depends on more than the model knows.
    """

    mismatches: list[ProgramMeeting] = field(default_factory=list)
    blocked: dict[int, Action] = field(default_factory=dict)
    left: list[tuple[int, Action]] = field(default_factory=list)
    doubtful: bool = False


def ending(plans: Plans) -> Ending:
    """The end of these plans."""
    return _Run(plans).run()


class _Run:
    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._at = [0] * len(plans)
        self._waiting: list[tuple[Action, list[_Operation]] | None] = [None] * len(plans)
        self._flying: dict[tuple[int, int], tuple[Action, list[_Operation]]] = {}
        self._counts: collections.Counter[Any] = collections.Counter()
        self._meetings: dict[Any, ProgramMeeting] = {}
        self._posts: dict[Any, collections.deque[tuple[int, Made, _Operation]]] = {}
        self._ending = Ending()

    def run(self) -> Ending:
        ranks = range(len(self._plans))
        while any(self._advance(rank) for rank in ranks):
            pass
        result = self._ending
        result.blocked = {
            rank: waiting[0] for rank, waiting in enumerate(self._waiting) if waiting is not None
        }
        result.left = [(rank, action) for (rank, _), (action, _) in self._flying.items()]
        return result

    def _advance(self, rank: int) -> bool:
        """Let a rank go on as far as it can; whether it went anywhere."""
        moved = False
        while True:
            waiting = self._waiting[rank]
            if waiting is not None:
                if not all(operation.done for operation in waiting[1]):
                    return moved
                self._waiting[rank] = None
            if self._at[rank] == len(self._plans[rank]):
                return moved
            action = self._plans[rank][self._at[rank]]
            self._at[rank] += 1
            moved = True
            key = rank, action.step.number
            if action.what == "call":
                operations = self._call(rank, action)
                if action.waits:
                    self._waiting[rank] = action, operations
                else:
                    self._flying[key] = action, operations
            elif action.what == "wait":
                self._waiting[rank] = action, self._flying.pop(key)[1]

    def _call(self, rank: int, action: Action) -> list[_Operation]:
        step = action.step
        name, peer = step.operation, step.peer
        if name == "send":
            return [
                self._post(
                    rank, action, rank == step.root, peer if rank == step.root else step.root
                )
            ]
        if name == "batch_isend_irecv":
            return [
                self._post(rank, action, sends, neighbour(step, rank, shift))
                for sends, shift in ((True, step.shift), (False, -step.shift))
            ]
        if name in ("smp.send", "smp.broadcast"):
            to = [each for each in step.participants if each != step.root]
            if rank == step.root:
                return [self._send_object(rank, action, to)]
            return [self._match(("object", step.root, rank), rank, (action, None), False, None)]
        return [self._join(rank, action)]

    # Collectives.

    def _join(self, rank: int, action: Action) -> _Operation:
        step = action.step
        channel = step.group, step.members
        number = self._counts[channel, rank] = self._counts[channel, rank] + 1
        meeting = self._meetings.setdefault((channel, number), ProgramMeeting())
        label, operation = _label(step), _Operation()
        for _, other in meeting.calls.values():
            self._ending.doubtful |= other != label and _as_real(other) == _as_real(label)
            if other != label and not meeting.differs:
                meeting.differs = True
                self._ending.mismatches.append(meeting)
        meeting.calls[rank] = action, label
        meeting.operations.append(operation)
        if len(meeting.calls) == len(step.members) and not meeting.differs:
            if _counts_agree(meeting, step.members):
                for each in meeting.operations:
                    each.left = 0
            else:
                meeting.differs = True
                self._ending.mismatches.append(meeting)
        return operation

    # Point-to-point, and objects.

    def _post(self, rank: int, action: Action, sends: bool, peer: int) -> _Operation:
        step = action.step
        ends = (rank, peer) if sends else (peer, rank)
        label = step.dtype, math.prod(step.shape)
        return self._match((step.group, *ends, step.tag), rank, (action, label), sends, None)

    def _send_object(self, rank: int, action: Action, to: Iterable[int]) -> _Operation:
        receivers = [*to]
        operation = _Operation(len(receivers))
        for each in receivers:
            self._match(("object", rank, each), rank, (action, None), True, operation)
        return operation

    def _match(
        self, channel: Any, rank: int, made: Made, sends: bool, operation: _Operation | None
    ) -> _Operation:
        operation = operation or _Operation()
        waiting = self._posts.get((channel, not sends))
        if not waiting:
            own = self._posts.setdefault((channel, sends), collections.deque())
            own.append((rank, made, operation))
            return operation
        other_rank, other, other_operation = waiting.popleft()
        if other[1] != made[1]:
            meeting = ProgramMeeting({rank: made, other_rank: other}, differs=True)
            self._ending.mismatches.append(meeting)
        else:
            operation.left -= 1
            other_operation.left -= 1
        return operation


def _label(step: Step) -> tuple[Any, ...]:
    """The values that the calls of one collective must agree on."""
    if not OPERATIONS[step.operation].has_tensors:
        return (step.operation,)
    if step.operation.startswith("all_to_all"):  # shapes may differ; counts are compared by pairs
        return step.operation, step.dtype
    rooted = step.root if OPERATIONS[step.operation].rooted else None
    return step.operation, step.reduce_op, rooted, step.dtype, step.shape


_REAL = {"complex64": "float32", "complex128": "float64"}


def _as_real(label: tuple[Any, ...]) -> tuple[Any, ...]:
    """The label that torch's own view of complex tensors as real ones would have."""
    if len(label) == 5 and label[3] in _REAL:
        return (*label[:3], _REAL[label[3]], (*label[4], 2))
    return label


def _counts_agree(meeting: ProgramMeeting, members: tuple[int, ...]) -> bool:
    """Return whether in an all-to-all every member expects of every other the number of elements it sends."""
    steps = {rank: action.step for rank, (action, _) in meeting.calls.items()}
    if not all(step.rows for step in steps.values()):
        return True

    def elements(rank: int, i: int, j: int) -> int:
        return steps[rank].rows[i][j] * math.prod(steps[rank].shape[1:])

    return all(
        elements(sender, i, j) == elements(receiver, i, j)
        for i, sender in enumerate(members)
        for j, receiver in enumerate(members)
    )
