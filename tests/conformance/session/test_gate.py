"""Verdicts by the phases of properties that the suite saw, some of them never logged, against a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.requirements.catalogue import REQUIREMENTS
from conformance.session.expectations import Expectation
from conformance.session.session import SuiteSession
from conformance.session.verdicts import PropertyOutcome, Verdict, not_supported
from conformance.session.witness import SeenFailure, Witness
from smp_core.errors import RunTimeout

IDS = tuple(REQUIREMENTS)[:3]


def fail(error: BaseException) -> Any:
    def raise_error() -> None:
        raise error

    return raise_error


#: For each kind of phase: what it runs, the phase, and the outcome that it leaves on threads and on processes.
PHASES = {
    "pass": (lambda: None, "call", "PASSED", "PASSED"),
    "assertion": (fail(AssertionError("no")), "call", "FAILED", "FAILED"),
    "pytest.fail": (lambda: pytest.fail("no"), "call", "FAILED", "FAILED"),
    "time-out": (fail(RunTimeout("late")), "call", "ERROR", "FAILED"),
    "exit": (fail(SystemExit(0)), "call", "ERROR", "ERROR"),
    "skip": (lambda: pytest.skip("no"), "call", "SKIPPED", "SKIPPED"),
    "not supported": (lambda: not_supported("no"), "call", "NOT_SUPPORTED", "NOT_SUPPORTED"),
    "set-up": (fail(AssertionError("no")), "setup", "ERROR", "ERROR"),
    "tear-down": (fail(AssertionError("no")), "teardown", "ERROR", "ERROR"),
    "silence": (lambda: None, "teardown", None, None),
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase that runs, whether its report is logged, and the hook of another plugin that makes it a pass.

    Hooks: "forgiven" (the report says passed), "cleared" (the call has no exception when its report is made),
    "swallowed" (a wrapper keeps the exception), "left out" (nothing runs).
    """

    kind: str
    logged: bool = True
    hook: str = ""


HOOKS = ["", "forgiven", "cleared", "swallowed", "left out"]
PHASE = st.builds(Phase, st.sampled_from(sorted(PHASES)), st.booleans(), st.sampled_from(HOOKS))


@contextlib.contextmanager
def suite_session(config: pytest.Config, *, processes: bool = False) -> Iterator[SuiteSession]:
    suite = SuiteSession(config)
    executor = SimpleNamespace(steady=not processes)
    suite._controller = SimpleNamespace(open=lambda: executor, close=lambda: None)  # type: ignore[assignment]
    suite.expected = {}
    try:
        yield suite
    finally:
        suite._witness.close()


def prepare(suite: SuiteSession, nodeid: str, id: str, siblings: int = 1, **more: Any) -> Any:
    suite.siblings[id] = siblings
    item = SimpleNamespace(
        nodeid=nodeid, stash=pytest.Stash(), user_properties=[], obj=run_phase, **more
    )
    suite._prepare(item, id)  # type: ignore[arg-type]
    suite.results[nodeid].outcome = PropertyOutcome.NOT_RUN
    return item


def run_phase(function: Callable[[], None]) -> None:
    function()


def run(suite: SuiteSession, item: Any, phase: Phase) -> None:
    function, when, *_ = PHASES[phase.kind]

    def call_item() -> None:
        swallowed = (BaseException,) if phase.hook == "swallowed" else ()
        with contextlib.suppress(*swallowed), suite.watched(item, when):
            if phase.hook != "left out":
                item.obj(function)

    call = pytest.CallInfo.from_call(call_item, when)  # type: ignore[arg-type]
    if phase.hook == "cleared":
        call.excinfo = None
    made = report_of(item, call)
    suite.tell(item, call, made)
    if phase.hook == "forgiven":
        made.outcome = "passed"
    if phase.logged:
        suite.logged(made)


def report_of(item: Any, call: pytest.CallInfo[None]) -> pytest.TestReport:
    error = None if call.excinfo is None else call.excinfo.value
    outcome: Any = "passed" if error is None else "failed"
    if isinstance(error, pytest.skip.Exception):
        outcome = "skipped"
    place, properties = ("f", 0, "t"), item.user_properties
    return pytest.TestReport(
        item.nodeid,
        place,
        {},
        outcome,
        None,
        call.when,  # type: ignore[arg-type]
        user_properties=properties,
    )


