"""``--smp-selftest``, as a third party runs it: what is killed, what is not, and what is neither."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.mutants.catalogue import MUTANTS
from conformance.mutants.selftest import LOST, MutantScore, _kinds, _Selftest, score
from conformance.mutants.trials import (
    FEW,
    MANY,
    Attempt,
    Lost,
    TrialOutcome,
    TrialResult,
    in_processes,
    limit,
    own_examples,
)

SELFTEST = ["--smp-selftest"]
BARRIERS = [*SELFTEST, "--pyargs", "conformance.suite.test_barriers"]
OUR_BARRIERS = sum(mutant.requirement.startswith("COMM-BARRIER-") for mutant in MUTANTS)
OF_TENSORFLOW = sum(mutant.requirement.startswith("TF-") for mutant in MUTANTS)

#: Limits that a test need not wait for, and mutants of other people.
THEIRS = """
import os, time
import smp_core.torch as smp
from conformance.mutants import trials
from conformance.mutants.protocol import Bugs
from smp_core.errors import RunTimeout

trials.TIMES, trials.MORE, trials.GRACE = 2.0, 8.0, 2.0
BUGS = Bugs("theirs")

def bug(name, sentence, *by):
    def enter(plant):
        plant.__name__, plant.__doc__ = name, sentence
        BUGS.enter("COMM-BARRIER-DEFAULT", *by)(plant)
    return enter

def barrier(patch, body):
    patch.setattr(smp, "barrier", body)

def wrong_type(group=smp.WORLD):
    raise TypeError("not by assertion")

def loop(*_, **__):
    while True:
        time.sleep(0.01)

@bug("their_nothing", "nothing is wrong")
def _(patch):
    pass

@bug("their_error", "a barrier raises")
def _(patch):
    barrier(patch, wrong_type)

@bug("their_declared_error", "a barrier raises, and says so", TypeError)
def _(patch):
    barrier(patch, wrong_type)

@bug("their_import", "it is not there")
def _(patch):
    import no_such_module

@bug("their_loop", "a barrier never ends")
def _(patch):
    barrier(patch, loop)

@bug("their_declared_loop", "a barrier never ends, and says so", RunTimeout)
def _(patch):
    barrier(patch, loop)

@bug("their_loop_outside", "the run never begins")
def _(patch):
    from smp_core import runtime
    patch.setattr(runtime, "validate", loop)

@bug("their_crash", "the process ends")
def _(patch):
    import ctypes  # os._exit would end a rank of sim alone
    barrier(patch, lambda group=smp.WORLD: ctypes.CDLL(None)._exit(3))

@bug("their_sleep", "not even a signal is heard")
def _(patch):
    import signal
    from smp_core import runtime
    def deaf(*_):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # blocked here, another thread would hear it
        loop()
    patch.setattr(runtime, "validate", deaf)

AGAIN = [next(each for each in BUGS if each.name == "their-nothing")] * 2
ELSEWHERE = Bugs("theirs")

@ELSEWHERE.enter("COMM-SEND-ODER")
def typo(patch):
    "its requirement is a typo"
