"""The marker ``smp``: what it accepts, which tests and fixtures it refuses, and the ids it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Ended, Session


def refused(ended: Ended, *texts: str) -> None:
    """Assert that collection failed, for the test it, with these texts."""
    assert ended.code == pytest.ExitCode.INTERRUPTED
    assert ended.counts == {"errors": 1}
    ended.shows("ERROR collecting test_it.py", "test_it.py::", ": marker smp: ")
    ended.shows(*texts)
    ended.hides("Traceback", "pytest_smp/", "smp_core/")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ("4", ["takes keyword arguments only, not 4: smp(ranks=4)"]),
        ("2, 'cluster'", ["takes keyword arguments only, not 2, 'cluster'"]),
        ("ranks=0", ["ranks=0: must be a whole number of at least 1, or a list of them"]),
        ("ranks=-1", ["ranks=-1: must be a whole number of at least 1"]),
        ("ranks=True", ["ranks=True: must be a whole number of at least 1"]),
        ("ranks='4'", ["ranks='4': must be a whole number of at least 1"]),
        ("ranks=2.0", ["ranks=2.0: must be a whole number of at least 1"]),
        ("ranks=None", ["ranks=None: must be a whole number of at least 1"]),
        ("ranks=[]", ["ranks=[] asks for no run at all"]),
        ("ranks=[2, 0]", ["ranks=0: must be a whole number of at least 1"]),
        ("ranks=[2, [4]]", ["ranks=[4]: must be a whole number of at least 1"]),
        ("rank=4", ["rank"]),
        ("pipeline_paralel_degree=2", ["pipeline_paralel_degree", "pipeline_parallel_degree"]),
        ("microbatches=0", ["microbatches", "0"]),
        ("ddp=False, tensor_parallel_degree=2", ["tensor_parallel_degree", "ddp"]),
        (
            "ranks=3, pipeline_parallel_degree=2",
            ["with 3 ranks: ", "pipeline_parallel_degree", "2"],
        ),
        (
            "ranks=[2, 3], tensor_parallel_degree=2, ddp=True",
            ["with 3 ranks: ", "tensor_parallel_degree"],
        ),
    ],
)
def test_a_marker_that_cannot_work_is_refused_at_collection(
    session: Session, arguments: str, texts: list[str]
) -> None:
    ended = session(
        f"""
        @pytest.mark.smp({arguments})
        def test_wrong(smp):
            pass
        """
    )
    refused(ended, "test_it.py::test_wrong: marker smp: ", *texts)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "def test_x(smp, subtests): pass",
            "fixture 'subtests' cannot be shared by ranks: its reports",
        ),
        (
            "async def test_x(smp): pass",
            "the test is async (have a plain one call asyncio.run(main())): a rank runs a plain function",
        ),
        (
            "async def test_x(smp): yield",
            "the test is async (have a plain one call asyncio.run(main())): a rank runs a plain function",
        ),
        ("def test_x(smp): yield", "'yield' keyword is allowed in fixtures, but not in tests"),
    ],
)
def test_what_is_no_plain_function_is_refused(session: Session, source: str, text: str) -> None:
    ended = session(f"@pytest.mark.smp\n{source}\n")
    assert ended.code == pytest.ExitCode.INTERRUPTED
    assert ended.counts == {"errors": 1}
    ended.shows("ERROR collecting test_it.py")
    ended.shows(text)


@pytest.mark.parametrize("where", ["class", "method"])
def test_a_unittest_method_is_refused(session: Session, where: str) -> None:
    mark = "@pytest.mark.smp(ranks=2)"
    ended = session(
        f"""
        {mark if where == "class" else ""}
        class TestIt(unittest.TestCase):
            {mark if where == "method" else ""}
            def test_x(self):
                pass
        """
    )
    assert ended.code in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    ended.shows(
        "test_it.py::TestIt::test_x: marker smp: unittest.TestCase methods cannot run on ranks; "
        "use a plain class or function"
    )
    ended.hides("INTERNALERROR", "Traceback")


@pytest.mark.parametrize(
    ("fixture", "hint"),
    [
        ("monkeypatch", "patch inside the body"),
        ("request", "fixture of your own"),
        ("capsys", "shown per rank"),
        ("capfd", "shown per rank"),
        ("capsysbinary", "shown per rank"),
        ("capfdbinary", "shown per rank"),
        ("caplog", "smp_world"),
        ("recwarn", "warning filters are shared"),
        ("record_property", "smp_world"),
        ("smp_world", "without the marker"),
    ],
)
def test_a_fixture_that_cannot_be_shared_is_refused_with_a_way_out(
    session: Session, fixture: str, hint: str
) -> None:
    ended = session(
        f"""
        @pytest.mark.smp
        def test_x(smp, {fixture}):
            pass
        """
    )
    refused(ended, f"fixture '{fixture}' cannot be shared by ranks: ", hint)


def test_such_a_fixture_may_serve_another_fixture(session: Session) -> None:
    ended = session(
        """
        @pytest.fixture
        def name(request):
            return request.node.name

        @pytest.mark.smp
        def test_x(smp, name):
            assert name == "test_x"
        """
    )
    assert ended.counts == {"passed": 1}


def test_without_arguments_a_test_gets_all_ranks(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            assert smp.size() == 4

        @pytest.mark.smp()
        def test_y(smp):
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]
        """
    )
    assert ended.counts == {"passed": 2}