def told_by(phase: Phase, processes: bool) -> str | None:
    """The outcome that a phase leaves; a pass of which no end of the function was seen is none."""
    outcome: str | None = PHASES[phase.kind][2 + processes]
    call = PHASES[phase.kind][1] == "call"
    if phase.hook == "left out":
        return "SKIPPED" if call else None
    if phase.hook in ("cleared", "swallowed") and outcome in ("SKIPPED", "NOT_SUPPORTED"):
        return "SKIPPED"
    return outcome


def worst(names: set[str]) -> str:
    order = [outcome.name for outcome in PropertyOutcome]
    return min(names, key=order.index, default="NOT_RUN")


def expected_verdict(
    properties: Sequence[Sequence[Phase]], waived: bool, processes: bool
) -> Verdict:
    """The verdict on one requirement by its page: docs/conformance.md, Verdicts."""
    outcomes: set[str] = set()
    for phases in properties:
        # The suite sees each failure, and hears of all else by its report alone.
        left = {outcome for phase in phases if (outcome := told_by(phase, processes))}
        heard = {
            outcome for phase in phases if phase.logged and (outcome := told_by(phase, processes))
        }
        outcomes.add(worst((left & {"FAILED", "ERROR"}) | heard))
    if "ERROR" in outcomes or ("FAILED" in outcomes and not waived):
        return Verdict.FAIL
    if "FAILED" in outcomes:
        return Verdict.WAIVED
    if outcomes & {"SKIPPED", "NOT_RUN"}:
        return Verdict.SKIPPED
    if outcomes == {"NOT_SUPPORTED"}:
        return Verdict.NOT_SUPPORTED
    return Verdict.STALE_WAIVER if waived else Verdict.PASS


@given(
    properties=st.lists(st.lists(PHASE, max_size=4), min_size=1, max_size=3),
    waived=st.booleans(),
    processes=st.booleans(),
)
def test_the_verdict_is_that_of_every_phase_that_was_seen(
    pytestconfig: pytest.Config,
    properties: list[list[Phase]],
    waived: bool,
    processes: bool,
) -> None:
    check_verdict(pytestconfig, properties, waived, processes)


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("waived", [False, True], ids=["", "waived"])
@pytest.mark.parametrize("kind", sorted(PHASES))
@pytest.mark.parametrize("hook", HOOKS)
def test_the_verdict_of_one_phase(
    pytestconfig: pytest.Config, hook: str, kind: str, waived: bool, processes: bool
) -> None:
    phases = [Phase("pass"), Phase(kind, hook=hook)]
    check_verdict(pytestconfig, [phases], waived, processes)


def check_verdict(
    pytestconfig: pytest.Config,
    properties: Sequence[Sequence[Phase]],
    waived: bool,
    processes: bool,
) -> None:
    """Run the phases of the properties of one requirement, and compare its verdict with the model's."""
    id, quiet, _ = IDS
    with suite_session(pytestconfig, processes=processes) as suite:
        if waived:
            suite.expected[id] = Expectation(id, "It is known.", "https://example.com/1")
        count = len(properties)
        items = [prepare(suite, f"t.py::{number}", id, count) for number in range(count)]
        suite.siblings[quiet] = 1
        for item, phases in zip(items, properties, strict=True):
            for phase in phases:
                run(suite, item, phase)
        suite._add_failures(suite._seen_failures())
        verdicts = suite.verdicts()
    assert verdicts[id] is expected_verdict(properties, waived, processes)
    assert verdicts[quiet] is Verdict.SKIPPED


@pytest.mark.parametrize("reported", [1, 2])
def test_a_property_that_a_worker_never_reported_is_missed(
    pytestconfig: pytest.Config, reported: int
) -> None:
    """Its worker died between two properties: the main process knows their number alone."""
    id = IDS[0]
    with suite_session(pytestconfig) as suite:
        for number in range(reported):
            item = prepare(suite, f"t.py::{number}", id, siblings=2)
            run(suite, item, Phase("pass"))
        verdicts = suite.verdicts()
        assert verdicts[id] is (Verdict.PASS if reported == 2 else Verdict.SKIPPED)


