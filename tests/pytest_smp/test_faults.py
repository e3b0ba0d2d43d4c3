"""The fixture ``smp_faults``, the marker, drawn faults: in sessions of pytest."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.errors import InvalidArgument

from pytest_smp import strategies
from pytest_smp.ranks.faults import Exit, Kill, Raise, Stall

TESTS = """
    import pytest
    import smp_core.torch as api
    from hypothesis import Phase, given, settings, strategies as st
    from pytest_smp import faults, strategies
    from smp_core.errors import (
        ArgumentError, CrashError, FaultNotReachedError, InjectedError, RankError,
    )

    def step():
        return api.allgather(api.rank(), api.WORLD)

    def two_steps():
        return [step(), step()]

    def test_kill(smp_world, smp_faults):
        smp_faults.kill(rank=2, at="allgather", nth=2)
        report = smp_world.report(two_steps, ranks=3)
        assert (report.verdict, report.root) == ("crashed", 2)
        with pytest.raises(CrashError, match="rank 2 crashed: killed by SIGKILL"):
            smp_world.run(two_steps, ranks=3)  # it strikes in each run
        smp_faults.clear()
        assert smp_world.run(step, ranks=3) == [[0, 1, 2]] * 3

    def test_each_test_begins_without(smp_world):
        assert smp_world.run(two_steps, ranks=3)

    def test_with(smp_world, smp_faults):
        with smp_faults.exit(rank=0, code=9), smp_faults.delay(rank=1):
            assert "exit code 9" in str(smp_world.report(step, ranks=2).error)
        assert smp_world.run(step, ranks=2) == [[0, 1]] * 2

    def test_bad_values_at_once(smp_faults):
        with pytest.raises(ArgumentError, match="did you mean 'allgather'"):
            smp_faults.kill(rank=0, at="allgathr")

    def test_bad_rank_before_the_run(smp_world, smp_faults):
        smp_faults.kill(rank=2)
        ran = []
        with pytest.raises(RankError, match="ranks 0 to 1"):
            smp_world.run(lambda: ran.append(1), ranks=2)
        assert not ran

    def test_not_reached(smp_world, smp_faults):
        smp_faults.raise_(rank=1, at="allgather", nth=3)
        with pytest.raises(FaultNotReachedError, match="rank 1 did not come to it") as caught:
            smp_world.run(two_steps, ranks=2)
        assert "Raise(rank=1" in str(caught.value)
        with pytest.raises(FaultNotReachedError):
            smp_world.report(two_steps, ranks=2)

    def test_not_required(smp_world, smp_faults):
        smp_faults.raise_(rank=1, at="allgather", nth=3, required=False)
        assert smp_world.run(two_steps, ranks=2)

    def test_who_skips_need_not_come_to_it(smp_world, smp_faults):
        smp_faults.raise_(rank=1, at="allgather")
        smp_world.run(pytest.skip, "does not apply", ranks=2)

    @pytest.mark.smp(ranks=2)
    @pytest.mark.smp_faults(faults.Raise(rank=1, at="allgather", error=OSError("gone")))
    def test_marked(smp):
        if smp.rank() == 1:
            with pytest.raises(OSError, match="gone"):
                smp.allgather(1, smp.WORLD)
        smp.allgather(1, smp.WORLD)

    @pytest.fixture
    def late(smp_faults):
        smp_faults.delay(rank=0, at="end", seconds=0.01)

    @pytest.mark.smp(ranks=2)
    @pytest.mark.usefixtures("late")
    def test_by_a_fixture_of_ones_own(smp):
        pass

    @pytest.mark.smp(ranks=2)
    @pytest.mark.xfail(raises=CrashError, strict=True)
    @pytest.mark.smp_faults(faults.Kill(rank=0))
    def test_expected_crash(smp):
        pass

    @pytest.mark.smp(ranks=2)
    @given(fault=strategies.faults(ranks=2, kinds=("raise_",), at=("start",)), extra=st.integers())
    @settings(deadline=None, phases=[Phase.generate])
    def test_drawn(smp, fault, extra):
        try:
            smp.allgather(smp.rank(), smp.WORLD)
        except InjectedError:
            assert fault.rank == smp.rank()

    @given(fault=strategies.faults(ranks=2, kinds=("kill", "raise_", "exit"), at=("allgather",)))
    @settings(max_examples=8, deadline=None)
    def test_drawn_outside(smp_world, smp_faults, fault):
        with smp_faults.add(fault):
            report = smp_world.report(step, ranks=2)
        struck = fault.nth == 1
        assert (report.root == fault.rank) is struck
        assert (report.verdict == "passed") is not struck
