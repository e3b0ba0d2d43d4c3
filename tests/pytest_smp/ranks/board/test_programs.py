"""Communication programs, written down as ranks would write them: valid ones never get a verdict,
however old the records of each rank are; invalid ones get the verdict that the model of matching
says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from pytest_smp.ranks.board import Board, BoardRecorder, fingerprint
from pytest_smp.ranks.protocols import VerdictKind
from pytest_smp.strategies.communication import FAULTS, RACES, sample, sample_invalid
from pytest_smp.strategies.communication.faults import named
from pytest_smp.strategies.communication.matching import ending
from pytest_smp.strategies.communication.operations import OPERATIONS, neighbour
from pytest_smp.strategies.communication.steps import Action, Plans, Step
from smp_core.errors import CollectiveMismatchError, DeadlockError
from smp_core.transport.protocols import Group

FOREVER = 1e9  # seconds: longer than any patience
DETECTED = tuple(kind for kind in FAULTS if kind not in RACES)


class Writer:
    """Writes what one rank of a program would write. ``stops``: the action that it never leaves."""

    def __init__(self, rank: int, plans: Plans, stops: Action | None) -> None:
        self.records: list[bytes] = []
        self._rank, self._stops = rank, stops
        self._recorder = BoardRecorder(rank, self.records.append)
        self._flying: dict[int, list[int]] = {}
        self._recorder.begin()
        if self._plan(plans[rank]):
            self._recorder.end()

    def _plan(self, plan: tuple[Action, ...]) -> bool:
        for action in plan:
            if action.what == "call" and action.step.operation.startswith("smp."):
                if not self._object(action):
                    return False
            elif action.what == "call":
                numbers = self._issue(action.step)
                if not action.waits:
                    for number in numbers:
                        self._recorder.returned(number)
                    self._flying[action.step.number] = numbers
                elif not self._wait(action, numbers):
                    return False
            elif action.what == "wait" and not self._wait(
                action, self._flying.pop(action.step.number)
            ):
                return False
        return True

    def _wait(self, action: Action, numbers: list[int]) -> bool:
        self._recorder.waits(numbers)
        if action == self._stops:
            return False
        self._recorder.done(numbers)
        return True

    def _object(self, action: Action) -> bool:
        step = action.step
        group = Group(step.group, step.members)
        to: list[int] = []
        source = None
        name = step.operation
        if name in ("smp.send", "smp.broadcast"):
            if self._rank == step.root:
                to = [rank for rank in step.participants if rank != step.root]
                name = f"{name}({to})"
            else:
                name, source = f"smp.recv_from(world rank {step.root})", step.root
        if action == self._stops:
            self._left_open = self._recorder.call(name, group, to=to, source=source)
            self._left_open.__enter__()
            return False
        with self._recorder.call(name, group, to=to, source=source):
            return True

    def _issue(self, step: Step) -> list[int]:
        group = self._recorder.group("torch", step.group, step.group or "WORLD", 0, step.members)
        specs = {
            what: [(step.dtype, shape) for shape in shapes(step, self._rank)]
            for what, shapes in (
                ("brings", OPERATIONS[step.operation].inputs),
                ("gets", OPERATIONS[step.operation].outputs),
            )
        }
        tensor: Any = [(step.dtype, step.shape)]
        if step.operation == "send":
            sends = self._rank == step.root
            return [self._post(group, step, sends, step.peer if sends else step.root, tensor)]
        if step.operation == "batch_isend_irecv":
            return [
                self._post(group, step, sends, neighbour(step, self._rank, shift), tensor)
                for sends, shift in ((True, step.shift), (False, -step.shift))
            ]
        named_root = OPERATIONS[step.operation].rooted
        # On a rank that is not the root, the tensors that it brings or gets stand in the other list.
        both = specs["brings"] or specs["gets"]
        brings = specs["gets"] if step.operation == "scatter" else both
        key = fingerprint.Key(
            step.operation,
            step.reduce_op or None,
            step.position(step.root) if named_root else None,
            tuple(brings),  # type: ignore[arg-type]
            tuple(specs["gets"]),  # type: ignore[arg-type]
        )
        if step.operation == "all_to_all_single":
            at = step.position(self._rank)
            cuts = (step.rows[at], tuple(row[at] for row in step.rows)) if step.rows else ((), ())
            key = key._replace(cuts=cuts)
        size = len(step.members)
        return [self._recorder.collective(group, key, lambda: fingerprint.describe(key, size))]

    def _post(self, group: int, step: Step, sends: bool, peer: int, tensor: Any) -> int:
        verb = "send" if sends else "recv"
        return self._recorder.post(
            sends,
            group,
            step.position(peer),
            step.tag,
            (verb, *tensor),
            lambda: fingerprint._describe_post(verb, tensor),
        )


def written(plans: Plans) -> list[bytes]:
    """The records that each rank writes."""
    blocked = ending(plans).blocked
    writers = [Writer(rank, plans, blocked.get(rank)) for rank in range(len(plans))]
    return [b"".join(writer.records) for writer in writers]


def _rests(data: bytes) -> bool:
    *lines, _ = data.split(b"\n")
    return bool(lines) and lines[-1][2:3] in (b"w", b"o", b"e")


def fed(
    streams: list[bytes], choose: Callable[[int], int], each: Callable[[Board, bool], None]
) -> Board:
    """A board that has read all, piece by piece in a random order.

    ``each`` is called in between, with whether all that was read of every rank ends in a wait or
    with the body: a rank that says no more is in there, not on its way back from a call.
    """
    board = Board(len(streams))
    at = [0] * len(streams)
    while open_ := [rank for rank, data in enumerate(streams) if at[rank] < len(data)]:
        rank = open_[choose(len(open_))]
        piece = 1 + choose(200)
        board.feed(rank, streams[rank][at[rank] : at[rank] + piece])
        at[rank] += piece
        read = [data[:end] for data, end in zip(streams, at, strict=True)]
        each(board, all(_rests(data) for data in read))
    return board


@pytest.mark.parametrize("block", range(8))
def test_valid_programs_get_no_verdict_at_any_time(block: int) -> None:
    """The records of different ranks are of different ages, and time is always up."""
    for seed in range(block * 25, block * 25 + 25):
        choose = random.Random(seed).randrange
        program = sample(choose, most_ranks=5)
        everybody = range(program.ranks)

        def look(board: Board, rests: bool, seed: int = seed, everybody: range = everybody) -> None:
            for now in (0.0, 0.0, FOREVER if rests else 0.0):
                finding = board.look(everybody, now)
                assert finding is None, f"seed {seed}: {finding.error}"

        board = fed(written(program.plans), choose, look)
        assert board.look((), FOREVER) is None
        assert board.leaks(strict=False) == ([], []), f"seed {seed}"
        assert board.settled()


@pytest.mark.parametrize("kind", DETECTED)
def test_invalid_programs_get_their_verdict(kind: str) -> None:
    """The class of the verdict is that of the model, and the message names who is at fault."""
    for seed in range(25):
        choose = random.Random(f"{kind} {seed}").randrange
        program = sample_invalid(choose, most_ranks=5, kinds=(kind,))
        streams, blocked = written(program.plans), ending(program.plans).blocked
        board = fed(streams, choose, lambda board, rests: None)
        finding = board.look(blocked, 0.0) or board.look(blocked, FOREVER)
        truth, where = program.truth, f"{kind}, seed {seed}"
        if truth.verdict is VerdictKind.LEAK:
            assert finding is None, where
            leaks, _ = board.leaks(strict=False)
            assert truth.rank in named("\n".join(leaks)), where
            assert not board.settled(), where
            continue
        assert finding is not None, where
        message = str(finding.error)
        if truth.verdict is VerdictKind.MISMATCH:
            assert isinstance(finding.error, CollectiveMismatchError), f"{where}: {message}"
            assert truth.rank in named(message), where
        else:
            assert isinstance(finding.error, DeadlockError), f"{where}: {message}"
            assert {*finding.waits} == {*blocked}, where
            chain = "\n".join(re.findall(r"^wait-for.*$", message, re.MULTILINE))
            assert truth.rank in named(chain), f"{where}: {message}"