@given(st.none())
def draw_none(nothing: None) -> None:
    """A property of Hypothesis."""


def run_none() -> None:
    """Another function than the property's."""


@functools.wraps(run_none)
def decorated(*arguments: object) -> None:
    """The function of a property, as a decorator of another plugin leaves it."""
    return run_none()


@pytest.mark.parametrize(
    ("test", "called", "outcome"),
    [
        (draw_none, draw_none, PropertyOutcome.PASSED),
        (run_none, run_none, PropertyOutcome.PASSED),
        (run_none, decorated, PropertyOutcome.SKIPPED),  # which may catch exceptions
        (draw_none, run_none, PropertyOutcome.SKIPPED),  # a hook has replaced it
    ],
    ids=["hypothesis", "plain", "decorated", "replaced"],
)
def test_a_pass_needs_the_end_of_the_function(
    pytestconfig: pytest.Config, test: Any, called: Any, outcome: PropertyOutcome
) -> None:
    with suite_session(pytestconfig) as suite:
        item = prepare(suite, "t.py::a", IDS[0])
        item.obj = test
        suite._prepare(item, IDS[0])
        suite.selected([item])
        item.obj = called
        with suite.watched(item, "call"):
            item.obj()
        assert item.obj is called
        call = pytest.CallInfo.from_call(lambda: None, "call")
        shown = SimpleNamespace(nodeid=item.nodeid, user_properties=item.user_properties[:2])
        for expected in (outcome, PropertyOutcome.SKIPPED):  # one run is no proof of two reports
            made = report_of(shown, call)
            suite.tell(item, call, made)
            suite.logged(made)
            assert suite.results["t.py::a"].outcome is expected


@pytest.mark.parametrize("early", [False, True])
def test_a_function_that_hypothesis_calls_instead_is_no_proof(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """Nor is a decorator that a hook puts there before the session has seen the item."""
    with suite_session(pytestconfig) as suite:
        item = prepare(suite, "t.py::a", IDS[0])
        item.parent, item.originalname = SimpleNamespace(obj=SimpleNamespace(a=draw_none)), "a"
        item.obj = decorated if early else draw_none
        suite._prepare(item, IDS[0])
        suite.selected([item])
        if not early:
            monkeypatch.setattr(draw_none.hypothesis, "inner_test", lambda nothing: None)  # type: ignore[attr-defined]
        with suite.watched(item, "call"):
            item.obj()
        call = pytest.CallInfo.from_call(lambda: None, "call")
        made = report_of(
            SimpleNamespace(nodeid=item.nodeid, user_properties=item.user_properties[:2]), call
        )
        suite.tell(item, call, made)
        suite.logged(made)
        assert suite.results["t.py::a"].outcome is PropertyOutcome.SKIPPED


def test_a_run_is_no_proof_of_the_next_one(pytestconfig: pytest.Config) -> None:
    with suite_session(pytestconfig) as suite:
        item = prepare(suite, "t.py::a", IDS[0])
        with suite.watched(item, "call"):  # of which no report is made
            item.obj(lambda: None)
        run(suite, item, Phase("pass", hook="left out"))
        assert suite.results["t.py::a"].outcome is PropertyOutcome.SKIPPED


@pytest.mark.parametrize("overridden", [False, True])
def test_a_pass_with_a_fixture_of_others_is_no_proof(
    pytestconfig: pytest.Config, overridden: bool
) -> None:
    """A fixture may run a body again until the body passes."""
    definitions = [SimpleNamespace(func=SuiteSession.found), SimpleNamespace(func=run_none)]
    with suite_session(pytestconfig) as suite:
        fixtures = SimpleNamespace(name2fixturedefs={"smp_world": definitions[: 1 + overridden]})
        item = prepare(suite, "t.py::a", IDS[0], _fixtureinfo=fixtures)
        run(suite, item, Phase("pass"))
        expected = PropertyOutcome.SKIPPED if overridden else PropertyOutcome.PASSED
        assert suite.results["t.py::a"].outcome is expected


def test_a_selftest_leaves_no_failure(pytestconfig: pytest.Config) -> None:
    with suite_session(pytestconfig) as suite, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytestconfig.option, "smp_selftest", True)
        item = prepare(suite, "t.py::a", IDS[0])
        with pytest.raises(AssertionError), suite.watched(item, "call"):
            item.obj(fail(AssertionError("no")))
        assert suite._seen_failures() == []


