"""How long runs may take after one has hung, on ranks whose hanging and slowness are made up: no test
here waits for a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

#: A backend whose runs take as long as their body says, by a clock of its own, and end in time or not.
_BACKEND = """
    import pytest_smp.running
    from pytest_smp.ranks.protocols import PROTOCOL_VERSION, Backend, Executor, Outcome, OutcomeKind
    from pytest_smp.ranks.protocols import Report, VerdictKind
    from smp_core.errors import RunTimeout

    class Clock:
        now = 0.0
        monotonic = staticmethod(lambda: Clock.now)

    pytest_smp.running.time = Clock
    limits = []  # of all runs, in order
    origins = []  # of the limits, in words

    class World:
        def __init__(self, size):
            self.size = size
        def run(self, job):
            limits.append(job.timeout)
            origins.append(job.timeout_origin)
            args, kwargs = job.arguments(0)
            seconds = job.body(*args, **kwargs)
            Clock.now += min(seconds, job.timeout)
            if seconds <= job.timeout:
                outcomes = [Outcome(rank, OutcomeKind.RETURNED) for rank in range(self.size)]
                return Report(VerdictKind.PASSED, outcomes)
            outcomes = [Outcome(rank, OutcomeKind.STUCK) for rank in range(self.size)]
            return Report(VerdictKind.TIMED_OUT, outcomes, None, RunTimeout("it took too long"))

    class Slow(Executor):
        protocol = PROTOCOL_VERSION
        steady = False
        open = staticmethod(World)
        def close(self):
            pass

    backend = Backend("slow", "as slow as its bodies say", Slow)
"""

_HEAD = """
import pytest
from hypothesis import example, given, strategies as st
from slow import Clock, limits, origins
from smp_core.errors import StuckError

def takes(seconds):
    return seconds

def takes_too(seconds):
    return seconds
"""


@pytest.fixture
def slow(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Sessions on the backend above, with a limit of 60 s."""
    monkeypatch.setattr("pytest_smp.running.time", None)  # put back afterwards
    session.pytester.makepyfile(slow=_BACKEND)
    session.pytester.syspathinsert()
    return session


_ARGUMENTS = ("--smp-backend=slow:backend", "--smp-timeout=60")


@pytest.mark.parametrize("hangs", ["smp_world", "marked"])
@pytest.mark.parametrize("next_one", ["smp_world", "marked"])
def test_the_next_test_has_the_whole_limit(slow: Session, hangs: str, next_one: str) -> None:
    """The limit is whole for each way of starting the runs of the test that hangs, and of the one after it."""
    bodies = {
        "smp_world": ("", "smp_world, seconds", "smp_world.run(takes, seconds)"),
        "marked": ("@pytest.mark.smp", "smp, seconds", "return seconds"),
    }
    source = ""
    for name, how, seconds in (("hangs", hangs, "61, 100"), ("correct", next_one, "58, 59")):
        mark, arguments, body = bodies[how]
        source += f"""
        {mark}
        @given(seconds=st.integers({seconds}))
        def test_{name}({arguments}):
            {body}
"""
    ended = slow(source, *_ARGUMENTS, head=_HEAD)
    ended.shows("StuckError: it took too long")
    assert ended.counts == {"failed": 1, "passed": 1}


def test_examples_of_a_property_that_hung_get_less(slow: Session) -> None:
    ended = slow(
        """
        asked = []

        @pytest.mark.smp
        @given(seconds=st.sampled_from([2, 3, 70, 100]))
        @example(seconds=3)
        @example(seconds=2)
        def test_hangs(smp, seconds):
            asked.append(seconds)
            return seconds  # and the run takes as long

        def test_after():
            hung = next(index for index, seconds in enumerate(asked) if seconds > 60)
            whole, shortened = limits[:hung + 1], limits[hung + 1:]
            assert set(whole) == {60}
            assert set(shortened) == {30}  # ten times the slowest that passed
            assert set(origins[:hung + 1]) == {"--smp-timeout"}
            assert set(origins[hung + 1:]) == {
                "an example before has hung for the whole 60 s of --smp-timeout"
            }

        def test_of_the_call(smp_world):
            smp_world.run(takes, 5, timeout=40.0)
            assert (limits[-1], origins[-1]) == (40.0, "timeout= of the call")
        """,
        *_ARGUMENTS,
        head=_HEAD,
    )
    assert ended.counts == {"failed": 1, "passed": 2}
    ended.shows("StuckError: it took too long")


def test_runs_outside_of_examples_have_their_whole_limit(slow: Session) -> None:
    """A plain test tries nothing again: what it runs after a hang is another run."""
    ended = slow(
        """
        def test_two_runs(smp_world):
            with pytest.raises(StuckError):
                smp_world.run(takes, 70)
            smp_world.run(takes, 50)
            smp_world.run(takes_too, 50)
            assert limits == [60, 60, 60]
        """,
        *_ARGUMENTS,
        head=_HEAD,
    )
    assert ended.counts == {"passed": 1}


def test_another_body_in_the_same_example_has_its_whole_limit(slow: Session) -> None:
    ended = slow(
        """
        @given(seconds=st.integers(50, 59))
        def test_two_runs(smp_world, seconds):
            with pytest.raises(StuckError):
                smp_world.run(takes, 70)
            smp_world.run(takes_too, seconds)
        """,
        *_ARGUMENTS,
        head=_HEAD,
    )
    assert ended.counts == {"passed": 1}
