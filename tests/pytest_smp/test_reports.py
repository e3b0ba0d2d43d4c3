"""The results of a marked test in pytest: one item and one report, output per rank, skips and expected
failures agreed by all ranks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session


# Skips and expected failures.


@pytest.mark.parametrize(
    "skip",
    [
        "pytest.skip('no such device')",
        "raise unittest.SkipTest('no such device')",
        "pytest.importorskip('no_such_device', reason='no such device')",
    ],
)
def test_all_ranks_skip(session: Session, skip: str) -> None:
    ended = session(
        f"""
        @pytest.mark.smp
        def test_x(smp):
            smp.barrier()
            {skip}
        """,
        "-rs",
    )
    assert ended.counts == {"skipped": 1}
    ended.shows("SKIPPED [1]", ": no such device")
    ended.hides_ours("failures on ranks")


def test_one_rank_skips(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 1:
                pytest.skip("no such device")
        """
    )
    assert ended.counts == {"failed": 1}
    skipped = f"rank 1: skipped: Skipped: no such device ({session.line_of('pytest.skip')})"
    ended.shows(
        "RankDisagreementError: the ranks do not agree whether the test applies",
        "ranks 0, 2-3: returned",
        skipped,
    )
    assert skipped in ended.end
    ended.hides_ours("results.py")


