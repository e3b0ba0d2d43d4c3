"""The soak, in short: every verdict right, nothing left; and that it finds what is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import os

import pytest

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import Claim, Kill
from pytest_smp.ranks.protocols import ExecutorOptions, Job, OutcomeKind, VerdictKind
from tools.soak import differing, leaks, programs, verdicts
from tools.soak.__main__ import main, soak
from tools.soak.leaks import Held


@pytest.mark.parametrize(("backend", "faults", "tests"), [("sim", 200, 200), ("gloo", 25, 40)])
def test_a_short_soak_misses_nothing(backend, faults, tests, capsys):
    assert soak(backend, faults=faults, tests=tests, ranks=3) == []
    assert f"{faults} faults and {tests} tests" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["drop", "stall"])
def test_without_the_board_ranks_that_wait_use_up_their_time(kind, capsys):
    claims = {Claim.STRIKES, Claim.PROCESSES}
    numbers = itertools.count()
    first = next(each for each in numbers if verdicts.draw(f"0-{each}", 4, claims, "").kind == kind)
    assert soak("gloo", faults=1, first=first, timeout=10.0, check=False) == []


@pytest.fixture(scope="module")
def executor():
    executor = open_backend("sim", ExecutorOptions(ranks=3))
    yield executor
    executor.close()


def _run(executor, case, *faults):
    arguments = programs.SoakArguments((case.steps, case.folder))
    job = Job(body=programs.run, arguments=arguments, faults=faults)
    return executor.open(case.size).run(job)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_programs_make_the_calls_that_they_say(executor, size, tmp_path):
    steps = tuple(programs.SoakStep(kind, number) for number, kind in enumerate(programs.STEPS, 1))
    arguments = programs.SoakArguments((steps, str(tmp_path)))
    report = executor.open(size).run(Job(body=programs.run, arguments=arguments))
    said = [programs.calls(steps, rank, size).total() for rank in range(size)]
    assert report.values == said, report.error


@pytest.mark.parametrize("kind", differing.CALLS)
def test_calls_that_differ_are_a_mismatch_and_one_that_passes_is_a_miss(executor, kind, tmp_path):
    fault = differing.Differing(rank=2, step=0, kind=kind)
    steps = (programs.SoakStep("barrier", 1),)
    case = verdicts.SoakCase(steps, fault, "mismatch", 3, str(tmp_path))
    job = Job(body=programs.run, arguments=programs.SoakArguments(case.arguments))
    report = executor.open(3).run(job)
    assert verdicts.complaints(case, report, processes=False) == []
    blamed = dataclasses.replace(report, root=1)
    assert verdicts.complaints(case, blamed, processes=False) == ["root 1, not 2"]


def test_a_seed_draws_the_same_case_again(tmp_path):
    cases = [verdicts.draw("7-3", 4, set(Claim), str(tmp_path)) for _ in range(2)]
    assert cases[0] == cases[1]
    kinds = {verdicts.draw(f"7-{n}", 4, set(Claim), "").kind for n in range(600)}
    assert kinds == set(verdicts._WEIGHTS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"verdict": VerdictKind.PASSED}, "verdict passed, not crashed"),
        ({"root": 0}, "root 0, not 1"),
        ({"error": RuntimeError("rank 1 crashed: killed by SIGKILL (signal 9)")}, "kill before"),
        ({"error": RuntimeError("rank 0 crashed")}, "rank 1 crashed: killed by SIGKILL"),
    ],
    ids=["verdict", "rank", "cause", "text"],
)
def test_a_wrong_verdict_is_a_miss(executor, tmp_path, change, text):
    steps = (programs.SoakStep("allgather", 1),)
    case = verdicts.SoakCase(steps, Kill(rank=1, at="allgather"), "kill", 3, str(tmp_path))
    report = _run(executor, case, case.fault)
    assert verdicts.complaints(case, report, processes=False) == []
    wrong = verdicts.complaints(case, dataclasses.replace(report, **change), processes=False)
    assert any(text in each for each in wrong), wrong


def test_harm_to_another_rank_is_a_miss(executor, tmp_path):
    case = verdicts.SoakCase((), Kill(rank=1), "kill", 3, str(tmp_path))
    report = _run(executor, case, case.fault)
    report.outcomes[2].kind, report.outcomes[2].error = OutcomeKind.RAISED, AssertionError("x")
    assert len(verdicts.complaints(case, report, processes=False)) == 2


def test_what_grows_is_told():
    before = Held(descriptors=5, objects=1000, resident=10**6)
    assert leaks.growth("x", before, before, 10) == []
    assert leaks.growth("x", before, Held(6, 1000, 10**6), 10) == ["x: descriptors 5 -> 6"]
    assert leaks.growth("x", before, Held(5, 1099, 10**6), 100) == []
    assert leaks.growth("x", before, Held(5, 1100, 10**6), 100) != []
    assert leaks.growth("x", before, Held(5, 1100, 10**6), 99) == []
    much = 10**6 + 1000 * os.sysconf("SC_PAGE_SIZE")
    assert leaks.growth("x", before, Held(5, 1000, much), 1000) != []
    assert leaks.growth("x", before, Held(5, 1000, much), 999) == []


def test_the_exit_code_tells(capsys, monkeypatch):
    assert main(["--backend", "sim", "--faults", "3", "--ranks", "2"]) == 0
    # Every verdict is wrong for a judge that expects another rank.
    monkeypatch.setattr(verdicts, "complaints", lambda case, report, processes: ["wrong"])
    assert main(["--backend", "sim", "--faults", "3", "--ranks", "2"]) == 1
    assert "MISS 0: " in capsys.readouterr().out