"""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_faults_of_a_session(pytester, apart_pytest, backend):
    pytester.makepyfile(TESTS)
    result = apart_pytest("--smp-ranks=3", f"--smp-backend={backend}", "-p", "no:cacheprovider")
    text = result.stdout.str()
    counts = result.parseoutcomes()
    assert counts["skipped"] == 1, text
    assert counts["xfailed"] == 1, text
    assert counts["failed"] == 1, text
    assert counts["passed"] == 10, text
    result.stdout.fnmatch_lines(["*FAILED *test_drawn - *"])
    result.stdout.fnmatch_lines(["*InjectedError: rank 0: before the body (smp_faults)"])
    result.stdout.fnmatch_lines(["*fault=Raise(rank=0, required=False*"])


def test_a_marker_takes_faults_alone(pytester, apart_pytest):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.smp_faults("kill rank 3")
        def test_text(): pass
        @pytest.mark.smp_faults(rank=3)
        def test_keyword(): pass
        """
    )
    result = apart_pytest("-p", "no:cacheprovider")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        ["*'kill rank 3' is no fault; pytest_smp.faults has them", "*takes faults, and no keyword*"]
    )


def test_the_fixture_stays_in_the_controller(pytester, apart_pytest):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.smp(ranks=1)
        def test_on_ranks(smp, smp_faults): pass
        """
    )
    result = apart_pytest("--collect-only", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*fixture 'smp_faults' cannot be shared by ranks: declare*"])


def test_a_host_that_injects_nothing_is_named(pytester, apart_pytest):
    pytester.makepyfile(
        theirs="""
        from pytest_smp.ranks.protocols import Backend, Executor, PROTOCOL_VERSION
        class Theirs(Executor):
            protocol = PROTOCOL_VERSION
            def open(self, size): raise AssertionError("a world was opened")
            def close(self): pass
        backend = Backend("theirs", "an executor of somebody's", Theirs)
        """,
        test_theirs="""
        import pytest
        from smp_core.errors import UnsupportedError
        def test(smp_world, smp_faults):
            smp_faults.kill(rank=0)
            with pytest.raises(UnsupportedError, match="theirs:backend"):
                smp_world.run(int, ranks=1)
        """,
    )
    result = apart_pytest("--smp-backend=theirs:backend", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_the_example_of_the_page_passes(pytester, apart_pytest):
    page = Path(__file__).parents[2] / "docs" / "faults.md"
    example, *_ = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    pytester.makepyfile(example)
    result = apart_pytest("--smp-ranks=4", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


# ---- Drawn ----------------------------------------------------------------------------------------


@given(fault=strategies.faults(ranks=3, kinds=("kill", "exit", "stall", "delay", "raise_")))
@settings(max_examples=200)
def test_drawn_faults_are_of_the_world_and_print_as_code(fault):
    assert 0 <= fault.rank < 3
    assert fault.at in ("start", "smp.allgather", "end")
    assert not fault.required
    names = {"Kill": Kill, "Exit": Exit, "Raise": Raise, "Stall": Stall, "signal": signal}
    assert eval(repr(fault), names) == fault


@pytest.mark.parametrize(
    "arguments",
    [
        {"ranks": 0},
        {"ranks": 2, "kinds": ()},
        {"ranks": 2, "kinds": ("explode",)},
        {"ranks": 2, "at": ()},
        {"ranks": 2, "at": ("allgatherr",)},
        {"ranks": 2, "at": ("sent",), "kinds": ("raise_",)},
        {"ranks": 2, "max_nth": 0},
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused(arguments):
    with pytest.raises(InvalidArgument):
        strategies.faults(**arguments)
