"""The plugin's options and ini keys: what they do, and what is refused before anything starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session


_PASSES = """
    @pytest.mark.smp
    def test_it(smp):
        assert smp.size() == 4
"""


@pytest.mark.parametrize(
    ("flag", "must_be"),
    [
        ("--smp-ranks=0", "a whole number of at least 1"),
        ("--smp-ranks=-3", "a whole number of at least 1"),
        ("--smp-ranks=abc", "a whole number of at least 1"),
        ("--smp-ranks=2.5", "a whole number of at least 1"),
        ("--smp-timeout=0", "a number of seconds above 0"),
        ("--smp-timeout=-1", "a number of seconds above 0"),
        ("--smp-timeout=nan", "a number of seconds above 0"),
        ("--smp-timeout=soon", "a number of seconds above 0"),
        ("--smp-seed=-1", "a whole number from 0 to 2**32 - 1"),
        ("--smp-seed=4294967296", "a whole number from 0 to 2**32 - 1"),
    ],
)
def test_a_bad_value_is_refused_before_anything_starts(
    session: Session, flag: str, must_be: str
) -> None:
    ended = session(_PASSES, flag, ranks=None)
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    ended.shows(f"ERROR: {flag}: must be {must_be}")
    ended.hides("Traceback", "collected")


def test_an_unknown_backend_is_refused_before_anything_starts(session: Session) -> None:
    ended = session(_PASSES, "--smp-backend=simm")
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    ended.shows("unknown backend 'simm'", "did you mean 'sim'?")
    ended.hides("Traceback", "collected")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pytest.ini", "[pytest]\nsmp_ranks = 4\n"),
        ("tox.ini", "[pytest]\nsmp_ranks = 4\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\nsmp_ranks = 4\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\nsmp_ranks = '4'\n"),
        ("pyproject.toml", "[tool.pytest]\nsmp_ranks = '4'\n"),
    ],
)
def test_every_option_has_an_ini_key(session: Session, file: str, text: str) -> None:
    session.pytester.path.joinpath(file).write_text(text)
    ended = session(_PASSES, ranks=None)
    ended.shows("smp: 4 ranks on sim")
    assert ended.counts == {"passed": 1}


def test_a_bad_ini_value_is_refused_and_its_key_and_file_are_named(session: Session) -> None:
    session.pytester.makeini("[pytest]\nsmp_timeout = never\n")
    ended = session(_PASSES)
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    ended.shows("smp_timeout in tox.ini", "never", "must be a number of seconds above 0")


def test_the_flag_wins_over_the_ini_key(session: Session) -> None:
    session.pytester.makeini("[pytest]\nsmp_ranks = 2\n")
    ended = session(_PASSES, "--smp-ranks=4", ranks=None)
    ended.shows("smp: 4 ranks on sim")
    assert ended.counts == {"passed": 1}


def test_eight_ranks_are_the_default_and_the_header_is_silent_about_it(session: Session) -> None:
    ended = session(_PASSES.replace("4", "8"), ranks=None)
    ended.hides("smp: ")
    assert ended.counts == {"passed": 1}


def test_help_lists_every_option_and_markers_tells_how_to_write_one(session: Session) -> None:
    ended = session("", "--help", "--markers")
    for name in ("ranks", "backend", "timeout", "seed", "strict"):
        assert f"--smp-{name}" in ended.text
        assert f"smp_{name}" in ended.text
    session("", "--markers").shows("@pytest.mark.smp(ranks=N or [N, ...], **config)")


def test_the_seed_sets_every_generator_of_every_rank_and_of_every_run(session: Session) -> None:
    ended = session.anew(  # where nobody has touched numpy.random yet
        """
        import numpy

        def expect():
            assert random.random() == random.Random(7).random()
            assert numpy.random.rand() == numpy.random.RandomState(7).rand()
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))

        @pytest.mark.smp
        def test_first(smp):
            expect()
            smp.barrier()
            assert random.random() != random.Random(7).random()

        @pytest.mark.smp
        def test_again():
            expect()
        """,
        "--smp-seed=7",
    )
    assert ended.counts == {"passed": 2}


_GROUP_LEFT = """
    @pytest.mark.smp(ranks=2)
    def test_it(smp):
        dist.new_group([0, 1])
"""


def test_a_group_that_is_left_over_is_a_warning(session: Session) -> None:
    ended = session(_GROUP_LEFT)
    assert ended.counts == {"passed": 1, "warnings": 1}
    ended.shows("GroupLeftWarning: rank", "process group", "of ranks [0, 1] was never destroyed")


def test_a_group_that_is_left_over_fails_a_strict_run(session: Session) -> None:
    ended = session(_GROUP_LEFT, "--smp-strict")
    assert ended.counts == {"failed": 1}
    ended.shows("LeakError: leak:", "process group", "of ranks [0, 1] was never destroyed")


def test_strict_has_an_ini_key_too(session: Session) -> None:
    session.pytester.makeini("[pytest]\nsmp_strict = true\n")
    assert session(_GROUP_LEFT).counts == {"failed": 1}


@pytest.mark.parametrize(
    ("launcher", "ranks", "command"),
    [
        ("torchrun", 8, "torchrun --nproc-per-node=4"),  # on each of two machines
        ("torchrun", 7, "torchrun --nproc-per-node=4"),
        ("mpiexec (Open MPI)", 8, "mpiexec -n 8"),
        ("mpiexec (MPICH)", 8, "mpiexec -n 8"),
        ("srun", 8, "srun -n 8"),
    ],
)
def test_under_a_launcher_more_ranks_are_the_launchers_to_start(
    monkeypatch: pytest.MonkeyPatch, launcher: str, ranks: int, command: str
) -> None:
    from pytest_smp import launch
    from smp_core.transport.launchers import LAUNCHERS, Launch

    (chosen,) = (each for each in LAUNCHERS if each.name == launcher)
    monkeypatch.setattr(launch, "_job", lambda: Launch(chosen, 0, 4, 0, 2, "env://", True))
    told = launch.shortage(ranks, 2)
    assert told == f"needs {ranks} ranks, and {launcher} started 4: {command} pytest"
    # These the job has; it was the session that asked for fewer.
    assert launch.shortage(4, 2) == "needs 4 ranks, and 2 are there: pytest --smp-ranks=4"


def test_help_gives_each_option_one_default(session: Session) -> None:
    ended = session.apart("", "--help", head="", ranks=None)
    text = " ".join(ended.text.split())
    options = dict(re.findall(r"(--smp-[a-z-]+)(?:=\S+)? (.*?)(?= --| \[pytest\])", text))
    for name in ("ranks", "mpiexec", "schedule", "require-ranks", "strict"):
        assert options[f"--smp-{name}"].count("(default: ") == 1
    assert "(default: the one beside this Python, or on the path)" in options["--smp-mpiexec"]
