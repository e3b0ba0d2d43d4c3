"""The section *failures on ranks*, the line of pytest's short summary, and ids that can be pasted."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.pytest_smp.conftest import Session


# Several failures of one property.


def test_each_of_two_failures_of_a_property_is_shown(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=3)
        @given(number=st.integers(0, 1000))
        def test_x(smp, number):
            if number > 500 and smp.rank() == 1:
                raise ValueError("too large")
            if 100 < number <= 500 and smp.rank() == 2:
                smp.barrier()  # alone
        """
    )
    assert ended.counts == {"failed": 1}
    assert "2 distinct failures" in ended.end
    for text in (
        "ValueError: too large",
        "raised by rank 1 of 3 ranks (sim)",
        f"{session.line_of('raise ValueError')}: raise ValueError",
        "number=501",
        "verdict: deadlock (3 ranks, sim)",
        "rank 2 waits in smp.barrier()",
        "number=101",
    ):
        assert text in ended.end


def test_each_of_two_failures_of_an_exploration_shows_its_token(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=4)
        def test_order(smp):
            first = torch.zeros(1)
            if smp.rank():
                dist.send(torch.tensor([float(smp.rank())]), 0)
            else:
                for box in (first, torch.zeros(1), torch.zeros(1)):
                    dist.recv(box)
            who = smp.allgather(first.item(), smp.WORLD)[0]
            if who == 2 and smp.rank() == 1:
                raise ValueError("two came first")
            if who == 3 and smp.rank() == 2:
                raise KeyError("three came first")
        """,
        "--smp-explore=100",
    )
    assert ended.counts == {"failed": 1}
    assert "2 distinct failures" in ended.end
    for text in ("ValueError: two came first", "KeyError: 'three came first'"):
        assert text in ended.end
    assert ended.end.count("replay it: --smp-schedule=") == 2
    for rank in (1, 2):
        assert f"raised by rank {rank} of 4 ranks (sim)" in ended.end


# Tests that start their runs by smp_world.


@pytest.mark.parametrize("where", ["a test", "a fixture", "a property"])
def test_a_run_of_smp_world_is_shown_as_well(session: Session, where: str) -> None:
    source = {
        "a test": "def test_x(smp_world): smp_world.run(body, ranks=3)",
        "a fixture": (
            "@pytest.fixture\ndef world(smp_world): smp_world.run(body, ranks=3)\n"
            "def test_x(world): pass"
        ),
        "a property": (
            "@given(st.integers())\ndef test_x(smp_world, number): smp_world.run(body, ranks=3)"
        ),
    }[where]
    ended = session(
        f"def body():\n    if dist.get_rank() == 1:\n        dist.barrier()  # alone\n{source}\n"
    )
    assert ended.counts == ({"errors": 1} if where == "a fixture" else {"failed": 1})
    for text in (
        "test_it.py::test_x\n",
        "DeadlockError: deadlock: 1 of 3 ranks wait",
        f"{session.line_of('# alone')}: dist.barrier()",
        "verdict: deadlock (3 ranks, sim)",
    ):
        assert text in ended.end


def test_what_the_controller_asserts_is_no_failure_on_ranks(session: Session) -> None:
    ended = session(
        """
        def body(): return dist.get_rank()

        def test_x(smp_world):
            assert smp_world.run(body, ranks=2) == [0, 2]

        def test_y(smp_world):
            with pytest.raises(ZeroDivisionError):
                smp_world.run(lambda: 1 / 0, ranks=2)
            raise ValueError("another")
        """
    )
    assert ended.counts == {"failed": 2}
    ended.hides("failures on ranks")


# pytest's short summary.


def test_the_short_summary_begins_with_the_verdict(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = session(
        """
        @pytest.mark.smp(ranks=3)
        def test_deadlock(smp):
            if smp.rank():
                smp.barrier()

        @pytest.mark.smp(ranks=3)
        def test_key(smp):
            smp.allgather(lambda: 1, smp.WORLD)
        """
    )
    short = ended.text.partition("short test summary info")[2]
    assert "FAILED test_it.py::test_deadlock - deadlock: 2 of 3 ranks wait" in short
    assert "FAILED test_it.py::test_key - PayloadError: " in short
    assert "smp_core.errors" not in short


# Ids.


def test_an_id_of_the_section_can_be_pasted(
    pytester: pytest.Pytester, tmp_path: Path, apart_pytest: Callable[..., pytest.RunResult]
) -> None:
    """From a subfolder, of a file outside of the root folder, with what a shell would read."""
    body = (
        "import pytest\n@pytest.mark.smp(ranks=1)\n"
        "@pytest.mark.parametrize('word', ['a b$x', 'plain'])\n"
        "def test_x(smp, word): raise ValueError(word)\n"
    )
    pytester.makeini("[pytest]\n")
    inside = pytester.mkdir("inner")
    (inside / "test_in.py").write_text(body)
    outside = tmp_path / "out side"
    outside.mkdir()
    (outside / "test_out.py").write_text(body)

    def pasted(arguments: str) -> str:
        """The output of pytest with these arguments, once a shell has read them."""
        read = subprocess.check_output(f"printf '%s\\0' {arguments}", shell=True, text=True)
        words = read.removesuffix("\0").split("\0")
        ended = apart_pytest("-p", "no:cacheprovider", *words, folder=inside)
        return f"{ended.stdout}\n{ended.stderr}"

    first = pasted(f"-c ../tox.ini test_in.py {shlex.quote(str(outside))}")
    ids = [line for line in first.partition("failures on ranks")[2].splitlines() if "::" in line]
    ids = [line for line in ids if not line.startswith(("FAILED", " "))]
    assert len(ids) == 4, first
    again = pasted(f"-c ../tox.ini {' '.join(ids)}")
    assert "4 failed" in again
    for each in ids:
        assert each in again