"""


def test_the_page_shows_what_happens(sessions: Any) -> None:
    page = (Path(__file__).parents[3] / "docs/mutants.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (example,) = (block for language, block in blocks if language == "python")
    (shown,) = (block for language, block in blocks if not language)
    arguments = [
        *SELFTEST,
        "--pyargs",
        "conformance.suite.test_allgather",
        "--smp-mutants=planted:BUGS",
    ]
    (output,) = sessions(arguments, plugin=example)
    assert shown in output


def test_planted_bugs_are_killed(sessions: Any) -> None:
    (output,) = sessions(BARRIERS)
    assert f"{OUR_BARRIERS} mutants\n{'.' * OUR_BARRIERS}\n" in output
    score = f"{OUR_BARRIERS} of {OUR_BARRIERS} killed (100 %)"
    assert f"written by hand: {score} of those collected\n" in output
    assert f"not applicable: {OF_TENSORFLOW} whose requirement needs what engine smp" in output
    elsewhere = len(MUTANTS) - OUR_BARRIERS - OF_TENSORFLOW
    assert f"left out: {elsewhere} whose requirement has no property here" in (output)
    assert "generated" not in output  # what kills them is known only when all properties are there
    assert "selftest: passed in " in output
    assert re.search(rf"^=* ?{OUR_BARRIERS} killed in ", output, re.MULTILINE)
    assert "=== exit 0" in output


def test_what_became_of_other_peoples_mutants(sessions: Any) -> None:
    arguments = [*BARRIERS, "--smp-mutants=planted:BUGS", "--smp-timeout=3"]
    (output,) = sessions([*arguments, "--smp-mutant=their-*"], plugin=THEIRS)
    lines = {line.split(":")[0]: line for line in output.splitlines() if ": " in line}
    assert "  theirs " in output
    # Those that raise what they say.
    assert "written by hand (their-*): 2 of 9 killed (22.2 %)\n" in output
    assert "SURVIVED their-nothing" in lines
    assert "nothing is wrong [COMM-BARRIER-DEFAULT]" in lines["SURVIVED their-nothing"]
    for name, why in {
        "their-error": "TypeError: not by assertion",
        "their-import": "cannot be planted: ModuleNotFoundError: No module named 'no_such_module'",
        "their-loop": "RunTimeout: ",
        "their-loop-outside": "DidNotEnd: the property did not end within ",
        "their-crash": "its process ended with exit code 3, in a property",
        "their-sleep": "its process did not end in time, in a property",
    }.items():
        assert why in lines[f"BROKEN {name}"]
    assert "declared" not in output
    assert "selftest: failed in " in output
    assert "=== exit 1" in output


def test_the_reference_must_pass(sessions: Any) -> None:
    bug = "import smp_core.torch as smp\nsmp.barrier = lambda group=smp.WORLD: None\n"
    (output,) = sessions(BARRIERS, plugin=bug)
    assert "FAILED without a mutant: " in output
    assert "::test_nobody_leaves_before_all_have_come: AssertionError: " in output
    assert "the reference must pass: nothing is scored" in output
    assert "killed" not in output
    assert "=== exit 1" in output


#: A property that fails with many examples, whatever is planted, and a mutant that changes nothing.
FAILS_LATE = """
from conformance.mutants import selftest, trials
from conformance.mutants.protocol import Bugs

BUGS = Bugs("theirs")

@BUGS.enter("COMM-BARRIER-DEFAULT")
def their_nothing(patch):
    "nothing is wrong"

def run(item, examples, seconds, few=trials.run):
    return AssertionError("late") if examples > trials.FEW else few(item, examples, seconds)

trials.run = selftest.run = run
"""


def test_the_reference_must_pass_the_examples_that_kill(sessions: Any) -> None:
    (output,) = sessions(
        [*BARRIERS, "--smp-mutants=planted:BUGS", "--smp-mutant=their-*"], plugin=FAILS_LATE
    )
    assert re.search(r"FAILED without a mutant: .*: AssertionError: late\n", output)
    assert "the reference must pass: nothing is scored" in output
    assert "killed (" not in output
    assert "=== exit 1" in output


def test_what_is_skipped_is_not_scored(sessions: Any) -> None:
    arguments = [*SELFTEST, "--pyargs", "conformance.suite.test_send_recv", "--smp-ranks=1"]
    (output,) = sessions([*arguments, "--smp-mutant=newest-first"])
    assert "0 of 0 killed (-), 1 left out" in output
    assert "not tried: 1 mutants, because all of their properties are skipped" in output
    assert "=== exit 1" in output


def test_every_mutant_written_by_hand_must_be_tried(sessions: Any) -> None:
    (output,) = sessions(
        [*SELFTEST, "--pyargs", "conformance", "--smp-mutant=[!g]*-barrier*"],
        plugin="""
def pytest_collection_modifyitems(items):
    items[:] = [each for each in items if each.path.name == "test_barriers.py"]
    del items[1:]
""",
    )
    assert "killed (100 %) of those collected\n" in output
    assert re.search(
        r"not tried: \d+ mutants, whose requirements have no property here although the whole suite "
        "was asked for",
        output,
    )
    assert "selftest: failed in " in output
    assert "=== exit 1" in output


#: The like of a generated mutant, with only a few properties in the session.
AS_GENERATED = """
import contextlib, os, signal
import smp_core.torch as smp
from conformance.mutants import generated, trials
from conformance.mutants.protocol import Bugs, Mutant
from smp_core.errors import CollectiveMismatchError, DeadlockError, LeakError, RaceError
from hypothesis.errors import Unsatisfiable, Flaky

