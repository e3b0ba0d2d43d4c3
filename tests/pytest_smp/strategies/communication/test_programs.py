"""Valid programs: they pass on `sim`, and a backend that moves data wrong does not pass; what is
drawn, what it shrinks to, and which arguments are refused.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import InvalidArgument

import pytest_smp.strategies
import smp_core.torch as api
from pytest_smp.ranks.capabilities import EVERYTHING, Capabilities, Capability
from pytest_smp.ranks.protocols import Report, VerdictKind
from pytest_smp.strategies import programs
from pytest_smp.strategies.communication import Lie, Program, Step, all_cells, cells
from pytest_smp.strategies.communication.coverage import kind_of
from pytest_smp.strategies.communication.drawing import sample
from pytest_smp.strategies.communication.program import Runnable

Run = Callable[[Runnable], Report]
Draw = Callable[..., list[Any]]
Find = Callable[..., Any]

CALM = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@settings(CALM, max_examples=250)
@given(program=programs())
def test_valid_programs_pass(smp_world: Any, program: Program) -> None:
    smp_world.run(program.run, ranks=program.ranks)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_signs_of_zero_do_not_matter_where_the_order_decides_them(
    program: Callable[..., Program], report: Run, dtype: str, ranks: int
) -> None:
    """A product of factors v - vi has parts that are 0 or -0, as it is multiplied."""
    calls = [
        {"operation": name, "reduce_op": "PRODUCT", "dtype": dtype, "shape": (9,), "root": root}
        for name, root in (("reduce", 0), ("reduce_scatter", -1))
    ]
    passed = report(program(ranks, *calls))
    assert passed.verdict is VerdictKind.PASSED, passed.error


@pytest.mark.smp(ranks=3)
@settings(CALM, max_examples=30)
@given(program=programs(ranks=3))
def test_a_marked_test_runs_programs_of_its_own_size(program: Program) -> None:
    program.run()


def test_a_program_passes_by_pickle_and_repr(drawn: Draw) -> None:
    names = {"Program": Program, "Step": Step, "Lie": Lie}
    for program in drawn(programs(), 40):
        copy = pickle.loads(pickle.dumps(program))
        assert copy == program
        assert copy.code() == program.code()
        assert eval(repr(program), names) == program


# ---- What a wrong backend gets -------------------------------------------------------------------


ALL_GATHER = dist.all_gather


def _writes_a_guard(outputs: list[torch.Tensor], value: torch.Tensor) -> None:
    ALL_GATHER(outputs, value)
    torch.empty(0, dtype=torch.uint8).set_(outputs[0].untyped_storage())[-1] = 0


def _writes_between_elements(outputs: list[torch.Tensor], value: torch.Tensor) -> None:
    ALL_GATHER(outputs, value)
    outputs[1].as_strided((2,), (1,)).fill_(outputs[1][0])


def _changes_its_input(outputs: list[torch.Tensor], value: torch.Tensor) -> None:
    ALL_GATHER(outputs, value)
    value.zero_()


def _writes_what_was_there(outputs: list[torch.Tensor], value: torch.Tensor) -> None:
    kept = outputs[1].clone()
    ALL_GATHER(outputs, value)
    outputs[1].copy_(kept)


def _exchanges_two_outputs(outputs: list[torch.Tensor], value: torch.Tensor) -> None:
    ALL_GATHER(outputs[::-1], value)


def _changes_one_bit(outputs: list[torch.Tensor], value: torch.Tensor) -> None:
    ALL_GATHER(outputs, value)
    outputs[0].view(torch.int32)[0] ^= 1


@pytest.mark.parametrize(
    "wrong",
    [
        _writes_a_guard,
        _writes_between_elements,
        _changes_its_input,
        _writes_what_was_there,
        _exchanges_two_outputs,
        _changes_one_bit,
    ],
)
def test_what_a_backend_does_wrong_is_seen(
    program: Callable[..., Program], report: Run, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = program(2, {"operation": "all_gather", "shape": (2,), "output": Lie("strided", 1)})
    assert report(call).verdict is VerdictKind.PASSED
    monkeypatch.setattr(dist, "all_gather", wrong)
    failed = report(call)
    assert failed.verdict is VerdictKind.FAILED
    assert isinstance(failed.error, AssertionError), failed.error


def test_an_object_that_differs_is_seen(
    program: Callable[..., Program], report: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = program(2, {"operation": "smp.allgather", "group": "WORLD"})
    assert report(call).verdict is VerdictKind.PASSED
    monkeypatch.setattr(api, "allgather", lambda obj, group: [obj, obj])
    assert isinstance(report(call).error, AssertionError)


# ---- What is drawn, and what it shrinks to -------------------------------------------------------


def test_many_kinds_of_call_are_drawn(drawn: Draw) -> None:
    seen = drawn(programs(), 400)
    steps = [step for program in seen for step in program.steps]
    hit = {cell for program in seen for cell in cells(program)}
    claimed = all_cells()
    for axis in ("operation", "dtype", "group", "mode", "layout"):
        assert {getattr(cell, axis) for cell in hit} == {getattr(cell, axis) for cell in claimed}
    assert {program.ranks for program in seen} == {*range(1, 9)}
    assert {len(program.steps) for program in seen} == {*range(1, 9)}
    assert {step.reduce_op for step in steps} == {"", *EVERYTHING.reductions}
    for program in seen:  # nothing is made that is not used
        used = {step.group for step in program.steps}
        assert {*program.groups} <= used
        assert (program.degrees == (1, 1)) == (not used - {*program.groups, "", "WORLD"})
    assert any(0 in step.shape for step in steps)
    assert any(step.group in ("DP", "TP", "PP", "MP", "RDP") for step in steps)
    assert any(len({*row}) > 1 for step in steps for row in step.rows)
    waits = [
        (plan.index(action), action.step.number)
        for program in seen
        for plan in program.plans
        for action in plan
        if action.what == "wait"
    ]
    assert any(later > earlier for (_, later), (_, earlier) in itertools.pairwise(waits))


SIMPLEST = [
    (lambda program: True, 1, ["barrier"]),
    (lambda program: program.ranks >= 3, 3, ["barrier"]),
    (lambda program: len(program.steps) >= 3, 1, ["barrier"] * 3),
    (lambda program: any(kind_of(step) == "unsorted" for step in program.steps), 2, ["barrier"]),
    (
        lambda program: any(step.operation == "all_reduce" for step in program.steps),
        1,
        ["all_reduce"],
    ),
    (lambda program: any(step.operation == "send" for step in program.steps), 2, ["send"]),
]


@pytest.mark.parametrize(("condition", "ranks", "operations"), SIMPLEST, ids=range(len(SIMPLEST)))
def test_programs_shrink(
    minimal: Find, condition: Callable[[Program], bool], ranks: int, operations: list[str]
) -> None:
    found = minimal(programs(), condition)
    assert found.ranks == ranks
    assert [step.operation for step in found.steps] == operations
    for step in found.steps:
        assert (step.dtype, step.shape) == ("float32", ())
        assert (step.input, step.output) == (Lie(), Lie())
        assert {*step.lags} == {None}
        assert step.reduce_op in ("", "SUM")


def test_capabilities_limit_what_is_drawn(drawn: Draw) -> None:
    few = Capabilities(
        claims=frozenset({Capability.PROCESS_GROUPS, Capability.ALL_REDUCE, Capability.GATHER}),
        dtypes=frozenset({"int8", "float32"}),
        reductions={"MAX": frozenset({"int8"})},
    )
    for program in drawn(programs(capabilities=few), 100):
        assert cells(program) <= {*all_cells(few)}
        assert {step.reduce_op for step in program.steps} <= {"", "MAX"}
        assert not program.groups
    for program in drawn(programs(ranks=5, max_calls=2), 30):
        assert program.ranks == 5
        assert len(program.steps) <= 2


#: Steps that must not be drawn where a capability is not claimed.
NOT_ASKED: dict[Capability, Callable[[Step], bool]] = {
    Capability.TAGS: lambda step: step.tag != 0,
    Capability.GROUP_ORDER: lambda step: [*step.members] != sorted(step.members),
    Capability.UNEVEN: lambda step: (
        step.operation == "all_to_all" and len({*itertools.chain(*step.rows)}) > 1
    ),
    Capability.LAYOUTS: lambda step: step.operation not in MESSAGES and not _contiguous(step),
    Capability.MESSAGE_LAYOUTS: lambda step: step.operation in MESSAGES and not _contiguous(step),
}
MESSAGES = ("send", "batch_isend_irecv")


def _contiguous(step: Step) -> bool:
    return {step.input.layout, step.output.layout} == {"contiguous"}


@pytest.mark.parametrize("capability", NOT_ASKED)
def test_what_is_not_claimed_is_not_drawn(capability: Capability) -> None:
    asks = NOT_ASKED[capability]
    less = Capabilities(claims=frozenset(Capability) - {capability})
    drawn = {
        claims: [
            step
            for seed in range(300)
            for step in sample(random.Random(seed).randrange, capabilities=claims).steps
        ]
        for claims in (less, EVERYTHING)
    }
    assert not any(map(asks, drawn[less]))
    assert any(map(asks, drawn[EVERYTHING]))


def test_an_operation_is_drawn_on_what_it_moves() -> None:
    messages = frozenset({"int16"})
    less = Capabilities(narrower={Capability.POINT_TO_POINT: messages})
    for seed in range(100):
        for step in sample(random.Random(seed).randrange, capabilities=less).steps:
            assert step.operation not in MESSAGES or step.dtype == "int16"


@pytest.mark.parametrize("name", ["programs", "invalid_programs"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 9}, "ranks=9"),
        ({"ranks": True}, "ranks=True"),
        ({"max_ranks": 9}, "max_ranks=9"),
        ({"max_ranks": 2.0}, "max_ranks=2.0"),
        ({"max_calls": 0}, "max_calls=0"),
        ({"capabilities": None}, "capabilities=None"),
        ({"capabilities": Capabilities(frozenset({Capability.RANKS}))}, "nothing that comm"),
        ({"capabilities": Capabilities(frozenset({Capability.BARRIER}))}, "nothing that comm"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        getattr(pytest_smp.strategies, name)(**arguments)