def test_the_configuration_is_that_of_smp_init(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=4, pipeline_parallel_degree=2, placement_strategy="spread")
        def test_x(smp):
            assert (smp.pp_size(), smp.rdp_size()) == (2, 2)
            # spread is TPD: of the pairs (pipeline, data), data varies fastest
            assert smp.get_pp_group() == [smp.rank() % 2, smp.rank() % 2 + 2]
        """
    )
    assert ended.counts == {"passed": 1}


def test_markers_of_module_class_and_function_add_up_and_the_nearest_wins(session: Session) -> None:
    ended = session(
        """
        pytestmark = pytest.mark.smp(ranks=4, microbatches=4)

        @pytest.mark.smp(pipeline_parallel_degree=2)
        class TestIt:
            def test_module_and_class(self, smp):
                assert (smp.size(), smp.pp_size()) == (4, 2)

            @pytest.mark.smp(ranks=2)
            def test_function_says_ranks(self, smp):
                assert (smp.size(), smp.pp_size()) == (2, 2)

            @pytest.mark.smp(pipeline_parallel_degree=4)
            def test_function_says_degree(self, smp):
                assert (smp.size(), smp.pp_size()) == (4, 4)

        def test_module_alone(smp):
            assert (smp.size(), smp.pp_size()) == (4, 1)
        """
    )
    assert ended.counts == {"passed": 4}


_IDS = """
    @pytest.mark.smp(ranks=2)
    def test_one(smp):
        assert smp.size() == 2

    @pytest.mark.smp(ranks=[1, 2, 4])
    def test_many(smp):
        assert smp.size() in (1, 2, 4)

    @pytest.mark.smp(ranks=[2])
    def test_list_of_one(smp):
        assert smp.size() == 2

    @pytest.mark.smp(ranks=(1, 4))
    @pytest.mark.parametrize("letter", ["a", "b"])
    def test_letters(smp, letter):
        assert letter in "ab"

    @pytest.mark.smp(ranks=[1, 3])
    @given(number=st.integers())
    def test_property(smp, number):
        assert smp.allgather(number, smp.WORLD) == [number] * smp.size()