trials.TIMES, trials.MORE, trials.GRACE, trials.START_LIMIT = 2.0, 2.0, 1.0, 5.0
SITE = generated.sites("smp_core.comm")[0]

def raising(make):
    def body(group=smp.WORLD):
        raise make("no barrier")
    return body

def bug(name, body):
    @contextlib.contextmanager
    def plant():
        before, smp.barrier = smp.barrier, body
        yield
        smp.barrier = before
    return made(name, plant)

def made(name, plant):
    site = SITE.mutant("COMM-BARRIER-DEFAULT", trials.DidNotEnd)
    return Mutant(name, site.kind, name, site.requirement, plant, site.by, site.but)

def deaf(group=smp.WORLD):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    while True: pass

def end():
    os._exit(9)

def block():
    while True: pass

BUGS = [
    *(bug(f"as-{each.__name__.lower()}", raising(each)) for each in (
        TypeError, DeadlockError, LeakError, CollectiveMismatchError, RaceError,
        Unsatisfiable, Flaky,
    )),
    bug("as-crash", lambda group=smp.WORLD: os._exit(3)),
    made("as-early", end),
    made("as-stuck", block),
]
"""


def test_what_kills_a_generated_mutant(sessions: Any) -> None:
    arguments = [*BARRIERS, "-k", "test_the_default", "--smp-mutants=planted:BUGS"]
    (output,) = sessions([*arguments, "--smp-mutant=as-*"], plugin=AS_GENERATED)
    found = {
        name: result
        for result, name in re.findall(
            r"^(SURVIVED|BROKEN|HARNESS ONLY) (as-\w+):", output, re.MULTILINE
        )
    }
    assert found == {
        "as-leakerror": "HARNESS ONLY",
        "as-collectivemismatcherror": "HARNESS ONLY",
        "as-raceerror": "HARNESS ONLY",
        "as-unsatisfiable": "BROKEN",
        "as-flaky": "BROKEN",
        "as-early": "BROKEN",
        "as-stuck": "BROKEN",
    }
    assert "3 of 10 killed (30 %)" in output
    assert "its process ended with exit code 9, before its first property" in output
    assert "its process did not end in time, before its first property" in output
    assert "=== exit 1" in output


def test_a_process_that_is_lost_without_a_property_kills_nothing(sessions: Any) -> None:
    plugin = f"{AS_GENERATED}\ntrials.Trial.__call__ = lambda *_: os._exit(9)\n"
    arguments = [*BARRIERS, "-k", "test_the_default", "--smp-mutants=planted:BUGS"]
    (output,) = sessions([*arguments, "--smp-mutant=as-[dt]*"], plugin=plugin)
    assert "0 of 2 killed (0 %)" in output
    assert output.count("BROKEN as-") == 2
    assert "=== exit 1" in output


ATTEMPT = Attempt("test_it.py::test_it", 6)


@dataclasses.dataclass
class Told:
    """A trial that ends its process the first time, and is well the second."""

    folder: Path
    early: bool

    def __call__(self, tell: Any) -> str:
        if not self.early:
            tell(60.0, ATTEMPT)
        try:
            (self.folder / "tried").touch(exist_ok=False)
        except FileExistsError:
            return "well"
        os._exit(9)


@pytest.mark.parametrize("early", [True, False])
def test_a_lost_process_says_whether_a_property_had_started(
    tmp_path: Path, pytestconfig: pytest.Config, early: bool
) -> None:
    trial = Told(tmp_path, early)
    ((_, answer),) = in_processes([trial], pytestconfig)
    when = "before its first property" if early else "in a property"
    attempt = None if early else ATTEMPT
    assert answer == Lost(f"its process ended with exit code 9, {when}", not early, attempt)
    ((_, answer),) = in_processes([trial], pytestconfig)
    assert answer == "well"


def test_a_bug_of_a_trial_is_no_property(pytestconfig: pytest.Config) -> None:
    def trial(tell: Any) -> None:
        tell(60.0, ATTEMPT)
        raise MemoryError("ours")

    ((_, answer),) = in_processes([trial], pytestconfig)
    assert answer == Lost("its trial raised MemoryError: ours", started=False)


def test_a_property_gets_a_multiple_of_its_seconds() -> None:
    assert limit(0.0, MANY) > 0
    # A machine ten times slower than for the reference, which has run FEW examples.
    assert limit(3.0, MANY + 1) - limit(2.0, MANY + 1) >= 10 * MANY / FEW
    # One that asks for fewer by itself, or is run once, takes no longer than on the reference.
    assert limit(3.0, FEW - 1) == limit(3.0, 1) < limit(3.0, FEW + 1) < limit(3.0, MANY)
    assert limit(3.0, 1) - limit(2.0, 1) >= 10


def test_the_examples_that_a_property_asks_for_are_known(request: pytest.FixtureRequest) -> None:
    @given(st.integers())
    @settings(max_examples=7)
    def seven(number: int) -> None: ...

    def once() -> None: ...

    for test, expected in ((seven, 7), (once, 1)):
        item = pytest.Function.from_parent(request.node.parent, name="test", callobj=test)
        assert own_examples(item) == expected


def test_generated_mutants_need_the_properties_of_one_engine(pytestconfig: pytest.Config) -> None:
    """Mutants of another engine's requirements have no property in a session that collects everything."""

    def generated_sites(requirements: set[str]) -> list[Any]:
        items = [
            SimpleNamespace(get_closest_marker=lambda _, id=id: pytest.mark.requirement(id).mark)
            for id in requirements
        ]
        return _Selftest(
            cast(Any, SimpleNamespace(config=pytestconfig, items=items)), MUTANTS
        ).sites

    claimed = {each.requirement for each in MUTANTS if not each.requirement.startswith("TF-")}
    assert len(claimed) < len({each.requirement for each in MUTANTS})
    assert generated_sites(claimed)
    assert not generated_sites(claimed - {"COMM-BARRIER-DEFAULT"})


