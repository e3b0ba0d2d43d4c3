"""Schedules in a session: drawn, explored, shrunk, printed and replayed."""

from __future__ import annotations

import pytest

from tests.pytest_smp.conftest import Session

FIRST_COME = """
    def protocol(smp):
        if smp.rank():
            dist.send(torch.ones(1), 0)
        else:
            first = dist.recv(torch.zeros(1))
            dist.recv(torch.zeros(1))
            assert first == 1
"""

PLAIN = (
    FIRST_COME
    + """
    @pytest.mark.smp(ranks=3)
    def test_x(smp):
        protocol(smp)
    """
)


def test_round_robin_does_not_find_it(session: Session) -> None:
    assert session(PLAIN).counts == {"passed": 1}


def test_exploring_finds_it_shrinks_it_and_prints_the_token(session: Session) -> None:
    ended = session(PLAIN, "--smp-explore=100")
    assert ended.counts == {"failed": 1}
    ended.shows("assert 2 == 1", "in the schedule 0.2; replay it: --smp-schedule=0.2")
    ended.hides_ours()


def test_the_token_replays_it(session: Session) -> None:
    ended = session(PLAIN, "--smp-schedule=0.2")
    assert ended.counts == {"failed": 1}
    ended.shows("assert 2 == 1", "--smp-schedule=0.2")


def test_a_token_replays_round_robin_whatever_the_test_draws(session: Session) -> None:
    source = (
        FIRST_COME
        + """
    @pytest.mark.smp(ranks=3)
    @given(schedule=strategies.schedules())
    def test_x(smp, schedule):
        protocol(smp)
    """
    )
    source = "    from pytest_smp import strategies\n" + source
    ended = session(source)
    assert ended.counts == {"failed": 1}
    ended.shows("schedule=Schedule.parse('0.2')")
    assert session(source, "--smp-schedule=round-robin").counts == {"passed": 1}


def test_exploring_draws_a_schedule_for_each_example_of_a_property(session: Session) -> None:
    ended = session(
        FIRST_COME
        + """
    @pytest.mark.smp(ranks=3)
    @settings(database=None)
    @given(number=st.integers())
    def test_x(smp, number):
        protocol(smp)

    @settings(database=None)
    @given(number=st.integers())
    def test_y(smp_world, number):
        smp_world.run(lambda: protocol(api), ranks=3)

    @pytest.mark.smp(ranks=3)
    @settings(phases=["explicit"])
    @example(number=0)
    @given(number=st.integers())
    def test_explicit_examples_are_not_drawn(smp, number):
        protocol(smp)
    """,
        "--smp-explore=1",
    )
    assert ended.counts == {"failed": 2, "passed": 1}
    shown = "in the schedule 0.2; replay it: --smp-schedule=0.2"
    ended.shows("_ test_x _", shown, "_ test_y _", shown)


def test_two_schedules_are_one_too_many(session: Session) -> None:
    ended = session(
        """
    from pytest_smp import strategies
    @pytest.mark.smp(ranks=2)
    @given(a=strategies.schedules(), b=strategies.schedules())
    def test_x(smp, a, b): pass
    """
    )
    ended.shows("ArgumentError: a run has one schedule, and two arguments of the test are one each")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--smp-schedule=3", "--smp-schedule=3: schedule '3': a token looks like 3.1-17.2"),
        ("--smp-explore=-1", "--smp-explore=-1: must be a whole number"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    session: Session, option: str, text: str
) -> None:
    ended = session(PLAIN, option)
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    ended.shows(text)


def test_exploring_goes_as_far_as_the_run_does(session: Session) -> None:
    ended = session(
        FIRST_COME
        + """
    @pytest.mark.smp(ranks=4)
    def test_x(smp):
        for _ in range(15):
            smp.barrier()
        if smp.rank() < 3:
            protocol(smp)
    """,
        "--smp-explore=200",
    )
    assert ended.counts == {"failed": 1}
    ended.shows("assert 2 == 1", "replay it: --smp-schedule=")


def test_every_explored_run_has_a_folder_of_its_own(session: Session) -> None:
    ended = session(
        """
    @pytest.fixture
    def filled(smp_tmp_path):
        (smp_tmp_path / "data").write_text("1")

    @pytest.mark.smp(ranks=2)
    def test_x(smp, smp_tmp_path, filled):
        assert (smp_tmp_path / "data").read_text() == "1"
        if smp.rank() == 0:
            (smp_tmp_path / "x").mkdir()
    """,
        "--smp-explore=5",
    )
    assert ended.counts == {"passed": 1}


def test_a_replayed_run_is_made_once_and_says_its_own_schedule(session: Session) -> None:
    ended = session(
        FIRST_COME
        + """
    from pytest_smp import strategies

    @pytest.mark.smp(ranks=3)
    def test_x(smp):
        protocol(smp)

    @pytest.mark.smp(ranks=3)
    @given(schedule=strategies.schedules())
    def test_y(smp, schedule):
        assert str(schedule) == "0.2"
    """,
        "--smp-explore=5",
        "--smp-schedule=0.2",
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows("in the schedule 0.2")
    ended.hides("Schedule()", "Failing")
