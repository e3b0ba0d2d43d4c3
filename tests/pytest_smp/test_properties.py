"""Hypothesis on ranks: one example for all of them, shrinking through every kind of failure, one
failure reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session


SMALLEST = "objects=[0, 0, 0, 51, 0, 0, 0, 0]"  # what is wrong when objects[3] is above 50

_FAILS = {
    "AssertionError": "assert objects[smp.rank()] <= 50 or smp.rank() != 3",
    "DeadlockError": """
            if smp.rank() != 3 or objects[3] <= 50:
                smp.barrier()
    """,
    "CollectiveMismatchError": """
            if smp.rank() == 3 and objects[3] > 50:
                smp.barrier()
            else:
                smp.allgather(0, smp.WORLD)
    """,
    "LeakError": """
            if smp.rank() == 3 and objects[3] > 50:
                dist.isend(torch.zeros(1), 0)
    """,
    "PayloadError": """
            mine = threading.Lock() if smp.rank() == 3 and objects[3] > 50 else objects
            smp.allgather(mine, smp.WORLD)
    """,
    "SystemExit": """
            if smp.rank() == 3 and objects[3] > 50:
                sys.exit()
            smp.barrier()
    """,
}


@pytest.mark.parametrize("error", _FAILS)
def test_a_failure_shrinks_to_the_smallest_example(session: Session, error: str) -> None:
    ended = session(
        f"""
        @pytest.mark.smp(ranks=8)
        @given(objects=st.lists(st.integers(), min_size=8, max_size=8))
        def test_x(smp, objects):
            {_FAILS[error].strip()}

        @pytest.mark.smp(ranks=3)
        @given(number=st.integers())
        def test_next(smp, number):
            assert smp.allgather(number, smp.WORLD) == [number] * 3
        """,
        ranks=8,
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows(error, "Failing test case: test_x(", SMALLEST)
    for text in (error, "rank 3", "test_it.py:", "Failing test case: test_x(", SMALLEST):
        assert text in ended.end  # where the user looks first
    ended.hides_ours("ExceptionGroup", "distinct failures", "Flaky")


def test_a_failure_that_depends_on_the_rank_stays_one_failure(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(objects=st.lists(st.integers(), min_size=4, max_size=4))
        def test_x(smp, objects):
            mine = objects[smp.rank()]
            if smp.rank() % 2:
                assert mine <= 50
            elif mine > 50:
                raise ValueError(mine)
            smp.barrier()
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("Failing test case: test_x(", "objects=[")
    ended.hides_ours("ExceptionGroup sub-exception", "Flaky")


def test_the_same_failure_on_every_rank_is_one_failure(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(number=st.integers())
        def test_x(smp, number):
            assert number * (smp.rank() + 1) < 100
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("Failing test case: test_x(", "number=25,")  # rank 3 is the first to see 4 * 25
    ended.hides_ours("ExceptionGroup", "distinct failures", "Flaky")


def test_two_deadlocks_on_two_lines_are_two_failures(session: Session) -> None:
    """Hypothesis tells failures apart by their last line, so that line must be the user's."""
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        @given(number=st.integers())
        def test_x(smp, number):
            if smp.rank() == 0 and number > 50:
                smp.recv_from(1, smp.RankType.WORLD_RANK)
            if smp.rank() == 0 and number < -50:
                smp.send(0, 1, smp.RankType.WORLD_RANK)
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("Hypothesis found 2 distinct failures")
    ended.shows("number=51,")
    ended.shows("number=-51,")


