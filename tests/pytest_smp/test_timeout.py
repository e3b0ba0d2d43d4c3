"""Ranks that never come back: named with their stacks, left behind, and never a passed session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session


_LINE = '", line '  # as a stack writes it


def test_a_rank_that_computes_for_ever(session: Session) -> None:
    ended = session(
        """
        threads = []

        @pytest.mark.smp
        def test_x(smp):
            threads.append(threading.current_thread())
            if smp.rank() == 2:
                while True:
                    pass  # computes
            smp.recv_from(2, smp.RankType.WORLD_RANK)

        @pytest.mark.smp
        def test_next(smp):
            assert threading.current_thread() not in threads
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]
        """,
        "--smp-timeout=5",
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    computing = {session.line_of("while True:"), session.line_of("pass  # computes")}
    assert any(f"{place.replace(':', _LINE)}, in test_x" in ended.text for place in computing)
    ended.shows(
        "RunTimeout: timeout: the run did not end within 5 s (--smp-timeout)",
        "rank 2 never came back: it computes, or waits where the scheduler cannot see",
        "in test_x",
        "rank 0 waits in smp.recv_from(world rank 2) for rank 2",
        f"{session.line_of('smp.recv_from').replace(':', _LINE)}, in test_x",
        "smp.recv_from(2, smp.RankType.WORLD_RANK)",
        "rank 1 waits in smp.recv_from(world rank 2) for rank 2",
        "rank 3 has not started",
    )
    assert "rank 2 never came back" in ended.end
    ended.hides_ours()


@pytest.mark.parametrize("mark", ["pytest.mark.xfail", "pytest.mark.xfail(strict=True)"])
def test_an_expected_failure_does_not_hide_it(session: Session, mark: str) -> None:
    ended = session(
        f"""
        @{mark}
        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            while True:
                time.sleep(0.01)

        @pytest.mark.smp
        def test_next(smp):
            smp.barrier()
        """,
        "--smp-timeout=5",
    )
    assert ended.counts == {"xfailed": 1, "passed": 1}
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    ended.shows("--smp-timeout")  # why the session failed, though no test did
    ended.hides("INTERNALERROR")


def test_hypothesis_does_not_run_into_it_again_and_shows_the_example(session: Session) -> None:
    ended = session(
        """
        seen = []

        @pytest.mark.smp(ranks=2)
        @given(number=st.integers())
        def test_x(smp, number):
            if smp.rank() == 0:
                seen.append(number)
            while abs(number) > 50:
                time.sleep(0.01)
            smp.barrier()

        def test_after():
            assert len([number for number in seen if abs(number) > 50]) == 1
            print(f"it was number={seen[-1]}")

        @pytest.mark.smp
        @given(number=st.integers())
        def test_next(smp, number):
            assert smp.allgather(number, smp.WORLD) == [number] * 4
        """,
        "--smp-timeout=5",
        "-rP",
    )
    assert ended.counts == {"failed": 1, "passed": 2}
    ended.shows("RunTimeout: timeout: ", "rank 0 never came back", "time.sleep(0.01)")
    (example,) = [
        line.removeprefix("it was ")
        for line in ended.text.splitlines()
        if line.startswith("it was ")
    ]
    assert example in ended.end  # not the smallest, but the one that it takes
    ended.hides_ours()


def test_smp_world_reports_it_or_raises(session: Session) -> None:
    ended = session(
        """
        def body():
            while api.rank() == 1:
                time.sleep(0.01)

        def test_report(smp_world):
            report = smp_world.report(body, ranks=2, timeout=5)
            assert report.verdict == "timed out"
            assert [outcome.kind for outcome in report.outcomes] == ["returned", "stuck"]

        def test_raises(smp_world):
            with pytest.raises(errors.RunTimeout, match="within 5 s"):
                smp_world.run(body, ranks=2, timeout=5)
        """,
    )
    assert ended.counts == {"passed": 2}


def test_a_rank_that_sleeps_on_a_lock_is_left_behind_and_the_process_ends(session: Session) -> None:
    """A lock that is held over a barrier: the scheduler cannot see who waits for it."""
    ended = session.apart(
        """
        lock = threading.Lock()

        @pytest.mark.smp
        def test_x(smp):
            print("rank", smp.rank(), "is here")
            with lock:
                smp.barrier()

        @pytest.mark.smp
        def test_next(smp):
            smp.barrier()
        """,
        "--smp-timeout=5",
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    ended.shows(
        "RunTimeout: timeout: the run did not end within 5 s (--smp-timeout)",
        "rank 1 never came back",
        "with lock:",
        "rank 0 waits in smp.barrier() [group WORLD, call 1] for ranks 1-3",
        "rank 2 has not started",
        "Captured stdout (rank 1) call",
        "rank 1 is here",
    )
    ended.hides_ours("Fatal Python error")


def test_pytest_timeout_ends_a_run_too(session: Session) -> None:
    ended = session.apart(
        """
        @pytest.mark.smp
        def test_before(smp):
            pass  # what is loaded once is loaded here, without a limit

        @pytest.mark.timeout(5)
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 2:
                while True:
                    pass  # computes
            smp.barrier()

        @pytest.mark.smp
        def test_next(smp):
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]
        """,
    )
    assert ended.counts == {"failed": 1, "passed": 2}
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    ended.shows("_ test_x _", "Timeout (>5.0s) from pytest-timeout")
    ended.shows("smp rank 2", "while True:")  # the stack of the rank that computes
    ended.hides("INTERNALERROR")
