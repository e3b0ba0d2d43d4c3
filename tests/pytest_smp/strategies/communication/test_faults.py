"""Invalid programs: each kind of fault against a truth written by hand, and runs on `sim` that get the
verdict, name the rank and show the lines.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import InvalidArgument

from pytest_smp.ranks.protocols import Report, VerdictKind
from pytest_smp.strategies import invalid_programs
from pytest_smp.strategies.communication import (
    FAULTS,
    InvalidProgram,
    Program,
    ProgramFault,
    Score,
    Truth,
)
from pytest_smp.strategies.communication.code import FILENAME
from pytest_smp.strategies.communication.faults import Unused, named, sample_invalid
from pytest_smp.strategies.communication.program import Runnable

Make = Callable[..., Program]
Run = Callable[[Runnable], Report]

DEADLOCK, MISMATCH = VerdictKind.DEADLOCK, VerdictKind.MISMATCH
LEAK, RACE = VerdictKind.LEAK, VerdictKind.RACE

SUM = {"operation": "all_reduce", "reduce_op": "SUM"}
LATER = {**SUM, "lags": (0, 0, 0)}
BARRIER = {"operation": "barrier"}
SEND = {"operation": "send", "root": 0, "peer": 1}
GATHER_LATER = {"operation": "all_gather", "lags": (0, 0, 0)}

# A program of three ranks, the fault (kind, rank, step, and what changes in the call), and its
# truth: the verdict, the lines that must be shown, and those of which one must be shown.
CASES: list[tuple[list[dict[str, Any]], tuple[Any, ...], VerdictKind, list[str], list[str]]] = [
    ([SUM], ("missing call", 1, 0), DEADLOCK, ["dist.all_reduce(x0, op=dist.ReduceOp.SUM)"], []),
    (
        [LATER, BARRIER],
        ("missing call", 1, 0),
        MISMATCH,
        ["dist.barrier()"],
        ["w0 = dist.all_reduce(x0, op=dist.ReduceOp.SUM, async_op=True)"],
    ),
    ([LATER], ("missing call", 2, 0), DEADLOCK, ["w0.wait()"], []),
    (
        [BARRIER, SUM],
        ("early return", 2, 1),
        DEADLOCK,
        ["dist.all_reduce(x1, op=dist.ReduceOp.SUM)"],
        [],
    ),
    (
        [SUM, BARRIER],
        ("swap", 0, 0, {"other": 1}),
        MISMATCH,
        ["dist.barrier()"],
        ["dist.all_reduce(x0, op=dist.ReduceOp.SUM)"],
    ),
    (  # the wait goes with its call
        [LATER, BARRIER],
        ("swap", 0, 0, {"other": 1}),
        MISMATCH,
        ["dist.barrier()"],
        ["w0 = dist.all_reduce(x0, op=dist.ReduceOp.SUM, async_op=True)"],
    ),
    (
        [{"operation": "broadcast", "root": 0}],
        ("wrong root", 1, 0, {"root": 2}),
        MISMATCH,
        ["dist.broadcast(x0, src=2)"],
        ["dist.broadcast(x0, src=0)"],
    ),
    (
        [SUM],
        ("wrong reduce op", 0, 0, {"reduce_op": "MAX"}),
        MISMATCH,
        ["dist.all_reduce(x0, op=dist.ReduceOp.MAX)"],
        ["dist.all_reduce(x0, op=dist.ReduceOp.SUM)"],
    ),
    (
        [SUM],
        ("wrong operation", 2, 0, {"operation": "barrier"}),
        MISMATCH,
        ["dist.barrier()"],
        ["dist.all_reduce(x0, op=dist.ReduceOp.SUM)"],
    ),
    (
        [SUM],
        ("wrong dtype", 2, 0, {"dtype": "int32"}),
        MISMATCH,
        ["dist.all_reduce(x0, op=dist.ReduceOp.SUM)"],
        ["dist.all_reduce(x0, op=dist.ReduceOp.SUM)"],
    ),
    (
        [SEND],
        ("wrong shape", 1, 0, {"shape": (2,)}),
        MISMATCH,
        ["dist.recv(y0, 0)"],
        ["dist.send(x0, 1)"],
    ),
    (
        [SEND],
        ("wrong peer", 0, 0, {"peer": 2}),
        DEADLOCK,
        ["dist.send(x0, 2)", "dist.recv(y0, 0)"],
        [],
    ),
    (
        [SEND],
        ("wrong tag", 1, 0, {"tag": 1}),
        DEADLOCK,
        ["dist.send(x0, 1)", "dist.recv(y0, 0, tag=1)"],
        [],
    ),
    (
        [{**BARRIER, "group": "g1"}],
        ("wrong group", 1, 0, {"group": "", "members": (0, 1, 2)}),
        DEADLOCK,
        ["dist.barrier(group=g1)", "dist.barrier()"],
        [],
    ),
    (
        [LATER, BARRIER],
        ("missing wait", 1, 0),
        LEAK,
        ["w0 = dist.all_reduce(x0, op=dist.ReduceOp.SUM, async_op=True)"],
        [],
    ),
    (
        [BARRIER],
        (
            "unmatched send",
            1,
            0,
            {"operation": "send", "root": 1, "peer": 2, "lags": (0, 0), "number": 1},
        ),
        LEAK,
        ["w1 = dist.isend(x1, 2)"],
        [],
    ),
    (
        [BARRIER],
        (
            "unmatched send",
            1,
            0,
            {"operation": "send", "root": 1, "peer": 2, "lags": (None, None), "number": 1},
        ),
        DEADLOCK,
        ["dist.send(x1, 2)", "dist.barrier()"],
        [],
    ),
    (
        [GATHER_LATER],
        ("changed input", 1, 0),
        RACE,
        ["w0 = dist.all_gather(y0, x0, async_op=True)"],
        [],
    ),
    (
        [GATHER_LATER],
        ("changed output", 2, 0),
        RACE,
        ["w0 = dist.all_gather(y0, x0, async_op=True)"],
        [],
    ),
    (
        [LATER],
        ("changed output", 0, 0),
        RACE,
        ["w0 = dist.all_reduce(x0, op=dist.ReduceOp.SUM, async_op=True)"],
        [],
    ),
]


@pytest.mark.parametrize(
    ("calls", "fault", "verdict", "lines", "others"), CASES, ids=range(len(CASES))
)
def test_the_truth_is_the_one_written_by_hand_and_the_run_says_so(
    program: Make,
    report: Run,
    calls: list[dict[str, Any]],
    fault: tuple[Any, ...],
    verdict: VerdictKind,
    lines: list[str],
    others: list[str],
) -> None:
    valid = program(3, *calls, g1=(0, 1))
    assert report(valid).verdict is VerdictKind.PASSED
    kind, rank, number, *changes = fault
    fields = dict(*changes)
    other = fields.pop("other", -1)
    step = replace(valid.steps[number], **fields) if fields else None
    invalid = InvalidProgram(valid, ProgramFault(kind, rank, number, step, other))
    text = invalid.code().splitlines()
    truth = invalid.truth
    assert (truth.verdict, truth.rank) == (verdict, rank)
    assert sorted({text[line - 1].strip() for line in truth.lines}) == sorted({*lines})
    assert sorted({text[line - 1].strip() for line in truth.others}) == sorted({*others})
    assert invalid.score(report(invalid)) == Score(True, True, True)


def test_every_kind_of_fault_has_a_case() -> None:
    assert {fault[0] for _, fault, _, _, _ in CASES} == {*FAULTS}


@pytest.mark.parametrize("kind", FAULTS)
def test_drawn_faults_get_their_verdict(smp_world: Any, kind: str) -> None:
    @settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=12,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=invalid_programs(faults=(kind,)))
    def run(program: InvalidProgram) -> None:
        report = smp_world.report(program.run, ranks=program.ranks)
        assert program.score(report) == Score(True, True, True), report.error

    run()


# ---- The score -----------------------------------------------------------------------------------


def test_ranks_are_read_from_messages() -> None:
    assert named("rank 3 waits for ranks 0-2, 5, which") == {0, 1, 2, 3, 5}
    assert named("5 of 8 ranks wait, ranks disagree") == set()


@pytest.mark.parametrize(
    ("verdict", "message", "score"),
    [
        (
            DEADLOCK,
            "wait-for: rank 0 waits for rank 1, which\n  <F>:{line} in f",
            (True, True, True),
        ),
        (
            MISMATCH,
            "wait-for: rank 0 waits for rank 1, which\n  <F>:{line} in f",
            (False, True, True),
        ),
        # Named, but not where the waits end.
        (
            DEADLOCK,
            "rank 1\nwait-for cycle: rank 0 -> rank 2\n  <F>:{line} in f",
            (True, False, True),
        ),
        (DEADLOCK, "wait-for: rank 0 waits for rank 1\n  <F>:1 in f", (True, True, False)),
        (
            DEADLOCK,
            "wait-for: rank 0 waits for rank 1\n  other.py:{line} in f",
            (True, True, False),
        ),
    ],
)
def test_the_score_sees_what_is_wrong(
    program: Make, verdict: VerdictKind, message: str, score: tuple[bool, bool, bool]
) -> None:
    invalid = InvalidProgram(program(3, SUM), ProgramFault("missing call", 1, 0))
    text = message.replace("<F>", FILENAME).format(line=invalid.truth.lines[0])
    assert invalid.score(Report(verdict, [], error=RuntimeError(text))) == Score(*score)


def test_one_of_the_other_lines_is_enough_and_needed(program: Make) -> None:
    valid = program(2, {"operation": "broadcast", "root": 0})
    wrong = replace(valid.steps[0], root=1)
    invalid = InvalidProgram(valid, ProgramFault("wrong root", 1, 0, wrong))
    truth = invalid.truth
    assert isinstance(truth, Truth)
    for lines, shown in ((truth.lines, False), ((*truth.lines, *truth.others), True)):
        text = "rank 1 " + " ".join(f"{FILENAME}:{line} in f" for line in lines)
        assert invalid.score(Report(MISMATCH, [], error=RuntimeError(text))).lines is shown


# ---- What is not drawn ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "fault", "said"),
    [
        ([SUM, SUM], ProgramFault("swap", 0, 0, other=1), "valid"),
        ([LATER, SUM], ProgramFault("swap", 0, 0, other=1), "valid"),  # the wait goes with its call
        ([{**BARRIER, "group": "g2"}], ProgramFault("missing call", 2, 0), "valid"),
        ([{**BARRIER, "group": "g2"}], ProgramFault("early return", 2, 0), "valid"),
    ],
)
def test_a_fault_that_leaves_the_program_valid_is_none(
    program: Make, calls: list[dict[str, Any]], fault: ProgramFault, said: str
) -> None:
    invalid = InvalidProgram(program(3, *calls, g2=(2,)), fault)
    with pytest.raises(InvalidArgument, match=said):
        _ = invalid.truth


def test_two_mismatches_leave_a_doubt(program: Make) -> None:
    """Rank 0 calls on g2 what belongs on g1: both groups then see unlike calls, and which of them
    first is a matter of turns.
    """
    calls = [
        {**BARRIER, "group": "g1", "lags": (3, 3)},
        {**SUM, "group": "g2", "lags": (2, 2)},
        {**SUM, "group": "g1", "lags": (1, 1)},
    ]
    valid = program(2, *calls, g1=(0, 1), g2=(0, 1))
    wrong = replace(valid.steps[0], group="g2")
    with pytest.raises(InvalidArgument, match="doubt"):
        _ = InvalidProgram(valid, ProgramFault("wrong group", 0, 0, wrong)).truth


def test_invalid_programs_shrink_to_a_call_left_out(minimal: Callable[..., Any]) -> None:
    found = minimal(invalid_programs())
    assert found.fault == ProgramFault("missing call", 0, 0)
    assert found.ranks == 2
    assert [step.operation for step in found.program.steps] == ["barrier"]
    races = minimal(invalid_programs(faults=("changed input",)))
    assert races.verdict is RACE
    assert (races.ranks, len(races.program.steps)) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranks": 1}, "ranks=1"),
        ({"faults": ()}, "must list"),
        ({"faults": "swap"}, "must list"),
        ({"faults": ("typo",)}, "'typo' is none of missing call"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        invalid_programs(**arguments)


def test_a_message_that_names_everything_is_noise() -> None:
    for seed in range(20):
        invalid = sample_invalid(random.Random(seed).randrange)
        lines = range(1, invalid.code().count("\n") + 1)
        text = "\n".join(
            ["wait-for ranks 0-7", *(f"<program>:{line} in test_program" for line in lines)]
        )
        everything = Report(invalid.verdict, [], error=RuntimeError(f"  ranks 0-7: all\n{text}"))
        assert all(invalid.score(everything))
        truth = invalid.truth
        noise = 8 - len(truth.ranks) + len(lines) - len({*truth.lines, *truth.others})
        assert invalid.noise(everything) == noise


def test_what_is_not_used_is_counted() -> None:
    unused: Unused = collections.Counter()
    for seed in range(60):
        sample_invalid(random.Random(seed).randrange, kinds=("swap",), unused=unused)
    assert unused["swap", "in doubt"]
    assert unused["swap", "still valid"]
    assert unused.keys() <= {("swap", "in doubt"), ("swap", "still valid")}
