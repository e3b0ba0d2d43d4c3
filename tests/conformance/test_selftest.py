"""``--smp-selftest``, as a third party runs it: what is killed, what is not, and what is neither."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from conformance.mutants.catalogue import MUTANTS

SELFTEST = ["--smp-selftest"]
BARRIERS = [*SELFTEST, "--pyargs", "conformance.test_barriers"]
OUR_BARRIERS = sum(mutant.requirement.startswith("COMM-BARRIER-") for mutant in MUTANTS)

#: Limits that a test need not wait for, and mutants of other people.
THEIRS = """
import os, time
import smp_core.torch as smp
from conformance.mutants import trials
from conformance.mutants.protocol import Bugs
from smp_core.errors import RunTimeout

trials.PROPERTY_LIMIT, trials.PROCESS_LIMIT = 2.0, 4.0
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
        pass

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
    barrier(patch, lambda group=smp.WORLD: os._exit(3))

@bug("their_sleep", "not even a signal is heard")
def _(patch):
    import signal
    from smp_core import runtime
    def deaf(*_):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        loop()
    patch.setattr(runtime, "validate", deaf)

AGAIN = [next(each for each in BUGS if each.name == "their-nothing")] * 2
ELSEWHERE = Bugs("theirs")

@ELSEWHERE.enter("COMM-SEND-ODER")
def typo(patch):
    "its requirement is a typo"
"""


def test_the_page_shows_what_happens(sessions: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/mutants.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (example,) = (block for language, block in blocks if language == "python")
    (shown,) = (block for language, block in blocks if not language)
    arguments = [*SELFTEST, "--pyargs", "conformance.test_allgather", "--smp-mutants=planted:BUGS"]
    (output,) = sessions(arguments, plugin=example)
    assert shown in output


def test_planted_bugs_are_killed(sessions: Any) -> None:
    (output,) = sessions(BARRIERS)
    assert f"{OUR_BARRIERS} mutants\n{'.' * OUR_BARRIERS}\n" in output
    assert f"written by hand: {OUR_BARRIERS} of {OUR_BARRIERS} killed (100 %)" in output
    assert f"left out: {len(MUTANTS) - OUR_BARRIERS} whose requirement has no property here" in (
        output
    )
    assert "generated" not in output  # what kills them is known only when all properties are there
    assert "selftest: passed in " in output
    assert "=== exit 0" in output


def test_what_became_of_other_peoples_mutants(sessions: Any) -> None:
    arguments = [*BARRIERS, "--smp-mutants=planted:BUGS", "--smp-timeout=0.5"]
    (output,) = sessions([*arguments, "--smp-mutant=their-*"], plugin=THEIRS)
    lines = {line.split(":")[0]: line for line in output.splitlines() if ": " in line}
    assert "  theirs " in output
    assert "2 of 9 killed (22.2 %)" in output  # those that raise what they say
    assert "SURVIVED their-nothing" in lines
    assert "nothing is wrong [COMM-BARRIER-DEFAULT]" in lines["SURVIVED their-nothing"]
    for name, why in {
        "their-error": "TypeError: not by assertion",
        "their-import": "cannot be planted: ModuleNotFoundError: No module named 'no_such_module'",
        "their-loop": "RunTimeout: ",
        "their-loop-outside": "DidNotEnd: the property did not end within 2 s",
        "their-crash": "its process ended with exit code 3",
        "their-sleep": "its process did not end within 4 s",
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


def test_what_is_skipped_is_not_scored(sessions: Any) -> None:
    arguments = [*SELFTEST, "--pyargs", "conformance.test_send_recv", "--smp-ranks=1"]
    (output,) = sessions([*arguments, "--smp-mutant=newest-first"])
    assert "0 of 0 killed (100 %), 1 left out" in output
    assert "=== exit 1" in output


def test_a_session_without_a_property_to_try(sessions: Any) -> None:
    (output,) = sessions([*BARRIERS, "-k", "test_the_default", "--smp-mutant=newest-first"])
    assert "no mutant to try: their requirements have no property here" in output
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
        ["--pyargs", "conformance.test_barriers", *options],
        plugin=THEIRS,
    )
    assert error in output
    assert "collected" not in output
    assert "=== exit 4" in output