def test_the_score_of_nothing_is_no_number() -> None:
    assert str(MutantScore(0, 0)) == "0 of 0 killed (-)"
    assert str(MutantScore(2, 3)) == "2 of 3 killed (66.6 %)"


def test_kills_are_counted_by_kind() -> None:
    mutant = MUTANTS[0]
    killed = [
        TrialOutcome(TrialResult.KILLED, "", by) for by in ("AssertionError", LOST, "time limit")
    ]
    tried = [*killed, killed[0], TrialOutcome(TrialResult.HARNESS_ONLY, "", "LeakError")]
    assert _kinds([(mutant, each) for each in tried]) == (
        "2 AssertionError, 1 process lost, 1 time limit (2 by loss or time limit)"
    )
    assert score([(mutant, each) for each in tried]) == MutantScore(4, 5)


def test_a_session_without_a_property_to_try(sessions: Any) -> None:
    (output,) = sessions([*BARRIERS, "-k", "test_the_default", "--smp-mutant=newest-first"])
    assert (
        "no mutant to try: no mutant has such a name, or its requirement has no property here"
        in output
    )
    assert "=== exit 1" in output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--smp-selftest", "--smp-mutants=nowhere:BUGS"], "cannot import nowhere: ModuleNotFound"),
        (["--smp-selftest", "--smp-mutants=planted:NO"], "module planted has no attribute 'NO'"),
        (["--smp-selftest", "--smp-mutants=planted:loop"], "is no iterable of mutants"),
        (
            ["--smp-selftest", "--smp-mutants=planted:AGAIN"],
            "two mutants are called 'their-nothing",
        ),
        (
            ["--smp-selftest", "--smp-mutants=planted:ELSEWHERE"],
            "mutant 'typo': unknown requirement 'COMM-SEND-ODER': did you mean COMM-SEND-ORDER?",
        ),
        (["--smp-mutants=planted:BUGS"], "--smp-mutants and --smp-mutant belong to --smp-selftest"),
        (["--smp-selftest", "-n", "2"], "uses all cores by itself: leave out -n and --dist"),
    ],
)
def test_bad_input_ends_the_session_before_anything_runs(
    sessions: Any, options: list[str], error: str
) -> None:
    (output,) = sessions(
        ["--pyargs", "conformance.suite.test_barriers", *options],
        plugin=THEIRS,
    )
    assert error in output
    assert "collected" not in output
    assert "=== exit 4" in output