"""


def test_a_list_of_ranks_makes_ids_and_one_number_leaves_the_id_alone(session: Session) -> None:
    ended = session(_IDS, "--collect-only", "-q")
    ids = [line.partition("::")[2] for line in ended.text.splitlines() if "::" in line]
    assert ids[:5] == [
        "test_one",
        "test_many[ranks=1]",
        "test_many[ranks=2]",
        "test_many[ranks=4]",
        "test_list_of_one[ranks=2]",
    ]
    letters = {frozenset(name.removeprefix("test_letters[")[:-1].split("-")) for name in ids[5:9]}
    assert letters == {frozenset({f"ranks={n}", x}) for n in (1, 4) for x in "ab"}
    assert ids[9:] == ["test_property[ranks=1]", "test_property[ranks=3]"]


def test_each_of_a_list_runs_on_its_number_of_ranks(session: Session) -> None:
    ended = session(_IDS, "-v")
    assert ended.counts == {"passed": 11}
    properties = session(
        """
        sizes = []

        @pytest.mark.smp(ranks=[1, 2, 4])
        def test_many(smp):
            if smp.rank() == 0:
                sizes.append(smp.size())

        def test_after():
            assert sizes == [1, 2, 4]
        """
    )
    assert properties.counts == {"passed": 4}


def test_an_id_picks_one_number_of_ranks(session: Session) -> None:
    session.write(_IDS)
    ended = session.run("test_it.py::test_many[ranks=4]", "test_it.py::test_property", "-v")
    assert ended.counts == {"passed": 3}
    ended.shows("test_many[ranks=4] PASSED", "test_property[ranks=1] PASSED")


def test_k_picks_tests_as_ever(session: Session) -> None:
    ended = session(_IDS, "-k", "many or letters and b")
    assert ended.counts == {"passed": 5, "deselected": 6}


def test_a_marker_on_one_set_of_parameters_is_checked_too(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.smp(ranks=9))])
        def test_x(number):
            pass
        """
    )
    assert ended.counts == {"passed": 1, "skipped": 1}
    refused(
        session.run("--smp-require-ranks"),
        "test_it.py::test_x[2]: marker smp: ranks=9: needs 9 ranks, and 4 are there: ",
    )