def test_the_explanation_shows_lines_of_the_user_alone(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(number=st.integers(), other=st.integers())
        def test_x(smp, number, other):
            if number > 50:
                smp.recv_from((smp.rank() + 1) % 4, smp.RankType.WORLD_RANK)
            smp.barrier()
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("number=51,", "other=0,")
    ended.hides_ours()


def test_a_property_that_holds_runs_every_example_once_on_every_rank(session: Session) -> None:
    ended = session(
        """
        seen = []

        @pytest.mark.smp(ranks=3)
        @settings(max_examples=7)
        @given(number=st.integers())
        def test_x(smp, number):
            seen.append((smp.rank(), number))
            assert smp.allgather(number, smp.WORLD) == [number] * 3

        def test_after():
            assert len(seen) == 3 * 7
            runs = [dict(seen[start:start + 3]) for start in range(0, 21, 3)]
            assert all(set(run) == {0, 1, 2} and len(set(run.values())) == 1 for run in runs)
        """
    )
    assert ended.counts == {"passed": 2}


def test_explicit_examples_run_first(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @example(number=4321)
        @given(number=st.integers())
        def test_x(smp, number):
            assert smp.allgather(number, smp.WORLD)[0] != 4321
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("raised by rank ", "Failing explicit", "number=4321,")
    ended.hides_ours()


def test_the_database_replays_the_example_in_the_next_session(session: Session) -> None:
    source = f"""
        from hypothesis.database import DirectoryBasedExampleDatabase

        @pytest.mark.smp
        @settings(
            derandomize=False,
            database=DirectoryBasedExampleDatabase({str(session.pytester.path / "examples")!r}),
        )
        @given(objects=st.lists(st.integers(), min_size=4, max_size=4))
        def test_x(smp, objects):
            if smp.rank() == 0:
                with open("seen", "a") as file:
                    print(objects, file=file)
            assert smp.allgather(objects[smp.rank()], smp.WORLD)[2] <= 50
        """
    seen = session.pytester.path / "seen"
    for expect_first in (False, True):
        ended = session(source)
        assert ended.counts == {"failed": 1}
        ended.shows("objects=[0, 0, 51, 0],")
        assert (seen.read_text().splitlines()[0] == "[0, 0, 51, 0]") == expect_first
        seen.unlink()


def test_a_class_is_fine(session: Session) -> None:
    ended = session(
        """
        class TestIt:
            limit = 50

            def setup_method(self):
                self.made = "by setup_method"

            @pytest.mark.smp
            @given(number=st.integers())
            def test_fails(self, smp, number):
                assert self.made == "by setup_method"
                assert smp.allgather(number, smp.WORLD)[1] <= self.limit

            @pytest.mark.smp(ranks=[1, 2])
            @given(number=st.integers())
            def test_passes(self, smp, number):
                assert smp.allgather(number, smp.WORLD) == [number] * smp.size()
        """
    )
    assert ended.counts == {"failed": 1, "passed": 2}
    ended.shows("number=51,", "FAILED test_it.py::TestIt::test_fails")
    ended.hides_ours()


def test_each_number_of_ranks_shrinks_by_itself(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=[1, 2])
        @given(number=st.integers())
        def test_x(smp, number):
            assert smp.allgather(number, smp.WORLD)[-1] < 10 * smp.size()
        """
    )
    assert ended.counts == {"failed": 2}
    ended.shows("_ test_x[ranks=1] _", "number=10,", "_ test_x[ranks=2] _", "number=20,")


def test_parameters_and_fixtures_of_the_session_go_along(session: Session) -> None:
    ended = session(
        """
        @pytest.fixture(scope="session")
        def table():
            return {"limit": 7}

        @pytest.mark.smp(ranks=2)
        @pytest.mark.parametrize("factor", [1, 3])
        @given(number=st.integers(0, 100))
        def test_x(smp, table, factor, number):
            assert smp.allgather(number * factor, smp.WORLD)[0] <= 100 * factor
            assert table == {"limit": 7}
            table["limit"] = smp.rank()  # seen by nobody else
        """
    )
    assert ended.counts == {"passed": 2}


def test_a_function_scoped_fixture_of_the_user_is_refused_by_hypothesis_as_ever(
    session: Session,
) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(number=st.integers())
        def test_x(smp, tmp_path, number):
            pass
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("FailedHealthCheck: 'test_it.py::test_x' uses a function-scoped fixture 'tmp_path'")


# Hypothesis's own calls, inside a rank.


def test_data_is_drawn_inside_a_rank(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(data=st.data())
        def test_x(smp, data):
            if smp.rank() == 2:
                number = data.draw(st.integers(), label="weight")
                smp.broadcast(number, smp.WORLD)
            else:
                number = smp.recv_from(2, smp.RankType.WORLD_RANK)
            assert number <= 50
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("data=data(...)", "rank 2: Draw 1 (weight): 51")
    ended.hides_ours("Flaky")


def test_every_rank_may_draw_for_itself(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(data=st.data())
        def test_x(smp, data):
            numbers = smp.allgather(data.draw(st.integers(0, 100)), smp.WORLD)
            assert numbers[3] <= 50
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("rank 0: Draw 1: 0", "rank 1: Draw 2: 0", "rank 2: Draw 3: 0", "rank 3: Draw 4: 51")
    ended.hides_ours("Flaky")


def test_assume_on_one_rank_rejects_the_example(session: Session) -> None:
    ended = session(
        """
        seen = []

        @pytest.mark.smp
        @given(number=st.integers())
        def test_x(smp, number):
            smp.barrier()
            if smp.rank() == 2:
                assume(number % 2 == 0)
            smp.barrier()
            seen.append(number)

        @pytest.mark.smp
        @given(number=st.integers())
        def test_fails(smp, number):
            if smp.rank() == 1:
                assume(number % 2 == 0)
            assert smp.allgather(number, smp.WORLD)[0] < 100

        def test_after():
            assert seen and all(number % 2 == 0 for number in seen)
        """
    )
    assert ended.counts == {"failed": 1, "passed": 2}
    ended.shows("FAILURES", "number=100,")
    ended.hides_ours("deadlock")


def test_assuming_too_much_is_said_as_ever(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(number=st.integers())
        def test_x(smp, number):
            assume(smp.rank() != 0)
        """
    )
    assert ended.counts == {"failed": 1}
    assert "filter" in ended.text or "Unable to satisfy assumptions" in ended.text
    ended.hides("INTERNALERROR")


def test_notes_of_ranks_are_shown_with_the_example(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(number=st.integers())
        def test_x(smp, number):
            note(f"rank {smp.rank()} has {number}")
            smp.barrier()
            assert number <= 50
        """
    )
    assert ended.counts == {"failed": 1}
    for rank in range(4):
        assert f"rank {rank} has 51" in ended.text
    assert "rank 2 has 51" in ended.end


def test_target_and_event_work_on_a_rank(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        @settings(max_examples=50)
        @given(number=st.floats(0, 1e6))
        def test_x(smp, number):
            target(number, label=f"rank {smp.rank()}")
            event(f"on rank {smp.rank()}")
        """,
        "--hypothesis-show-statistics",
    )
    assert ended.counts == {"passed": 1}
    ended.shows("Highest target scores", "rank 0")
    ended.shows("Events", "on rank 0")
    ended.shows("Events", "on rank 1")


def test_the_example_is_printed_once_when_verbose(session: Session) -> None:
    ended = session(
        """
        from hypothesis import Verbosity

        @pytest.mark.smp
        @settings(verbosity=Verbosity.verbose, max_examples=3)
        @given(number=st.integers())
        def test_x(smp, number):
            smp.barrier()
        """,
        "-s",
    )
    assert ended.counts == {"passed": 1}
    assert ended.text.count("Test case: test_x(") == 3


def test_a_plain_property_runs_ranks_by_smp_world(session: Session) -> None:
    ended = session(
        """
        def body(number):
            return api.allgather(number + api.rank(), api.WORLD)

        @given(number=st.integers())
        def test_passes(smp_world, number):
            assert smp_world.run(body, number, ranks=2) == [[number, number + 1]] * 2

        @given(number=st.integers())
        def test_fails(smp_world, number):
            assert smp_world.run(body, number, ranks=2)[0][1] <= 50
        """
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows("number=50,")
    ended.hides("smp_core/", "INTERNALERROR")


def test_what_a_rank_does_to_the_example_is_seen_by_nobody_else(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(objects=st.lists(st.integers(), min_size=1))
        def test_x(smp, objects):
            before = list(objects)
            objects.append(smp.rank())
            smp.barrier()
            assert objects == [*before, smp.rank()]
        """
    )
    assert ended.counts == {"passed": 1}


def test_smp_tmp_path_is_new_for_each_example(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        @settings(max_examples=5)
        @given(number=st.integers())
        def test_x(smp, smp_tmp_path, number):
            assert list(smp_tmp_path.iterdir()) == []
            smp.barrier()
            if smp.rank() == 1:
                (smp_tmp_path / "weights").write_text(str(number))
            smp.barrier()
            assert (smp_tmp_path / "weights").read_text() == str(number)
        """
    )
    assert ended.counts == {"passed": 1}