def test_one_rank_raises_a_group_of_skips(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 1:
                raise BaseExceptionGroup("skips", [pytest.skip.Exception("no such device")])
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("RankDisagreementError: rank 1 raised a group of skips")


def test_one_rank_skips_while_the_others_wait_for_it(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 1:
                pytest.skip("no such device")
            smp.barrier()
        """
    )
    assert ended.counts == {"failed": 1}
    assert "rank 1" in ended.end
    assert "no such device" in ended.end  # a reader must not look for a missing call
    ended.hides_ours()


def test_some_ranks_skip_and_others_expect_to_fail(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            if smp.rank() == 1:
                pytest.skip("no such device")
            pytest.xfail("known")
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows(
        "do not agree",
        "rank 0: skipped: XFailed: known",
        "rank 1: skipped: Skipped: no such device",
    )


def test_a_rank_that_raises_wins_over_ranks_that_skip(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=3)
        def test_x(smp):
            if smp.rank() == 2:
                raise ValueError("broken")
            pytest.skip("no such device")
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("ValueError: broken", "raised by rank 2 of 3 ranks (sim)", "ranks 0-1: skipped")


def test_ranks_that_skip_in_an_example_skip_the_test(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        @given(number=st.integers())
        def test_x(smp, number):
            pytest.skip("no such device")
        """,
        "-rs",
    )
    assert ended.counts == {"skipped": 1}
    ended.shows("no such device")


def test_pytest_fail_on_a_rank_is_shown_at_the_users_line(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            if smp.rank():
                pytest.fail("not good enough")
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows(
        '>           pytest.fail("not good enough")',
        "Failed: not good enough",
        f"{session.line_of('pytest.fail')}: Failed",
    )
    assert f"{session.line_of('pytest.fail')}: pytest.fail(" in ended.end
    ended.hides_ours("outcomes.py")


def test_expected_failures(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_imperative(smp):
            pytest.xfail("known")

        @pytest.mark.smp
        def test_imperative_on_one_rank(smp):
            if smp.rank() == 1:
                pytest.xfail("known")

        @pytest.mark.xfail(reason="known")
        @pytest.mark.smp
        def test_marker(smp):
            assert smp.rank() != 3

        @pytest.mark.xfail(raises=errors.DeadlockError)
        @pytest.mark.smp
        def test_raises(smp):
            if smp.rank():
                smp.barrier()

        @pytest.mark.xfail(raises=KeyError)
        @pytest.mark.smp
        def test_raises_another(smp):
            raise ValueError

        @pytest.mark.xfail(raises=KeyError)
        @pytest.mark.smp
        def test_another_rank_raises_another(smp):
            raise [KeyError, ValueError, KeyError, KeyError][smp.rank()]

        @pytest.mark.xfail(raises=(KeyError, ValueError))
        @pytest.mark.smp
        def test_ranks_raise_both(smp):
            raise [KeyError, ValueError, KeyError, KeyError][smp.rank()]

        @pytest.mark.xfail
        @pytest.mark.smp
        def test_passes(smp):
            smp.barrier()

        @pytest.mark.xfail(strict=True)
        @pytest.mark.smp
        def test_passes_strictly(smp):
            smp.barrier()

        @pytest.mark.skip(reason="not now")
        @pytest.mark.smp
        def test_skipped(smp):
            raise ValueError
        """,
        "-rA",
    )
    assert ended.counts == {"failed": 4, "xfailed": 4, "xpassed": 1, "skipped": 1}
    for line in (
        "XFAIL test_it.py::test_imperative - known",
        "XFAIL test_it.py::test_marker - known",
        "XFAIL test_it.py::test_raises",
        "XPASS test_it.py::test_passes",
        "FAILED test_it.py::test_raises_another - ValueError",
        "FAILED test_it.py::test_passes_strictly",
        "FAILED test_it.py::test_imperative_on_one_rank",
    ):
        assert line in ended.text
    ended.shows("do not agree", "rank 1: skipped: XFailed: known")


# Output.


def test_output_stands_in_a_section_for_each_rank(session: Session) -> None:
    ended = session(
        """
        import logging

        @pytest.mark.smp(ranks=3)
        def test_x(smp):
            print("out of", smp.rank())
            smp.barrier()
            print("err of", smp.rank(), file=sys.stderr)
            smp.barrier()
            print("more of", smp.rank())
            logging.getLogger("mine").warning("log of %s", smp.rank())
            assert smp.rank() != 1
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows(
        *("- Captured stdout (rank 0) call -", "-\nout of 0\nmore of 0\n-"),
        *("- Captured stderr (rank 0) call -", "-\nerr of 0\n-"),
        *("- Captured stdout (rank 1) call -", "-\nout of 1\nmore of 1\n-"),
        *("- Captured stderr (rank 1) call -", "-\nerr of 1\n-"),
        *("- Captured stdout (rank 2) call -", "-\nout of 2\nmore of 2\n-"),
    )
    ended.shows("Captured log call", "log of 0")
    assert ended.text.count("out of 1") == 1


def test_output_of_threads_that_a_rank_starts_is_its_own(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            text = f"thread of {smp.rank()}"
            thread = threading.Thread(target=print, args=(text,))
            thread.start()
            thread.join()
            assert smp.rank() == 2
        """
    )
    ended.shows(
        *("- Captured stdout (rank 0) call -", "-\nthread of 0\n-"),
        *("- Captured stdout (rank 1) call -", "-\nthread of 1\n="),
    )


def test_output_of_a_property_is_that_of_its_last_example(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        @given(number=st.integers())
        def test_x(smp, number):
            print("number", number)
            assert number <= 50
        """
    )
    ended.shows("Captured stdout (rank 0) call", "number 51")
    assert ended.text.count("number 51\n") == 2


def test_s_shows_output_as_it_comes(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            print("out of", smp.rank())
            assert smp.rank() == 2
        """,
        "-s",
    )
    ended.shows("out of 0\nout of 1\n", "= FAILURES =")
    ended.hides("Captured stdout")


def test_output_of_a_passed_test_is_not_shown_and_can_be(session: Session) -> None:
    source = """
        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            print("out of", smp.rank())
        """
    session(source).hides("out of")
    session(source, "-rP").shows(
        "Captured stdout (rank 0) call", "out of 0", "Captured stdout (rank 1)"
    )


# One item, one report.


def test_x_stops_after_the_first_failure(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_a(smp):
            assert smp.rank() != 3

        @pytest.mark.smp
        def test_b(smp):
            pass
        """,
        "-x",
    )
    assert ended.counts == {"failed": 1}
    ended.shows("stopping after 1 failures")


def test_junit_has_one_case_for_each_item_and_a_property_that_programs_can_read(
    session: Session,
) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2, pipeline_parallel_degree=2)
        def test_passes(smp):
            smp.barrier()

        @pytest.mark.smp(ranks=[3])
        def test_fails(smp):
            assert smp.rank() != 1

        def test_plain(): pass
        """,
        "--junitxml=report.xml",
    )
    assert ended.counts == {"failed": 1, "passed": 2}
    (suite,) = ElementTree.parse(session.pytester.path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == ["test_passes", "test_fails[ranks=3]", "test_plain"]

    def told(name: str) -> dict[str, Any]:
        (value,) = [
            each.get("value") for each in cases[name].iter("property") if each.get("name") == "smp"
        ]
        return json.loads(value)

    passed = told("test_passes")
    assert (passed["backend"], passed["verdict"], passed["root"]) == ("sim", "passed", None)
    assert passed["abandoned"] is False
    assert [rank["outcome"] for rank in passed["ranks"]] == ["returned", "returned"]
    failed = told("test_fails[ranks=3]")
    assert (failed["verdict"], failed["root"]) == ("failed", 1)
    assert [rank["outcome"] for rank in failed["ranks"]] == ["returned", "raised", "returned"]
    assert "raised by rank 1 of 3 ranks (sim)" in cases["test_fails[ranks=3]"].find("failure").text
    assert not list(cases["test_plain"].iter("property"))


def test_xdist_changes_neither_ids_nor_what_is_shown(session: Session) -> None:
    ended = session.apart(
        """
        @pytest.mark.smp(ranks=[1, 2])
        def test_passes(smp):
            assert smp.allgather(smp.rank(), smp.WORLD) == list(range(smp.size()))

        @pytest.mark.smp
        @given(objects=st.lists(st.integers(), min_size=4, max_size=4))
        def test_fails(smp, objects):
            print("printed by", smp.rank())
            assert smp.allgather(objects[smp.rank()], smp.WORLD)[3] <= 50

        @pytest.mark.smp(ranks=2)
        def test_stuck(smp):
            if smp.rank():
                smp.barrier()

        @pytest.mark.smp(ranks=2)
        def test_skips(smp):
            pytest.skip("no such device")

        def test_world(smp_world, smp_tmp_path):
            assert smp_world.run(api.rank) == [0, 1, 2, 3]
        """,
        "-n2",
        "-v",
    )
    assert ended.counts == {"passed": 3, "failed": 2, "skipped": 1}
    for line in (
        "PASSED test_it.py::test_passes[ranks=1]",
        "PASSED test_it.py::test_passes[ranks=2]",
        "FAILED test_it.py::test_fails",
        "FAILED test_it.py::test_stuck",
        "SKIPPED test_it.py::test_skips",
    ):
        assert line in ended.text
    ended.shows("Captured stdout (rank 3) call", "printed by 3")
    for text in (
        "objects=[0, 0, 0, 51],",
        "DeadlockError: deadlock: 1 of 2 ranks wait",
        "raised by rank 3",
    ):
        assert text in ended.end


# The debugger.


def test_pdb_opens_on_the_ranks_own_frame(session: Session) -> None:
    ended = session.apart(
        """
        @pytest.mark.smp
        def test_x(smp):
            mine = "weights of " + str(smp.rank())
            smp.barrier()
            if smp.rank() == 2:
                raise ValueError(mine)
            smp.barrier()

        @pytest.mark.smp
        def test_next(smp):
            smp.barrier()
        """,
        "--pdb",
        stdin=b"p 'mine', mine\nc\n",
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows(
        "ValueError: weights of 2", "entering PDB", "test_it.py(", "('mine', 'weights of 2')"
    )
    ended.hides_ours()


def test_warnings_that_are_errors_end_the_test_and_not_the_session(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(xla=True)
        def test_x(smp):
            assert smp.rank() == 5

        def test_next():
            pass
        """,
        "-Werror",
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows("IgnoredKeyWarning: smp.init: xla=True has no effect")


def test_a_key_without_effect_is_not_warned_of_again_by_a_failure(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(xla=True)
        def test_x(smp):
            with warnings.catch_warnings(record=True):
                smp.init()
            raise ValueError("broken")
        """,
        head="import warnings, pytest",
    )
    assert ended.counts == {"failed": 1}


def test_a_configuration_that_is_bad_by_now_does_not_end_the_session(session: Session) -> None:
    ended = session(
        """
        def body():
            raise ValueError("broken")

        def test_x(smp_world, monkeypatch):
            try:
                smp_world.run(body, ranks=2, config={"pipeline_parallel_degree": 2})
            finally:
                monkeypatch.setenv("SM_HP_MP_PARAMETERS", "no JSON")

        def test_next():
            pass
        """
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows("ValueError: broken")


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_pdb_says_which_rank_it_is_in_and_the_api_answers_as_that_rank(
    session: Session, backend: str
) -> None:
    ended = session.apart(
        """
        @pytest.mark.smp(ranks=4, pipeline_parallel_degree=2)
        def test_x(smp):
            if smp.rank() == 2:
                raise ValueError("broken")

        def body():
            if api.rank() == 1:
                raise ValueError("broken")

        def test_by_smp_world(smp_world):
            smp_world.run(body, ranks=2)

        @pytest.mark.smp
        def test_next(smp):
            smp.barrier()
        """,
        "--pdb",
        f"--smp-backend={backend}",
        stdin=(
            b"p 'who', smp.rank(), api.size(), api.pp_rank(), api.get_pp_group()\n"
            b"api.barrier()\nc\n"
            b"p 'who', api.rank(), api.size()\napi.dp_rank()\nc\n"
        ),
    )
    assert ended.counts == {"failed": 2, "passed": 1}
    ended.shows(
        "> rank 2 of 4",
        "('who', 2, 4, 0, [2, 3])",  # `cluster`: ranks of one pipeline are neighbours
        "ThreadError: post-mortem of rank 2: the run is over, and its ranks cannot communicate",
        "> rank 1 of 2",
        "('who', 1, 2)",
        "ThreadError: post-mortem of rank 1: which configuration the body gave smp.init is not known",
    )


@pytest.mark.parametrize("capture", ["-s", "--capture=fd"])
def test_breakpoint_on_a_rank_stops_the_clock(session: Session, capture: str) -> None:
    """The debugger stays open for longer than a run may take, and is left by its quit command."""
    ended = session.apart(
        """
        @pytest.mark.smp
        def test_x(smp):
            mine = "weights of " + str(smp.rank())
            smp.barrier()
            if smp.rank() == 2:
                breakpoint()
            smp.barrier()
            print("after", smp.rank())

        @pytest.mark.smp
        def test_next(smp):
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]

        @pytest.mark.smp
        def test_quits(smp):
            breakpoint()
            smp.barrier()

        def test_never(): pass
        """,
        capture,
        "-rP",
        "--smp-timeout=4",
        stdin=b"p 'mine', mine\nimport threading; threading.Event().wait(4.5)\np 7, smp.rank()\nc\nq\n",
    )
    assert ended.counts == {"passed": 2}
    ended.shows(
        "PDB set_trace", "> rank 2 of ", "('mine', 'weights of 2')", "(7, 2)", "PDB continue"
    )
    ended.shows("after")
    ended.shows("Exit: Quitting debugger")
    ended.hides_ours("timeout: ")