def test_a_marker_on_one_set_of_parameters_cannot_ask_for_several_runs(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.parametrize("number", [pytest.param(2, marks=pytest.mark.smp(ranks=[1, 2]))])
        def test_x(number):
            pass
        """
    )
    assert "passed" not in ended.counts
    ended.shows("test_it.py::test_x[2]: marker smp: ")
    ended.hides("INTERNALERROR", "Traceback")


def test_one_bad_marker_does_not_hide_the_next(session: Session) -> None:
    session.pytester.makepyfile(
        test_bad="import pytest\n@pytest.mark.smp(ranks=0)\ndef test_x(): pass\ndef test_y(): pass\n",
        test_good="import pytest\n@pytest.mark.smp(ranks=2)\ndef test_x(): pass\n",
    )
    ended = session.run("--continue-on-collection-errors")
    assert ended.counts == {"errors": 1, "passed": 2}
    ended.shows("test_bad.py::test_x: marker smp: ranks=0")


_FEWER = """
    @pytest.mark.smp(ranks=[1, 2, 4, 8])
    def test_many(smp):
        assert smp.size() <= 4

    @pytest.mark.smp(ranks=5, pipeline_parallel_degree=5)
    def test_five(smp):
        assert False

    def test_plain():
        pass
"""


def test_what_there_are_no_ranks_for_is_skipped_and_the_rest_runs(session: Session) -> None:
    ended = session(_FEWER, "-rs")
    assert ended.counts == {"passed": 4, "skipped": 2}
    ended.shows("needs 8 ranks, and 4 are there: pytest --smp-ranks=8")
    ended.shows("needs 5 ranks, and 4 are there: pytest --smp-ranks=5")
    ended.hides("NOTHING RAN")


@pytest.mark.parametrize("how", ["option", "ini"])
def test_where_ranks_are_required_it_is_an_error(session: Session, how: str) -> None:
    session.pytester.makeini(
        f"[pytest]\nsmp_require_ranks = {'true' if how == 'ini' else 'false'}\n"
    )
    ended = session(_FEWER, *(["--smp-require-ranks"] if how == "option" else []))
    refused(
        ended,
        "test_many: marker smp: ranks=8: needs 8 ranks, and 4 are there: pytest --smp-ranks=8",
        "test_five: marker smp: ranks=5: needs 5 ranks, and 4 are there: pytest --smp-ranks=5",
    )


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "workers"])
def test_a_session_that_runs_nothing_for_want_of_ranks_says_so(
    session: Session, workers: list[str]
) -> None:
    source = """
        @pytest.mark.smp(ranks=[6, 7])
        def test_many(smp):
            assert False

        @pytest.mark.skip
        def test_other():
            assert False
        """
    ended = session.apart(source, *workers)
    assert ended.counts == {"skipped": 3}
    ended.shows(
        "smp: NOTHING RAN: every test was skipped (3), 2 for want of ranks: "
        "a test needs 7 ranks, and 4 are there: pytest --smp-ranks=7"
    )


def test_a_marker_that_comes_after_collection_skips_as_well(session: Session) -> None:
    session.pytester.makeconftest(
        """
        import pytest

        def pytest_runtest_setup(item):
            item.add_marker(pytest.mark.smp(ranks=9))
        """
    )
    ended = session("def test_x(smp): assert False\n", "-rs")
    assert ended.counts == {"skipped": 1}
    ended.shows("needs 9 ranks, and 4 are there: pytest --smp-ranks=9")


def test_fresh_ranks_are_processes(session: Session) -> None:
    source = """
        @pytest.mark.smp(ranks=[1, 2], fresh=True)
        def test_fresh(smp):
            assert False

        @pytest.mark.smp(fresh=False)
        def test_warm(smp):
            pass
        """
    ended = session(source, "-rs")
    assert ended.counts == {"passed": 1, "skipped": 2}
    ended.shows("fresh=True: sim cannot start rank processes for a test")
    refused(session(source.replace("False)", "1)")), "test_warm: marker smp: fresh=1: must be")


def test_all_mistakes_are_told_in_one_go(session: Session) -> None:
    session.pytester.makepyfile(
        test_other="import pytest\n@pytest.mark.smp(ranks=0)\ndef test_x(): pass\n"
    )
    ended = session(
        """
        @pytest.mark.smp(4)
        def test_arguments(): pass

        @pytest.mark.smp(pipeline_parallel_degree=3)
        @pytest.mark.parametrize("number", [1, 2])
        def test_degree(number): pass

        @pytest.mark.smp(ranks=2)
        def test_good(): pass

        @pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.smp(ranks=-1))])
        def test_parameters(number): pass

        class TestIt:
            @pytest.mark.smp(ddp=3)
            def test_method(self): pass

            @pytest.mark.smp
            def test_fixture(self, capsys): pass

        class TestUnit(unittest.TestCase):
            @pytest.mark.smp
            def test_unit(self): pass
        """
    )
    assert ended.code == pytest.ExitCode.INTERRUPTED
    assert ended.counts == {"errors": 2}  # one for each file
    for text in (
        "test_it.py::test_arguments: marker smp: takes keyword arguments only",
        "test_it.py::test_degree: marker smp: with 4 ranks: ",
        "test_it.py::test_parameters[2]: marker smp: ranks=-1: must be",
        "test_it.py::TestIt::test_method: marker smp: with 4 ranks: ",
        "test_it.py::TestIt::test_fixture: marker smp: fixture 'capsys' cannot",
        "test_it.py::TestUnit::test_unit: marker smp: unittest.TestCase methods cannot",
        "test_other.py::test_x: marker smp: ranks=0: must be",
    ):
        assert ended.text.partition("short test summary")[0].count(text) == 1
    ended.hides("Traceback", "pytest_smp/", "test_good")