@pytest.mark.parametrize("process", ["worker", "fork"])
def test_a_failure_of_another_process_counts(pytestconfig: pytest.Config, process: str) -> None:
    """The last try passed in this process; the first one failed in a worker of xdist, or in a forked child."""
    id = IDS[0]
    broken = Phase("assertion", logged=False)
    with suite_session(pytestconfig) as suite, suite_session(pytestconfig) as worker:
        item = prepare(suite, "t.py::a", id)
        if process == "worker":
            run(worker, prepare(worker, "t.py::a", id), broken)
            suite.worker_told(worker.worker_output())
        else:
            child = os.fork()
            if child == 0:
                run(suite, item, broken)
                os._exit(0)
            os.waitpid(child, 0)
        run(suite, item, Phase("pass"))
        suite._add_failures(suite._seen_failures())
        assert suite.verdicts()[id] is Verdict.FAIL
        assert suite.results["t.py::a"].error == "AssertionError: no"


@pytest.mark.parametrize(
    ("ranks", "whole", "deselected", "refused"),
    [
        (7, True, False, True),
        (8, True, False, False),
        (7, False, False, False),
        (7, True, True, False),
    ],
)
def test_too_few_ranks_for_a_certificate_are_refused_before_it_runs(
    pytestconfig: pytest.Config, ranks: int, whole: bool, deselected: bool, refused: bool
) -> None:
    with suite_session(pytestconfig) as suite:
        item = prepare(suite, "t.py::a", IDS[0])
        suite.lacks = {IDS[0]: []}  # no backend is opened
        suite.options = dataclasses.replace(suite.options, certify=True)
        suite.settings = dataclasses.replace(suite.settings, ranks=ranks)
        suite.whole = whole
        if deselected:
            suite.results[item.nodeid].outcome = PropertyOutcome.DESELECTED
        message = f"^--smp-certify: a certificate needs 8 ranks, and {ranks} are there"
        with pytest.raises(pytest.UsageError, match=message) if refused else nullcontext():
            suite.open_backend([item])


def test_failures_of_one_error_are_told_together(pytestconfig: pytest.Config) -> None:
    error = RuntimeError("ProcessGroup name not set\nand more")
    with suite_session(pytestconfig) as suite:
        for number, id in enumerate((*IDS, IDS[0])):
            item = prepare(suite, f"t.py::{number}", id)
            call = pytest.CallInfo.from_call(fail(error), "call")
            made = report_of(item, call)
            suite.tell(item, call, made)
            suite.logged(made)
        text = (
            f"3 requirements fail alike ({', '.join(IDS)}): RuntimeError: ProcessGroup name not set"
        )
        assert list(suite._alike()) == [text]


def test_the_witness_leaves_no_file() -> None:
    witness = Witness()
    assert witness.failures() == []
    failure = SeenFailure("t.py::a", IDS[0], {"outcome": "failed", "error": "no", "notes": ["é"]})
    witness.add(failure)
    witness.add(failure)
    assert witness.failures() == [failure, failure]
    witness.close()
    assert witness.failures() == []
    witness.close()


@given(data=st.data())
def test_an_entry_by_id_covers_one_requirement(data: st.DataObject) -> None:
    id = data.draw(st.sampled_from(sorted(REQUIREMENTS)))
    part = data.draw(st.integers(1, len(id)))
    entry = Expectation(id[:part], "It is known.", "https://example.com/1")
    assert [each for each in REQUIREMENTS if entry.matches(each)] == [id[:part]] * (
        id[:part] in REQUIREMENTS
    )
